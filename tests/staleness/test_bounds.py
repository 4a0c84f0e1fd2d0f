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
    assert bounds.fresh([5, 5, 0], max_staleness=bound, on_stale=on_stale) == expected


@pytest.mark.parametrize("on_stale", ["mask", "drop", "pace"])
def test_injected_text_is_never_trained_on_and_never_stale(on_stale: bounds.OnStale) -> None:
    assert bounds.fresh([0, None, 1], max_staleness=1, on_stale=on_stale) == [True, False, True]


@pytest.mark.parametrize(
    ("sampled", "start", "least", "expected"),
    [
        ("ssss", 0, 3, 3),
        ("sss", 0, 3, None),
        ("ssssss", 0, 3, 5),
        ("ssssss", 2, 3, 5),
        ("ssssss", 3, 3, None),
        ("sssiisss", 0, 3, 5),  # the newest turn begins at 5
        ("sssiisss", 0, 4, 7),  # that would be too short
        ("sssiisssiis", 0, 3, 10),
        ("ssssii", 0, 3, 3),  # text that nobody sampled has no end of its own
        ("iiss", 0, 1, 3),
        ("", 0, 1, None),
    ],
)
def test_where_a_segment_ends(sampled: str, start: int, least: int, expected: int | None) -> None:
    column = np.asarray([each == "s" for each in sampled], np.bool_)
    assert bounds.cut(column, start=start, least=least) == expected
