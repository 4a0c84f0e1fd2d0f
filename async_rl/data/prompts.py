"""The prepared prompts of a run: token ids and rows in two files, given out in an order that a seed fixes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


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


def order(count: int, *, seed: int, shuffle: bool, start: int = 0) -> Iterator[tuple[int, int]]:
    """Keys (epoch, index) from the `start`-th on, without end; each epoch is a permutation of its own."""
    epoch, skip = divmod(start, count)
    while True:
        indices = list(range(count))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(indices)
        for index in indices[skip:]:
            yield epoch, index
        epoch, skip = epoch + 1, 0
