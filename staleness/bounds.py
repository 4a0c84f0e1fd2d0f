"""The hard bound: who may start, and which tokens may be trained on.

Admission (one rule): a group of n starts only if `running + ready + leased + n <= (max_staleness + 1) * B + slack`.
Check at `take` (never skipped): a sampled token older than `max_staleness` is not trained on.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

OnStale = Literal["mask", "drop"]


def capacity(*, max_staleness: int, batch: int, slack: int) -> int:
    """Most trajectories that may be running, ready or leased at once. All in trajectories, `batch` per step."""
    return (max_staleness + 1) * batch + slack


def admissible_groups(*, in_flight: int, group: int, limit: int) -> int:
    """How many whole groups of `group` trajectories may start now without exceeding `limit`."""
    return max(0, (limit - in_flight) // group)


def trainable(
    ages: NDArray[np.int64], usable: NDArray[np.bool_], *, max_staleness: int, on_stale: OnStale
) -> NDArray[np.bool_]:
    """Which tokens of one trajectory may be trained on; all False means that none of it may.

    `ages` and `usable` (False where the behaviour log-prob is not finite) have one entry per sampled token. Under
    `mask` stale tokens become context and the rest trains; under `drop` one stale token drops the trajectory.
    """
    fresh = ages <= max_staleness
    if on_stale == "drop" and not fresh.all():
        return np.zeros_like(usable)
    return fresh & usable
