"""Character arithmetic: the running sums of a few numbers, "7+15+20=" -> "22,42". The reward is for the last one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from async_rl.lockstep import Problem

SYMBOLS = ["<pad>", "<end>", *"0123456789+=,"]
ID = {symbol: i for i, symbol in enumerate(SYMBOLS)}
PAD, END = 0, 1
LARGEST = 49


def encode(text: str) -> list[int]:
    return [ID[character] for character in text]


def answer(terms: list[int]) -> str:
    """All running sums but the first term."""
    sums = [sum(terms[: i + 1]) for i in range(1, len(terms))]
    return ",".join(map(str, sums))


def problem(terms: list[int]) -> Problem:
    return Problem(encode("+".join(map(str, terms)) + "="), {"sum": sum(terms), "terms": len(terms)})


def draw(rng: random.Random, weights: dict[int, float]) -> list[int]:
    """Terms, as many as `weights` (number of terms -> how often) says."""
    count = rng.choices(list(weights), list(weights.values()))[0]
    return [rng.randint(1, LARGEST) for _ in range(count)]


def problems(count: int, seed: int, weights: dict[int, float]) -> list[Problem]:
    """Problems that differ from each other."""
    return [problem(list(terms)) for terms in _distinct(count, random.Random(seed), weights)]


def _distinct(count: int, rng: random.Random, weights: dict[int, float]) -> Iterator[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()
    while len(seen) < count:
        terms = tuple(draw(rng, weights))
        if terms not in seen:
            seen.add(terms)
            yield terms


def reward(response: str, row: dict[str, Any]) -> float:
    """1 if the last running sum is right."""
    last = response.rsplit(",", 1)[-1]
    return float(last.isdigit() and int(last) == row["sum"])
