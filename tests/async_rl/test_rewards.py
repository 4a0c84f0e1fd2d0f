"""Rewards run in real child processes that are killed at their limit (failures.md 2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from async_rl.errors import RewardError, RewardTimeout
from async_rl.rewards import functions
from async_rl.rewards.runner import RewardProcess, Rewards

USER = "tests.async_rl.user_rewards"


@contextmanager
def process(name: str, limit: float = 20.0) -> Iterator[RewardProcess]:
    reward = RewardProcess(f"{USER}:{name}", limit)
    yield reward
    reward.close()


def row(answer: str = "yes") -> bytes:
    return json.dumps({"answer": answer}).encode()


def test_a_reward_scores_and_may_print() -> None:
    with process("good") as reward:
        assert (reward.score("yes", row()), reward.score("no", row())) == (1.0, 0.0)


def test_numpy_scalars_are_numbers_and_rows_may_hold_nan() -> None:
    with process("a_numpy_scalar") as reward:
        assert reward.score("", row()) == 0.5
    with process("has_nan") as reward:
        assert reward.score("", b'{"x": NaN}') == 1.0


def test_a_reward_may_be_async() -> None:
    with process("slow_but_async") as reward:
        assert reward.score("", row()) == 0.5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "no such key"),
        ("not_a_number", "nan"),
        ("a_list", "not a finite number"),
        ("text", "not a finite number"),
        ("missing", "missing"),
    ],
)
def test_what_goes_wrong_is_said(name: str, why: str) -> None:
    with process(name) as reward, pytest.raises(RewardError, match=why):
        reward.score("", row())


def test_a_reward_that_fails_once_scores_the_next() -> None:
    with process("raises_on_bad") as reward:
        with pytest.raises(RewardError, match="bad row"):
            reward.score("", row("bad"))
        assert reward.score("", row()) == 1.0


def test_a_reward_that_never_returns_is_killed_and_replaced() -> None:
    with process("hangs", limit=2.0) as reward:
        with pytest.raises(RewardTimeout, match="within 2 s"):
            reward.score("", row("hang"))
        assert reward.score("", row()) == 1.0


def test_a_reward_whose_process_dies_is_an_error_and_is_replaced() -> None:
    with process("dies") as reward:
        for _ in range(2):
            with pytest.raises(RewardError, match="died"):
                reward.score("", row())


def test_a_reward_that_cannot_be_loaded_says_so_every_time() -> None:
    with process("missing") as reward:
        for _ in range(2):
            with pytest.raises(RewardError, match="missing"):
                reward.score("", row())


def test_an_idle_child_that_was_killed_is_replaced() -> None:
    with process("good") as reward:
        assert reward.score("yes", row()) == 1.0
        assert reward._child is not None
        reward._child.kill()
        reward._child.wait()
        with pytest.raises(RewardError, match="died"):
            reward.score("yes", row())
        assert reward.score("yes", row()) == 1.0


def test_scoring_does_not_block_the_loop() -> None:
    async def both() -> float:
        rewards = Rewards(f"{USER}:hangs", time_limit_s=2.0, processes=1)
        scoring = asyncio.create_task(rewards.score("", row("hang")))
        ticks = 0
        while not scoring.done():
            await asyncio.sleep(0.02)
            ticks += 1
        with pytest.raises(RewardTimeout):
            await scoring
        rewards.close()
        return ticks

    assert asyncio.run(both()) > 20


@pytest.mark.parametrize(
    ("response", "expected"),
    [("3 + 4 = 7", 1.0), ("7 is the answer, not 8", 0.0), ("seven", 0.0), ("-7", 0.0), ("07", 1.0)],
)
def test_last_integer(response: str, expected: float) -> None:
    assert functions.last_integer(response, {"answer": 7}) == expected


def test_a_reasoning_gym_row_is_scored_by_its_own_task() -> None:
    from async_rl.config import DataConfig, TaskConfig
    from async_rl.data import sources

    (found,) = sources.rows(DataConfig(task=TaskConfig(name="basic_arithmetic", size=1)))
    assert functions.reasoning_gym(found["answer"], found) == 1.0
    assert functions.reasoning_gym("no idea", found) < 1.0
