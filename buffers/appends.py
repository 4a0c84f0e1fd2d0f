"""Which chunks of a message are stored: contiguous, of the current attempt, within the budget; by array operations."""

from __future__ import annotations

import numpy as np

from buffers.messages import Chunks, Refusal
from buffers.pool import ROW_MASK, Int64s, Pool
from staleness.versions import INJECTED


def store(pool: Pool, chunks: Chunks, *, newest: int, owner: int, most: int) -> tuple[Int64s, list[Refusal]]:
    """Writes the chunks that fit into the pool; returns their places in the message, and the refused ones.

    A chunk fits if its ticket is held by `owner` (a worker's number) and open under that attempt, its offset is the
    trajectory's length, its end at most `most` tokens, and its version at most `newest`, or `INJECTED`. What is stored
    already is neither stored nor refused. Rows are judged independently.
    """
    rows = chunks.ticket & ROW_MASK
    outside = rows >= pool.rows
    if outside.any():
        rows = np.where(outside, 0, rows)  # the ticket of row 0 is another one, so it is fenced
    refused: list[Refusal] = []
    if pool.distinct(rows):
        return _store_distinct(pool, chunks, np.arange(rows.size), rows, (newest, owner, most), refused), refused
    stored: list[Int64s] = []
    left = np.arange(rows.size)
    while left.size:
        # A trajectory may have several chunks in one message, one per version: take the first of each, then the next.
        _, first = np.unique(rows[left], return_index=True)
        first.sort()
        stored.append(_store_distinct(pool, chunks, left[first], rows, (newest, owner, most), refused))
        left = np.delete(left, first)
    return np.concatenate(stored), refused


def _store_distinct(
    pool: Pool, chunks: Chunks, at: Int64s, rows: Int64s, limits: tuple[int, int, int], refused: list[Refusal]
) -> Int64s:
    """One chunk a row: `at` are places of chunks that are all of different rows."""
    newest, owner, most = limits
    row, ticket, version, offset = rows[at], chunks.ticket[at], chunks.version[at], chunks.offset[at]
    end = offset.astype(np.int64) + chunks.length[at]
    known = pool.length[row]
    live = (pool.owner[row] == owner) & (pool.ticket[row] == ticket) & (pool.attempt[row] == chunks.attempt[at])
    valid = (end <= most) & (version <= newest) & (version >= INJECTED)
    fits = live & valid & (offset == known)
    if fits.all():
        good = at
    else:
        repeat = live & (end <= known)
        for i in np.flatnonzero(~fits & ~repeat):
            reason = "fenced" if not live[i] else "gap" if valid[i] else "invalid"
            refused.append(Refusal(int(ticket[i]), int(chunks.attempt[at[i]]), reason, int(known[i]) if live[i] else 0))
        good = at[fits]
    if good.size == chunks.ticket.size:
        tokens, logprobs = chunks.tokens, chunks.logprobs
    else:
        wanted = np.zeros(chunks.ticket.size, np.bool_)
        wanted[good] = True
        each = np.repeat(wanted, chunks.length)
        tokens, logprobs = chunks.tokens[each], chunks.logprobs[each]
    pool.write(rows[good], chunks.offset[good], chunks.length[good], chunks.version[good], tokens, logprobs)
    return good
