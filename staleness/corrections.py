"""Importance corrections: a weight and a keep-mask per token, both without gradient.

Every correction is a function of log rho, the log-ratio of the trained policy to the behaviour policy. Which ratio that
is (proximal to behaviour, or current to behaviour) is the loss's business; see `async_rl/algorithms/losses.py`.

Tokens come flat, trainable ones only; `Sequences` says which belong together. A sequence is never split.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from staleness.config import CorrectionConfig
from staleness.errors import CorrectionError

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are clamped to +-20 before `exp`, so that one broken token cannot overflow a batch."""

Tokens = Float[Tensor, " tokens"]
Keep = Bool[Tensor, " tokens"]


class Sequences(NamedTuple):
    """Which of `number` sequences each token belongs to. A sequence may have no token."""

    of: Int[Tensor, " tokens"]
    number: int

    def sum(self, values: Tokens) -> Tokens:
        """Each token gets the sum over its sequence."""
        return values.new_zeros(self.number).index_add(0, self.of, values)[self.of]

    def mean(self, values: Tokens) -> Tokens:
        """Each token gets the mean over its sequence."""
        return self.sum(values) / self.sum(torch.ones_like(values))


class Correction(NamedTuple):
    """`weight >= 0` multiplies a token's loss; `keep` False takes the token out of it."""

    weight: Tokens
    keep: Keep


def ratio(log_ratio: Tokens) -> Tokens:
    """`exp` of the clamped log-ratio."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def all_of(log_rho: Tokens) -> Keep:
    return torch.ones_like(log_rho, dtype=torch.bool)


def none(log_rho: Tokens) -> Correction:
    """w = 1, k = 1: the difference is ignored."""
    return Correction(torch.ones_like(log_rho), all_of(log_rho))


def tis(log_rho: Tokens, cap: float) -> Correction:
    """Truncated importance sampling: w = min(rho, C) (Ionides 2008; per token as in IMPALA, 1802.01561)."""
    return Correction(ratio(log_rho).clamp(max=cap), all_of(log_rho))


def tis_seq(log_rho: Tokens, sequences: Sequences, cap: float) -> Correction:
    """w = min(prod rho, C), the product over the sequence, the same for all of its tokens."""
    return Correction(ratio(sequences.sum(log_rho)).clamp(max=cap), all_of(log_rho))


def mis(log_rho: Tokens, low: float, high: float) -> Correction:
    """Masked importance sampling: w = rho, k = 1[low <= rho <= high]. With a wider window it is IcePop's."""
    rho = ratio(log_rho)
    return Correction(rho, (rho >= low) & (rho <= high))


def geo_mask(log_rho: Tokens, sequences: Sequences, low: float, high: float) -> Correction:
    """w = 1, k = 1[low <= g <= high] for the whole sequence, g the geometric mean of its ratios."""
    mean = ratio(sequences.mean(log_rho))
    return Correction(torch.ones_like(log_rho), (mean >= low) & (mean <= high))


def seq_mask_tis(log_rho: Tokens, sequences: Sequences, low: float, high: float, cap: float) -> Correction:
    """The mask of `geo_mask` with the weights of `tis`."""
    return Correction(tis(log_rho, cap).weight, geo_mask(log_rho, sequences, low, high).keep)


def veto(log_rho: Tokens, sequences: Sequences, least: float) -> Keep:
    """k = 0 for a sequence with any rho < `least`: one token that the policy would hardly sample spoils it."""
    broken = (ratio(log_rho) < least).to(log_rho.dtype)
    return sequences.sum(broken) == 0


def m2_keep(log_rho: NDArray[np.floating], tau: float) -> NDArray[np.bool_]:
    """Second-moment mask (M2PO, 2510.01161): the fewest largest (log rho)^2 go, until the mean of the rest is <= tau.

    Of a whole global batch, once, before micro-batching. One token is always kept.
    """
    squares = np.square(log_rho, dtype=np.float64)
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, squares.size + 1)
    keep = np.zeros(squares.size, np.bool_)
    # The means of the smallest 1, 2, ... never fall; rounding must not decide what lies at the bound.
    keep[order[: max(1, int(np.searchsorted(means, tau * (1 + 1e-9), side="right")))]] = True
    return keep


def correct(config: CorrectionConfig, log_rho: Tokens, sequences: Sequences, kept: Keep | None = None) -> Correction:
    """The configured correction of `log_rho`, which is detached first. `kept` is what `m2_keep` has left of the batch.

    Raises `CorrectionError` if `m2` is asked for without it.
    """
    log_rho = log_rho.detach()
    weight, keep = _correction(config, log_rho, sequences, kept)
    if config.veto is not None:
        keep = keep & veto(log_rho, sequences, config.veto)
    return Correction(weight, keep)


def _correction(config: CorrectionConfig, log_rho: Tokens, sequences: Sequences, kept: Keep | None) -> Correction:
    cap, low, high = config.window
    match config.name:
        case "none":
            return none(log_rho)
        case "tis" if cap is not None:
            return tis(log_rho, cap)
        case "tis-seq" if cap is not None:
            return tis_seq(log_rho, sequences, cap)
        case "mis" | "icepop" if low is not None and high is not None:
            return mis(log_rho, low, high)
        case "geo-mask" if low is not None and high is not None:
            return geo_mask(log_rho, sequences, low, high)
        case "seq-mask-tis" if cap is not None and low is not None and high is not None:
            return seq_mask_tis(log_rho, sequences, low, high, cap)
        case "m2" if kept is not None:
            return Correction(torch.ones_like(log_rho), kept)
        case _:
            raise CorrectionError(f"staleness.correction.name = {config.name!r} lacks what it is computed from")
