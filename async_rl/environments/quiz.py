"""A quiz of sums over several turns: the policy answers, is asked the next, and every right answer counts."""

from __future__ import annotations

import random
import re
from time import sleep
from typing import Any

LARGEST = 20


class Quiz:
    """The first question is the row's prompt, with its `answer`; the others are drawn from the seed, the same for all
    members of a group. A turn's last integer is its answer, a right one is worth 1 / `turns`. `latency_s`: how long it
    takes to come up with the next question."""

    replayable = True

    def __init__(self, row: dict[str, Any], *, turns: int = 4, latency_s: float = 0.0) -> None:
        self._first, self._turns, self._latency_s = int(row["answer"]), turns, latency_s

    def reset(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._answer, self._turn = self._first, 0

    def step(self, text: str) -> tuple[str, float, bool]:
        numbers = re.findall(r"-?\d{1,9}", text)
        reward = float(bool(numbers) and int(numbers[-1]) == self._answer) / self._turns
        self._turn += 1
        if self._turn == self._turns:
            return "", reward, True
        sleep(self._latency_s)
        left, right = (self._random.randint(1, LARGEST) for _ in range(2))
        self._answer = left + right
        return f"What is {left} + {right}?", reward, False
