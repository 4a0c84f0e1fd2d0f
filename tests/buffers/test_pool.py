"""Columnar writes and run-length versions, against a plain Python model.

1  a chunk lands at the end of its row and nowhere else
2  versions are kept as runs, in order, whatever the chunks' cuts
3  a ticket is never found on a row that another one has
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from buffers.pool import NOBODY, SEALED, Pool
from staleness.versions import INJECTED


def write(pool: Pool, rows: list[tuple[int, int, int, list[int]]]) -> None:
    """Rows of (row, offset, version, tokens); the log-prob of token t is -t."""
    tokens = np.asarray([token for row in rows for token in row[3]], np.int32)
    pool.write(
        np.asarray([row[0] for row in rows]),
        np.asarray([row[1] for row in rows], np.int32),
        np.asarray([len(row[3]) for row in rows], np.int32),
        np.asarray([row[2] for row in rows]),
        tokens,
        -tokens.astype(np.float32),
    )


def test_writes_land_where_their_rows_and_offsets_say() -> None:
    pool = Pool(rows=3, max_tokens=6)
    write(pool, [(2, 0, 7, [9])])
    write(pool, [(2, 1, 7, [1, 2, 3]), (0, 0, 9, [4, 5])])
    assert pool.tokens.tolist() == [[4, 5, 0, 0, 0, 0], [0] * 6, [9, 1, 2, 3, 0, 0]]
    assert pool.logprobs.tolist() == [[-4, -5, 0, 0, 0, 0], [0] * 6, [-9, -1, -2, -3, 0, 0]]
    assert pool.length.tolist() == [2, 0, 4]
    assert pool.spans_of(2) == [(0, 7)]
    assert pool.spans_of(0) == [(0, 9)]
    assert pool.spans_of(1) == []


def test_versions_are_runs_and_their_table_grows_with_them() -> None:
    pool = Pool(rows=2, max_tokens=64)
    for i in range(20):
        write(pool, [(1, 2 * i, i // 2, [i]), (0, i, INJECTED if i % 2 else 3, [i])])
        write(pool, [(1, 2 * i + 1, i // 2, [i])])
    assert pool.spans_of(1) == [(4 * i, i) for i in range(10)]
    assert pool.span_lengths(1) == [4] * 10
    assert pool.sampled_versions(1) == 10
    assert pool.spans_of(0) == [(i, INJECTED if i % 2 else 3) for i in range(20)]
    assert pool.sampled_versions(0) == 1


def test_any_chunks_equal_a_plain_model() -> None:
    rng = random.Random(5)
    pool = Pool(rows=5, max_tokens=40)
    tickets = [pool.open(1) for _ in range(5)]
    model: dict[int, list[tuple[int, int]]] = {pool.row(ticket): [] for ticket in tickets}
    for _ in range(120):
        rows = rng.sample(sorted(model), rng.randint(1, 5))
        parts = []
        for row in rows:
            size = min(rng.randint(1, 4), 40 - len(model[row]))
            if size:
                version = rng.choice([INJECTED, 1, 2, 1 << 32])
                tokens = [rng.randrange(1000) for _ in range(size)]
                parts.append((row, len(model[row]), version, tokens))
                model[row] += [(token, version) for token in tokens]
        if parts:
            write(pool, parts)
        if rng.random() < 0.05:
            row = rng.choice(sorted(model))
            assert pool.clear(int(pool.ticket[row])) == len(model[row])
            model[row] = []
    for row, said in model.items():
        assert pool.tokens[row, : pool.length[row]].tolist() == [token for token, _ in said]
        versions = np.repeat([span.version for span in pool.spans_of(row)], pool.span_lengths(row))
        assert versions.tolist() == [version for _, version in said]
        spans = pool.spans_of(row)
        assert all(one.version != next_.version for one, next_ in pairwise(spans))


def test_a_filled_row_reads_like_a_written_one_and_goes_on() -> None:
    pool = Pool(rows=1, max_tokens=8)
    row = pool.row(pool.open(1))
    pool.fill(row, np.asarray([1, 2, 3], np.int32), np.asarray([-1, -2, -3], np.float32), [(0, 4), (2, INJECTED)])
    write(pool, [(row, 3, INJECTED, [4])])
    assert pool.tokens[row, :4].tolist() == [1, 2, 3, 4]
    assert pool.spans_of(row) == [(0, 4), (2, INJECTED)]
    assert pool.span_lengths(row) == [2, 2]


def test_a_ticket_is_never_found_on_a_row_that_has_been_given_again() -> None:
    pool = Pool(rows=2, max_tokens=1)
    first = pool.open(1)
    row = pool.row(first)
    pool.owner[row] = 7
    write(pool, [(row, 0, 3, [5])])
    pool.seal(first)
    assert (pool.attempt[row], pool.owner[row]) == (SEALED, NOBODY)
    pool.close(first)
    again = [pool.open(1), pool.open(1)]
    assert len({first, *again}) == 3
    assert row in {pool.row(ticket) for ticket in again}
    with pytest.raises(KeyError):
        pool.row(first)
    assert pool.free_rows == 0
    assert pool.length.tolist() == [0, 0]
    assert pool.spans.tolist() == [0, 0]
    assert pool.owner.tolist() == [NOBODY, NOBODY]


def test_the_lowest_free_row_is_given_also_after_a_recovery() -> None:
    live = Pool(rows=6, max_tokens=1)
    tickets = [live.open(1) for _ in range(6)]
    for i in (4, 1, 3):
        live.close(tickets[i])
    again = Pool(rows=6, max_tokens=1, serial=live.serial)
    for i in (5, 0, 2):
        again.place(tickets[i], 1)
    again.count_free()
    assert [live.open(1) for _ in range(3)] == [again.open(1) for _ in range(3)]
    assert live.ticket.tolist() == again.ticket.tolist()


def test_rows_named_twice_are_told_apart_from_distinct_ones() -> None:
    pool = Pool(rows=4, max_tokens=1)
    assert pool.distinct(np.asarray([3, 0, 2]))
    assert not pool.distinct(np.asarray([3, 0, 3]))
    assert pool.distinct(np.asarray([], np.int64))
