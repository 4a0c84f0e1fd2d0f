"""Importance corrections: a weight and a keep-mask per token, both without gradient.

Every correction is a function of the log-ratio of the trained policy to the behaviour policy. Which ratio that is
(proximal to behaviour, or current to behaviour) is the loss's business; see `async_rl/algorithms/losses.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from staleness.config import CorrectionConfig
from staleness.errors import CorrectionError

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are clamped to +-20 before `exp`, so that one broken token cannot overflow a batch."""


class Correction(NamedTuple):
    """`weight >= 0` multiplies a token's loss; `keep` False takes the token out of it."""

    weight: Float[Tensor, " tokens"]
    keep: Bool[Tensor, " tokens"]


def ratio(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """`exp` of the clamped log-ratio."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def none(log_rho: Float[Tensor, " tokens"]) -> Correction:
    """w = 1, k = 1: the difference is ignored."""
    return Correction(torch.ones_like(log_rho), torch.ones_like(log_rho, dtype=torch.bool))


def tis(log_rho: Float[Tensor, " tokens"], cap: float) -> Correction:
    """Truncated importance sampling: w = min(rho, C) (Ionides 2008; per token as in IMPALA, 1802.01561)."""
    return Correction(ratio(log_rho).clamp(max=cap), torch.ones_like(log_rho, dtype=torch.bool))


def mis(log_rho: Float[Tensor, " tokens"], low: float, high: float) -> Correction:
    """Masked importance sampling: w = rho, k = 1[low <= rho <= high]."""
    rho = ratio(log_rho)
    return Correction(rho, (rho >= low) & (rho <= high))


def correct(config: CorrectionConfig, log_rho: Float[Tensor, " tokens"]) -> Correction:
    """The configured correction of `log_rho`, which is detached first."""
    log_rho = log_rho.detach()
    if config.name == "none":
        return none(log_rho)
    if config.name == "tis":
        return tis(log_rho, config.cap)
    if config.name == "mis":
        return mis(log_rho, config.low, config.high)
    raise CorrectionError(f"staleness.correction.name = {config.name!r} is not a correction")
