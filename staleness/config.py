"""Configuration of the staleness bound and of its correction."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from staleness.bounds import OnStale

CorrectionName = Literal["none", "tis", "mis"]
ProximalName = Literal["current", "recompute", "loglinear"]


class CorrectionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Importance correction between the policy that sampled and the one the gradient is taken of."""

    name: CorrectionName = "tis"
    """`none`: weight 1. `tis`: min(ratio, cap). `mis`: the ratio, masked outside [low, high]."""
    cap: Annotated[float, Meta(gt=0)] = 5.0
    """Upper bound C of `tis` weights. Ratio, > 0."""
    low: Annotated[float, Meta(ge=0)] = 0.5
    """Lower edge of the `mis` window. Ratio, >= 0."""
    high: Annotated[float, Meta(gt=0)] = 2.0
    """Upper edge of the `mis` window. Ratio, > low."""
    proximal: ProximalName = "current"
    """Trust-region anchor: `current` (no extra pass), `recompute` (one pass per batch) or `loglinear` (A-3PO)."""


class StalenessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How old a token may be when it is trained on, and what is done about the difference."""

    max_staleness: Annotated[int, Meta(ge=0, le=1_000_000)] = 2
    """Largest age, in learner steps, of a token that is trained on. Hard. 0 is synchronous training."""
    on_stale: OnStale = "mask"
    """Trajectory with tokens over the bound: `mask` those tokens, or `drop` the whole trajectory. `pace`: batches wait
    for old groups, so that there are none."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance correction."""
