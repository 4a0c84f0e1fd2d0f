"""Which chunks of a message are stored: contiguous, of the current attempt, within the budget; by array operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from buffers.messages import Chunks, Refusal
from buffers.pool import Int64s, Pool


def store(pool: Pool, chunks: Chunks, newest: int, held: set[int]) -> tuple[Int64s, list[Refusal]]:
    """Writes the chunks that fit into the pool; returns their places in the message, and the refused ones.

    A chunk fits if its ticket is among those `held` by the sender and open under that attempt, its offset is the
    trajectory's length and its version is at most `newest`. What is stored already is neither stored nor refused. Rows
    are judged independently.
    """
    rows = chunks.ticket % pool.rows
    ours = np.isin(chunks.ticket, np.fromiter(held, np.int64, len(held)))
    stored: list[Int64s] = []
    refused: list[Refusal] = []
    left = np.arange(rows.size)
    while left.size:
        # A trajectory may have several chunks in one message, one per version: take the first of each, then the next.
        _, first = np.unique(rows[left], return_index=True)
        first.sort()
        stored.append(_store_distinct(pool, chunks, left[first], rows, ours, newest, refused))
        left = np.delete(left, first)
    return np.concatenate(stored) if stored else left, refused


def _store_distinct(
    pool: Pool,
    chunks: Chunks,
    at: Int64s,
    rows: Int64s,
    ours: NDArray[np.bool_],
    newest: int,
    refused: list[Refusal],
) -> Int64s:
    """One chunk a row: `at` are places of chunks that are all of different rows."""
    row, ticket, version = rows[at], chunks.ticket[at], chunks.version[at]
    end = chunks.offset[at].astype(np.int64) + chunks.length[at]
    known = pool.length[row]
    live = ours[at] & (pool.ticket[row] == ticket) & (pool.attempt[row] == chunks.attempt[at])
    valid = (end <= pool.max_tokens) & (version <= newest) & (version >= 0)
    fits = live & valid & (chunks.offset[at] == known)
    repeat = live & (end <= known)
    for i in np.flatnonzero(~fits & ~repeat):
        reason = "fenced" if not live[i] else "gap" if valid[i] else "invalid"
        refused.append(Refusal(int(ticket[i]), reason, int(known[i]) if live[i] else 0))
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
