"""Which groups a batch holds: each sampler against the sentence that describes it, and its frequencies against numpy.

1  every sampler stops at the batch, takes what there is if that is less, takes nothing twice
2  oldest and freshest by issue
3  uniform: every subset as likely as any other
4  prioritized: first draws in proportion to variance ** exponent, the next ones among the rest; weights 1 / (N p)
5  through the core: the sampler decides, weights reach the rows, and the same seed chooses the same
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from buffers import messages as m
from buffers.sampler import SAMPLERS, Choice, Offer, freshest, oldest, prioritized, uniform
from tests.buffers.driver import Driver

REWARDS = [[0.0, 1.0], [0.0, 0.5], [0.25, 0.5, 1.0], [1.0, 1.0], [0.75]]
OFFERS = [Offer(serial, 1, rewards) for serial, rewards in zip((3, 7, 1, 9, 4), REWARDS, strict=True)]
LEAST = 1e-3
"""Added to every variance, so that no group has probability zero."""


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def chi_square(observed: Counter, expected: dict) -> float:
    total = sum(observed.values())
    assert set(observed) <= set(expected)
    return sum((observed[key] - total * p) ** 2 / (total * p) for key, p in expected.items())


def bound(cells: int) -> float:
    """Far above what chance gives: mean plus five standard deviations of chi-square."""
    free = cells - 1
    return free + 5 * (2 * free) ** 0.5


# --- 1 all -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@pytest.mark.parametrize("batch", [1, 4, 5, 11, 99])
def test_a_sampler_stops_when_the_batch_is_reached(name: str, batch: int) -> None:
    offers = [Offer(i, size, [0.0, float(i)]) for i, size in enumerate([2, 1, 3, 2, 4])]
    sizes = {offer.serial: offer.members for offer in offers}
    for seed in range(20):
        chosen = SAMPLERS[name](offers, batch, generator(seed), exponent=1.0)
        serials = [choice.serial for choice in chosen]
        assert len(set(serials)) == len(serials)
        total = sum(sizes[serial] for serial in serials)
        assert total >= min(batch, 12)
        assert total - sizes[serials[-1]] < batch
        assert max(choice.weight for choice in chosen) == 1.0


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_nothing_on_offer_is_nothing_chosen(name: str) -> None:
    assert SAMPLERS[name]([], 4, generator(), exponent=1.0) == []


# --- 2 by issue --------------------------------------------------------------------------------------------------


def test_oldest_and_freshest_go_by_issue_whatever_the_order_of_the_offers() -> None:
    for order in itertools.permutations(OFFERS):
        assert oldest(order, 3, generator(), exponent=1.0) == [Choice(1, 1.0), Choice(3, 1.0), Choice(4, 1.0)]
        assert freshest(order, 2, generator(), exponent=1.0) == [Choice(9, 1.0), Choice(7, 1.0)]


# --- 3 uniform ---------------------------------------------------------------------------------------------------


def test_uniform_chooses_every_ordered_pair_as_often() -> None:
    rng = generator(1)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(6000):
        chosen = uniform(OFFERS, 2, rng, exponent=1.0)
        assert {choice.weight for choice in chosen} == {1.0}
        seen[tuple(choice.serial for choice in chosen)] += 1
    pairs = list(itertools.permutations([offer.serial for offer in OFFERS], 2))
    assert chi_square(seen, dict.fromkeys(pairs, 1 / len(pairs))) < bound(len(pairs))


# --- 4 prioritized -----------------------------------------------------------------------------------------------


def probabilities(exponent: float) -> dict[int, float]:
    """From the definition: mean square of the centred rewards."""
    scores = {}
    for offer in OFFERS:
        mean = sum(offer.rewards) / len(offer.rewards)
        variance = sum((reward - mean) ** 2 for reward in offer.rewards) / len(offer.rewards)
        scores[offer.serial] = (variance + LEAST) ** exponent
    return {serial: score / sum(scores.values()) for serial, score in scores.items()}


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_prioritized_draws_in_proportion_without_replacement(exponent: float) -> None:
    p = probabilities(exponent)
    pairs = {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in itertools.permutations(p, 2)}
    assert sum(pairs.values()) == pytest.approx(1)
    rng = generator(2)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(6000):
        seen[tuple(choice.serial for choice in prioritized(OFFERS, 2, rng, exponent=exponent))] += 1
    # Cells too rare for chi-square are put together.
    rare = {pair for pair, chance in pairs.items() if chance * 6000 < 5}
    expected = {pair: chance for pair, chance in pairs.items() if pair not in rare}
    observed = Counter({pair: seen[pair] for pair in expected})
    if rare:
        expected[0, 0] = sum(pairs[pair] for pair in rare)
        observed[0, 0] = sum(seen[pair] for pair in rare)
    assert chi_square(observed, expected) < bound(len(expected))


def test_a_wrong_exponent_would_have_been_noticed() -> None:
    """The bound above can fail."""
    rng = generator(2)
    seen = Counter(prioritized(OFFERS, 1, rng, exponent=1.0)[0].serial for _ in range(6000))
    assert chi_square(seen, probabilities(1.0)) < bound(5) < chi_square(seen, probabilities(0.5))


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0])
def test_weights_are_those_of_prioritized_replay(exponent: float) -> None:
    p = probabilities(exponent)
    for seed in range(20):
        chosen = prioritized(OFFERS, 3, generator(seed), exponent=exponent)
        raw = np.asarray([1 / (len(p) * p[choice.serial]) for choice in chosen])
        np.testing.assert_allclose([choice.weight for choice in chosen], raw / raw.max(), rtol=1e-12)


def test_weights_undo_the_preference() -> None:
    """Sum of w f over single draws is the mean of f over all groups, up to the normalisation each draw has."""
    p = probabilities(1.0)
    values = {serial: float(serial) ** 2 for serial in p}
    rng = generator(3)
    draws = [prioritized(OFFERS, 1, rng, exponent=1.0)[0].serial for _ in range(6000)]
    estimate = np.mean([values[serial] / (len(p) * p[serial]) for serial in draws])
    spread = np.std([values[serial] / (len(p) * p[serial]) for serial in draws]) / len(draws) ** 0.5
    assert abs(estimate - np.mean(list(values.values()))) < 5 * spread


def test_groups_of_equal_rewards_and_of_one_stay_possible_and_finite() -> None:
    offers = [Offer(0, 1, [1.0, 1.0]), Offer(1, 1, [0.5]), Offer(2, 1, [])]
    seen = Counter(prioritized(offers, 1, generator(s), exponent=1.0)[0].serial for s in range(300))
    assert set(seen) == {0, 1, 2}
    assert [choice.weight for choice in prioritized(offers, 3, generator(), exponent=1.0)] == [1.0] * 3
    mixed = prioritized([*offers, Offer(3, 1, [0.0, 1.0])], 4, generator(), exponent=1.0)
    weights = {choice.serial: choice.weight for choice in mixed}
    assert weights[3] == pytest.approx(LEAST / (0.25 + LEAST))


# --- 5 through the core ------------------------------------------------------------------------------------------


def rows(sampler: str, *, seed: int = 0, steps: int = 4) -> list[list[tuple[int, float]]]:
    """(group, weight) of each row of the first batches; groups' variances grow with their serial."""
    driver = Driver(batch=4, group=2, max_staleness=4, sampler=sampler, seed=seed)
    found = []
    for _ in range(steps):
        driver.feed()
        for ticket in list(driver.tickets):
            driver.finish(ticket, reward=ticket.member * (1 + ticket.key[1]) / 8)
        batch = driver.take()
        assert batch is not None
        serials = [driver.core.store.trajectories[row.ticket].group.serial for row in batch.rows]
        found.append([(serial, row.weight) for serial, row in zip(serials, batch.rows, strict=True)])
        driver.commit(batch)
    return found


