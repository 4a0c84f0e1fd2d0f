"""One trajectory at the worker: turns of the engine, and between them answers of the environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.environments.protocol import Environment, Step, anchor
from async_rl.errors import EngineError, EnvironmentFailed
from async_rl.rollout.engines.protocol import Engine, Request
from buffers import messages as m
from staleness.versions import INJECTED

Emit = Callable[[list[int], list[float], list[int]], None]
"""Takes tokens, their behaviour log-probs and their versions as they come."""


def unheard(_tokens: list[int], _logprobs: list[float], _versions: list[int]) -> None:
    """Of a response that is not trained on."""


def unwatched(_state: str) -> None:
    """Nobody asks what goes on."""


@dataclass
class Talk:
    """How text becomes tokens and back. `stops` end a turn."""

    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    stops: frozenset[int]
    template: str = "{text}"
    time_limit_s: float = 60.0
    turn_tokens: int | None = None

    def injected(self, text: str) -> list[int]:
        return self.encode(self.template.replace("{text}", text))


@dataclass
class Played:
    """All tokens of a response, injected ones too; `turns` are empty without an environment."""

    tokens: list[int]
    finish_reason: str
    turns: list[m.Turn] = field(default_factory=list[m.Turn])
    span_mismatch: bool = False

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)


class Episode:
    """Plays a ticket to its end. A prefix of an earlier attempt is replayed to the environment first.

    `seed` is that of its samples; None leaves them to the engine. `doing` hears who is at work, `generate` or
    `environment`.
    """

    def __init__(
        self,
        ticket: m.Ticket,
        engine: Engine,
        talk: Talk,
        environment: Environment | None,
        seed: int | None = None,
        doing: Callable[[str], None] = unwatched,
        priority: int = 0,
    ) -> None:
        self._ticket, self._engine, self._talk, self._environment = ticket, engine, talk, environment
        self._sample_seed, self._doing, self._priority = seed, doing, priority
        self._limit = len(ticket.prefix) + ticket.max_tokens
        self._state = anchor("")
        self._turn = 0
        """Where the turn in progress begins."""

    async def play(self, emit: Emit = unheard, *, greedy: bool = False) -> Played:
        played = Played(list(self._ticket.prefix), self._ticket.finish_reason)
        if self._environment is not None:
            await self._ask(self._environment.reset, _seed(self._ticket))
            await self._replay(played)
        while True:
            if not played.finish_reason:
                played.finish_reason = await self._generate(played, emit, greedy=greedy)
            if self._environment is None:
                return played
            answer = await self._step(played)
            new = self._talk.injected(answer.text)
            if answer.done or played.finish_reason == "length" or len(played.tokens) + len(new) >= self._limit:
                return played
            emit(new, [0.0] * len(new), [INJECTED] * len(new))
            self._inject(played, new, answer.text)

    async def _replay(self, played: Played) -> None:
        tokens, whole = played.tokens, played.finish_reason
        for start, end in self._ticket.injected:
            played.tokens = tokens[:start]
            answer = await self._step(played)
            if self._talk.injected(answer.text) != tokens[start:end]:
                raise EnvironmentFailed(
                    f"ticket {self._ticket.id}: the environment answers {answer.text!r} where it answered otherwise "
                    "before; set environment.replayable: false"
                )
            self._inject(played, tokens[start:end], answer.text)
        played.tokens, played.finish_reason = tokens, whole

    async def _step(self, played: Played) -> Step:
        """The answer to the turn that has just ended."""
        assert self._environment is not None
        text = self._talk.decode(played.tokens[self._turn :])
        answer = Step(*await self._ask(self._environment.step, text))
        played.turns.append(m.Turn(self._turn, answer.reward, self._state))
        return answer

    def _inject(self, played: Played, new: list[int], text: str) -> None:
        played.tokens = played.tokens + new
        played.finish_reason = ""
        self._turn, self._state = len(played.tokens), anchor(text)

    async def _ask(self, function: Callable[..., Any], argument: object) -> Any:
        self._doing("environment")
        try:
            return await asyncio.wait_for(asyncio.to_thread(function, argument), self._talk.time_limit_s)
        except TimeoutError as error:
            raise EnvironmentFailed(f"the environment did not answer within {self._talk.time_limit_s:g} s") from error
        except Exception as error:
            raise EnvironmentFailed(f"the environment failed: {error!r}") from error
        finally:
            self._doing("generate")

    async def _generate(self, played: Played, emit: Emit, *, greedy: bool) -> str:
        """One turn of the engine; returns how it ended."""
        ticket, known = self._ticket, len(played.tokens)
        end = self._limit
        if self._talk.turn_tokens is not None:
            end = min(end, self._turn + self._talk.turn_tokens)
        # A worker may have died before it could say that a turn had ended.
        if known > self._turn and played.tokens[-1] in self._talk.stops:
            return "stop"
        if known >= end:
            return "length" if end == self._limit else "turn"
        name = f"{ticket.id}.{ticket.attempt}.{len(played.turns)}{'g' if greedy else ''}"
        request = Request(name, ticket.prompt + played.tokens, end - known, self._sample_seed, greedy, self._priority)
        versions: list[int] = []
        last = None
        async for delta in self._engine.generate(request):
            emit(delta.tokens, delta.logprobs, delta.versions)
            played.tokens += delta.tokens
            versions += delta.versions
            last = delta
        if last is None or last.finish_reason is None:
            raise EngineError(f"ticket {ticket.id}: the engine ended a request without saying how")
        spans = [version for version, start, end in last.spans or [] for _ in range(end - start)]
        played.span_mismatch |= spans != versions
        return "turn" if last.finish_reason == "length" and end < self._limit else last.finish_reason


def _seed(ticket: m.Ticket) -> int:
    """The same for all members of a group and for every attempt: they meet the same environment."""
    epoch, index = ticket.key
    return epoch * 1_000_003 + index
