"""What is maximised per token, f(r, A). See `objective.py` for how it becomes the loss.

`current` (theta), `proximal` (p) and `behaviour` (mu) are log-probs, `log_ratio` a difference of two of them. Every
function returns f and, per token, 1 where clipping has changed it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from staleness.corrections import LOG_RATIO_CLAMP, Sequences, ratio

Tokens = Float[Tensor, " tokens"]


class Objective(NamedTuple):
    """`value` is maximised; `clipped` has no gradient."""

    value: Tokens
    clipped: Tokens


def ppo(log_ratio: Tokens, advantage: Tokens, *, low: float, high: float, dual: float | None = None) -> Objective:
    """`min(r A, clip(r, 1 - low, 1 + high) A)` (1707.06347); with `dual`, at least `dual A` if A < 0 (1912.09729)."""
    r = ratio(log_ratio)
    unclipped = r * advantage
    value = torch.minimum(unclipped, r.clamp(1 - low, 1 + high) * advantage)
    if dual is not None:
        value = torch.where(advantage < 0, torch.maximum(value, dual * advantage), value)
    return Objective(value, (value != unclipped).float().detach())


def reinforce(current: Tokens, advantage: Tokens) -> Objective:
    """`A theta`: its gradient is the score times the advantage; nothing is clipped."""
    return Objective(advantage * current, torch.zeros_like(current).detach())


def cispo(current: Tokens, log_ratio: Tokens, advantage: Tokens, *, low: float, high: float) -> Objective:
    """`sg clip(r, 1 - low, 1 + high) A theta`: clipped tokens keep their gradient (MiniMax-M1, 2506.13585)."""
    r = ratio(log_ratio.detach())
    clipped = r.clamp(1 - low, 1 + high)
    return Objective(clipped * advantage * current, (clipped != r).float())


def gspo(log_ratio: Tokens, advantage: Tokens, sequences: Sequences, *, low: float, high: float) -> Objective:
    """PPO's clip on the sequence's ratio `s = exp(mean log r)` (2507.18071), in its per-token form.

    `log s_t = sg log s + log r_t - sg log r_t`: every token has the value of s and its own gradient.
    """
    mean = sequences.mean(log_ratio.detach())
    # In this order the value is exactly the mean, the same for all tokens.
    return ppo(mean + (log_ratio - log_ratio.detach()), advantage, low=low, high=high)


def sapo(log_ratio: Tokens, advantage: Tokens, *, tau_positive: float, tau_negative: float) -> Objective:
    """`(4 / tau) sigmoid(tau (r - 1)) A`, tau by the sign of A: a soft clip (2511.20347)."""
    tau = torch.where(advantage > 0, log_ratio.new_tensor(tau_positive), log_ratio.new_tensor(tau_negative))
    value = 4 / tau * torch.sigmoid(tau * (ratio(log_ratio) - 1)) * advantage
    return Objective(value, torch.zeros_like(value).detach())


def topr(
    current: Tokens, log_ratio: Tokens, advantage: Tokens, sequences: Sequences, positive: Bool[Tensor, " tokens"]
) -> Objective:
    """`A theta` where the raw reward is positive, else `sg clip(prod r, 0, 1) A theta` (Tapered, 2503.14286)."""
    product = ratio(sequences.sum(log_ratio.detach()))
    weight = torch.where(positive, torch.ones_like(product), product.clamp(max=1))
    return Objective(weight * advantage * current, ((product > 1) & ~positive).float())


def dppo_tv(current: Tokens, behaviour: Tokens, advantage: Tokens, *, delta: float) -> Objective:
    """`A r` with tokens masked that have moved by more than `delta` in probability, the way A pushes (2602.04879)."""
    moved = (current.exp() - behaviour.exp()).detach()
    gone = torch.where(advantage > 0, moved > delta, moved < -delta)
    return Objective(advantage * ratio(current - behaviour) * ~gone, gone.float())


# --- regularisers ------------------------------------------------------------------------------------------------


def k2(current: Tokens, reference: Tokens) -> Tokens:
    """`(theta - q)^2 / 2`: as a loss, its expected gradient on-policy is that of KL(theta || q) (Schulman 2020)."""
    return 0.5 * (current - reference).square()


def k3(current: Tokens, reference: Tokens) -> Tokens:
    """`exp(q - theta) - (q - theta) - 1`: unbiased as an estimate of KL(theta || q), never negative."""
    log_ratio = (reference - current).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return log_ratio.exp() - log_ratio - 1


# --- values ------------------------------------------------------------------------------------------------------


def value_loss(value: Tokens, before: Tokens, target: Tokens, clip: float | None) -> Tokens:
    """`(V - G)^2 / 2`, or the larger of that and the same of V held within `clip` of its value before (PPO's)."""
    error = (value - target).square()
    if clip is not None:
        error = torch.maximum(error, (before + (value - before).clamp(-clip, clip) - target).square())
    return 0.5 * error
