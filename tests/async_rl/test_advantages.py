"""Advantages against the check values of their papers' formulas (failures.md 21)."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.algorithms.advantages import advantages, dr_grpo, grpo
from async_rl.config import AlgorithmConfig


def array(*values: float) -> np.ndarray:
    return np.asarray(values, np.float64)


def test_grpo_check_values() -> None:
    rewards = array(1, 0, 0, 0)
    np.testing.assert_allclose(grpo(rewards, rewards), [1.7320, -0.5773, -0.5773, -0.5773], atol=1e-4)
    rewards = array(*[0.35] * 7, 0)
    np.testing.assert_allclose(grpo(rewards, rewards), [*[0.3780] * 7, -2.6457], atol=1e-4)


def test_sample_std_divides_by_n_minus_1() -> None:
    rewards = array(1, 0, 0, 0)
    np.testing.assert_allclose(grpo(rewards, rewards, sample_std=True), [1.5, -0.5, -0.5, -0.5], atol=1e-4)


def test_dr_grpo_check_values() -> None:
    rewards = array(1, 0, 0, 0)
    np.testing.assert_allclose(dr_grpo(rewards, rewards), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("name", ["grpo", "dr-grpo"])
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    rewards = array(*[0.1] * 8)
    assert (
        advantages(AlgorithmConfig(advantage=name), rewards, np.zeros(8, np.int64), [[0.1] * 8]).tolist() == [0.0] * 8
    )


@pytest.mark.parametrize("name", ["grpo", "dr-grpo"])
def test_a_group_of_one_and_a_missing_reward_give_zero(name: str) -> None:
    assert advantages(AlgorithmConfig(advantage=name), array(1.0), np.zeros(1, np.int64), [[1.0]]).tolist() == [0.0]
    out = advantages(
        AlgorithmConfig(advantage=name), array(1.0, 0.0, np.nan), np.zeros(3, np.int64), [[1.0, 0.0, np.nan]]
    )
    assert out[2] == 0.0
    np.testing.assert_allclose(
        out[:2], advantages(AlgorithmConfig(advantage=name), array(1.0, 0.0), np.zeros(2, np.int64), [[1.0, 0.0]])
    )


def test_members_that_are_not_in_the_batch_count_in_the_statistics() -> None:
    out = advantages(AlgorithmConfig(advantage="dr-grpo"), array(1.0), np.zeros(1, np.int64), [[1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(out, [0.75])


def test_groups_do_not_mix() -> None:
    out = advantages(
        AlgorithmConfig(advantage="dr-grpo"), array(1, 0, 5, 5), np.asarray([0, 0, 1, 1]), [[1, 0], [5, 5]]
    )
    assert out.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_a_reward_list_of_the_wrong_length_raises() -> None:
    with pytest.raises(ValueError, match="3 rewards for 2 trajectories"):
        advantages(AlgorithmConfig(), array(1, 0, 0), np.zeros(2, np.int64), [[1, 0, 0]])
