"""Columnar writes against a plain Python model."""

from __future__ import annotations

import numpy as np
import pytest

from buffers.pool import Pool


def test_writes_land_where_their_rows_and_offsets_say() -> None:
    pool = Pool(rows=3, max_tokens=6)
    pool.write(
        np.asarray([2, 0]),
        np.asarray([1, 0], np.int32),
        np.asarray([3, 2], np.int32),
        np.asarray([7, 9]),
        np.asarray([1, 2, 3, 4, 5], np.int32),
        np.asarray([-1, -2, -3, -4, -5], np.float32),
    )
    assert pool.tokens.tolist() == [[4, 5, 0, 0, 0, 0], [0] * 6, [0, 1, 2, 3, 0, 0]]
    assert pool.versions[2].tolist() == [0, 7, 7, 7, 0, 0]
    assert pool.length.tolist() == [2, 0, 4]


def test_a_ticket_is_never_found_on_a_row_that_has_been_given_again() -> None:
    pool = Pool(rows=2, max_tokens=1)
    first = pool.open(1)
    row = pool.row(first)
    pool.close(first)
    again = [pool.open(1), pool.open(1)]
    assert len({first, *again}) == 3
    assert row in {pool.row(ticket) for ticket in again}
    with pytest.raises(KeyError):
        pool.row(first)
    assert pool.free_rows == 0
