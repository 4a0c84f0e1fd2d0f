"""Configuration of the staleness bound and of its correction."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from staleness.bounds import OnStale

CorrectionName = Literal["none", "tis", "tis-seq", "mis", "icepop", "geo-mask", "seq-mask-tis", "m2"]
ProximalName = Literal["current", "recompute", "loglinear", "behaviour"]


class Window(NamedTuple):
    """Upper bound of the weights, and the edges between which a ratio is kept; None where a correction has none."""

    cap: float | None = None
    low: float | None = None
    high: float | None = None


DEFAULTS: dict[CorrectionName, Window] = {
    "none": Window(),
    "tis": Window(cap=2.0),
    "tis-seq": Window(cap=5.0),
    "mis": Window(low=0.5, high=2.0),
    "icepop": Window(low=0.5, high=5.0),
    "geo-mask": Window(low=0.99, high=1.01),
    "seq-mask-tis": Window(cap=2.0, low=0.999, high=1.002),
    "m2": Window(),
}
MASKS: frozenset[CorrectionName] = frozenset({"none", "geo-mask", "m2"})
"""Corrections whose weights are all 1."""


class CorrectionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Importance correction between the policy that sampled and the one the gradient is taken of."""

    name: CorrectionName = "tis"
    """Weight w and mask of a token of ratio r, g being the geometric mean of its sequence's. `none`: w = 1. `tis`:
    w = min(r, cap). `tis-seq`: the same of the product over the sequence. `mis`, `icepop`: w = r, masked outside
    [low, high]. `geo-mask`: w = 1, sequences with g outside [low, high] masked. `seq-mask-tis`: that mask and `tis`.
    `m2`: the tokens of largest (log r)^2 masked, until the mean of the others over the batch is at most `tau`."""
    cap: Annotated[float, Meta(gt=0)] | None = None
    """Largest weight. Ratio. Default: 2, `tis-seq` 5."""
    low: Annotated[float, Meta(ge=0)] | None = None
    """Lower edge of the mask. Ratio. Default: 0.5, `geo-mask` 0.99, `seq-mask-tis` 0.999."""
    high: Annotated[float, Meta(gt=0)] | None = None
    """Upper edge of the mask. Ratio. Default: `mis` 2, `icepop` 5, `geo-mask` 1.01, `seq-mask-tis` 1.002."""
    tau: Annotated[float, Meta(gt=0)] = 0.04
    """`m2`: largest mean of the squared log-ratios that are kept."""
    veto: Annotated[float, Meta(ge=1e-8, lt=1)] | None = None
    """A sequence with any ratio below this is masked, whatever the correction; 1e-4 is usual."""
    proximal: ProximalName = "current"
    """Anchor p of a `ppo` loss: `current` (the policy itself), `recompute` (one pass per batch), `loglinear` (A-3PO,
    without one) or `behaviour` (what sampled: the coupled form, whose clip sees the whole ratio)."""

    @property
    def window(self) -> Window:
        """The configured numbers, or the correction's own."""
        own = DEFAULTS[self.name]
        return Window(
            own.cap if self.cap is None else self.cap,
            own.low if self.low is None else self.low,
            own.high if self.high is None else self.high,
        )


class ControllerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Less staleness while the effective sample size is low; see `staleness/controller.py`."""

    target_ess: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Effective sample size, a share of 1, below which the effective bound falls. None: off."""


class StalenessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How old a token may be when it is trained on, and what is done about the difference."""

    max_staleness: Annotated[int, Meta(ge=0, le=1_000_000)] = 2
    """Largest age, in learner steps, of a token that is trained on. Hard. 0 is synchronous training."""
    on_stale: OnStale = "mask"
    """Trajectory with tokens over the bound: `mask` those tokens, or `drop` the whole trajectory. `pace`: batches wait
    for old groups, so that there are none."""
    segments: Annotated[int, Meta(ge=1)] | None = None
    """Sampled tokens after which a trajectory that goes on may be trained on in part, up to the beginning of its newest
    turn if there is one; a value model stands for what is still to come. None: when it is complete."""
    correction: CorrectionConfig = CorrectionConfig(cap=5.0)
    """Importance correction."""
    controller: ControllerConfig = ControllerConfig()
    """Adapts the effective bound, inside `max_staleness`, and the learning rate."""
