"""Losses in every permitted pairing with a correction and a proximal policy, against a reference worked by token.

The reference has two arguments for the current policy: `theta`, of which the gradient is taken, and `frozen`, which
everything behind a stop-gradient sees. Its finite differences in `theta` alone are what autograd must give.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.algorithms import losses
from async_rl.algorithms.aggregation import shares
from async_rl.algorithms.config import AlgorithmConfig, KlConfig, conflict, form
from async_rl.algorithms.losses import value_loss
from async_rl.algorithms.objective import LossInput, loss
from staleness.config import CorrectionConfig
from staleness.corrections import Sequences, m2_keep
from tests.staleness.test_corrections import OTHER, SPEC, exp, worked

LOSSES = ["ppo", "reinforce", "cispo", "gspo", "sapo", "topr", "dppo-tv"]
PROXIMAL = ["current", "recompute", "loglinear", "behaviour"]
MASKS = ["none", "geo-mask", "m2"]
CLIPS = {"ppo": (0.2, 0.2), "cispo": (1.0, 0.28), "gspo": (3e-4, 4e-4)}
"""Default clips, below and above."""
PERMITTED = [
    *itertools.product(["ppo"], SPEC, PROXIMAL[:3]),
    *itertools.product(["ppo"], MASKS, ["behaviour"]),
    *itertools.product(["reinforce"], SPEC, ["current"]),
    *itertools.product(["cispo", "gspo", "sapo", "topr", "dppo-tv"], MASKS, ["current"]),
]
"""Pairings that count every ratio once: decoupled with any, weighted with any, coupled with masks only."""


def settings(kind: str, **more: Any) -> AlgorithmConfig:
    aggregation = "seq-mean-token-mean" if kind == "gspo" else "token-mean"
    return AlgorithmConfig(loss=kind, aggregation=aggregation, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", LOSSES)
def test_what_is_permitted_counts_every_ratio_once(kind: str) -> None:
    """No other pairing of loss, correction and proximal policy passes."""
    passed = [
        (kind, name, proximal)
        for name, proximal in itertools.product(SPEC, PROXIMAL)
        if conflict(settings(kind), CorrectionConfig(name=name, proximal=proximal)) is None  # type: ignore[arg-type]
    ]
    assert sorted(passed) == sorted(pairing for pairing in PERMITTED if pairing[0] == kind)


@pytest.mark.parametrize("pairing", PERMITTED, ids="-".join)
def test_the_form_of_a_pairing(pairing: tuple[str, str, str]) -> None:
    kind, name, proximal = pairing
    wanted = {"ppo": "decoupled", "reinforce": "weighted"}.get(kind, "coupled")
    wanted = "coupled" if proximal == "behaviour" else wanted
    assert form(settings(kind), CorrectionConfig(name=name, proximal=proximal)) == wanted  # type: ignore[arg-type]


@dataclasses.dataclass
class Batch:
    """Columns of plain numbers, one entry a token; `behaviour` is mu, `proximal` p, `reference` q."""

    current: list[float]
    proximal: list[float]
    behaviour: list[float]
    advantage: list[float]
    scale: list[float]
    of: list[int]
    number: int
    positive: list[bool]
    reference: list[float]
    entropy: list[float]
    kept: list[bool] = dataclasses.field(default_factory=list)

    def take(self, tokens: list[int]) -> Batch:
        """Only these tokens."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        cut = {name: [column[t] for t in tokens] for name, column in columns.items() if isinstance(column, list)}
        return Batch(**{**columns, **cut})

    def tensors(self, theta: torch.Tensor | None = None, **regularised: torch.Tensor | None) -> LossInput:
        column = {
            name: torch.tensor(getattr(self, name), dtype=torch.float64)
            for name in ("current", "proximal", "behaviour", "advantage", "scale")
        }
        if theta is not None:
            column["current"] = theta
        of = torch.tensor(self.of, dtype=torch.int64)
        positive = torch.tensor(self.positive, dtype=torch.bool)
        kept = torch.tensor(self.kept, dtype=torch.bool)
        return LossInput(**column, sequences=Sequences(of, self.number), positive=positive, kept=kept, **regularised)


