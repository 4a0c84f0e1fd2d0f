"""Corrections, second-moment mask, proximal policy and monitors against their formulas, worked token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from staleness import corrections, monitor
from staleness.config import CorrectionConfig
from staleness.corrections import Sequences, correct, m2_keep
from staleness.errors import CorrectionError
from staleness.proximal import loglinear

SPEC: dict[str, dict[str, float]] = {
    "none": {},
    "tis": {"cap": 2.0},
    "tis-seq": {"cap": 5.0},
    "mis": {"low": 0.5, "high": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "geo-mask": {"low": 0.99, "high": 1.01},
    "seq-mask-tis": {"cap": 2.0, "low": 0.999, "high": 1.002},
    "m2": {},
}
"""Every correction and its default numbers."""
OTHER: dict[str, dict[str, float]] = {
    "none": {},
    "tis": {"cap": 1.1},
    "tis-seq": {"cap": 1.3},
    "mis": {"low": 0.8, "high": 1.2},
    "icepop": {"low": 0.9, "high": 1.5},
    "geo-mask": {"low": 0.7, "high": 1.3},
    "seq-mask-tis": {"cap": 1.2, "low": 0.8, "high": 1.4},
    "m2": {},
}
"""Numbers of a user's own."""


def exp(log_ratio: float) -> float:
    """`exp` of a log-ratio held within +-20."""
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def of_sequence(values: list[float], of: list[int], token: int) -> list[float]:
    """The values of the tokens of the sequence that `token` belongs to."""
    return [value for value, sequence in zip(values, of, strict=True) if sequence == of[token]]


def worked(
    name: str,
    log_rho: list[float],
    of: list[int],
    *,
    cap: float = math.nan,
    low: float = math.nan,
    high: float = math.nan,
    veto: float | None = None,
    kept: list[bool] | None = None,
) -> tuple[list[float], list[bool]]:
    """Weight and mask of every token, by the formulas."""
    weights, keeps = [], []
    for t, own in enumerate(log_rho):
        rho = exp(own)
        sequence = of_sequence(log_rho, of, t)
        mean = exp(sum(sequence) / len(sequence))
        weight, keep = 1.0, True
        if name in ("tis", "seq-mask-tis"):
            weight = min(rho, cap)
        if name == "tis-seq":
            weight = min(exp(sum(sequence)), cap)
        if name in ("mis", "icepop"):
            weight, keep = rho, low <= rho <= high
        if name in ("geo-mask", "seq-mask-tis"):
            keep = low <= mean <= high
        if name == "m2":
            assert kept is not None
            keep = kept[t]
        if veto is not None and any(exp(other) < veto for other in sequence):
            keep = False
        weights.append(weight)
        keeps.append(keep)
    return weights, keeps


def smallest(squares: list[float], tau: float) -> int:
    """How many of the smallest stay, when the fewest of the largest go until the mean is at most tau."""
    ranked = sorted(squares)
    while len(ranked) > 1 and sum(ranked) / len(ranked) > tau:
        ranked.pop()
    return len(ranked)


