"""Advantages per token, for the algorithms that give each token its own: what a trajectory's reward owes to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from async_rl.algorithms.advantages import Floats, gae, returns, vtrace
from async_rl.algorithms.config import AlgorithmConfig


class Episode(NamedTuple):
    """Sampled tokens of one trajectory, injected ones left out. Columns that the algorithm has no use for are None.

    rewards          of each token; an outcome's reward is on the last one
    values           of the state before each token
    log_rho          log-ratio of the proximal to the behaviour policy
    log_divergence   log-ratio of the behaviour to the reference policy, for a penalty
    bootstrap        value of the state after the last token; 0 if the trajectory ends there
    """

    rewards: Floats
    values: Floats | None
    log_rho: Floats | None
    log_divergence: Floats | None
    bootstrap: float = 0.0


class Credit(NamedTuple):
    """Per token: its advantage, and what its value should have been."""

    advantage: Floats
    target: Floats


def penalty(config: AlgorithmConfig, log_divergence: Floats) -> Floats:
    """The KL estimate that a token's reward is reduced by; theta is the policy that sampled it."""
    clipped = np.clip(log_divergence, -20, 20)
    match config.kl.estimator:
        case "k1":
            estimate = clipped
        case "k2":
            estimate = 0.5 * np.square(clipped)
        case "k3":
            estimate = np.exp(-clipped) + clipped - 1
    return config.kl.coefficient * estimate


def credit(config: AlgorithmConfig, episode: Episode) -> Credit:
    """`reinforce++`: the return. `gae`, `vtrace`: see `advantages.py`."""
    rewards = episode.rewards
    if episode.log_divergence is not None:
        rewards = rewards - penalty(config, episode.log_divergence)
    gamma, lam = config.gamma, config.lam
    if config.advantage == "gae" and episode.values is not None:
        advantage = gae(rewards, episode.values, gamma=gamma, lam=lam, bootstrap=episode.bootstrap)
        return Credit(advantage, advantage + episode.values)
    if config.advantage == "vtrace" and episode.values is not None and episode.log_rho is not None:
        bounds = {"rho_max": config.rho_max, "c_max": config.c_max, "bootstrap": episode.bootstrap}
        return Credit(*vtrace(rewards, episode.values, episode.log_rho, gamma=gamma, lam=lam, **bounds))
    outcome = returns(rewards, gamma)
    return Credit(outcome, outcome)


def last_of(count: int, reward: float) -> Floats:
    """Rewards of `count` tokens: all of it on the last one."""
    rewards = np.zeros(count)
    rewards[-1:] = reward
    return rewards
