"""The numbers of the study's page, from results made up here."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.staleness.findings import Scores, interval, score
from experiments.staleness.study import Result, configuration, runs


def result(method: str, eta: int, seed: int, *rewards: float) -> Result:
    run = {"kind": "correction", "method": method, "eta": eta, "seed": seed}
    return Result(run, 1.0, [(20 * (i + 1), reward) for i, reward in enumerate(rewards)], {})


def test_a_score_is_the_mean_of_the_last_four_evaluations() -> None:
    assert score(result("tis", 4, 0, 0.0, 0.1, 0.2, 0.3, 0.4)) == pytest.approx(0.25)


def test_the_interval_is_students() -> None:
    """Three values of standard deviation .1: t = 4.303."""
    mean, half, count = interval([0.1, 0.2, 0.3])
    assert (mean, count) == (pytest.approx(0.2), 3)
    assert half == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert np.isnan(interval([0.5]).half)


def test_differences_are_of_the_same_seeds_only() -> None:
    scores = Scores(
        [
            result("tis", 4, 0, 0.5),
            result("tis", 4, 1, 0.7),
            result("tis", 4, 2, 0.9),
            result("tis", 0, 0, 0.6),
            result("tis", 0, 1, 0.6),
        ],
        "correction",
    )
    assert scores.difference(("tis", 4), ("tis", 0)).mean == pytest.approx(0.0)
    assert scores.difference(("tis", 4), ("tis", 0)).count == 2
    assert scores.best(4) == "tis"


def test_every_run_of_the_study_has_a_valid_configuration_and_a_name_of_its_own() -> None:
    assert len({run.name for run in runs()}) == len(runs())
    for run in runs():
        assert configuration(run).staleness.max_staleness == run.eta
