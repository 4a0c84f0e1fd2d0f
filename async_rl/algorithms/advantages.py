"""From rewards to advantages. Numpy, pure.

Of a trajectory: `grpo`, `dr_grpo`, `rloo`, `remax`, `gigpo`, from the rewards of its group. Of a token: `returns`,
`gae`, `vtrace`, over the sampled tokens of one trajectory, injected ones left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_rl.algorithms.config import AlgorithmConfig

Floats = NDArray[np.float64]
EPSILON = 1e-6

# --- of trajectories -----------------------------------------------------------------------------------------------


def grpo(rewards: Floats, group: Floats, *, sample_std: bool = False) -> Floats:
    """`(R - mean) / (std + 1e-6)` over the group (DeepSeekMath, 2402.03300).

    `rewards` are those of the trajectories wanted, `group` all finite rewards known of their group, which may be more.
    A group whose rewards are all equal gives exactly 0: compared by extremes, since the std of equal floats may be tiny
    but positive. `sample_std` divides by n - 1.
    """
    if _equal(group):
        return np.zeros_like(rewards)
    return (rewards - group.mean()) / (group.std(ddof=int(sample_std)) + EPSILON)


def dr_grpo(rewards: Floats, group: Floats) -> Floats:
    """`R - mean` over the group (Dr. GRPO, 2503.20783); exactly 0 where all rewards are equal."""
    if _equal(group):
        return np.zeros_like(rewards)
    return rewards - group.mean()


def rloo(rewards: Floats, group: Floats) -> Floats:
    """`R - mean of the others` (RLOO, 2402.14740); R itself in a group of one, 0 where all of several are equal."""
    if group.size == 1:
        return rewards.copy()
    if _equal(group):
        return np.zeros_like(rewards)
    return rewards - (group.sum() - rewards) / (group.size - 1)


def remax(rewards: Floats, greedy: float) -> Floats:
    """`R - R(greedy response)` (ReMax, 2310.10505); 0 if the greedy response has no reward."""
    return rewards - greedy if np.isfinite(greedy) else np.zeros_like(rewards)


class TurnRecord(NamedTuple):
    """A turn of an episode: the return from it on, and the state it began in."""

    outcome: float
    state: int


def gigpo(episodes: Sequence[Sequence[TurnRecord]], *, sample_std: bool = False) -> list[Floats]:
    """Step-level part of GiGPO (2505.10978): turns of a group that began in the same state, compared by their returns.

    One list of turns for each episode of the group. A state that only one turn began in gives 0.
    """
    outcomes: dict[int, list[float]] = {}
    for turn in (turn for episode in episodes for turn in episode):
        outcomes.setdefault(turn.state, []).append(turn.outcome)
    return [
        np.asarray(
            [
                float(grpo(np.asarray([turn.outcome]), np.asarray(outcomes[turn.state]), sample_std=sample_std)[0])
                for turn in episode
            ]
        )
        for episode in episodes
    ]


def _equal(group: Floats) -> bool:
    return group.size == 0 or bool(group.max() == group.min())


def advantages(
    config: AlgorithmConfig,
    rewards: Floats,
    group_of: NDArray[np.int64],
    group_rewards: Sequence[Sequence[float]],
    baselines: Sequence[float | None] = (),
) -> Floats:
    """One advantage per trajectory of a batch; the first stage of those that are per token.

    `rewards` and `group_of` have one entry a trajectory; `group_rewards[g]` holds all rewards known of group g, also of
    members that are not in the batch, `baselines[g]` that of its greedy response. A reward that is not finite takes no
    part in the statistics and gives 0.
    """
    if rewards.shape != group_of.shape:
        raise ValueError(f"{rewards.size} rewards for {group_of.size} trajectories")
    if group_of.size and not 0 <= group_of.min() <= group_of.max() < len(group_rewards):
        raise ValueError(f"groups {group_of.min()} to {group_of.max()}, but {len(group_rewards)} lists of rewards")
    out = np.zeros_like(rewards)
    for index, known in enumerate(group_rewards):
        members = (group_of == index) & np.isfinite(rewards)
        group = np.asarray(known, np.float64)
        group = group[np.isfinite(group)]
        if config.advantage == "remax":
            greedy = baselines[index] if index < len(baselines) else None
            out[members] = remax(rewards[members], float("nan") if greedy is None else greedy)
        else:
            out[members] = _of_group(config, rewards[members], group)
    return out


def _of_group(config: AlgorithmConfig, rewards: Floats, group: Floats) -> Floats:
    match config.advantage:
        case "grpo" | "gigpo":
            return grpo(rewards, group, sample_std=config.sample_std)
        case "dr-grpo" | "reinforce++-baseline":
            return dr_grpo(rewards, group)
        case "rloo":
            return rloo(rewards, group)
        case "reinforce++" | "gae" | "vtrace":
            return rewards
        case _:
            raise ValueError(f"algorithm.advantage = {config.advantage!r} is not built yet")


# --- of tokens -----------------------------------------------------------------------------------------------------


def returns(rewards: Floats, gamma: float = 1.0) -> Floats:
    """`sum_k gamma^k r_(t+k)`: what is still to come at each token."""
    out = np.zeros_like(rewards)
    coming = 0.0
    for t in range(rewards.size - 1, -1, -1):
        coming = rewards[t] + gamma * coming
        out[t] = coming
    return out


def gae(rewards: Floats, values: Floats, *, gamma: float, lam: float, bootstrap: float = 0.0) -> Floats:
    """Generalised advantage estimation (1506.02438): `sum_k (gamma lam)^k delta_(t+k)`.

    `delta_t = r_t + gamma V_(t+1) - V_t`; `bootstrap` is the value after the last token: 0 at the end of an episode.
    """
    delta = rewards + gamma * np.append(values[1:], bootstrap) - values
    return returns(delta, gamma * lam)


def vtrace(
    rewards: Floats,
    values: Floats,
    log_rho: Floats,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
    bootstrap: float = 0.0,
) -> tuple[Floats, Floats]:
    """(advantages, value targets) of V-trace (IMPALA, 1802.01561).

    With `rho = min(rho_max, exp log_rho)` and `c = lam min(c_max, exp log_rho)`:
    `delta_t = rho_t (r_t + gamma V_(t+1) - V_t)`, `v_t = V_t + delta_t + gamma c_t (v_(t+1) - V_(t+1))`,
    `A_t = rho_t (r_t + gamma v_(t+1) - V_t)`. On-policy with lam = 1, v is the n-step return.
    """
    ratio = np.exp(np.clip(log_rho, -20, 20))
    rho, c = np.minimum(rho_max, ratio), lam * np.minimum(c_max, ratio)
    following = np.append(values[1:], bootstrap)
    delta = rho * (rewards + gamma * following - values)
    excess = np.zeros(values.size + 1)
    """v - V"""
    for t in range(values.size - 1, -1, -1):
        excess[t] = delta[t] + gamma * c[t] * excess[t + 1]
    targets = values + excess[:-1]
    return rho * (rewards + gamma * (following + excess[1:]) - values), targets


def whiten(values: Floats, mean: float, variance: float) -> Floats:
    """`(x - mean) / (std + 1e-6)`, by the mean and variance over the whole batch."""
    return (values - mean) / (np.sqrt(variance) + EPSILON)
