"""Emulated devices: their time is waited for, everything around them is real.

A machine without accelerators can so measure what overlaps with what: processes, messages, admission, the journal and
the weights are those of any run. Nothing is learnt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

Some = Annotated[float, Meta(ge=0, lt=1e9)]


class EmulationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the devices would do. `rollout.engine: emulated` takes the first three, a learner the others."""

    tokens_per_s: Some = 0.0
    """Tokens that each slot generates in a second."""
    mean_tokens: Some = 0.0
    """Mean length of a turn, which is the response where there is no environment."""
    sigma: Some = 0.0
    """Spread of the lognormal lengths; 0: all equal."""
    train_s: Some = 0.0
    """Seconds of a learner step. 0: the learner is real."""
    update_s: Some = 0.0
    """Seconds for which an engine stands still to load weights, beside reading them."""


def length(config: EmulationConfig, key: str) -> int:
    """Tokens of the turn that `key` names: the same for the same key."""
    if not config.sigma:
        return max(1, round(config.mean_tokens))
    mu = math.log(config.mean_tokens) - config.sigma**2 / 2
    return max(1, round(random.Random(key).lognormvariate(mu, config.sigma)))


class DeviceClock:
    """Seconds for which a device has worked: stands still between `stop` and `go`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stopped_at: float | None = None
        self._lost = 0.0

    def now(self) -> float:
        return (self._clock() if self._stopped_at is None else self._stopped_at) - self._lost

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self._clock()

    def go(self) -> None:
        if self._stopped_at is not None:
            self._lost += self._clock() - self._stopped_at
            self._stopped_at = None
