"""A tool that takes its time and says little, for measuring what waits for it."""

from __future__ import annotations

from time import sleep
from typing import Any


class Tool:
    """`turns` turns, the tool's answer of `latency_s` seconds after each but the last; worth nothing by itself."""

    replayable = True

    def __init__(self, row: dict[str, Any], *, latency_s: float = 1.0, turns: int = 4) -> None:
        self._latency_s, self._turns = latency_s, turns
        self._turn = 0

    def reset(self, seed: int) -> None:
        self._turn = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turn += 1
        if self._turn == self._turns:
            return "", 0.0, True
        sleep(self._latency_s)
        return "ok", 0.0, False
