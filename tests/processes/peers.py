"""A worker, a feeder and a learner in threads, with the real sessions and clients, whose every token can be checked."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import numpy as np
import zmq

from async_rl.config import DataConfig
from async_rl.data.prompts import Prompts
from buffers import messages as m
from buffers.client import Client
from buffers.session import WorkerSession
from launchers.feeder import Feeder

CHUNK = 16


def content(index: int, member: int, start: int, stop: int) -> np.ndarray:
    """Tokens of a trajectory, whoever generates them."""
    return ((index * 7919 + member * 104_729 + np.arange(start, stop) * 31) & 0x7FFFFFFF).astype(np.int32)


class Peer(threading.Thread):
    """Runs `turn` until it is stopped; `check` raises what went wrong in it."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = False
        self.error = ""

    def run(self) -> None:
        try:
            while not self.stopping:
                self.turn()
        except Exception:
            self.error = traceback.format_exc()

    def turn(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        assert not self.error, f"{self.name}: {self.error}"

    def stop(self) -> None:
        self.stopping = True
        self.join(20)
        assert not self.is_alive(), f"{self.name} does not end"
        self.check()


class Worker(Peer):
    """Streams 16 tokens of every ticket per message. `acknowledged` has the end of each (ticket, attempt)."""

    def __init__(self, endpoint: str, slots: int, length: int, pause_s: float = 0.0) -> None:
        super().__init__("worker")
        self._length, self._pause_s = length, pause_s
        self._session = WorkerSession(slots, heartbeat_s=1.0, retry_s=1.0)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"worker0#1")
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(endpoint)
        self._at: dict[int, int] = {}
        self._tickets: dict[int, m.Ticket] = {}
        self._said: dict[int, dict[tuple[int, int], int]] = {}
        self._version = -1
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.tokens = 0
        self._socket.send_multipart(self._session.hello(time.monotonic()))

    def turn(self) -> None:
        now = time.monotonic()
        for frames in self._session.due(now):
            self._socket.send_multipart(frames)
        ready = [ticket for ticket in self._tickets.values() if ticket.min_version <= self._version]
        if ready and self._session.open:
            self._stream(ready)
        while self._socket.poll(0 if ready and self._session.open else 20):
            self._receive(m.decode_outbound(self._socket.recv_multipart()[0]), now)
        if self._pause_s:
            time.sleep(self._pause_s)

    def _stream(self, tickets: list[m.Ticket]) -> None:
        starts = [self._at[ticket.id] for ticket in tickets]
        stops = [min(start + CHUNK, self._length) for start in starts]
        tokens = [content(t.key[1], t.member, a, b) for t, a, b in zip(tickets, starts, stops, strict=True)]
        chunks = m.Chunks(
            ticket=np.asarray([ticket.id for ticket in tickets], np.int64),
            attempt=np.asarray([ticket.attempt for ticket in tickets], np.int32),
            offset=np.asarray(starts, np.int32),
            length=np.asarray(stops, np.int32) - np.asarray(starts, np.int32),
            version=np.full(len(tickets), self._version, np.int64),
            tokens=np.concatenate(tokens),
            logprobs=-np.concatenate(tokens).astype(np.float32) / 2**31,
        )
        frames = self._session.append(chunks)
        self._said[m.decode_from_peer(frames[0]).seq] = {  # type: ignore[union-attr]
            (ticket.id, ticket.attempt): stop for ticket, stop in zip(tickets, stops, strict=True)
        }
        self._socket.send_multipart(frames)
        self._at.update({ticket.id: stop for ticket, stop in zip(tickets, stops, strict=True)})
        done = [ticket for ticket, stop in zip(tickets, stops, strict=True) if stop == self._length]
        if done:
            outcomes = [
                m.Outcome(ticket.id, ticket.attempt, self._length, "finished", "stop", float(ticket.member))
                for ticket in done
            ]
            self._socket.send_multipart(self._session.outcomes(outcomes))
            for ticket in done:
                del self._tickets[ticket.id]

    def _receive(self, message: m.Outbound, now: float) -> None:
        if isinstance(message, m.Ack):
            gaps = {refusal.ticket for refusal in message.refused}
            ends = [item for seq in (*message.before, message.seq) for item in self._said.get(seq, {}).items()]
            for key, end in ends:
                if key[0] not in gaps and end > self.acknowledged.get(key, 0):
                    self.tokens += end - max(end - CHUNK, self.acknowledged.get(key, 0))
                    self.acknowledged[key] = end
        news, again = self._session.received(message, now)
        for frames in again:
            self._socket.send_multipart(frames)
        for item in news:
            if isinstance(item, m.Tickets):
                for ticket in item.tickets:
                    self._tickets[ticket.id] = ticket
                    self._at[ticket.id] = len(ticket.prefix)
            elif isinstance(item, m.Cancel):
                for held in item.tickets:
                    self._tickets.pop(held.ticket, None)
            elif isinstance(item, m.News):
                self._version = max(self._version, item.version)


class FeederPeer(Peer):
    """The real feeder and its client."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("feeder")
        self._client = Client(endpoint, "feeder", "feeder")
        prompts = Prompts([np.asarray([1, 2, 3])] * 1_000_000, [b"{}"] * 1_000_000, "test")
        self.feeder = Feeder(self._client, prompts, DataConfig(shuffle=False), start=0)

    def turn(self) -> None:
        self.feeder.turn(0.05)


class Learner(Peer):
    """Takes, checks every token, commits; saves every few steps. `group`: trajectories of a prompt."""

    def __init__(self, endpoint: str, *, group: int, checkpoint_every: int = 4) -> None:
        super().__init__("learner")
        self._client = Client(endpoint, "learner0", "learner")
        self._group, self._every = group, checkpoint_every
        self.step = 0
        self.trained: Counter[tuple[int, int]] = Counter()
        self._client.ask(m.Published(0), m.Done)

    def turn(self) -> None:
        batch = self._client.ask(m.Take(self.step), m.Batch, until=lambda: self.stopping)
        if batch is None:
            return
        arrays = self._client.fetch(m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
        self._look_at(batch, arrays)
        self.step += 1
        self._client.ask(m.Commit(batch.lease, self.step), m.Committed)
        if self.step % self._every == 0:
            self._client.ask(m.Checkpointed(self.step), m.Done)

    def _look_at(self, batch: m.Batch, arrays: m.SampleArrays) -> None:
        at, groups = 0, [row.group for row in batch.rows]
        assert len(set(groups)) == len(batch.group_rewards)
        keys = self._keys(batch)
        for row, key in zip(batch.rows, keys, strict=True):
            tokens = arrays.tokens[at : at + row.length]
            expected = content(*key, 0, row.length)
            assert tokens.tolist() == expected.tolist(), f"{key} holds tokens that were not generated for it"
            logprobs = arrays.logprobs[at : at + row.length]
            assert np.array_equal(logprobs, -expected.astype(np.float32) / 2**31)
            at += row.length
        self.trained.update(keys)
        assert max(self.trained.values()) == 1, "trained twice"

    def _keys(self, batch: m.Batch) -> list[tuple[int, int]]:
        """(prompt, member) of each row. Prompts are in order of issue, and so are ticket serials."""
        return [((row.ticket >> 20) // self._group, row.member) for row in batch.rows]


def wait_for(done: Callable[[], bool], peers: list[Peer], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        for peer in peers:
            peer.check()
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.005)
