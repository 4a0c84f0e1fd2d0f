"""Policy versions and the lineage they live in.

A version is the pair (incarnation, step). On the wire it is one int64, `incarnation << 32 | step`, so that
versions of one incarnation are ordered like their steps and arrays of them stay plain numpy. Version (0, 0) is the
model as it was before any training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staleness.errors import VersionError

INJECTED = -1
"""In place of a version: a token that no policy sampled (tool output, environment text). Never trained on."""

_STEP_BITS = 32
_STEP_MASK = (1 << _STEP_BITS) - 1


def pack(incarnation: int, step: int) -> int:
    """The int64 form of (incarnation, step); both must fit 31 and 32 bits and be non-negative."""
    if not (0 <= incarnation < 1 << 31 and 0 <= step <= _STEP_MASK):
        raise VersionError(f"version ({incarnation}, {step}) does not fit int64: both parts must be >= 0")
    return incarnation << _STEP_BITS | step


def unpack(version: int) -> tuple[int, int]:
    """(incarnation, step) of a packed version."""
    return version >> _STEP_BITS, version & _STEP_MASK


def step_of(version: int) -> int:
    """The step of a packed version."""
    return version & _STEP_MASK


def show(version: int) -> str:
    """`12` for a version of the first incarnation, `1:12` after a restore."""
    incarnation, step = unpack(version)
    return f"{incarnation}:{step}" if incarnation else str(step)


@dataclass(frozen=True)
class Lineage:
    """The history of restores: `forks[i]` is the step from which incarnation `i + 1` was restored.

        Lineage()          one learner, never restored
        Lineage((4,))      incarnation 1 restored the checkpoint of step 4

    A token of incarnation 0 sampled at step 6 lies on the branch that incarnation 1 lost. Trained at step 5 of
    incarnation 1 it is `(5 - 4) + (6 - 4) = 3` learner steps away.
    """

    forks: tuple[int, ...] = ()

    @property
    def incarnation(self) -> int:
        return len(self.forks)

    def age_of(self, trained_at: int, sampled_at: int) -> int:
        """`age` of one version, without arrays; a version from the future has a negative one."""
        incarnation, step = unpack(trained_at)
        born, sampled = unpack(sampled_at)
        if born == incarnation:
            return step - sampled
        parted = min([step, *self.forks[born:incarnation]])
        return step - sampled if sampled <= parted else (step - parted) + (sampled - parted)

    def age(self, trained_at: int, sampled_at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Learner steps between the versions of tokens and the version that trains on them.

        `trained_at` is packed, of this lineage's newest incarnation; `sampled_at` is any array of packed versions.
        Raises `VersionError` for a token from the future, which no honest engine can produce.
        """
        incarnation, step = unpack(trained_at)
        if incarnation != self.incarnation:
            raise VersionError(
                f"version {show(trained_at)} is of incarnation {incarnation}, but this learner is incarnation "
                f"{self.incarnation}: it has restored {len(self.forks)} time(s)"
            )
        born = sampled_at >> _STEP_BITS
        steps = sampled_at & _STEP_MASK
        # Where the token's incarnation and ours parted: the lowest fork since then.
        parted = np.full(incarnation + 1, step, dtype=np.int64)
        for earlier in range(incarnation - 1, -1, -1):
            parted[earlier] = min(parted[earlier + 1], self.forks[earlier])
        if sampled_at.size and (born.max() > incarnation or born.min() < 0):
            raise VersionError(f"a token carries version {show(int(sampled_at.max()))}, newer than {show(trained_at)}")
        cut = parted[born]
        lost = np.maximum(steps - cut, 0)
        ages = np.where(born == incarnation, step - steps, np.where(lost > 0, (step - cut) + lost, step - steps))
        if ages.size and ages.min() < 0:
            raise VersionError(f"a token carries version {show(int(sampled_at.max()))}, newer than {show(trained_at)}")
        return ages
