"""Corrections and proximal policies against formulas worked in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from staleness import corrections, monitor
from staleness.config import CorrectionConfig
from staleness.proximal import loglinear

LOG_RHO = torch.tensor([0.0, np.log(0.4), np.log(3.0), np.log(9.0), 50.0, -50.0])


def test_none_is_one_everywhere() -> None:
    weight, keep = corrections.correct(CorrectionConfig(name="none"), LOG_RHO)
    assert weight.tolist() == [1.0] * 6
    assert keep.all()


def test_tis_truncates_from_above_only() -> None:
    weight, keep = corrections.correct(CorrectionConfig(name="tis", cap=5.0), LOG_RHO)
    np.testing.assert_allclose(weight, [1.0, 0.4, 3.0, 5.0, 5.0, np.exp(-20.0)], rtol=1e-6)
    assert keep.all()


def test_mis_masks_outside_its_window() -> None:
    weight, keep = corrections.correct(CorrectionConfig(name="mis", low=0.5, high=3.5), LOG_RHO)
    assert keep.tolist() == [True, False, True, False, False, False]
    np.testing.assert_allclose(weight[:4], [1.0, 0.4, 3.0, 9.0], rtol=1e-6)


@pytest.mark.parametrize("name", ["none", "tis", "mis"])
def test_a_correction_has_no_gradient(name: str) -> None:
    log_rho = LOG_RHO.clone().requires_grad_()
    weight, _ = corrections.correct(CorrectionConfig(name=name), log_rho)  # type: ignore[arg-type]
    assert not weight.requires_grad


def test_loglinear_check_values() -> None:
    """algorithms.md: next step 10; u = 6 gives 3/4, u = 9 gives 0, age 1 gives 1/2."""
    behaviour, current = torch.zeros(3), torch.ones(3)
    age = torch.tensor([9 - 6, 9 - 9, 1])
    np.testing.assert_allclose(loglinear(behaviour, current, age), [0.75, 0.0, 0.5])


def test_loglinear_has_no_gradient() -> None:
    current = torch.ones(1, requires_grad=True)
    assert not loglinear(torch.zeros(1), current, torch.tensor([3])).requires_grad


def test_ess_check_values() -> None:
    assert monitor.ess(np.asarray([1.0, 1.0, 1.0, 5.0])) == pytest.approx(64 / 112)
    assert monitor.ess(np.ones(7)) == pytest.approx(1.0)
    assert np.isnan(monitor.ess(np.zeros(3)))


def test_ratio_summary_of_identical_policies() -> None:
    summary = monitor.ratio_summary(np.zeros(10, np.float32))
    assert (summary["ratio_mean"], summary["ratio_max"], summary["kl"], summary["ess"]) == (1.0, 1.0, 0.0, 1.0)


def test_age_histogram_counts_every_age_up_to_the_bound() -> None:
    assert monitor.age_histogram(np.asarray([0, 2, 2]), 3) == [1, 0, 2, 0]
