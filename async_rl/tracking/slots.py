"""What a worker's slots do all day: slot-seconds by state, so that an idle one has a cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STATES = ("generate", "update", "yield", "environment", "reward", "wait for weights", "no ticket")
"""`update`: generation stands still for new weights. `yield`: the learner has the devices. `no ticket`: admission has
none to give."""


class Slots:
    """Counts a worker's trajectories by state over time. Times are seconds of any clock that does not go back.

    with slots.taken("wait for weights", clock) as doing:
        doing("generate")
    slots.seconds(now)["generate"]
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots = slots
        self._now: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._since = now

    @contextmanager
    def taken(self, state: str, clock: Callable[[], float]) -> Iterator[Callable[[str], None]]:
        """A slot for the length of the block; gives what to call when its state changes."""
        self._settle(clock())
        self._now[state] += 1

        def doing(other: str) -> None:
            nonlocal state
            self._settle(clock())
            self._now[state] -= 1
            self._now[other] += 1
            state = other

        try:
            yield doing
        finally:
            self._settle(clock())
            self._now[state] -= 1

    def paused(self, state: str, seconds: float, now: float) -> None:
        """Generation has stood still for so long, for `update` or `yield`."""
        self._settle(now)
        moved = self._now["generate"] * seconds
        self._seconds["generate"] -= moved
        self._seconds[state] += moved

    def now(self, state: str) -> int:
        """How many slots are in a state."""
        return self._now[state]

    def seconds(self, now: float) -> dict[str, float]:
        self._settle(now)
        return {state: round(self._seconds[state], 4) for state in STATES}

    def _settle(self, now: float) -> None:
        passed = now - self._since
        self._since = now
        for state, count in self._now.items():
            self._seconds[state] += count * passed
        self._seconds["no ticket"] += (self._slots - self._now.total()) * passed
