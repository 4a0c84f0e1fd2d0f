"""From the rewards of a group to the advantages of its members. Numpy, pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from async_rl.config import AlgorithmConfig

Floats = NDArray[np.float64]
EPSILON = 1e-6


def grpo(rewards: Floats, group: Floats, *, sample_std: bool = False) -> Floats:
    """`(R - mean) / (std + 1e-6)` over the group (DeepSeekMath, 2402.03300).

    `rewards` are those of the trajectories wanted, `group` all finite rewards known of their group, which may be more.
    A group whose rewards are all equal gives exactly 0: compared by extremes, since the std of equal floats may be tiny
    but positive. `sample_std` divides by n - 1.
    """
    if group.size == 0 or group.max() == group.min():
        return np.zeros_like(rewards)
    return (rewards - group.mean()) / (group.std(ddof=int(sample_std)) + EPSILON)


def dr_grpo(rewards: Floats, group: Floats) -> Floats:
    """`R - mean` over the group (Dr. GRPO, 2503.20783); exactly 0 where all rewards are equal."""
    if group.size == 0 or group.max() == group.min():
        return np.zeros_like(rewards)
    return rewards - group.mean()


def advantages(
    config: AlgorithmConfig, rewards: Floats, group_of: NDArray[np.int64], group_rewards: list[list[float]]
) -> Floats:
    """One advantage per trajectory of a batch.

    `rewards` and `group_of` have one entry a trajectory; `group_rewards[g]` holds all rewards known of group g, also of
    members that are not in the batch. A reward that is not finite takes no part in the statistics and gives 0.
    """
    if rewards.shape != group_of.shape:
        raise ValueError(f"{rewards.size} rewards for {group_of.size} trajectories")
    out = np.zeros_like(rewards)
    for index, known in enumerate(group_rewards):
        members = (group_of == index) & np.isfinite(rewards)
        group = np.asarray(known, np.float64)
        group = group[np.isfinite(group)]
        if config.advantage == "grpo":
            out[members] = grpo(rewards[members], group, sample_std=config.sample_std)
        else:
            out[members] = dr_grpo(rewards[members], group)
    return out