def sample(seed: int, pairing: tuple[str, str, str], *, extreme: bool = False) -> Batch:
    """Sequences of unequal length, some of no token, some close to the policies they are compared with, some not."""
    kind, _, proximal = pairing
    rng = np.random.default_rng(seed)
    lengths, spread = [0, 4, 6, 1, 5, 0, 8], [1, 0.0005, 0.02, 0.3, 0.5, 1, 1.2]
    of = np.repeat(np.arange(len(lengths)), lengths)
    rng.shuffle(of)
    scale = np.asarray(spread)[of]
    behaviour = -rng.exponential(1.0, of.size)
    current = behaviour + rng.normal(0, scale)
    if extreme:
        at = rng.permutation(of.size)
        current[at[:4]] = behaviour[at[:4]] + [60.0, -60.0, 20.5, -19.5]
    between = {
        "current": current,
        "recompute": behaviour + rng.normal(0, scale),
        "loglinear": behaviour + rng.choice([0.0, 0.5, 2 / 3], of.size) * (current - behaviour),
        "behaviour": behaviour + rng.normal(0, 1, of.size),  # not to be looked at
    }
    if kind != "ppo":
        between["current"] = behaviour + rng.normal(0, 1, of.size)  # not to be looked at
    advantage = rng.normal(0, 1, of.size)
    advantage[rng.integers(of.size)] = 0.0
    seen = between[proximal] if kind == "ppo" and proximal != "behaviour" else current
    positive = rng.random(len(lengths)) < 0.5
    return Batch(
        current=current.tolist(),
        proximal=between[proximal].tolist(),
        behaviour=behaviour.tolist(),
        advantage=advantage.tolist(),
        scale=rng.uniform(0.01, 0.1, of.size).tolist(),
        of=of.tolist(),
        number=len(lengths),
        positive=positive[of].tolist(),
        reference=(current + rng.normal(0, 0.5, of.size)).tolist(),
        entropy=rng.uniform(0, 2, of.size).tolist(),
        kept=m2_keep(seen - behaviour, 0.04).tolist(),
    )


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def maximised(kind: str, theta: list[float], frozen: list[float], batch: Batch, base: list[float], own: dict) -> list:
    """f of every token; `base` is the policy that r compares with."""
    low, high = own.get("clip", CLIPS.get(kind, (math.nan, math.nan)))
    out = []
    for t, a in enumerate(batch.advantage):
        sequence = [s for s in range(len(theta)) if batch.of[s] == batch.of[t]]
        summed = sum(frozen[s] - batch.behaviour[s] for s in sequence)
        r = exp(theta[t] - base[t])
        if kind == "ppo":
            f = min(r * a, clip(r, 1 - low, 1 + high) * a)
            if own.get("dual") is not None and a < 0:
                f = max(f, own["dual"] * a)
        elif kind == "gspo":
            s = exp(summed / len(sequence) + theta[t] - frozen[t])
            f = min(s * a, clip(s, 1 - low, 1 + high) * a)
        elif kind == "reinforce":
            f = a * theta[t]
        elif kind == "cispo":
            f = clip(exp(frozen[t] - base[t]), 1 - low, 1 + high) * a * theta[t]
        elif kind == "sapo":
            tau = own.get("taus", (1.0, 1.05))[0 if a > 0 else 1]
            f = 4 / tau / (1 + math.exp(-tau * (r - 1))) * a if tau * (r - 1) < 700 else 4 / tau * a
        elif kind == "topr":
            f = (1.0 if batch.positive[t] else min(exp(summed), 1.0)) * a * theta[t]
        else:
            moved, delta = math.exp(frozen[t]) - math.exp(batch.behaviour[t]), own.get("delta", 0.2)
            f = 0.0 if (a > 0 and moved > delta) or (a <= 0 and moved < -delta) else a * r
        out.append(f)
    return out


def reference(
    pairing: tuple[str, str, str],
    theta: list[float],
    batch: Batch,
    *,
    numbers: dict[str, float] | None = None,
    veto: float | None = None,
    kl: tuple[str, float] | None = None,
    entropy: float = 0.0,
    **own: Any,
) -> float:
    """The loss of `theta`, what is behind a stop-gradient being that of the batch."""
    kind, name, proximal = pairing
    frozen = batch.current
    decoupled = kind == "ppo" and proximal != "behaviour"
    seen = batch.proximal if decoupled else frozen
    log_rho = [a - b for a, b in zip(seen, batch.behaviour, strict=True)]
    weight, keep = worked(name, log_rho, batch.of, veto=veto, kept=batch.kept, **(numbers or SPEC[name]))
    f = maximised(kind, theta, frozen, batch, batch.proximal if decoupled else batch.behaviour, own)
    total = 0.0
    for t, share in enumerate(batch.scale):
        term = -f[t]
        if kl is not None:
            d = batch.reference[t] - theta[t]
            term += kl[1] * (0.5 * d * d if kl[0] == "k2" else exp(d) - d - 1)
        total += share * weight[t] * (1.0 if keep[t] else 0.0) * term
        total -= share * entropy * batch.entropy[t]
    return total


