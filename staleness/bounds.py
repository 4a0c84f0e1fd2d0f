"""The hard bound: who may start, and which tokens may be trained on.

Admission (one rule): a group of n starts only if `in flight + n <= (max_staleness + 1) * B + slack`.
Check at `take` (never skipped): a sampled token older than `max_staleness` is not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

OnStale = Literal["mask", "drop", "pace"]


def capacity(*, max_staleness: int, batch: int, slack: int) -> int:
    """Most trajectories that may be in flight at once. All in trajectories, `batch` per step."""
    return (max_staleness + 1) * batch + slack


def admissible_groups(*, in_flight: int, group: int, limit: int) -> int:
    """How many whole groups of `group` trajectories may start now without exceeding `limit`."""
    return max(0, (limit - in_flight) // group)


def fresh(ages: Sequence[int | None], *, max_staleness: int, on_stale: OnStale) -> list[bool]:
    """Which spans of one trajectory may be trained on; all False means that none of it may.

    `ages` has one entry per span of equal version, None for text that no policy sampled. Under `mask` and `pace` stale
    spans become context and the rest trains; under `drop` one stale span drops the trajectory.
    """
    young = [age is not None and age <= max_staleness for age in ages]
    if on_stale == "drop" and any(age is not None and age > max_staleness for age in ages):
        return [False] * len(young)
    return young


def cut(sampled: NDArray[np.bool_], *, start: int, least: int) -> int | None:
    """Where a segment of a trajectory that goes on ends, None if it is too early for one.

    `sampled` has one entry per token so far. The segment is `[start, end)` and has at least `least` sampled tokens; the
    token at `end` is sampled too: the value of the state before it stands for what is still to come. The end is the
    beginning of the newest turn if it can be, else the last sampled token.
    """
    places = start + np.flatnonzero(sampled[start:])
    if places.size <= least:
        return None
    ends = places[least:]
    turns = ends[~sampled[ends - 1]]
    return int(turns[-1] if turns.size else ends[-1])
