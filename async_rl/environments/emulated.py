"""A tool that takes its time and says little, for measuring what waits for it."""

from __future__ import annotations

from time import sleep
from typing import Any


class Tool:
    """`turns` turns, each but the last followed by the tool's answer, `says`, which takes `latency_s` seconds; worth
    nothing by itself."""

    replayable = True

    def __init__(self, row: dict[str, Any], *, latency_s: float = 1.0, turns: int = 4, says: str = "ok") -> None:
        self._latency_s, self._turns, self._says = latency_s, turns, says
        self._turn = 0

    def reset(self, seed: int) -> None:
        self._turn = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turn += 1
        if self._turn == self._turns:
            return "", 0.0, True
        sleep(self._latency_s)
        return self._says, 0.0, False
