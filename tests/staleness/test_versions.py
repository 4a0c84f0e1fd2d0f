"""Versions are never reused and their ages follow the lineage."""

from __future__ import annotations

import numpy as np
import pytest

from staleness.errors import VersionError
from staleness.versions import Lineage, pack, show, unpack


def ages(lineage: Lineage, trained_at: int, *sampled_at: int) -> list[int]:
    return lineage.age(trained_at, np.asarray(sampled_at, np.int64)).tolist()


def test_a_version_survives_packing() -> None:
    assert unpack(pack(3, 17)) == (3, 17)
    assert pack(0, 5) == 5
    assert pack(1, 0) == 1 << 32
    assert (show(pack(0, 12)), show(pack(2, 4))) == ("12", "2:4")
    with pytest.raises(VersionError):
        pack(0, -1)


def test_age_is_the_number_of_steps_in_one_lineage() -> None:
    assert ages(Lineage(), 5, 0, 3, 5) == [5, 2, 0]


def test_a_token_from_the_future_is_refused() -> None:
    with pytest.raises(VersionError, match="newer"):
        ages(Lineage(), 5, 6)
    with pytest.raises(VersionError, match="newer"):
        ages(Lineage((4,)), pack(1, 5), pack(2, 0))


def test_a_lost_branch_is_left_and_entered() -> None:
    """failures.md 26: resumed at step 4 after 5 and 6 were published."""
    lineage = Lineage((4,))
    now = pack(1, 7)
    assert ages(lineage, now, 3, 4, 5, 6, pack(1, 4), pack(1, 6)) == [4, 3, 3 + 1, 3 + 2, 3, 1]


def test_two_restores_part_at_the_lowest_fork_between() -> None:
    lineage = Lineage((10, 4))  # restored at 10, then at 4
    now = pack(2, 6)
    # Incarnation 0 up to 4 is shared; its steps 5..10 are lost since the second restore.
    assert ages(lineage, now, 4, 8) == [2, (6 - 4) + (8 - 4)]
    assert ages(lineage, now, pack(1, 12)) == [(6 - 4) + (12 - 4)]


def test_only_the_newest_incarnation_trains() -> None:
    with pytest.raises(VersionError, match="incarnation"):
        ages(Lineage((4,)), pack(0, 5), 3)


def test_the_age_of_one_version_is_that_of_an_array() -> None:
    lineage = Lineage((4, 6, 2))
    trained = pack(3, 5)
    sampled = [pack(i, s) for i, steps in enumerate([range(8), range(4, 9), range(6, 9), range(2, 6)]) for s in steps]
    assert [lineage.age_of(trained, version) for version in sampled] == lineage.age(
        trained, np.asarray(sampled)
    ).tolist()
