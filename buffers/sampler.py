"""Which of the groups on offer a batch holds. Pure: randomness comes in as a generator.

    sampler = SAMPLERS["oldest"]
    chosen = sampler(offers, 128, rng, exponent=1.0)     # [Choice(serial, weight), ...]

A sampler stops when the members chosen reach the batch; it takes all there are if they are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from buffers.config import SamplerName


@dataclass(frozen=True)
class Offer:
    """A group with members to train on. `serial` orders groups by issue, `members` counts what may be trained on."""

    serial: int
    members: int
    rewards: Sequence[float]


class Choice(NamedTuple):
    """A chosen group and the weight of its members in the loss."""

    serial: int
    weight: float


class Sampler(Protocol):
    def __call__(
        self, offers: Sequence[Offer], batch: int, rng: np.random.Generator, *, exponent: float
    ) -> list[Choice]: ...


def oldest(offers: Sequence[Offer], batch: int, rng: np.random.Generator, *, exponent: float) -> list[Choice]:
    """In order of issue."""
    return _until(sorted(offers, key=lambda offer: offer.serial), batch)


def freshest(offers: Sequence[Offer], batch: int, rng: np.random.Generator, *, exponent: float) -> list[Choice]:
    """The last issued first; what is passed over grows old and expires."""
    return _until(sorted(offers, key=lambda offer: -offer.serial), batch)


def uniform(offers: Sequence[Offer], batch: int, rng: np.random.Generator, *, exponent: float) -> list[Choice]:
    """At random, each as likely as any other."""
    return _until([offers[int(i)] for i in rng.permutation(len(offers))], batch)


def prioritized(offers: Sequence[Offer], batch: int, rng: np.random.Generator, *, exponent: float) -> list[Choice]:
    """In proportion to the variance of the group's rewards to the power of `exponent`, without replacement.

    The variance is the mean square of a group's centred advantages. Weights are those of prioritized replay (Schaul et
    al., 2016, equation 1 and section 3.4 at beta = 1): 1 / (N p), divided by the largest among the chosen, with p the
    probability of the first draw. A group of equal rewards keeps a small probability, so that every weight is finite.
    """
    priority = np.asarray([np.var(offer.rewards) if len(offer.rewards) > 1 else 0.0 for offer in offers])
    scores = (priority + 1e-3) ** exponent
    p = scores / scores.sum()
    # Gumbel keys: sorting log p + Gumbel noise draws without replacement in proportion to p.
    keys = [math.log(chance) + float(rng.gumbel()) for chance in p]
    order = sorted(range(len(keys)), key=lambda i: -keys[i])
    chosen = _until([offers[i] for i in order], batch)
    weights = [1 / (p.size * float(p[i])) for i in order[: len(chosen)]]
    return [Choice(choice.serial, weight / max(weights)) for choice, weight in zip(chosen, weights, strict=True)]


def _until(offers: Iterable[Offer], batch: int) -> list[Choice]:
    chosen: list[Choice] = []
    total = 0
    for offer in offers:
        if total >= batch:
            break
        chosen.append(Choice(offer.serial, 1.0))
        total += offer.members
    return chosen


SAMPLERS: dict[SamplerName, Sampler] = {
    "oldest": oldest,
    "freshest": freshest,
    "uniform": uniform,
    "prioritized": prioritized,
}
