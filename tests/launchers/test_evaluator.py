"""Who is asked what, when, and what the answers come to."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.config import EvaluationConfig
from async_rl.data.prompts import Prompts
from buffers import messages as m
from launchers.evaluator import Evaluator, told

PROMPTS = Prompts([np.array([i, i], np.int32) for i in range(5)], [b"{}"] * 5, "")
FORK = 1 << 32


class Crowd:
    """Workers that answer when they are told to."""

    def __init__(self, **config: int) -> None:
        self.sent: list[m.Evaluate] = []
        self.evaluator = Evaluator(EvaluationConfig(**config), PROMPTS, lambda asked: self.sent.append(asked), 100.0)

    def turn(self, version: int, now: float = 0.0, workers: tuple[str, ...] = ("a", "b")) -> list[dict]:
        return self.evaluator.turn(version, workers, now)

    def answer(self, version: int, of: str | None = None, reward: float | None = 1.0) -> None:
        for asked in self.sent:
            if of in (None, asked.to):
                self.evaluator.answered(m.Evaluated(asked.id, version, reward, length=3))
        self.sent = [asked for asked in self.sent if of not in (None, asked.to)]


def test_every_prompt_is_asked_once_and_shared_out() -> None:
    crowd = Crowd(every=4)
    assert crowd.turn(0) == []
    assert [(asked.to, asked.version, asked.prompt.key) for asked in crowd.sent] == [
        ("a", 0, (0, 0)), ("b", 0, (0, 1)), ("a", 0, (0, 2)), ("b", 0, (0, 3)), ("a", 0, (0, 4)),
    ]  # fmt: skip
    crowd.answer(0)
    (record,) = crowd.turn(1)
    assert (record["step"], record["eval_reward"], record["eval_prompts"], record["eval_missing"]) == (0, 1.0, 5, 0)
    for version in (1, 2, 3):
        assert crowd.turn(version) == []
        assert crowd.sent == []
    crowd.turn(5)  # a step may pass between two looks
    assert {asked.version for asked in crowd.sent} == {5}
    crowd.answer(5)
    crowd.turn(7)
    assert crowd.sent == []
    crowd.turn(8)
    assert {asked.version for asked in crowd.sent} == {8}


def test_workers_that_were_further_have_a_record_of_their_own() -> None:
    crowd = Crowd(every=4)
    crowd.turn(4)
    crowd.answer(4, of="a", reward=0.5)
    crowd.answer(5, of="b", reward=1.0)
    assert [(each["step"], each["eval_reward"], each["eval_prompts"]) for each in crowd.turn(5)] == [
        (4, 0.5, 3), (5, 1.0, 2),
    ]  # fmt: skip


def test_who_dies_is_not_waited_for_and_what_is_missing_is_said() -> None:
    crowd = Crowd(every=1)
    crowd.turn(0)
    crowd.answer(0, of="a")
    assert crowd.turn(0) == []
    (record,) = crowd.turn(0, workers=("a",))
    assert (record["eval_prompts"], record["eval_missing"]) == (3, 2)
    assert told(record) == "evaluation at step 0: reward 1.000 on 3 held-out prompts, 2 not answered"


def test_answers_that_never_come_end_with_the_limit() -> None:
    crowd = Crowd(every=1)
    crowd.turn(0)
    late = list(crowd.sent)
    crowd.sent.clear()
    assert crowd.turn(3, now=101.0) == []
    assert {asked.version for asked in crowd.sent} == {3}
    for asked in late:  # nobody asks for them any more
        crowd.evaluator.answered(m.Evaluated(asked.id, 0, 0.0))
    crowd.answer(3)
    assert [each["eval_reward"] for each in crowd.turn(3)] == [1.0]


@pytest.mark.parametrize("reward", [None, 0.25])
def test_what_was_not_answered_is_not_a_zero(reward: float | None) -> None:
    crowd = Crowd(every=1, prompts=2)
    crowd.turn(0)
    assert len(crowd.sent) == 2
    crowd.answer(0, of="a", reward=reward)
    crowd.answer(0, of="b", reward=0.25)
    (record,) = crowd.turn(0)
    assert record["eval_reward"] == 0.25
    assert record["eval_missing"] == (reward is None)


def test_a_learner_that_goes_back_is_evaluated_anew() -> None:
    crowd = Crowd(every=4)
    crowd.turn(4)
    crowd.answer(4)
    crowd.turn(6)
    crowd.turn(FORK | 2)
    assert {asked.version for asked in crowd.sent} == {FORK | 2}
    crowd.answer(FORK | 2)
    crowd.turn(FORK | 3)
    crowd.turn(FORK | 4)
    assert {asked.version for asked in crowd.sent} == {FORK | 4}


def test_before_anything_is_published_the_first_version_is_asked_for() -> None:
    crowd = Crowd(every=4)
    crowd.turn(-1)
    assert {asked.version for asked in crowd.sent} == {-1}
    crowd.answer(FORK | 6)  # of a run that was resumed
    (record,) = crowd.turn(FORK | 7)
    assert record["step"] == 6
    assert crowd.sent == []
    crowd.turn(FORK | 8)
    assert {asked.version for asked in crowd.sent} == {FORK | 8}
