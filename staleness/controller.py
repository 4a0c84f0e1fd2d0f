"""Less staleness while it costs too much: the effective bound and the learning rate follow the effective sample size.

Pure. The bound falls by half when the effective sample size (ESS) is under its target, and rises by one step at a time
when it is well above; never above the configured bound. What is in flight when it falls is still trained on, so that
another decision waits until that is through. Until the ESS is back the learning rate is scaled by sqrt(ESS / target):
the variance of the weighted gradient grows with 1 / ESS.
"""

from __future__ import annotations

from math import isnan, sqrt
from typing import NamedTuple


class Control(NamedTuple):
    """`eta` bounds what may start; `scale` multiplies the learning rate; `wait` steps pass before the next decision."""

    eta: int
    scale: float = 1.0
    wait: int = 0


def decide(control: Control, ess: float, *, target: float, most: int) -> Control:
    """After a step of effective sample size `ess` (a share of 1; nan for one without a gradient).

    Above halfway between target and 1 the bound rises. `most` is the configured bound.
    """
    if isnan(ess):
        return control
    scale = min(1.0, sqrt(ess / target))
    if control.wait:
        return Control(control.eta, scale, control.wait - 1)
    if ess < target and control.eta > 0:
        return Control(control.eta // 2, scale, control.eta)
    if ess >= (1 + target) / 2 and control.eta < most:
        return Control(control.eta + 1, scale, control.eta + 1)
    return Control(control.eta, scale)
