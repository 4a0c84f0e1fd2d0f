"""Held-out prompts answered while the run trains: what to ask whom, and what the answers come to. Pure.

Every `evaluation.every` steps the prompts are shared out among the workers, which answer them greedily with what they
have to spare. A worker answers its share under one version: the first that it has from the one asked for on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from async_rl.config import EvaluationConfig
from async_rl.data.prompts import Prompts
from async_rl.tracking.metrics import Record
from buffers import messages as m
from staleness.versions import step_of


@dataclass
class Round:
    """One evaluation in progress: who was asked what, and what came back."""

    asked: dict[int, str]
    since: float
    answers: list[m.Evaluated] = field(default_factory=list[m.Evaluated])

    @property
    def open(self) -> set[int]:
        return self.asked.keys() - {answer.id for answer in self.answers}


class Evaluator:
    """`turn` once a second; `answered` for every `Evaluated`."""

    def __init__(
        self, config: EvaluationConfig, prompts: Prompts, send: Callable[[m.Evaluate], None], limit_s: float
    ) -> None:
        """`limit_s`: time after which an evaluation counts as it is."""
        self._config, self._send, self._limit_s = config, send, limit_s
        count = min(config.prompts or len(prompts), len(prompts))
        self._prompts = [
            m.Prompt((0, index), prompts.tokens[index].tolist(), prompts.rows[index]) for index in range(count)
        ]
        self._next = -1
        """The version from which on the next evaluation is due."""
        self._ids = 0
        self._round: Round | None = None

    def turn(self, version: int, workers: Sequence[str], now: float) -> list[Record]:
        """What has been found out; asks for more when it is due. `version`: the newest, -1 before there is one: then
        workers are asked for the first they get. `now` in monotonic seconds."""
        found: list[Record] = []
        if self._round is not None:
            gone = {number for number in self._round.open if self._round.asked[number] not in workers}
            if self._round.open <= gone or now - self._round.since > self._limit_s:
                found, self._round = _results(self._round), None
                self._next = max([self._next, *(self._following(int(record["version"])) for record in found)])
        if version >= self._next and self._round is None and workers:
            self._ask(version, workers, now)
        return found

    def _following(self, version: int) -> int:
        """The next multiple of `every`."""
        return version - step_of(version) % self._config.every + self._config.every if version >= 0 else 0

    def _ask(self, version: int, workers: Sequence[str], now: float) -> None:
        self._next = self._following(version)
        asked: dict[int, str] = {}
        for place, prompt in enumerate(self._prompts):
            self._ids += 1
            asked[self._ids] = workers[place % len(workers)]
            self._send(m.Evaluate(asked[self._ids], self._ids, version, prompt))
        self._round = Round(asked, now)

    def answered(self, answer: m.Evaluated) -> None:
        """Answers to what nobody asks any more do not count."""
        if self._round is not None and answer.id in self._round.open:
            self._round.answers.append(answer)


def _results(done: Round) -> list[Record]:
    """One record for each version that answered."""
    by_version: dict[int, list[m.Evaluated]] = {}
    for answer in done.answers:
        if answer.reward is not None and answer.version is not None:
            by_version.setdefault(answer.version, []).append(answer)
    missing = len(done.asked) - sum(len(answers) for answers in by_version.values())
    return [
        {
            "step": step_of(version),
            "version": version,
            "eval_reward": fmean(answer.reward or 0.0 for answer in answers),
            "eval_length": fmean(answer.length for answer in answers),
            "eval_prompts": len(answers),
            "eval_missing": missing,
        }
        for version, answers in sorted(by_version.items())
    ]


def told(record: Record) -> str:
    """For people."""
    missing = f", {record['eval_missing']} not answered" if record["eval_missing"] else ""
    return (
        f"evaluation at step {record['step']}: reward {record['eval_reward']:.3f} on {record['eval_prompts']} held-out "
        f"prompts{missing}"
    )
