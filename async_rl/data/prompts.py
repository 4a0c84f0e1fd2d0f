"""The prepared prompts of a run: token ids and rows in two files, given out in an order that a seed fixes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_rl.errors import DataError


@dataclass(frozen=True)
class Prompts:
    """`tokens[i]` and `rows[i]` belong to prompt i; rows are JSON."""

    tokens: list[NDArray[np.int32]]
    rows: list[bytes]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.tokens)

    def write(self, path: Path) -> None:
        ends = np.cumsum([len(tokens) for tokens in self.tokens])
        partial = path.with_suffix(".partial.npz")
        np.savez(
            partial,
            tokens=np.concatenate(self.tokens),
            ends=ends,
            rows=json.dumps([row.decode() for row in self.rows]),
            fingerprint=self.fingerprint,
        )
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> Prompts:
        with np.load(path) as file:
            ends = file["ends"].tolist()
            tokens = np.split(file["tokens"], ends[:-1])
            rows = [row.encode() for row in json.loads(str(file["rows"]))]
            return cls(tokens, rows, str(file["fingerprint"]))


def difficulties(prompts: Prompts, column: str | None) -> list[float]:
    """What `data.difficulty_column` says of each prompt; nothing without a column. Raises `DataError`."""
    if column is None:
        return []
    found = [json.loads(row).get(column) for row in prompts.rows]
    wrong = next((i for i, value in enumerate(found) if isinstance(value, bool) or not _is_number(value)), None)
    if wrong is not None:
        raise DataError(f"data.difficulty_column = {column!r}: row {wrong} has {found[wrong]!r} there, not a number")
    return [float(value) for value in found]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def order(
    count: int,
    *,
    seed: int,
    shuffle: bool,
    start: int = 0,
    difficulty: Sequence[float] = (),
    curriculum_epochs: int = 0,
) -> Iterator[tuple[int, int]]:
    """Keys (epoch, index) from the `start`-th on, without end; each epoch is a permutation of its own.

    In the first `curriculum_epochs` of them `difficulty`, a number for each prompt if there is one, rises.
    """
    epoch, skip = divmod(start, count)
    while True:
        indices = list(range(count))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(indices)
        if difficulty and epoch < curriculum_epochs:
            indices.sort(key=difficulty.__getitem__)
        for index in indices[skip:]:
            yield epoch, index
        epoch, skip = epoch + 1, 0
