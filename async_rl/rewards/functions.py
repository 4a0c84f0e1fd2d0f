"""Rewards that ship with the project. Your own looks the same: `function(response, row) -> float`."""

from __future__ import annotations

import re
from typing import Any


def last_integer(response: str, row: dict[str, Any]) -> float:
    """1 if the last integer in the response is the row's `answer`, else 0."""
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and int(numbers[-1]) == int(row["answer"]))


def mentions_answer(response: str, row: dict[str, Any]) -> float:
    """1 if the row's `answer` is among the integers in the response, else 0."""
    return float(int(row["answer"]) in map(int, re.findall(r"-?\d+", response)))


def reasoning_gym(response: str, row: dict[str, Any]) -> float:
    """The score of the reasoning-gym task that made the row."""
    from reasoning_gym import get_score_answer_fn

    return float(get_score_answer_fn(row["metadata"]["source_dataset"])(response, row))