def test_the_core_hands_out_what_the_sampler_chose() -> None:
    assert [[serial for serial, _ in batch] for batch in rows("oldest", steps=2)] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert [[serial for serial, _ in batch] for batch in rows("freshest", steps=2)] == [[9, 9, 8, 8], [11, 11, 10, 10]]
    assert {weight for batch in rows("uniform") for _, weight in batch} == {1.0}


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_the_same_seed_chooses_the_same_and_another_one_does_not(sampler: str) -> None:
    assert rows(sampler, seed=4) == rows(sampler, seed=4)
    assert rows(sampler, seed=4) != rows(sampler, seed=5)
    assert len({tuple(sorted({serial for serial, _ in batch})) for batch in rows(sampler, steps=6)}) > 1


def test_the_weights_of_a_prioritized_batch_reach_its_rows() -> None:
    (batch,) = rows("prioritized", steps=1)
    variance = {serial: ((1 + serial) / 8) ** 2 / 4 + LEAST for serial in range(10)}
    raw = {serial: 1 / variance[serial] for serial, _ in batch}
    for serial, weight in batch:
        assert weight == pytest.approx(raw[serial] / max(raw.values()))
    assert len({serial for serial, _ in batch}) == 2


def test_a_repeated_take_is_not_another_draw() -> None:
    driver = Driver(batch=2, group=1, max_staleness=4, sampler="uniform")
    driver.feed()
    driver.finish_all()
    first = driver.take()
    assert first is not None
    for request in range(1, 5):
        out = driver.send("rank0", m.Take(0, request))
        assert [s.message.rows for s in out if isinstance(s.message, m.Batch)] == [first.rows]
