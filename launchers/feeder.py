"""Gives prompts to the buffer, as many as it grants, in the order that the seed fixes."""

from __future__ import annotations

from async_rl.data.prompts import Prompts, order
from buffers import messages as m
from buffers.client import Client
from launchers.errors import RunFailed

BATCH = 64
"""Prompts per message."""


class Feeder:
    """`start` prompts of the order have ended in an earlier life of the run and are skipped."""

    def __init__(self, client: Client, prompts: Prompts, *, seed: int, shuffle: bool, start: int) -> None:
        self._client = client
        self._prompts = prompts
        self._keys = order(len(prompts), seed=seed, shuffle=shuffle, start=start)
        self._submitted = 0
        self.stats = m.Stats()
        self.dumped: m.Dumped | None = None

    def turn(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the buffer and acts on everything it has said."""
        received = self._client.poll(timeout_s)
        while received is not None:
            self._act(received[0])
            received = self._client.poll(0)

    def ask_status(self) -> None:
        """The answer comes with a later turn and lands in `stats`."""
        self._client.send(m.Status())

    def _act(self, message: m.Outbound) -> None:
        match message:
            case m.Credit(total):
                self._submit(total - self._submitted)
            case m.StatusReply(stats):
                self.stats = stats
            case m.Dumped():
                self.dumped = message
            case m.Fatal(reason, stats):
                self.stats = stats
                raise RunFailed(reason)
            case m.Rejected(reason):
                raise RunFailed(reason)
            case other:
                raise RunFailed(f"the feeder cannot act on {type(other).__name__}")

    def _submit(self, count: int) -> None:
        keys = [next(self._keys) for _ in range(count)]
        self._submitted += count
        for i in range(0, count, BATCH):
            batch = [
                m.Prompt(key, self._prompts.tokens[key[1]].tolist(), self._prompts.rows[key[1]])
                for key in keys[i : i + BATCH]
            ]
            self._client.send(m.Submit(batch))
