"""Drives a core through its public events, as peers would; keeps what was sent."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from buffers import messages as m
from buffers.core import Core, Send
from buffers.records import Settings

Kind = TypeVar("Kind", bound=m.Message)


def prompt(index: int, epoch: int = 0, tokens: int = 3) -> m.Prompt:
    return m.Prompt((epoch, index), list(range(tokens)), b"{}")


def chunks(rows: list[tuple[int, int, int, list[int]]], *, attempt: int = 1, logprob: float = -1.0) -> m.Chunks:
    """Rows of (ticket, offset, version, tokens)."""
    tokens = [token for row in rows for token in row[3]]
    return m.Chunks(
        ticket=np.asarray([row[0] for row in rows], np.int64),
        attempt=np.full(len(rows), attempt, np.int32),
        offset=np.asarray([row[1] for row in rows], np.int32),
        length=np.asarray([len(row[3]) for row in rows], np.int32),
        version=np.asarray([row[2] for row in rows], np.int64),
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.full(len(tokens), logprob, np.float32),
    )


class Driver:
    """A core with a feeder, one worker and rank 0. `tickets` are those granted and not finished."""

    def __init__(self, slots: int = 64, **settings: object) -> None:
        defaults = {"batch": 4, "group": 2, "max_staleness": 1, "max_tokens": 8}
        self.core = Core(Settings(**(defaults | settings)))  # type: ignore[arg-type]
        self.sent: list[Send] = []
        self.tickets: list[m.Ticket] = []
        self.credit = 0
        self.submitted = 0
        self.version = 0
        self.seq = 0
        self.send("feeder", m.Hello("feeder"))
        self.send("w", m.Hello("worker", slots))
        self.send("rank0", m.Published(0))

    def _note(self, out: list[Send]) -> list[Send]:
        self.sent += out
        for send in out:
            if isinstance(send.message, m.Tickets):
                self.tickets += send.message.tickets
            if isinstance(send.message, m.Credit):
                self.credit = send.message.upto
        self.core.check()
        return out

    def send(self, peer: str, message: m.Message) -> list[Send]:
        return self._note(self.core.handle(peer, message))

    def append(self, columns: m.Chunks) -> m.Ack:
        self.seq += 1
        (ack,) = [
            s.message for s in self._note(self.core.append("w", self.seq, columns)) if isinstance(s.message, m.Ack)
        ]
        return ack

    def outcome(self, *outcomes: m.Outcome, worker: str = "w") -> m.Ack:
        self.seq += 1
        out = self.send(worker, m.Outcomes(self.seq, list(outcomes)))
        (ack,) = [s.message for s in out if isinstance(s.message, m.Ack)]
        return ack

    def feed(self) -> None:
        """Submits as many prompts as the credit allows."""
        count = self.credit - self.submitted
        self.send("feeder", m.Submit(self.submitted, [prompt(self.submitted + i) for i in range(count)]))
        self.submitted += count

    def finish(self, ticket: m.Ticket, reward: float | None = 1.0, tokens: int = 2, version: int | None = None) -> None:
        at = len(ticket.prefix)
        new = [(ticket.id, at, self.version if version is None else version, [7] * (tokens - at))]
        self.append(chunks(new, attempt=ticket.attempt))
        self.outcome(m.Outcome(ticket.id, ticket.attempt, tokens, "finished", "stop", reward))
        self.tickets.remove(ticket)

    def fail(self, ticket: m.Ticket, error: str = "broken") -> None:
        self.outcome(m.Outcome(ticket.id, ticket.attempt, 0, "failed", error=error))
        self.tickets.remove(ticket)

    def finish_all(self, **how: object) -> None:
        for ticket in list(self.tickets):
            self.finish(ticket, **how)  # type: ignore[arg-type]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Everything of one kind that was ever sent."""
        return [send.message for send in self.sent if isinstance(send.message, kind)]

    def take(self, version: int | None = None) -> m.Batch | None:
        out = self.send("rank0", m.Take(self.version if version is None else version))
        return next((send.message for send in out if isinstance(send.message, m.Batch)), None)

    def commit(self, batch: m.Batch, max_staleness: int | None = None) -> None:
        self.version += 1
        self.send("rank0", m.Commit(batch.lease, self.version, max_staleness=max_staleness))
