"""Admission and the hard bound."""

from __future__ import annotations

import numpy as np
import pytest

from staleness import bounds


@pytest.mark.parametrize(("eta", "slack", "expected"), [(0, 0, 16), (1, 0, 32), (4, 8, 88)])
def test_capacity_is_eta_plus_one_batches_and_slack(eta: int, slack: int, expected: int) -> None:
    assert bounds.capacity(max_staleness=eta, batch=16, slack=slack) == expected


@pytest.mark.parametrize(("in_flight", "expected"), [(0, 4), (1, 3), (24, 1), (25, 0), (32, 0)])
def test_only_whole_groups_are_admitted(in_flight: int, expected: int) -> None:
    assert bounds.admissible_groups(in_flight=in_flight, group=8, limit=32) == expected


@pytest.mark.parametrize(
    ("bound", "on_stale", "expected"),
    [
        (2, "mask", [False, False, True]),
        (2, "drop", [False, False, False]),
        (5, "mask", [True, True, True]),
        (5, "drop", [True, True, True]),
        (4, "mask", [False, False, True]),
    ],
)
def test_versions_0_0_5_at_learner_step_5(bound: int, on_stale: bounds.OnStale, expected: list[bool]) -> None:
    """failures.md 9."""
    ages = np.asarray([5, 5, 0])
    usable = np.ones(3, np.bool_)
    assert bounds.trainable(ages, usable, max_staleness=bound, on_stale=on_stale).tolist() == expected


def test_a_token_without_a_finite_logprob_is_not_trained_on() -> None:
    usable = np.asarray([True, False, True])
    assert bounds.trainable(np.zeros(3, np.int64), usable, max_staleness=0, on_stale="drop").tolist() == [
        True,
        False,
        True,
    ]
