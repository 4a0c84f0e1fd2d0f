"""What a learner step reports about staleness and off-policyness. Numpy in, plain numbers out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
QUANTILES = (1, 10, 50, 90, 99)
"""Percents."""


def ess(weights: Floats) -> float:
    """Effective sample size as a share of n: `(sum w)^2 / (n sum w^2)`; 1 for equal weights, nan for none."""
    squares = float(np.square(weights, dtype=np.float64).sum())
    if weights.size == 0 or squares == 0.0:
        return float("nan")
    return float(weights.sum(dtype=np.float64)) ** 2 / (weights.size * squares)


def age_histogram(ages: NDArray[np.int64], max_staleness: int) -> list[int]:
    """Token counts by age, 0 to `max_staleness`; whoever asks has already refused older ones."""
    return np.bincount(ages, minlength=max_staleness + 1).tolist()


def ratios(log_ratio: Floats) -> Floats:
    """Importance ratios, float64, of log-ratios held within +-20."""
    return np.exp(np.clip(log_ratio.astype(np.float64), -20.0, 20.0))


def ratio_summary(log_ratio: Floats) -> dict[str, float]:
    """Mean, extremes and KL of importance ratios, from log-ratios `log pi - log mu` of single tokens.

    `kl` is the k3 estimate of KL(mu || pi) under samples of mu: mean of `(r - 1) - log r` (Schulman 2020).
    """
    if log_ratio.size == 0:
        return {}
    ratio = ratios(log_ratio)
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ratio_min": float(ratio.min()),
        **{f"ratio_p{percent:02}": float(np.quantile(ratio, percent / 100)) for percent in QUANTILES},
        "kl": float((ratio - 1.0 - np.log(ratio)).mean()),
        "ess": ess(ratio),
    }


def proximal_summary(log_r: Floats) -> dict[str, float]:
    """Mean, extremes and quantiles of the ratio to the proximal policy, which a `ppo` loss clips."""
    if log_r.size == 0:
        return {}
    r = ratios(log_r)
    quantiles = {f"r_p{percent:02}": float(np.quantile(r, percent / 100)) for percent in QUANTILES}
    return {"r_mean": float(r.mean()), "r_max": float(r.max()), "r_min": float(r.min()), **quantiles}
