"""Who has been silent, or late, for too long. No clock: the time comes in as an argument, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Deadline:
    """Notes since when each of a changing set of things has been in it.

        deadline = Deadline(60.0)
        deadline.seen("worker0", now)             # starts the time of worker0 anew
        deadline.over(["worker0", "worker1"], now)   # those whose time is up

    A thing that `over` has not met before has its whole time from then on; one that it is not asked about is forgotten.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str | int, float] = {}

    @property
    def since(self) -> Mapping[str | int, float]:
        return self._since

    def seen(self, thing: str | int, now: float) -> None:
        self._since[thing] = now

    def over(self, things: Iterable[str | int], now: float) -> list[str | int]:
        self._since = {thing: self._since.get(thing, now) for thing in things}
        return [thing for thing, since in self._since.items() if now - since >= self._limit_s]
