"""The clock and the network."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass
class Weather:
    """Of one run. Probabilities per message, delays in seconds."""

    delay_s: float
    loss: float
    duplication: float
    reordering: bool


class Clock:
    """Events in order of time; equal times in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, event))

    def step(self) -> None:
        """The next event."""
        self.now, _, event = heapq.heappop(self._events)
        event()


class Net:
    """One-way links by name. Without reordering a link delivers in the order sent, as a connection does."""

    def __init__(self, clock: Clock, random: Random, weather: Weather) -> None:
        self._clock, self._random = clock, random
        self.weather = weather
        self._last: dict[str, float] = {}

    def send(self, link: str, deliver: Callable[[], None]) -> None:
        random, weather = self._random, self.weather
        if random.random() < weather.loss:
            return
        for _ in range(2 if random.random() < weather.duplication else 1):
            at = self._clock.now + random.expovariate(1 / weather.delay_s)
            if not weather.reordering:
                at = self._last[link] = max(at, self._last.get(link, 0.0))
            self._clock.after(at - self._clock.now, deliver)
