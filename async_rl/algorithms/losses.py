"""From log-probs and advantages to the scalar that is minimised.

    L = -(1/N) sum_t k_t w_t f(r_t, A_t)

over trainable tokens, with N their number in the whole global batch, before any correction mask: masking never inflates
the gradient. How loss and correction share the work, so that no ratio counts twice:

    ppo        decoupled: r = exp(theta - p), the correction sees exp(p - mu)   (2110.00641, 2505.24298)
    reinforce  weighted:  f = A theta,        the correction sees exp(theta - mu), detached
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from async_rl.config import AlgorithmConfig
from staleness.config import CorrectionConfig
from staleness.corrections import correct, ratio


class LossInput(NamedTuple):
    """Log-probs of the trainable tokens of a micro-batch, in float32, and their advantages."""

    current: Float[Tensor, " tokens"]
    proximal: Float[Tensor, " tokens"]
    behaviour: Float[Tensor, " tokens"]
    advantage: Float[Tensor, " tokens"]


class LossMetrics(NamedTuple):
    """Sums over the micro-batch's tokens, to be divided by their number; detached."""

    clipped: Float[Tensor, ""]
    corrected_away: Float[Tensor, ""]
    weight: Float[Tensor, ""]


def ppo(
    current: Float[Tensor, " tokens"],
    proximal: Float[Tensor, " tokens"],
    advantage: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`min(r A, clip(r, 1 - low, 1 + high) A)` and, per token, 1 where the clip bites (1707.06347)."""
    r = ratio(current - proximal)
    unclipped = r * advantage
    clipped = r.clamp(1 - clip_low, 1 + clip_high) * advantage
    return torch.minimum(unclipped, clipped), (clipped < unclipped).float()


def reinforce(
    current: Float[Tensor, " tokens"], advantage: Float[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`A theta`: its gradient is the score times the advantage; nothing is clipped."""
    return advantage * current, torch.zeros_like(current)


def loss(
    batch: LossInput, algorithm: AlgorithmConfig, correction: CorrectionConfig, *, tokens: int
) -> tuple[Float[Tensor, ""], LossMetrics]:
    """The loss of one micro-batch; those of all micro-batches of all ranks add up to that of the batch.

    `tokens` is N: trainable tokens of the global batch, zero-advantage ones included.
    """
    if algorithm.loss == "ppo":
        objective, clipped = ppo(
            batch.current,
            batch.proximal,
            batch.advantage,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        weight, keep = correct(correction, batch.proximal - batch.behaviour)
    elif algorithm.loss == "reinforce":
        objective, clipped = reinforce(batch.current, batch.advantage)
        weight, keep = correct(correction, batch.current - batch.behaviour)
    else:
        raise ValueError(f"algorithm.loss = {algorithm.loss!r} is not one of ppo, reinforce")
    total = -(objective * weight * keep).sum() / tokens
    return total, LossMetrics(clipped.sum(), (~keep).sum().float(), weight.sum())