def run(pairing: tuple[str, str, str], batch: Batch, theta: torch.Tensor | None = None, **given: Any) -> torch.Tensor:
    """The loss under test with the arguments of `reference`."""
    kind, name, proximal = pairing
    clips = given.get("clip", (None, None))
    taus = {f"tau_{sign}": tau for sign, tau in zip(("positive", "negative"), given.get("taus", ()), strict=False)}
    delta = {"delta": given["delta"]} if "delta" in given else {}
    estimator, coefficient = given.get("kl") or ("k2", 0.0)
    algorithm = settings(
        kind,
        clip_low=clips[0],
        clip_high=clips[1],
        dual_clip=given.get("dual"),
        entropy=given.get("entropy", 0.0),
        kl=KlConfig(coefficient=coefficient, estimator=estimator),  # type: ignore[arg-type]
        **taus,
        **delta,
    )
    numbers = given.get("numbers") or {}
    correction = CorrectionConfig(name=name, proximal=proximal, veto=given.get("veto"), **numbers)  # type: ignore[arg-type]
    assert conflict(algorithm, correction) is None
    tensors = batch.tensors(
        theta,
        reference=torch.tensor(batch.reference, dtype=torch.float64) if given.get("kl") else None,
        entropy=torch.tensor(batch.entropy, dtype=torch.float64) if given.get("entropy") else None,
    )
    return loss(tensors, algorithm, correction)[0]


REGULARISED: list[dict] = [
    {},
    {"kl": ("k2", 0.3), "entropy": 0.1, "veto": 0.3},
    {"kl": ("k3", 0.7), "veto": 1e-4, "own": True},
]


def numbers_of(name: str, given: dict) -> dict:
    """`own` asks for numbers other than the defaults."""
    given = dict(given)
    return {**given, "numbers": OTHER[name]} if given.pop("own", False) else given


@pytest.mark.parametrize("given", REGULARISED, ids=["plain", "k2-entropy-veto", "k3-veto-own"])
@pytest.mark.parametrize("pairing", PERMITTED, ids="-".join)
def test_the_loss_is_the_reference(pairing: tuple[str, str, str], given: dict) -> None:
    """Default numbers and others, regularisers and veto; a share per token."""
    given = numbers_of(pairing[1], given)
    for seed in range(3):
        batch = sample(seed, pairing)
        expected = reference(pairing, batch.current, batch, **given)
        assert float(run(pairing, batch, **given)) == pytest.approx(expected, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("pairing", PERMITTED, ids="-".join)
def test_the_loss_is_the_reference_at_extreme_ratios(pairing: tuple[str, str, str]) -> None:
    """Log-ratios of +-60 count as +-20."""
    for seed in range(3):
        batch = sample(seed, pairing, extreme=True)
        expected = reference(pairing, batch.current, batch)
        assert float(run(pairing, batch)) == pytest.approx(expected, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("ppo", {"dual": 3.0}),
        ("ppo", {"dual": 1.05, "clip": (0.1, 0.3)}),
        ("ppo", {"clip": (0.0, 0.0)}),
        ("cispo", {"clip": (0.3, 0.5)}),
        ("gspo", {"clip": (0.01, 0.02)}),
        ("sapo", {"taus": (0.5, 2.0)}),
        ("dppo-tv", {"delta": 0.05}),
    ],
)
def test_the_loss_is_the_reference_with_numbers_of_ones_own(kind: str, given: dict) -> None:
    pairing = (kind, "none", "behaviour" if kind == "ppo" else "current")
    changed = 0
    for seed in range(5):
        batch = sample(seed, pairing)
        expected = reference(pairing, batch.current, batch, **given)
        assert float(run(pairing, batch, **given)) == pytest.approx(expected, abs=1e-6)
        changed += abs(expected - reference(pairing, batch.current, batch)) > 1e-5
    assert changed, "the numbers made no difference, so nothing is proved"


