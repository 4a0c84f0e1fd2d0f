"""300 seeds with all invariants, and ten deliberate bugs that each must be found within as many."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation, applied
from tests.simulation.world import World

SEEDS = 300


def test_a_few_seeds() -> None:
    for seed in range(1000, 1020):
        World(seed).run()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_every_promise_is_kept_whatever_fails(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            World(seed).run()
        except Exception as error:
            raise AssertionError(f"replay with: python -m tests.simulation.replay {seed}") from error


@pytest.mark.soak
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_deliberate_bug_is_found(mutation: Mutation) -> None:
    with applied(mutation):
        for seed in range(SEEDS):
            try:
                World(seed).run()
            except Exception as error:
                print(f"{mutation.name}: seed {seed}: {type(error).__name__} {error}")
                return
    raise AssertionError(f"{mutation.name} was not found within {SEEDS} seeds")


def test_a_seed_is_the_same_run_every_time() -> None:
    one, two = World(7).run(), World(7).run()
    assert one == two
