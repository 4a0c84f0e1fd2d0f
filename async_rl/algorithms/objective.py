"""From log-probs and advantages to the scalar that is minimised: how a loss and a correction combine.

    L = sum_t a_t k_t w_t (-f(r_t, A_t) + beta kl_t) - c sum_t a_t H_t

over trainable tokens. a_t is the token's share of the batch (`aggregation.py`), taken before any correction mask:
masking never inflates the gradient. w and k are the correction's, without gradient. No ratio counts twice:

    decoupled  ppo: r = exp(theta - p), the correction sees exp(p - mu)            (2110.00641, 2505.24298)
    coupled    cispo, gspo, sapo, topr, dppo-tv, and ppo with p = mu: r = exp(theta - mu), w = 1, only masks, which
               see exp(theta - mu)
    weighted   reinforce: f = A theta, the correction sees exp(theta - mu)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from async_rl.algorithms import losses
from async_rl.algorithms.config import AlgorithmConfig, Form, form
from staleness.config import CorrectionConfig
from staleness.corrections import Keep, Sequences, Tokens, correct


class LossInput(NamedTuple):
    """The trainable tokens of a micro-batch, all of float32.

    current, proximal, behaviour   log-probs
    advantage                      A
    scale                          a, see the module
    sequences                      which tokens are of one trajectory
    positive                       whether the trajectory's raw reward is positive
    kept                           what `m2` has left of the batch
    reference, entropy             log-probs of the reference policy, entropies with gradient; None if not wanted
    """

    current: Tokens
    proximal: Tokens
    behaviour: Tokens
    advantage: Tokens
    scale: Tokens
    sequences: Sequences
    positive: Keep
    kept: Keep | None = None
    reference: Tokens | None = None
    entropy: Tokens | None = None


class LossMetrics(NamedTuple):
    """Sums over the micro-batch's tokens, to be divided by their number; detached."""

    clipped: Float[Tensor, ""]
    corrected_away: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    kl_proximal: Float[Tensor, ""]
    kl_reference: Float[Tensor, ""]


def log_rho(current: Tokens, proximal: Tokens, behaviour: Tokens, form: Form) -> Tokens:
    """The log-ratio that the correction sees."""
    return ((proximal if form == "decoupled" else current) - behaviour).detach()


def objective(batch: LossInput, algorithm: AlgorithmConfig, correction: CorrectionConfig) -> losses.Objective:
    """The configured f of every token."""
    current, advantage, sequences = batch.current, batch.advantage, batch.sequences
    low, high = algorithm.clip
    decoupled = form(algorithm, correction) == "decoupled"
    log_ratio = current - (batch.proximal if decoupled else batch.behaviour)
    match algorithm.loss:
        case "ppo":
            return losses.ppo(log_ratio, advantage, low=low, high=high, dual=algorithm.dual_clip)
        case "reinforce":
            return losses.reinforce(current, advantage)
        case "cispo":
            return losses.cispo(current, log_ratio, advantage, low=low, high=high)
        case "gspo":
            return losses.gspo(log_ratio, advantage, sequences, low=low, high=high)
        case "sapo":
            taus = {"tau_positive": algorithm.tau_positive, "tau_negative": algorithm.tau_negative}
            return losses.sapo(log_ratio, advantage, **taus)
        case "topr":
            return losses.topr(current, log_ratio, advantage, sequences, batch.positive)
        case "dppo-tv":
            return losses.dppo_tv(current, batch.behaviour, advantage, delta=algorithm.delta)


def loss(
    batch: LossInput, algorithm: AlgorithmConfig, correction: CorrectionConfig
) -> tuple[Float[Tensor, ""], LossMetrics]:
    """The loss of one micro-batch; those of all micro-batches of all ranks add up to that of the batch."""
    value, clipped = objective(batch, algorithm, correction)
    seen = log_rho(batch.current, batch.proximal, batch.behaviour, form(algorithm, correction))
    weight, keep = correct(correction, seen, batch.sequences, batch.kept)
    factor = batch.scale * weight * keep
    total = -(factor * value).sum()
    divergence = torch.zeros_like(batch.current)
    if batch.reference is not None:
        estimate = losses.k3 if algorithm.kl.estimator == "k3" else losses.k2
        divergence = estimate(batch.current, batch.reference)
        if algorithm.kl.place == "loss":
            total = total + algorithm.kl.coefficient * (factor * divergence).sum()
    if batch.entropy is not None:
        total = total - algorithm.entropy * (batch.scale * batch.entropy).sum()
    away = (~keep).sum().float()
    moved = losses.k3(batch.proximal, batch.current).detach()  # samples of p, as far as mu is p
    return total, LossMetrics(clipped.sum(), away, weight.sum(), moved.sum(), divergence.detach().sum())
