"""Gives prompts to the buffer, as many as it grants, in the order that the seed fixes."""

from __future__ import annotations

from time import monotonic

from async_rl.config import DataConfig
from async_rl.data.prompts import Prompts, difficulties, order
from buffers import messages as m
from buffers.client import Client
from launchers.errors import RunFailed
from launchers.evaluator import Evaluator

BATCH = 16
"""Prompts per message."""


class Feeder:
    """Gives the prompts from place `start` of the order on, unless the buffer knows how far an earlier life came."""

    def __init__(self, client: Client, prompts: Prompts, config: DataConfig, *, start: int) -> None:
        self._client = client
        self._prompts = prompts
        self._config = config
        self._difficulty = difficulties(prompts, config.difficulty_column)
        self._start = start
        self._go_to(start)
        self.stats = m.Stats()
        self.workers: list[str] = []
        """Names of the workers that the buffer has."""
        self.heard_at = monotonic()
        self.last_word = False
        """Whether `stats` answers the last question asked."""
        self.evaluator: Evaluator | None = None

    def _go_to(self, place: int) -> None:
        self._place = place
        self._keys = order(
            len(self._prompts),
            seed=self._config.seed,
            shuffle=self._config.shuffle,
            start=place,
            difficulty=self._difficulty,
            curriculum_epochs=self._config.curriculum_epochs,
        )

    def turn(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the buffer and acts on everything it has said."""
        received = self._client.poll(timeout_s)
        while received is not None:
            self.heard_at = monotonic()
            self._act(received[0])
            received = self._client.poll(0)

    def ask_status(self) -> None:
        """The answer comes with a later turn and lands in `stats`."""
        self.last_word = False
        self._client.send(m.Status())

    def lost(self, name: str) -> None:
        """Tells the buffer that a process has died, so that others go on with what it had."""
        self._client.send(m.Lost(name))

    def _act(self, message: m.Outbound) -> None:
        match message:
            case m.Credit(upto, place):
                self._submit(upto, place)
            case m.StatusReply(stats, workers=workers):
                self.stats, self.workers, self.last_word = stats, workers, True
            case m.Fatal(reason, stats):
                self.stats = stats
                raise RunFailed(reason)
            case m.Rejected(reason):
                raise RunFailed(reason)
            case m.Evaluated():
                if self.evaluator is not None:
                    self.evaluator.answered(message)
            case m.Welcome():
                pass
            case other:
                raise RunFailed(f"the feeder cannot act on {type(other).__name__}")

    def _submit(self, upto: int, place: int | None) -> None:
        """Prompts up to a place of the order. If some that were submitted did not arrive, `place` is theirs."""
        if place is None:
            place, upto = self._start, self._start + upto
        if place != self._place:
            self._go_to(place)
        while self._place < upto:
            keys = [next(self._keys) for _ in range(min(BATCH, upto - self._place))]
            batch = [m.Prompt(key, self._prompts.tokens[key[1]].tolist(), self._prompts.rows[key[1]]) for key in keys]
            self._client.send(m.Submit(self._place, batch))
            self._place += len(keys)
