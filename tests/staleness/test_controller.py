"""The controller's decisions, step by step."""

from __future__ import annotations

import math

import pytest

from staleness.controller import Control, decide


def follow(control: Control, *sizes: float, target: float = 0.5, most: int = 8) -> Control:
    for ess in sizes:
        control = decide(control, ess, target=target, most=most)
    return control


def test_a_low_sample_size_halves_the_bound_and_scales_the_rate() -> None:
    control = follow(Control(8), 0.125)
    assert (control.eta, control.scale) == (4, 0.5)


def test_what_was_in_flight_is_trained_before_the_bound_falls_again() -> None:
    """At a bound of 8 that takes eight steps."""
    assert follow(Control(8), *[0.1] * 9).eta == 4
    assert follow(Control(8), *[0.1] * 10).eta == 2


def test_a_high_sample_size_raises_the_bound_one_by_one_to_the_configured_one() -> None:
    control = follow(Control(6), 0.9)
    assert (control.eta, control.scale) == (7, 1.0)
    assert follow(control, *[0.9] * 40).eta == 8


@pytest.mark.parametrize("ess", [0.5, 0.6, 0.74])
def test_between_the_target_and_well_above_it_the_bound_stays(ess: float) -> None:
    assert follow(Control(4), ess) == Control(4)


def test_the_rate_is_scaled_while_the_bound_waits() -> None:
    control = follow(Control(8), 0.1, 0.32)
    assert control.scale == pytest.approx(math.sqrt(0.64))
    assert follow(control, 0.8).scale == 1.0


def test_the_bound_stays_within_zero_and_the_configured_one() -> None:
    assert follow(Control(1), *[0.01] * 50).eta == 0
    assert follow(Control(0), *[1.0] * 50, most=3).eta == 3


def test_a_step_without_a_gradient_says_nothing() -> None:
    assert follow(Control(5, 0.7, 3), math.nan) == Control(5, 0.7, 3)
