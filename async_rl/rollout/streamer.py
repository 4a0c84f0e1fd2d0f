"""Turns sampled tokens into chunks. Pure: the time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from buffers.messages import Chunks


@dataclass
class _Tail:
    """What has been sampled for one ticket and not been sent; parallel lists."""

    attempt: int
    sent: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Streamer:
    """Collects tokens of many tickets and says when and what to flush.

    A flush is due when some ticket has `chunk_tokens` waiting, when the oldest waiting token is `flush_s` old, or when
    a ticket has ended. A chunk never spans two versions: a run of tokens of one version becomes one chunk.

    streamer = Streamer(chunk_tokens=16, flush_s=0.1)
    streamer.open(ticket, attempt=1)
    streamer.add(ticket, tokens, logprobs, versions, now=clock())
    if streamer.due(clock()): await client.append(streamer.flush())
    """

    def __init__(self, *, chunk_tokens: int, flush_s: float) -> None:
        self._chunk_tokens = chunk_tokens
        self._flush_s = flush_s
        self._tails: dict[int, _Tail] = {}
        self._waiting_since: float | None = None
        self._full = False

    def open(self, ticket: int, attempt: int, length: int = 0) -> None:
        """A ticket that goes on after `length` tokens of an earlier attempt."""
        self._tails[ticket] = _Tail(attempt, sent=length)

    def drop(self, ticket: int) -> None:
        """Forgets a ticket and what has not been sent of it."""
        self._tails.pop(ticket, None)

    def add(self, ticket: int, tokens: list[int], logprobs: list[float], versions: list[int], *, now: float) -> None:
        """Sampled tokens with their behaviour log-probs and policy versions; the three have equal length."""
        if not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(
                f"ticket {ticket}: {len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions"
            )
        tail = self._tails[ticket]
        tail.tokens += tokens
        tail.logprobs += logprobs
        tail.versions += versions
        self._full |= len(tail.tokens) >= self._chunk_tokens
        if tokens and self._waiting_since is None:
            self._waiting_since = now

    def due(self, now: float) -> bool:
        return self._full or (self._waiting_since is not None and now - self._waiting_since >= self._flush_s)

    def close(self, ticket: int) -> int:
        """Forgets an ended ticket, whose tokens must have been flushed; returns its length."""
        tail = self._tails.pop(ticket)
        assert not tail.tokens, "a ticket is closed after its last flush"
        return tail.sent

    def flush(self) -> Chunks | None:
        """Everything waiting, as one message; None if nothing is."""
        tickets: list[int] = []
        attempts: list[int] = []
        offsets: list[int] = []
        lengths: list[int] = []
        versions: list[int] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        for ticket, tail in self._tails.items():
            for start, stop in _runs(tail.versions):
                tickets.append(ticket)
                attempts.append(tail.attempt)
                offsets.append(tail.sent + start)
                lengths.append(stop - start)
                versions.append(tail.versions[start])
            tokens += tail.tokens
            logprobs += tail.logprobs
            tail.sent += len(tail.tokens)
            tail.tokens, tail.logprobs, tail.versions = [], [], []
        self._waiting_since, self._full = None, False
        if not tickets:
            return None
        return Chunks(
            ticket=np.asarray(tickets, np.int64),
            attempt=np.asarray(attempts, np.int32),
            offset=np.asarray(offsets, np.int32),
            length=np.asarray(lengths, np.int32),
            version=np.asarray(versions, np.int64),
            tokens=np.asarray(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
        )


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of each run of equal values."""
    edges = [0, *(i for i in range(1, len(values)) if values[i] != values[i - 1]), len(values)]
    return [(start, stop) for start, stop in pairwise(edges) if stop > start]
