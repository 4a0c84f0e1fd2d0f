"""Advantages against formulas worked in plain loops, and the check values of their papers (failures.md 21)."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from async_rl.algorithms.advantages import advantages, dr_grpo, gae, grpo, remax, returns, rloo, vtrace, whiten
from async_rl.config import AlgorithmConfig

GROUPED = ["grpo", "dr-grpo", "rloo"]


def array(*values: float | None) -> np.ndarray:
    return np.asarray(values, np.float64)


def of_batch(name: str, rewards: np.ndarray, group_of: list[int], groups: list, **more: bool) -> np.ndarray:
    config = AlgorithmConfig(advantage=name, **more)  # type: ignore[arg-type]
    return advantages(config, rewards, np.asarray(group_of, np.int64), groups)


def worked(name: str, rewards: list[float], *, sample_std: bool = False) -> list[float]:
    """Of one group, all of whose rewards are there."""
    mean, out = sum(rewards) / len(rewards), []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        std = statistics.stdev(rewards) if sample_std else statistics.pstdev(rewards)
        out.append(
            {
                "grpo": (reward - mean) / (std + 1e-6),
                "dr-grpo": reward - mean,
                "rloo": reward - sum(others) / len(others),
            }[name]
        )
    return out


# --- of trajectories -------------------------------------------------------------------------------------------------


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


def test_rloo_check_values() -> None:
    rewards = array(1, 0, 0, 0)
    np.testing.assert_allclose(rloo(rewards, rewards), [1, -1 / 3, -1 / 3, -1 / 3])


def test_rloo_of_one_is_its_reward() -> None:
    assert rloo(array(0.7), array(0.7)).tolist() == [0.7]
    assert of_batch("rloo", array(0.7), [0], [[0.7]]).tolist() == [0.7]


def test_remax_subtracts_the_reward_of_the_greedy_response() -> None:
    np.testing.assert_allclose(remax(array(1, 0, 0.25), 0.25), [0.75, -0.25, 0.0])
    assert remax(array(1, 0), math.nan).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sample_std", [False, True])
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_groups_are_their_formulas(name: str, seed: int, sample_std: bool) -> None:
    """Of several groups of unequal size, their members mixed up in the batch."""
    rng = np.random.default_rng(seed)
    groups = [rng.normal(0, 1, int(size)).tolist() for size in rng.integers(2, 9, 5)]
    members = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    rng.shuffle(members)
    rewards = array(*(groups[g][i] for g, i in members))
    out = of_batch(name, rewards, [g for g, _ in members], groups, sample_std=sample_std)
    expected = [worked(name, groups[g], sample_std=sample_std)[i] for g, i in members]
    np.testing.assert_allclose(out, expected, atol=1e-9)


@pytest.mark.parametrize("sample_std", [False, True])
@pytest.mark.parametrize("reward", [0.1, -1 / 3, 1e6 / 3, 0.0])
@pytest.mark.parametrize("size", [2, 3, 8, 17])
@pytest.mark.parametrize("name", [*GROUPED, "reinforce++-baseline"])
def test_equal_rewards_give_exactly_zero(name: str, size: int, reward: float, sample_std: bool) -> None:
    """Though their mean in floating point may differ from each of them."""
    out = of_batch(name, array(*[reward] * size), [0] * size, [[reward] * size], sample_std=sample_std)
    assert out.tolist() == [0.0] * size


def test_rewards_that_differ_by_little_are_not_equal() -> None:
    """Extremes are compared, not a tiny std."""
    rewards = array(0.0, 1e-13)
    np.testing.assert_allclose(grpo(rewards, rewards), [-5e-8, 5e-8], rtol=1e-6)
    np.testing.assert_allclose(rloo(rewards, rewards), [-1e-13, 1e-13])


@pytest.mark.parametrize("name", ["grpo", "dr-grpo"])
def test_a_group_of_one_gives_zero(name: str) -> None:
    assert of_batch(name, array(1.0), [0], [[1.0]]).tolist() == [0.0]


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("name", GROUPED)
def test_a_missing_reward_takes_no_part(name: str, missing: float | None) -> None:
    """Neither in the batch nor among the members that are not in it; its own advantage is 0."""
    out = of_batch(name, array(1.0, missing, 0.0, 0.5), [0] * 4, [[1.0, missing, 0.0, 0.5, missing]])
    assert out[1] == 0.0
    np.testing.assert_allclose(out[[0, 2, 3]], worked(name, [1.0, 0.0, 0.5]))


@pytest.mark.parametrize("name", [*GROUPED, "reinforce++", "reinforce++-baseline"])
def test_a_group_without_rewards_gives_zero(name: str) -> None:
    out = of_batch(name, array(math.nan, math.nan, 1, 0), [0, 0, 1, 1], [[math.nan] * 2, [1, 0]])
    assert out[:2].tolist() == [0.0, 0.0]
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", GROUPED)
def test_members_that_are_not_in_the_batch_count_in_the_statistics(name: str) -> None:
    known = [1.0, 0.0, 0.0, 0.0]
    out = of_batch(name, array(0.0, 1.0), [0, 0], [known])
    np.testing.assert_allclose(out, np.asarray(worked(name, known))[[1, 0]], atol=1e-9)


def test_groups_do_not_mix() -> None:
    out = of_batch("dr-grpo", array(1, 0, 5, 5), [0, 0, 1, 1], [[1, 0], [5, 5]])
    assert out.tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("name", ["reinforce++", "gae", "vtrace"])
def test_the_first_stage_of_an_advantage_per_token_is_the_reward(name: str) -> None:
    """Even where the rewards of a group are equal."""
    assert of_batch(name, array(1, 1), [0, 0], [[1, 1]]).tolist() == [1.0, 1.0]


def test_the_baseline_variant_subtracts_the_mean_of_the_group() -> None:
    out = of_batch("reinforce++-baseline", array(1, 0, 0, 0), [0] * 4, [[1, 0, 0, 0]])
    np.testing.assert_allclose(out, [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("name", [*GROUPED, "reinforce++"])
def test_a_reward_list_of_the_wrong_length_raises(name: str) -> None:
    with pytest.raises(ValueError, match="3 rewards for 2 trajectories"):
        of_batch(name, array(1, 0, 0), [0, 0], [[1, 0, 0]])


def test_the_rewards_given_are_left_as_they_are() -> None:
    rewards = array(1, 0, math.nan)
    of_batch("rloo", rewards, [0, 0, 1], [[1, 0], [math.nan]])
    np.testing.assert_array_equal(rewards, [1, 0, math.nan])


# --- of tokens -------------------------------------------------------------------------------------------------------


def episode(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Rewards, values, log-ratios, and the value after the end."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    return rng.normal(0, 1, size), rng.normal(0, 1, size), rng.normal(0, 1, size), float(rng.normal())


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_returns_are_discounted_sums(seed: int, gamma: float) -> None:
    rewards = episode(seed)[0]
    expected = [sum(gamma**k * rewards[t + k] for k in range(rewards.size - t)) for t in range(rewards.size)]
    np.testing.assert_allclose(returns(rewards, gamma), expected, atol=1e-12)


def test_gae_check_values() -> None:
    """gamma = 1, lambda = .5, V = [.1, .2, .3], r = [0, 0, 1], nothing after the end."""
    out = gae(array(0, 0, 1), array(0.1, 0.2, 0.3), gamma=1.0, lam=0.5)
    np.testing.assert_allclose(out, [0.325, 0.45, 0.7])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.95, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_gae_is_its_formula(seed: int, gamma: float, lam: float) -> None:
    """The sum over k of (gamma lambda)^k delta, with a value after the end."""
    rewards, values, _, bootstrap = episode(seed)
    following = [*values[1:].tolist(), bootstrap]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(rewards.size)]
    expected = [sum((gamma * lam) ** k * delta[t + k] for k in range(rewards.size - t)) for t in range(rewards.size)]
    np.testing.assert_allclose(gae(rewards, values, gamma=gamma, lam=lam, bootstrap=bootstrap), expected, atol=1e-12)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.95, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_vtrace_is_its_formula(seed: int, gamma: float, lam: float, bounds: tuple[float, float]) -> None:
    """The explicit sum of the paper: v_t = V_t + sum_k gamma^k (prod of the c before) delta_(t+k)."""
    rewards, values, log_rho, bootstrap = episode(seed)
    size = rewards.size
    rho = [min(bounds[0], math.exp(x)) for x in log_rho]
    c = [lam * min(bounds[1], math.exp(x)) for x in log_rho]
    following = [*values[1:].tolist(), bootstrap]
    delta = [rho[t] * (rewards[t] + gamma * following[t] - values[t]) for t in range(size)]
    v = [
        values[t] + sum(gamma**k * math.prod(c[t : t + k]) * delta[t + k] for k in range(size - t)) for t in range(size)
    ]
    after = [*v[1:], bootstrap]
    expected = [rho[t] * (rewards[t] + gamma * after[t] - values[t]) for t in range(size)]
    more = {"rho_max": bounds[0], "c_max": bounds[1], "bootstrap": bootstrap}
    out, targets = vtrace(rewards, values, log_rho, gamma=gamma, lam=lam, **more)
    np.testing.assert_allclose(targets, v, atol=1e-12)
    np.testing.assert_allclose(out, expected, atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_on_policy_the_target_of_vtrace_is_the_n_step_return(seed: int, gamma: float) -> None:
    """lambda = 1: rewards to the end and the value after it; values between have no part."""
    rewards, values, _, bootstrap = episode(seed)
    _, targets = vtrace(rewards, values, np.zeros(rewards.size), gamma=gamma, bootstrap=bootstrap)
    size = rewards.size
    expected = [
        sum(gamma**k * rewards[t + k] for k in range(size - t)) + gamma ** (size - t) * bootstrap for t in range(size)
    ]
    np.testing.assert_allclose(targets, expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_on_policy_vtrace_and_gae_agree(seed: int) -> None:
    """The target less the value is the advantage of GAE at the same lambda."""
    rewards, values, _, bootstrap = episode(seed)
    _, targets = vtrace(rewards, values, np.zeros(rewards.size), gamma=0.9, lam=0.7, bootstrap=bootstrap)
    expected = gae(rewards, values, gamma=0.9, lam=0.7, bootstrap=bootstrap)
    np.testing.assert_allclose(targets - values, expected, atol=1e-12)


@pytest.mark.parametrize("extreme", [60.0, -60.0])
def test_vtrace_clamps_extreme_ratios(extreme: float) -> None:
    """A ratio counts as e^20 at most, and nothing overflows."""
    rewards, values = array(0, 1), array(0.5, 0.25)
    out, targets = vtrace(rewards, values, array(extreme, 0.0), rho_max=1e300, c_max=1e300)
    rho = math.exp(math.copysign(20.0, extreme))
    np.testing.assert_allclose(targets, [0.5 + rho * -0.25 + rho * 0.75, 1.0])
    np.testing.assert_allclose(out, [rho * 0.5, 0.75])


def test_advantages_of_no_token() -> None:
    nothing = array()
    assert returns(nothing).shape == (0,)
    assert gae(nothing, nothing, gamma=0.9, lam=0.9, bootstrap=1.0).shape == (0,)
    assert [column.shape for column in vtrace(nothing, nothing, nothing)] == [(0,), (0,)]


@pytest.mark.parametrize("seed", range(4))
def test_whitening_is_by_the_statistics_of_the_whole_batch(seed: int) -> None:
    """Of two parts, each whitened on its own by the sums of both."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(3, 2, 11), rng.normal(-1, 0.5, 4)]
    whole = np.concatenate(parts)
    mean, std = sum(whole) / whole.size, statistics.pstdev(whole.tolist())
    out = np.concatenate([whiten(part, mean, std**2) for part in parts])
    np.testing.assert_allclose(out, [(x - mean) / (std + 1e-6) for x in whole], atol=1e-9)


def test_whitening_equal_values_stays_near_zero() -> None:
    """A std of 0, or below by rounding, does not blow up; nor does an empty batch."""
    values = array(*[0.1] * 8)
    out = whiten(values, float(values.mean()), float(values.var()))
    np.testing.assert_allclose(out, np.zeros(8), atol=1e-6)
    assert whiten(array(), 0.0, 0.0).shape == (0,)
