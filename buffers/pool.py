"""Columnar storage of live trajectories: one row a trajectory, written by array operations only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]


SEALED = -1


class Pool:
    """`rows` trajectories of at most `max_tokens` sampled tokens each.

    A ticket id is `serial * rows + row`, so that a row is found without a table and a late message for the row's
    former ticket is recognised. Attempts start at 1; `SEALED` closes a row to appends. Memory is 16 bytes per token of
    capacity, touched only as it fills.
    """

    def __init__(self, rows: int, max_tokens: int) -> None:
        self.rows = rows
        self.max_tokens = max_tokens
        self.tokens: Int32s = np.zeros((rows, max_tokens), np.int32)
        self.logprobs: Floats = np.zeros((rows, max_tokens), np.float32)
        self.versions: Int64s = np.zeros((rows, max_tokens), np.int64)
        self.length: Int32s = np.zeros(rows, np.int32)
        self.ticket: Int64s = np.full(rows, -1, np.int64)
        self.attempt: Int32s = np.zeros(rows, np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._serial = 0

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def open(self, attempt: int) -> int:
        """A new ticket on a free row; returns its id."""
        row = self._free.pop()
        ticket = self._serial * self.rows + row
        self._serial += 1
        self.ticket[row] = ticket
        self.attempt[row] = attempt
        self.length[row] = 0
        return ticket

    def seal(self, ticket: int) -> None:
        """Closes a finished trajectory to appends; its tokens stay."""
        self.attempt[self.row(ticket)] = SEALED

    def close(self, ticket: int) -> None:
        """Frees the row of a ticket that has ended."""
        row = self.row(ticket)
        self.ticket[row] = -1
        self._free.append(row)

    def row(self, ticket: int) -> int:
        """Row of a live ticket; KeyError if it has ended."""
        row = ticket % self.rows
        if self.ticket[row] != ticket:
            raise KeyError(ticket)
        return row

    def write(
        self, rows: Int64s, offsets: Int32s, lengths: Int32s, versions: Int64s, tokens: Int32s, logprobs: Floats
    ) -> None:
        """Stores checked chunks: chunk i goes to `rows[i]` at `offsets[i]`; `tokens` and `logprobs` are concatenated.

        A row may occur more than once; its chunks must then be contiguous and in order.
        """
        starts = rows * self.max_tokens + offsets
        ends = np.cumsum(lengths, dtype=np.int64)
        # Where each token goes: its chunk's start plus its place in the chunk.
        at = np.arange(tokens.size, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
        self.tokens.reshape(-1)[at] = tokens
        self.logprobs.reshape(-1)[at] = logprobs
        self.versions.reshape(-1)[at] = np.repeat(versions, lengths)
        np.maximum.at(self.length, rows, offsets + lengths)
