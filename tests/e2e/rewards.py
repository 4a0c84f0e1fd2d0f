"""Rewards for runs of the tiny model."""

from __future__ import annotations

import time
from typing import Any

Row = dict[str, Any]


def length(response: str, row: Row) -> float:
    """Differs within a group, so that there is a gradient."""
    return len(response) / 10


def raises_on_some(response: str, row: Row) -> float:
    """Fails on about a quarter of the members of any group."""
    if sum(response.encode()) % 4 == 0:
        raise ValueError("this response is not to be scored")
    return len(response) / 10


def hangs_on_some(response: str, row: Row) -> float:
    if row["answer"] % 8 == 0:
        time.sleep(3600)
    return len(response) / 10


def raises(response: str, row: Row) -> float:
    raise KeyError("the reward is broken")


def constant(response: str, row: Row) -> float:
    return 0.5


class Echo:
    """An environment of two turns that answers with a letter; a turn is worth the different characters in it."""

    replayable = True

    def __init__(self, row: Row, *, answer: str = "a") -> None:
        self._answer, self._turns = answer, 0

    def reset(self, seed: int) -> None:
        self._turns = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turns += 1
        return self._answer, len(set(text)) / 10, self._turns == 2
