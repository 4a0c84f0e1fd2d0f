"""Rewards run in real child processes that are killed at their limit (failures.md 2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from async_rl.benchmarks import tiny
from async_rl.errors import RewardError, RewardTimeout
from async_rl.rewards import functions, shaping
from async_rl.rewards.config import ModelRewardConfig, NamedReward, OverlongConfig, RewardConfig
from async_rl.rewards.runner import RewardProcess, Rewards, process_of
from tests.e2e.rewards import length as user_length

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
        rewards = Rewards(RewardConfig(f"{USER}:hangs", time_limit_s=2.0))
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


def test_several_rewards_come_back_in_the_order_of_the_configuration() -> None:
    others = {"length": NamedReward("tests.e2e.rewards:length", weight=0.5)}

    async def both() -> list[float]:
        rewards = Rewards(RewardConfig(f"{USER}:good", others=others))
        try:
            return await rewards.score("yes", row())
        finally:
            rewards.close()

    first, second = asyncio.run(both())
    assert first == 1.0
    assert second == user_length("yes", {})


def test_the_sum_is_weighted_and_clipped_and_long_responses_lose_some() -> None:
    config = RewardConfig(
        weight=2.0,
        others={"style": NamedReward("m:f", weight=-1.0)},
        clip=(-1.0, 1.5),
        overlong=OverlongConfig(share=0.25, penalty=0.8),
    )
    assert shaping.raw(config, [1.0, 0.2]) == pytest.approx(1.8)
    assert shaping.shaped(config, [1.0, 0.2], length=10, longest=40) == 1.5
    assert shaping.shaped(config, [0.0, 3.0], length=35, longest=40) == pytest.approx(-1.0 - 0.4)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (16, 0.0), (18, 0.5), (20, 1.0), (25, 1.0)])
def test_the_penalty_grows_linearly_over_the_last_part(length: int, penalty: float) -> None:
    """A fifth of 20 tokens: from 16 on."""
    config = OverlongConfig(share=0.2)
    assert shaping.overlong(config, length=length, longest=20) == pytest.approx(penalty)
    assert shaping.overlong(OverlongConfig(), length=length, longest=20) == 0.0


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of random weights with one label."""
    folder = tmp_path_factory.mktemp("judge")
    tiny.make(folder)
    config = LlamaConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_reward_model_judges_prompt_and_response_in_batches(judge: Path) -> None:
    """Padding and company change nothing: each score is the logit of the model for that text alone."""
    config = RewardConfig(f"model:{judge}", model=ModelRewardConfig(device="cpu", batch_size=4, wait_ms=5.0))
    row = json.dumps({"prompt": "how much?"}).encode()
    responses = ["a", "bb", "a much longer answer", "", "a", "x" * 40]

    async def all_of_them() -> list[float]:
        rewards = Rewards(config)
        try:
            return [score for (score,) in await asyncio.gather(*(rewards.score(text, row) for text in responses))]
        finally:
            rewards.close()

    scores = asyncio.run(all_of_them())
    model = LlamaForSequenceClassification.from_pretrained(judge).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    for text, score in zip(responses, scores, strict=True):
        messages = [{"role": "user", "content": "how much?"}, {"role": "assistant", "content": text}]
        tokens = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")
        with torch.inference_mode():
            assert score == pytest.approx(float(model(**tokens).logits[0, 0]), abs=1e-4)
    assert len(set(scores)) == 5


def test_a_reward_model_that_is_not_there_says_so(tmp_path: Path) -> None:
    process = process_of(f"model:{tmp_path}/nothing", RewardConfig(), "prompt")
    with pytest.raises(RewardError, match="nothing"):
        process.start()
