"""Losses against an independent numpy reference, and autograd against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from async_rl.algorithms.losses import LossInput, loss
from async_rl.config import AlgorithmConfig
from staleness.config import CorrectionConfig


def reference(
    kind: str, current, proximal, behaviour, advantage, *, low: float, high: float, cap: float, n: int
) -> float:
    """The formulas of the module, token by token, with correction `tis`."""
    total = 0.0
    for theta, p, mu, a in zip(current, proximal, behaviour, advantage, strict=True):
        if kind == "ppo":
            r = np.exp(np.clip(theta - p, -20, 20))
            f = min(r * a, min(max(r, 1 - low), 1 + high) * a)
            w = min(np.exp(np.clip(p - mu, -20, 20)), cap)
        else:
            f = a * theta
            w = min(np.exp(np.clip(theta - mu, -20, 20)), cap)
        total += w * f
    return -total / n


def batch(seed: int, size: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    current = -rng.exponential(2.0, size)
    proximal = current + rng.normal(0, 0.3, size)
    behaviour = current + rng.normal(0, 1.0, size)
    behaviour[0], behaviour[1] = -60.0, current[1]  # an extreme one, an exact one
    return [current, proximal, behaviour, rng.normal(0, 1, size)]


@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_reference(kind: str, seed: int) -> None:
    columns = batch(seed)
    tensors = LossInput(*(torch.tensor(column) for column in columns))
    value, _ = loss(tensors, AlgorithmConfig(loss=kind, clip_high=0.28), CorrectionConfig(cap=3.0), tokens=50)  # type: ignore[arg-type]
    expected = reference(kind, *columns, low=0.2, high=0.28, cap=3.0, n=50)
    assert float(value) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
def test_the_gradient_is_that_of_finite_differences(kind: str) -> None:
    columns = [torch.tensor(column) for column in batch(9, 12)]
    # The correction has no gradient, so it must not see the perturbed log-probs.
    correction = CorrectionConfig(name="none")

    def f(current: torch.Tensor) -> torch.Tensor:
        value, _ = loss(LossInput(current, *columns[1:]), AlgorithmConfig(loss=kind), correction, tokens=12)  # type: ignore[arg-type]
        return value

    assert torch.autograd.gradcheck(f, columns[0].requires_grad_())


def test_masking_never_inflates_the_gradient() -> None:
    """N counts tokens before any correction mask: half masked away is half the loss, not the mean of the rest."""
    columns = [torch.zeros(4, dtype=torch.float64)] * 2
    behaviour = torch.tensor([0.0, 0.0, -5.0, -5.0], dtype=torch.float64)
    advantage = torch.ones(4, dtype=torch.float64)
    value, metrics = loss(
        LossInput(*columns, behaviour, advantage), AlgorithmConfig(), CorrectionConfig(name="mis"), tokens=4
    )
    assert float(value) == pytest.approx(-0.5)
    assert float(metrics.corrected_away) == 2


def test_clipped_tokens_are_counted_only_where_the_clip_bites() -> None:
    current = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    zeros = torch.zeros(4)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    _, metrics = loss(LossInput(current, zeros, zeros, advantage), AlgorithmConfig(), CorrectionConfig(), tokens=4)
    assert float(metrics.clipped) == 2


def test_an_empty_micro_batch_is_zero() -> None:
    nothing = torch.zeros(0)
    value, _ = loss(LossInput(nothing, nothing, nothing, nothing), AlgorithmConfig(), CorrectionConfig(), tokens=8)
    assert float(value) == 0.0