# --- gradients -------------------------------------------------------------------------------------------------------


def differences(pairing: tuple[str, str, str], batch: Batch, **given: Any) -> list[float]:
    """Central differences of the reference, everything behind a stop-gradient held fixed."""
    step, out = 1e-6, []
    for t in range(len(batch.current)):
        ends = []
        for sign in (1, -1):
            moved = list(batch.current)
            moved[t] += sign * step
            ends.append(reference(pairing, moved, batch, **given))
        out.append((ends[0] - ends[1]) / (2 * step))
    return out


@pytest.mark.parametrize("given", REGULARISED[:2], ids=["plain", "k2-entropy-veto"])
@pytest.mark.parametrize("pairing", PERMITTED, ids="-".join)
def test_the_gradient_is_that_of_the_reference(pairing: tuple[str, str, str], given: dict) -> None:
    """Weights, masks and detached coefficients have none."""
    batch = sample(4, pairing)
    theta = torch.tensor(batch.current, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(pairing, batch, theta, **given), theta)
    np.testing.assert_allclose(gradient, differences(pairing, batch, **given), atol=1e-6)


@pytest.mark.parametrize("name", list(SPEC))
def test_at_ratio_one_the_gradient_is_that_of_reinforce_under_the_correction(name: str) -> None:
    """PPO with p = theta: nothing is clipped, and the correction is all there is."""
    pairing = ("ppo", name, "current")
    batch = sample(4, pairing)
    theta = torch.tensor(batch.current, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(pairing, batch, theta), theta)
    weighted = ("reinforce", name, "current")
    np.testing.assert_allclose(gradient, differences(weighted, batch), atol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_the_divergence(estimator: str) -> None:
    """Alone, with the correction's weights."""
    pairing = ("reinforce", "tis", "current")
    batch = sample(5, pairing)
    batch.advantage = [0.0] * len(batch.advantage)
    theta = torch.tensor(batch.current, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(pairing, batch, theta, kl=(estimator, 0.7)), theta)
    np.testing.assert_allclose(gradient, differences(pairing, batch, kl=(estimator, 0.7)), atol=1e-6)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    "kind", ["ppo", "ppo-dual", "reinforce", "sapo", "dppo-tv", "cispo", "topr", "gspo", "k2", "k3", "value"]
)
def test_autograd_passes_gradcheck(kind: str) -> None:
    """Losses, at the log-probs that what is detached was computed from; those with a coefficient that is detached are
    linear in theta, or in its exponential, beside it."""
    pairing = ({"ppo-dual": "ppo"}.get(kind, kind), "none", "recompute" if kind.startswith("ppo") else "current")
    batch = sample(6, pairing)
    theta = torch.tensor(batch.current, dtype=torch.float64, requires_grad=True)
    tensors = batch.tensors()
    advantage, behaviour, sequences = tensors.advantage, tensors.behaviour, tensors.sequences
    log_ratio = tensors.current - behaviour
    functions = {
        "ppo": lambda x: losses.ppo(x - tensors.proximal, advantage, low=0.2, high=0.2).value,
        "ppo-dual": lambda x: losses.ppo(x - tensors.proximal, advantage, low=0.2, high=0.2, dual=1.5).value,
        "reinforce": lambda x: losses.reinforce(x, advantage).value,
        "sapo": lambda x: losses.sapo(x - behaviour, advantage, tau_positive=1.0, tau_negative=1.05).value,
        "dppo-tv": lambda x: losses.dppo_tv(x, behaviour, advantage, delta=0.2).value,
        "cispo": lambda x: losses.cispo(x, log_ratio, advantage, low=1.0, high=0.28).value,
        "topr": lambda x: losses.topr(x, log_ratio, advantage, sequences, tensors.positive).value,
        "k2": lambda x: losses.k2(x, behaviour),
        "k3": lambda x: losses.k3(x, behaviour),
        "value": lambda x: value_loss(x, behaviour, advantage, 0.2),
    }
    together = Sequences(torch.zeros(4, dtype=torch.int64), 1)
    if kind == "gspo":  # detached inside: one token at a time would move the mean, so only sums of equal moves agree
        assert torch.autograd.gradcheck(
            lambda x: losses.gspo(log_ratio[:4] + x, advantage[:4], together, low=9.0, high=9.0).value,
            torch.zeros((), dtype=torch.float64, requires_grad=True),
        )  # fmt: skip
        return
    assert torch.autograd.gradcheck(functions[kind], theta)


