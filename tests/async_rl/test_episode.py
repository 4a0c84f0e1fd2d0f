"""Turns of an engine and of an environment as one trajectory: what is injected, replayed, cut off (failures.md 24)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from async_rl.environments.calculator import Calculator
from async_rl.environments.protocol import Environment, anchor
from async_rl.errors import EnvironmentFailed
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.rollout.episode import Episode, Played, Talk
from buffers import messages as m
from staleness.versions import INJECTED

END = 0
VERSION = 7


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token != END)


class Script:
    """An engine that says the turns it was given, a token at a time, each ended by `END`."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self.asked.append(request)
        tokens = [*encode(self.turns.pop(0)), END]
        reason = "stop" if len(tokens) <= request.max_tokens else "length"
        tokens = tokens[: request.max_tokens]
        for token in tokens[:-1]:
            yield Delta([token], [-1.0], [VERSION])
        yield Delta([tokens[-1]], [-1.0], [VERSION], reason, [(VERSION, 0, len(tokens))])


def ticket(prefix: Sequence[int] = (), injected: Sequence[tuple[int, int]] = (), budget: int = 50) -> m.Ticket:
    known = list(prefix)
    return m.Ticket(1, 1, 0, (0, 3), encode("?"), b"{}", 0, budget - len(known), known, injected=list(injected))


class Heard:
    """What was streamed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.versions: list[int] = []

    def __call__(self, tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
        assert len(tokens) == len(logprobs) == len(versions)
        self.tokens += tokens
        self.versions += versions


def play(
    engine: Script, given: m.Ticket, environment: Environment | None = None, heard: Heard | None = None, **how: object
) -> Played:
    talk = Talk(decode, encode, frozenset({END}), **how)  # type: ignore[arg-type]
    return asyncio.run(Episode(given, engine, talk, environment).play(heard or Heard()))  # type: ignore[arg-type]


def calculator(answer: int = 43, **params: float) -> Calculator:
    return Calculator({"answer": answer}, **params)


def test_without_an_environment_a_response_is_one_turn() -> None:
    played = play(Script("hello"), ticket())
    assert (decode(played.tokens), played.finish_reason, played.turns) == ("hello", "stop", [])


def test_the_calculators_answer_is_injected_between_two_turns() -> None:
    engine, heard = Script("6*7", "it is 43"), Heard()
    played = play(engine, ticket(), calculator(), heard, template="={text};")
    assert decode(played.tokens) == "6*7=42;it is 43"
    assert heard.tokens == played.tokens
    injected = [token for token, version in zip(heard.tokens, heard.versions, strict=True) if version == INJECTED]
    assert decode(injected) == "=42;"
    assert engine.asked[1].prompt == [*encode("?"), *encode("6*7"), END, *encode("=42;")]
    assert played.turns == [m.Turn(0, 0.1, anchor("")), m.Turn(8, 1.0, anchor("42"))]
    assert played.reward == pytest.approx(1.1)
    assert not played.span_mismatch


def test_another_worker_goes_on_in_mid_turn() -> None:
    """The prefix is replayed to the environment, and only the rest is generated."""
    whole = play(Script("6*7", "it is 43"), ticket(), calculator()).tokens
    for cut in range(len(whole)):
        injected = [(4, 6)] if cut >= 6 else []
        if 4 < cut < 6:
            continue  # what an environment says is streamed whole
        rest = decode(whole[6:])[max(0, cut - 6) :]
        turns = [decode(whole[:3])[cut:], rest] if cut < 4 else [rest]
        heard = Heard()
        played = play(Script(*turns), ticket(whole[:cut], injected), calculator(), heard)
        assert played.tokens == whole, cut
        assert heard.tokens == whole[cut:], cut
        assert [turn.start for turn in played.turns] == [0, 6]
        assert played.reward == pytest.approx(1.1)


def test_a_complete_response_is_replayed_for_its_reward_alone() -> None:
    whole = play(Script("6*7", "it is 43"), ticket(), calculator()).tokens
    complete = m.Ticket(1, 2, 0, (0, 3), encode("?"), b"{}", 0, 0, whole, "stop", [(4, 6)])
    played = play(Script(), complete, calculator())
    assert (played.reward, played.finish_reason) == (pytest.approx(1.1), "stop")


def test_an_environment_that_answers_otherwise_when_replayed_fails_the_trajectory() -> None:
    prefix = [*encode("6*7"), END, *encode("41")]
    with pytest.raises(EnvironmentFailed, match="replayable: false"):
        play(Script("43"), ticket(prefix, [(4, 6)]), calculator())


def test_a_budget_that_ends_between_turns_ends_the_trajectory() -> None:
    """Nothing is injected that no turn could follow."""
    played = play(Script("6*7"), ticket(budget=6), calculator())
    assert (decode(played.tokens), [turn.reward for turn in played.turns]) == ("6*7", [0.1])


def test_a_turn_that_is_cut_off_ends_the_trajectory() -> None:
    played = play(Script("6*7000"), ticket(budget=4), calculator())
    assert (played.finish_reason, decode(played.tokens)) == ("length", "6*70")


def test_a_turn_may_have_a_limit_of_its_own() -> None:
    """Its first four tokens go to the environment; a worker that takes over after them asks for no more."""
    played = play(Script("6*7000", "43"), ticket(), calculator(), turn_tokens=4)
    assert decode(played.tokens) == "6*704243".replace("42", "420", 1)
    assert [turn.start for turn in played.turns] == [0, 7]
    again = play(Script("43"), ticket(encode("6*70")), calculator(), turn_tokens=4)
    assert again.tokens == played.tokens


def test_an_environment_that_raises_or_hangs_fails_the_trajectory() -> None:
    class Broken(Calculator):
        def step(self, text: str) -> tuple[str, float, bool]:
            raise RuntimeError("no such tool")

    class Hangs(Calculator):
        def step(self, text: str) -> tuple[str, float, bool]:
            time.sleep(0.5)
            return "", 0.0, True

    with pytest.raises(EnvironmentFailed, match="no such tool"):
        play(Script("1"), ticket(), Broken({"answer": 1}))
    with pytest.raises(EnvironmentFailed, match=r"within 0\.05 s"):
        play(Script("1"), ticket(), Hangs({"answer": 1}), time_limit_s=0.05)


@pytest.mark.parametrize(
    ("turn", "said"), [("what is 12 + 30", "42"), ("7-9", "-2"), ("2**3", "error"), ("nothing", "error")]
)
def test_the_calculator_says_the_value_of_the_first_expression(turn: str, said: str) -> None:
    text, reward, done = calculator().step(turn)
    assert (text, done) == (said, False)
    assert (reward > 0) == (said != "error")