def sample(seed: int, *, extreme: bool = False) -> tuple[list[float], list[int], int]:
    """Log-ratios, the sequence of each and the number of sequences, of which some have no token; tokens interleave."""
    rng = np.random.default_rng(seed)
    lengths, spread = [0, 5, 1, 9, 0, 3, 7, 2, 0], [1, 0.0005, 0.01, 0.3, 1, 1.5, 0.05, 0.0, 1]
    of = [sequence for sequence, length in enumerate(lengths) for _ in range(length)]
    log_rho = [float(rng.normal(0, spread[sequence])) for sequence in of]
    if extreme:
        for at, value in zip(rng.permutation(len(of))[:4], (60.0, -60.0, 20.5, -19.5), strict=True):
            log_rho[at] = value
    order = rng.permutation(len(of))
    return [log_rho[i] for i in order], [of[i] for i in order], len(lengths)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("veto", [None, 1e-4, 0.6])
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("numbers", [SPEC, OTHER], ids=["defaults", "own"])
@pytest.mark.parametrize("name", list(SPEC))
def test_a_correction_is_its_formula(
    name: str, numbers: dict, extreme: bool, veto: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    """Weights and masks of interleaved sequences of unequal length, log-ratios up to +-60; the code's own defaults."""
    for seed in range(3):
        log_rho, of, number = sample(seed, extreme=extreme)
        kept = (np.random.default_rng(seed).random(len(of)) < 0.5).tolist()
        own = {} if numbers is SPEC else numbers[name]
        config = CorrectionConfig(name=name, veto=veto, **own)  # type: ignore[arg-type]
        weight, keep = correct(
            config, torch.tensor(log_rho, dtype=dtype), Sequences(torch.tensor(of), number), torch.tensor(kept)
        )
        weights, keeps = worked(name, log_rho, of, veto=veto, kept=kept, **numbers[name])
        np.testing.assert_allclose(weight, weights, rtol=tolerance, atol=1e-9)
        assert keep.tolist() == keeps
        assert keep.dtype == torch.bool
        assert weight.dtype == dtype


@pytest.mark.parametrize("name", ["mis", "icepop", "geo-mask", "seq-mask-tis"])
def test_samples_have_tokens_on_both_sides_of_a_mask(name: str) -> None:
    """The comparison above would prove nothing of masks that keep everything or nothing."""
    keeps = [keep for seed in range(3) for keep in worked(name, *sample(seed)[:2], **SPEC[name])[1]]
    assert 0 < sum(keeps) < len(keeps)


@pytest.mark.parametrize("edge", [0.5, 2.0])
def test_the_edges_of_a_window_are_kept(edge: float) -> None:
    """l <= rho <= h: log-ratios of exactly representable ratios."""
    log_rho = torch.tensor([math.log(edge)], dtype=torch.float64)
    rho = float(log_rho.exp())
    config = CorrectionConfig(name="mis", low=rho, high=8.0) if edge < 1 else CorrectionConfig(name="mis", high=rho)
    assert correct(config, log_rho, Sequences(torch.tensor([0]), 1)).keep.all()


def test_a_veto_takes_the_whole_sequence_and_no_other() -> None:
    """One ratio below the veto is enough; a ratio equal to it is not below; weights stay as they are."""
    log_rho = torch.tensor([0.0, -10.0, 0.1, -9.0, 0.0], dtype=torch.float64)
    weight, keep = correct(
        CorrectionConfig(name="tis", veto=1e-4), log_rho, Sequences(torch.tensor([0, 0, 1, 1, 2]), 3)
    )
    assert keep.tolist() == [False, False, True, True, True]
    np.testing.assert_allclose(weight, log_rho.exp())


@pytest.mark.parametrize("veto", [None, 1e-4])
@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name", list(SPEC))
def test_nothing_is_corrected_to_nothing(name: str, number: int, veto: float | None) -> None:
    """An empty micro-batch, without or with sequences."""
    config = CorrectionConfig(name=name, veto=veto)  # type: ignore[arg-type]
    nothing = Sequences(torch.zeros(0, dtype=torch.int64), number)
    weight, keep = correct(config, torch.zeros(0), nothing, torch.zeros(0, dtype=torch.bool))
    assert weight.shape == keep.shape == (0,)
    assert keep.dtype == torch.bool


@pytest.mark.parametrize("name", list(SPEC))
def test_a_correction_has_no_gradient(name: str) -> None:
    log_rho, of, number = sample(0)
    live = torch.tensor(log_rho, requires_grad=True)
    kept = torch.ones(len(of), dtype=torch.bool)
    config = CorrectionConfig(name=name, veto=0.6)  # type: ignore[arg-type]
    weight, keep = correct(config, live, Sequences(torch.tensor(of), number), kept)
    assert not weight.requires_grad
    assert not keep.requires_grad


def test_numbers_of_sequences_have_no_meaning() -> None:
    """Renumbering the sequences changes nothing."""
    log_rho, of, number = sample(1)
    config = CorrectionConfig(name="seq-mask-tis", low=0.8, high=1.3)
    before = correct(config, torch.tensor(log_rho), Sequences(torch.tensor(of), number))
    renamed = torch.tensor([number - 1 - sequence for sequence in of])
    after = correct(config, torch.tensor(log_rho), Sequences(renamed, number))
    assert before.keep.tolist() == after.keep.tolist()
    assert before.weight.tolist() == after.weight.tolist()


# --- second-moment mask ----------------------------------------------------------------------------------------------


def test_m2_check_value() -> None:
    """x = {1, .04, .01, 0} and tau = .04: exactly one goes, and the mean of the rest is .0167."""
    x = np.asarray([1.0, 0.04, 0.01, 0.0])
    keep = m2_keep(np.sqrt(x), 0.04)
    assert keep.tolist() == [False, True, True, True]
    assert x[keep].mean() == pytest.approx(0.0167, abs=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(20))
def test_m2_removes_the_fewest_largest(seed: int, dtype: type) -> None:
    """Against removal one by one; of both signs, up to +-60, and the default tau that of the paper."""
    rng = np.random.default_rng(seed)
    log_rho = rng.normal(0, rng.choice([0.1, 0.25, 1.0]), int(rng.integers(1, 50))).astype(dtype)
    log_rho[rng.random(log_rho.size) < 0.1] = rng.choice([-60.0, 60.0])
    tau = CorrectionConfig(name="m2").tau
    assert tau == 0.04
    keep = m2_keep(log_rho, tau)
    squares = [float(value) ** 2 for value in log_rho]
    assert keep.sum() == smallest(squares, tau)
    gone = [square for square, stays in zip(squares, keep, strict=True) if not stays]
    stay = [square for square, stays in zip(squares, keep, strict=True) if stays]
    assert max(stay) <= min(gone, default=math.inf)


def test_m2_always_keeps_one() -> None:
    """All over the bound: the smallest stays. Nothing: nothing."""
    assert m2_keep(np.asarray([3.0, -2.0, 60.0]), 0.04).tolist() == [False, True, False]
    assert m2_keep(np.asarray([5.0]), 0.04).tolist() == [True]
    assert m2_keep(np.zeros(0), 0.04).tolist() == []


def test_m2_keeps_all_at_the_bound() -> None:
    """A mean equal to tau is not over it."""
    assert m2_keep(np.asarray([0.5, -0.5, 0.5]), 0.25).all()


def test_m2_of_ties_removes_no_more_than_needed() -> None:
    """Two equal largest, of which one must go."""
    keep = m2_keep(np.asarray([0.3, -0.3, 0.0, 0.0]), 0.04)  # means: .045, then .03
    assert keep.sum() == 3
    assert keep[2:].all()


def test_m2_needs_the_mask_of_the_whole_batch() -> None:
    sequences = Sequences(torch.tensor([0]), 1)
    with pytest.raises(CorrectionError, match="m2"):
        correct(CorrectionConfig(name="m2"), torch.zeros(1), sequences)


# --- proximal policy -------------------------------------------------------------------------------------------------


def test_loglinear_check_values() -> None:
    """Next step 10: u = 6 gives 3/4, u = 9 gives 0; age 1 gives 1/2."""
    behaviour, current = torch.zeros(3), torch.ones(3)
    age = torch.tensor([9 - 6, 9 - 9, 1])
    np.testing.assert_allclose(loglinear(behaviour, current, age), [0.75, 0.0, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loglinear_is_its_formula(dtype: torch.dtype) -> None:
    """mu + clamp((v_p - u) / (v_theta - u), 0, 1) (theta - mu) with v_theta = v_p + 1; age 0 is mu to the bit."""
    rng = np.random.default_rng(0)
    behaviour, current = -rng.exponential(2.0, 12), -rng.exponential(2.0, 12)
    step, steps = 11, np.arange(12)
    expected = []
    for mu, theta, u in zip(behaviour, current, steps, strict=True):
        expected.append(mu + min(max((step - u) / (step + 1 - u), 0.0), 1.0) * (theta - mu))
    behaviour, current = torch.tensor(behaviour, dtype=dtype), torch.tensor(current, dtype=dtype)
    out = loglinear(behaviour, current, torch.tensor(step - steps))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert out.dtype == dtype
    assert out[-1] == behaviour[-1]


def test_loglinear_has_no_gradient() -> None:
    current = torch.ones(1, requires_grad=True)
    assert not loglinear(torch.zeros(1), current, torch.tensor([3])).requires_grad


# --- monitors --------------------------------------------------------------------------------------------------------


def test_ess_check_values() -> None:
    assert monitor.ess(np.asarray([1.0, 1.0, 1.0, 5.0])) == pytest.approx(64 / 112)
    assert monitor.ess(np.ones(7)) == pytest.approx(1.0)
    assert np.isnan(monitor.ess(np.zeros(3)))


def test_ratio_summary_of_identical_policies() -> None:
    summary = monitor.ratio_summary(np.zeros(10, np.float32))
    assert (summary["ratio_mean"], summary["ratio_max"], summary["kl"], summary["ess"]) == (1.0, 1.0, 0.0, 1.0)


def test_age_histogram_counts_every_age_up_to_the_bound() -> None:
    assert monitor.age_histogram(np.asarray([0, 2, 2]), 3) == [1, 0, 2, 0]


def test_a_ratio_is_clamped_before_exp() -> None:
    """One broken token cannot overflow a batch, in float32 either."""
    out = corrections.ratio(torch.tensor([60.0, -60.0, 0.0]))
    np.testing.assert_allclose(out, [math.exp(20), math.exp(-20), 1.0], rtol=1e-6)