def test_the_entropy_bonus_has_the_gradient_of_its_share() -> None:
    """-c a: not weighted, and not masked by the correction."""
    batch = sample(0, ("reinforce", "mis", "current"))
    entropy = torch.tensor(batch.entropy, dtype=torch.float64, requires_grad=True)
    value, _ = loss(batch.tensors(entropy=entropy), settings("reinforce", entropy=0.3), CorrectionConfig(name="mis"))
    (gradient,) = torch.autograd.grad(value, entropy)
    np.testing.assert_allclose(gradient, -0.3 * np.asarray(batch.scale))


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_clipped_tokens_have_no_gradient_and_those_of_cispo_do(kind: str) -> None:
    """A ratio of e beyond the clip, the way the advantage pushes."""
    current = torch.tensor([0.0, 0.0], dtype=torch.float64, requires_grad=True)
    behaviour, ones = torch.full((2,), -1.0, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    positive, together = torch.ones(2, dtype=torch.bool), Sequences(torch.tensor([0, 0]), 1)
    batch = LossInput(current, behaviour, behaviour, ones, ones, together, positive)
    value, _ = loss(batch, settings(kind), CorrectionConfig(name="none", proximal="current"))
    assert torch.autograd.grad(value, current)[0].tolist() == [0.0, 0.0]
    value, _ = loss(batch, settings("cispo"), CorrectionConfig(name="none"))
    np.testing.assert_allclose(torch.autograd.grad(value, current)[0], [-1.28, -1.28])


# --- what holds for all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PERMITTED, ids="-".join)
def test_micro_batches_add_up(pairing: tuple[str, str, str]) -> None:
    """Whole sequences in two micro-batches have the loss of all in one, though some are empty in each."""
    batch = sample(7, pairing)
    parts = [batch.take([t for t, of in enumerate(batch.of) if (of < 4) == first]) for first in (True, False)]
    given = {"kl": ("k2", 0.1), "entropy": 0.2, "veto": 0.4}
    total = sum(float(run(pairing, part, **given)) for part in parts)
    assert total == pytest.approx(float(run(pairing, batch, **given)), abs=1e-9)


@pytest.mark.parametrize("pairing", PERMITTED, ids="-".join)
def test_an_empty_micro_batch_is_zero(pairing: tuple[str, str, str]) -> None:
    nothing = sample(0, pairing).take([])
    theta = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    value = run(pairing, nothing, theta, kl=("k3", 0.1), entropy=0.1, veto=1e-4)
    assert float(value.detach()) == 0.0
    value.backward()


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_of_float32_is_finite_at_extreme_ratios(kind: str) -> None:
    """With its gradient."""
    current = torch.tensor([-0.1, -60.0, -60.0, -0.1], requires_grad=True)
    behaviour = torch.tensor([-60.0, -0.1, -60.0, -0.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    ones, positive = torch.ones(4), torch.tensor([True, True, False, False])
    batch = LossInput(
        current, behaviour, behaviour, advantage, ones, Sequences(torch.tensor([0, 0, 1, 1]), 2), positive
    )
    value, _ = loss(batch, settings(kind), CorrectionConfig(name="none"))
    value.backward()
    assert torch.isfinite(value)
    assert current.grad is not None
    assert torch.isfinite(current.grad).all()


def test_a_penalty_in_the_reward_is_not_in_the_loss() -> None:
    batch = sample(0, ("ppo", "tis", "recompute"))
    algorithm = AlgorithmConfig(advantage="gae", kl=KlConfig(coefficient=0.5, place="reward", estimator="k1"))
    far = torch.tensor(batch.reference, dtype=torch.float64) - 3
    correction = CorrectionConfig(proximal="recompute")
    with_reference, metrics = loss(batch.tensors(reference=far), algorithm, correction)
    without, _ = loss(batch.tensors(), algorithm, correction)
    assert float(with_reference) == float(without)
    assert float(metrics.kl_reference) > 0


def plain(current: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, share: float) -> LossInput:
    """Tokens that are a sequence each, all anchored at 0."""
    number = current.numel()
    sequences = Sequences(torch.arange(number), number)
    scale = torch.full((number,), share, dtype=current.dtype)
    return LossInput(
        current, torch.zeros_like(current), behaviour, advantage, scale, sequences, torch.ones(number, dtype=torch.bool)
    )


def test_masking_never_inflates_the_gradient() -> None:
    """N counts tokens before any correction mask: half masked away is half the loss, not the mean of the rest."""
    zeros = torch.zeros(4, dtype=torch.float64)
    behaviour = torch.tensor([0.0, 0.0, -5.0, -5.0], dtype=torch.float64)
    batch = plain(zeros, behaviour, torch.ones(4, dtype=torch.float64), 0.25)
    value, metrics = loss(batch, AlgorithmConfig(), CorrectionConfig(name="mis"))
    assert float(value) == pytest.approx(-0.5)
    assert float(metrics.corrected_away) == 2


def test_clipped_tokens_are_counted_only_where_the_clip_bites() -> None:
    current = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    batch = plain(current, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.25)
    _, metrics = loss(batch, AlgorithmConfig(), CorrectionConfig())
    assert float(metrics.clipped) == 2
    assert float(metrics.weight) == 4


# --- shares of the tokens --------------------------------------------------------------------------------------------

LENGTHS = [3, 0, 7, 1, 0, 12, 2]


def worked_mean(aggregation: str, values: list[list[float]], longest: int) -> float:
    """The aggregate of the values of the tokens of each sequence; sequences of no token do not count."""
    values = [tokens for tokens in values if tokens]
    if aggregation == "token-mean":
        return sum(map(sum, values)) / sum(map(len, values))
    if aggregation == "seq-mean-token-sum":
        return sum(map(sum, values)) / len(values)
    if aggregation == "seq-mean-token-mean":
        return sum(sum(tokens) / len(tokens) for tokens in values) / len(values)
    return sum(sum(tokens) / longest for tokens in values) / len(values)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_shares_aggregate_the_batch_however_it_is_split(aggregation: Any, ranks: int) -> None:
    """The sum over ranks of share times value is the aggregate over all sequences, by the formula."""
    rng = np.random.default_rng(3)
    values = [rng.normal(0, 1, length).tolist() for length in LENGTHS]
    whole = {"tokens": sum(LENGTHS), "sequences": sum(length > 0 for length in LENGTHS), "longest": 16}
    owner = rng.integers(0, ranks, len(LENGTHS))
    total = 0.0
    for rank in range(ranks):
        mine = [tokens for tokens, own in zip(values, owner, strict=True) if own == rank]
        scale = shares(aggregation, np.asarray([len(tokens) for tokens in mine], np.int64), **whole)
        assert scale.shape == (len(mine),)
        assert np.isfinite(scale).all()
        total += sum(share * sum(tokens) for share, tokens in zip(scale.tolist(), mine, strict=True))
    assert total == pytest.approx(worked_mean(aggregation, values, 16), abs=1e-12)


def test_shares_of_nothing_are_finite() -> None:
    for aggregation in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        scale = shares(aggregation, np.asarray([0, 0], np.int64), tokens=0, sequences=0, longest=4)  # type: ignore[arg-type]
        assert np.isfinite(scale).all()


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [None, 0.2])
def test_the_value_loss_is_its_formula(bound: float | None) -> None:
    """Half the square, or the larger of that and the same with the value held near its old one."""
    rng = np.random.default_rng(0)
    value, before, target = rng.normal(0, 0.5, (3, 20))
    expected = []
    for v, old, g in zip(value, before, target, strict=True):
        squares = [(v - g) ** 2]
        if bound is not None:
            squares.append((old + clip(v - old, -bound, bound) - g) ** 2)
        expected.append(0.5 * max(squares))
    out = value_loss(*(torch.tensor(column) for column in (value, before, target)), bound)
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_the_divergence_never_pushes_away_from_the_reference() -> None:
    """Beyond the clamp of the log-ratio k3 is flat, not turned round."""
    current = torch.tensor([-30.0, -21.0, -2.0], dtype=torch.float64, requires_grad=True)
    losses.k3(current, torch.full((3,), -0.5, dtype=torch.float64)).sum().backward()
    assert current.grad is not None
    assert (current.grad <= 0).all()
    assert current.grad[2] < 0
