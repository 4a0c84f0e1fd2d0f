"""A task of two turns: the policy writes an expression, is told its value, and gives the answer."""

from __future__ import annotations

import operator
import re
from time import sleep
from typing import Any

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"(-?\d{1,9})\s*([+*-])\s*(\d{1,9})")


class Calculator:
    """The row's `answer` as the last integer of the second turn is worth 1, an expression in the first one `hint`.

    `latency_s`: how long the calculator takes.
    """

    replayable = True

    def __init__(self, row: dict[str, Any], *, latency_s: float = 0.0, hint: float = 0.1) -> None:
        self._answer = int(row["answer"])
        self._latency_s, self._hint = latency_s, hint
        self._turn = 0

    def reset(self, seed: int) -> None:
        self._turn = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turn += 1
        if self._turn == 1:
            sleep(self._latency_s)
            found = EXPRESSION.search(text)
            if found is None:
                return "error", 0.0, False
            left, sign, right = found.groups()
            return str(OPERATORS[sign](int(left), int(right))), self._hint, False
        numbers = re.findall(r"-?\d+", text)
        return "", float(bool(numbers) and int(numbers[-1]) == self._answer), True
