"""Columnar storage of live trajectories: one row a trajectory, written by array operations only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from staleness.versions import INJECTED

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]

SEALED = -1
"""Attempt of a row that takes no more tokens."""
NOBODY = -1
"""Owner of a row that no worker is generating."""
ROW_BITS = 20
ROW_MASK = (1 << ROW_BITS) - 1
MAX_ROWS = 1 << ROW_BITS


class Span(NamedTuple):
    """A run of tokens of one version, from `start` to the next span's start. `INJECTED` marks text nobody sampled."""

    start: int
    version: int


class Pool:
    """`rows` trajectories of at most `max_tokens` tokens each.

    A ticket id is `serial << 20 | row`, so that a row is found without a table and a late message for the row's former
    ticket is recognised. Attempts start at 1; `SEALED` closes a row to appends. Versions are run-length encoded.
    Memory is 8 bytes per token of capacity, touched only as it fills.
    """

    def __init__(self, rows: int, max_tokens: int, serial: int = 0) -> None:
        assert rows <= MAX_ROWS
        self.rows = rows
        self.max_tokens = max_tokens
        self.tokens: Int32s = np.zeros((rows, max_tokens), np.int32)
        self.logprobs: Floats = np.zeros((rows, max_tokens), np.float32)
        self.length: Int32s = np.zeros(rows, np.int32)
        self.ticket: Int64s = np.full(rows, -1, np.int64)
        self.attempt: Int32s = np.zeros(rows, np.int32)
        self.owner: Int32s = np.full(rows, NOBODY, np.int32)
        self.spans: Int32s = np.zeros(rows, np.int32)
        self.span_start: Int32s = np.zeros((rows, 8), np.int32)
        self.span_version: Int64s = np.zeros((rows, 8), np.int64)
        self.serial = serial
        self._free = list(range(rows))
        self._place = np.zeros(rows, np.int64)

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def open(self, attempt: int) -> int:
        """A new ticket on the lowest free row; returns its id."""
        row = heapq.heappop(self._free)
        ticket = self.serial << ROW_BITS | row
        self.serial += 1
        self._occupy(row, ticket, attempt)
        return ticket

    def place(self, ticket: int, attempt: int) -> int:
        """Gives a ticket of an earlier life its row back."""
        row = ticket & ROW_MASK
        self._occupy(row, ticket, attempt)
        return row

    def count_free(self) -> None:
        """After the last `place`."""
        self._free = np.flatnonzero(self.ticket < 0).tolist()

    def _occupy(self, row: int, ticket: int, attempt: int) -> None:
        self.ticket[row] = ticket
        self.attempt[row] = attempt
        self.owner[row] = NOBODY
        self.length[row] = 0
        self.spans[row] = 0

    def seal(self, ticket: int) -> None:
        """Closes a finished trajectory to appends; its tokens stay."""
        row = self.row(ticket)
        self.attempt[row] = SEALED
        self.owner[row] = NOBODY

    def clear(self, ticket: int) -> int:
        """Forgets the tokens of a ticket that starts again; returns how many there were."""
        row = self.row(ticket)
        lost = int(self.length[row])
        self.length[row] = self.spans[row] = 0
        return lost

    def close(self, ticket: int) -> None:
        """Frees the row of a ticket that has ended."""
        row = self.row(ticket)
        self.ticket[row] = -1
        self.owner[row] = NOBODY
        heapq.heappush(self._free, row)

    def row(self, ticket: int) -> int:
        """Row of a live ticket; KeyError if it has ended."""
        row = ticket & ROW_MASK
        if row >= self.rows or self.ticket[row] != ticket:
            raise KeyError(ticket)
        return row

    def distinct(self, rows: Int64s) -> bool:
        """Whether no row occurs twice."""
        order = np.arange(rows.size)
        self._place[rows] = order
        return bool((self._place[rows] == order).all())

    def write(
        self, rows: Int64s, offsets: Int32s, lengths: Int32s, versions: Int64s, tokens: Int32s, logprobs: Floats
    ) -> None:
        """Stores checked chunks: chunk i goes to the end of `rows[i]`, which is `offsets[i]`. Rows are distinct.

        `tokens` and `logprobs` are the chunks' columns, concatenated.
        """
        starts = rows * self.max_tokens + offsets
        first = int(lengths[0]) if lengths.size else 0
        if first and first * lengths.size == tokens.size and (lengths == first).all():
            _windows(self.tokens, first)[starts] = tokens.view(f"V{4 * first}")
            _windows(self.logprobs, first)[starts] = logprobs.view(f"V{4 * first}")
        else:
            # Where each token goes: its chunk's start plus its place in the chunk.
            ends = np.cumsum(lengths, dtype=np.int64)
            at = np.arange(tokens.size) + np.repeat(starts - (ends - lengths), lengths)
            self.tokens.reshape(-1)[at] = tokens
            self.logprobs.reshape(-1)[at] = logprobs
        self.length[rows] = offsets + lengths
        self._extend_spans(rows, offsets, versions)

    def _extend_spans(self, rows: Int64s, offsets: Int32s, versions: Int64s) -> None:
        count = self.spans[rows]
        other = (count == 0) | (self.span_version[rows, count - 1] != versions)
        if not other.any():
            return
        new, place = rows[other], count[other]
        if int(place.max()) >= self.span_start.shape[1]:
            self.span_start = np.concatenate([self.span_start, np.zeros_like(self.span_start)], axis=1)
            self.span_version = np.concatenate([self.span_version, np.zeros_like(self.span_version)], axis=1)
        self.span_start[new, place] = offsets[other]
        self.span_version[new, place] = versions[other]
        self.spans[new] = place + 1

    def fill(self, row: int, tokens: Int32s, logprobs: Floats, spans: Sequence[tuple[int, int]]) -> None:
        """Puts a whole trajectory into an empty row; `spans` are (start, version)."""
        for start, version in spans:
            one = np.asarray([row])
            self._extend_spans(one, np.asarray([start], np.int32), np.asarray([version], np.int64))
        self.tokens[row, : tokens.size] = tokens
        self.logprobs[row, : tokens.size] = logprobs
        self.length[row] = tokens.size

    # --- reading -----------------------------------------------------------------------------------------------

    def spans_of(self, row: int) -> list[Span]:
        count = int(self.spans[row])
        pairs = zip(self.span_start[row, :count].tolist(), self.span_version[row, :count].tolist(), strict=True)
        return [Span(*pair) for pair in pairs]

    def span_lengths(self, row: int) -> list[int]:
        """Tokens of each span of a row."""
        edges: list[int] = [*self.span_start[row, : int(self.spans[row])].tolist(), int(self.length[row])]
        return [end - start for start, end in pairwise(edges)]

    def versions_of(self, row: int) -> list[int]:
        """The version of each span of a row."""
        return self.span_version[row, : int(self.spans[row])].tolist()

    def injected(self, row: int) -> list[tuple[int, int]]:
        """(start, end) of what in a row no policy has sampled."""
        spans = [*self.spans_of(row), Span(int(self.length[row]), 0)]
        return [(span.start, after.start) for span, after in pairwise(spans) if span.version == INJECTED]

    def sampled(self, row: int) -> NDArray[np.bool_]:
        """Which tokens of a row a policy has sampled."""
        return np.repeat([version != INJECTED for version in self.versions_of(row)], self.span_lengths(row))

    def count_sampled(self, row: int) -> tuple[int, int]:
        """Tokens of a row that a policy has sampled, and how many of them have a finite log-prob."""
        finite = np.isfinite(self.logprobs[row, : int(self.length[row])])
        if INJECTED not in self.versions_of(row):
            return finite.size, int(np.count_nonzero(finite))
        sampled = self.sampled(row)
        return int(np.count_nonzero(sampled)), int(np.count_nonzero(finite & sampled))

    def sampled_versions(self, row: int) -> int:
        """How many policy versions the sampled tokens of a row come from."""
        return len(set(self.versions_of(row)) - {INJECTED})


def _windows(column: Int32s | Floats, length: int) -> NDArray[np.void]:
    """`length` entries from each place of a column on, as one element, so that a chunk is copied at once."""
    return np.ndarray((column.size - length + 1,), f"V{4 * length}", column, strides=(4,))
