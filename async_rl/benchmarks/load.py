"""Worker, feeder and learner in one lean process, to load a buffer with.

The worker streams one chunk of each of its trajectories per message. Trajectories come in cohorts of a group's size,
whose ends are spread evenly over a trajectory's life, so that groups finish one after the other. Every rule of the
protocol is kept: tickets, contiguous offsets, outcomes with rewards, `take`, `commit` and `Checkpointed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep

import numpy as np
import zmq

from buffers import messages as m
from buffers.records import Settings
from buffers.session import WorkerSession

PATIENCE_S = 30.0
NAP_S = 0.0005
"""Longest sleep between two looks at what has come, when messages are paced."""


@dataclass(frozen=True)
class Shape:
    """What is streamed; lengths in tokens. `tickets` trajectories grow at once."""

    tickets: int = 256
    chunk: int = 16
    length: int = 2000
    prompt: int = 64
    group: int = 8
    batch: int = 512
    max_staleness: int = 3
    checkpoint_steps: int = 4

    def __post_init__(self) -> None:
        assert self.length % self.chunk == self.tickets % self.group == self.batch % self.group == 0

    @property
    def chunks(self) -> int:
        """Chunks of one trajectory."""
        return self.length // self.chunk

    @property
    def message_tokens(self) -> int:
        return self.tickets * self.chunk

    @property
    def settings(self) -> Settings:
        return Settings(
            batch=self.batch,
            group=self.group,
            max_staleness=self.max_staleness,
            max_tokens=self.length,
            min_group=self.group,
            retain=True,
        )


class Load:
    """Connected peers of one buffer; `close` it.

    load = Load(endpoint, Shape(), window=128)
    load.start()
    load.stream(10.0)                  # as fast as acknowledgements come
    load.stream(10.0, rate=1e6)        # tokens per second
    load.drain()
    load.acknowledged                  # tokens, all of them in the buffer
    batch, arrays = load.take()        # by hand, if `trains` is False
    """

    def __init__(self, endpoint: str, shape: Shape, *, window: int, trains: bool = True) -> None:
        self.shape, self.trains = shape, trains
        # Tickets in reserve, so that no cohort waits for the acknowledgement of its predecessor's end.
        reserve = -(-window * shape.tickets // shape.chunks // shape.group + 2) * shape.group
        self._session = WorkerSession(shape.tickets + reserve, window=window)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._worker = self._connect(endpoint, b"bench#1")
        self._feeder = self._connect(endpoint, b"feeder#1")
        self._learner = self._connect(endpoint, b"rank0#1")
        self._hear: dict[object, Callable[[m.Outbound, list[bytes]], None]] = {
            self._worker: self._worker_hears,
            self._feeder: self._feeder_hears,
            self._learner: self._learner_hears,
        }
        self._free: deque[m.Ticket] = deque()
        self._ends: deque[tuple[int, int]] = deque()
        """Of each cohort, in order: the message it ends with, and its first column."""
        self._messages = self._seq = 0
        self._sent: dict[int, tuple[float, int]] = {}
        """When each unacknowledged message was due, and its tokens."""
        self._submitted = self._commits = 0
        self._version: int | None = None
        self._batch: m.Batch | None = None
        self._arrays: m.SampleArrays | None = None
        self._status: m.StatusReply | None = None
        self.acknowledged = self.finished = self.steps = 0
        self.wire_bytes = 0
        """Bytes of all frames the worker has sent, with what ZMTP puts before each."""
        self.latencies: list[float] = []
        """Seconds from when each message of chunks was due to its acknowledgement."""
        self._lay_out()

    def _lay_out(self) -> None:
        count, tokens = self.shape.tickets, self.shape.message_tokens
        rng = np.random.default_rng(0)
        self._columns = m.Chunks(
            ticket=np.zeros(count, np.int64),
            attempt=np.ones(count, np.int32),
            offset=np.zeros(count, np.int32),
            length=np.full(count, self.shape.chunk, np.int32),
            version=np.zeros(count, np.int64),
            tokens=rng.integers(0, 150_000, tokens, dtype=np.int32),
            logprobs=-rng.exponential(1.0, tokens).astype(np.float32),
        )
        self._prompt = rng.integers(0, 150_000, self.shape.prompt).tolist()

    def _connect(self, endpoint: str, name: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def close(self) -> None:
        for socket in (self._worker, self._feeder, self._learner):
            socket.close()
        self._context.term()

    # --- what is done ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Publishes version 0, takes up all tickets and lays the cohorts out."""
        self._tell(self._learner, m.Published(0))
        self._tell(self._feeder, m.Hello("feeder"))
        self._worker.send_multipart(self._session.hello(perf_counter()))
        self._until(lambda: len(self._free) >= self.shape.tickets, "the first tickets")
        cohorts = self.shape.tickets // self.shape.group
        for cohort in range(cohorts):
            self._replace(cohort * self.shape.group)
            life = max(1, self.shape.chunks * (cohort + 1) // cohorts)
            self._ends.append((life, cohort * self.shape.group))

    def stream(self, seconds: float, *, rate: float | None = None) -> None:
        """Sends for so long, at most `rate` tokens per second if that is given."""
        begun = due = perf_counter()
        interval = 0.0 if rate is None else self.shape.message_tokens / rate
        while (now := perf_counter()) < begun + seconds:
            self._hear_all(0)
            if rate is None:
                due = now
            if not self._session.open or not self._ready():
                self._hear_all(1)
            elif now >= due:
                self._send(due)
                due += interval
            else:
                sleep(min(due - now, NAP_S))

    def stream_until(self, finished: int) -> None:
        """Sends until so many trajectories have finished since the start."""
        while self.finished < finished:
            self.stream(0.01)

    def drain(self) -> None:
        """Waits for all acknowledgements."""
        self._until(lambda: not self._sent, "acknowledgements")

    def take(self) -> tuple[m.Batch, m.SampleArrays]:
        """The next batch with all its tokens."""
        assert self._version is not None
        self._batch = self._arrays = None
        self._tell(self._learner, m.Take(self._version))
        self._until(lambda: self._batch is not None, "a batch")
        batch = self._batch
        assert batch is not None
        self._tell(self._learner, m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
        self._until(lambda: self._arrays is not None, "the tokens of a batch")
        assert self._arrays is not None
        return batch, self._arrays

    def go_on(self) -> None:
        """Trains again after `trains` was False, with the batch that has been waiting."""
        self.trains = True
        batch, self._batch = self._batch, None
        if batch is not None:
            self._commit(batch)

    def commit(self, batch: m.Batch) -> None:
        steps = self.steps
        self._commit(batch)
        self._until(lambda: self.steps > steps, "a commit")

    def stats(self) -> m.Stats:
        self._status = None
        self._tell(self._learner, m.Status())
        self._until(lambda: self._status is not None, "the buffer's counters")
        assert self._status is not None
        return self._status.stats

    # --- the worker --------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Whether every column has a trajectory; ended cohorts are replaced on the way."""
        while self._ends[0][0] <= self._messages:
            if len(self._free) < self.shape.group:
                return False
            _, first = self._ends.popleft()
            self._replace(first)
            self._ends.append((self._messages + self.shape.chunks, first))
        return True

    def _replace(self, first: int) -> None:
        columns = self._columns
        for place in range(first, first + self.shape.group):
            ticket = self._free.popleft()
            columns.ticket[place], columns.attempt[place], columns.offset[place] = ticket.id, ticket.attempt, 0

    def _send(self, due: float) -> None:
        """One chunk of every trajectory, and the outcomes of those that end with it."""
        self._say(self._session.append(self._columns), due, self.shape.message_tokens)
        self._columns.offset[:] += self.shape.chunk
        self._messages += 1
        for end, first in self._ends:
            if end > self._messages:
                break
            outcomes = [self._outcome(place) for place in range(first, first + self.shape.group)]
            self._say(self._session.outcomes(outcomes), due, 0)
            self.finished += len(outcomes)

    def _outcome(self, place: int) -> m.Outcome:
        columns = self._columns
        reward = float(place % self.shape.group == 0)
        length = int(columns.offset[place])
        return m.Outcome(int(columns.ticket[place]), int(columns.attempt[place]), length, "finished", "stop", reward)

    def _say(self, frames: list[bytes], due: float, tokens: int) -> None:
        self._seq += 1
        self._sent[self._seq] = due, tokens
        self.wire_bytes += sum(len(frame) + (2 if len(frame) < 256 else 9) for frame in frames)
        self._worker.send_multipart(frames)

    def _worker_hears(self, message: m.Outbound, _frames: list[bytes]) -> None:
        if isinstance(message, m.News):
            self._columns.version[:] = message.version
            return
        if isinstance(message, m.Ack):
            if message.refused:
                raise RuntimeError(f"the buffer refused chunks or outcomes: {message.refused[:3]}")
            for seq in (*message.before, message.seq):
                due, tokens = self._sent.pop(seq)
                if tokens:
                    self.acknowledged += tokens
                    self.latencies.append(perf_counter() - due)
        news, again = self._session.received(message, perf_counter())
        assert not again
        for item in news:
            if not isinstance(item, m.Tickets):
                raise RuntimeError(f"the worker did not expect {item}")
            self._free += item.tickets

    # --- the feeder and the learner ----------------------------------------------------------------------------

    def _feeder_hears(self, message: m.Outbound, _frames: list[bytes]) -> None:
        if isinstance(message, m.Credit) and message.upto > self._submitted:
            first, self._submitted = self._submitted, message.upto
            places = range(first, message.upto)
            self._tell(self._feeder, m.Submit(first, [m.Prompt((0, place), self._prompt, b"{}") for place in places]))
        elif isinstance(message, m.Fatal | m.Rejected):
            raise RuntimeError(f"the buffer says {message}")

    def _learner_hears(self, message: m.Outbound, frames: list[bytes]) -> None:
        match message:
            case m.Done() if self._version is None:
                self._version = 0
                self._take_on()
            case m.Batch() if self.trains:
                self._commit(message)
            case m.Batch():
                self._batch = message
            case m.Samples():
                self._arrays = m.SampleArrays.from_frames(frames)
            case m.Committed():
                self.steps += 1
                self._version = self.steps
                if self.steps % self.shape.checkpoint_steps == 0:
                    self._tell(self._learner, m.Checkpointed(self.steps))
                self._take_on()
            case m.StatusReply():
                self._status = message
            case m.Rejected():
                raise RuntimeError(f"the buffer says {message}")
            case _:
                pass

    def _take_on(self) -> None:
        if self.trains:
            self._tell(self._learner, m.Take(self.steps))

    def _commit(self, batch: m.Batch) -> None:
        self._tell(self._learner, m.Commit(batch.lease, batch.version + 1))

    # --- sockets -----------------------------------------------------------------------------------------------

    def _tell(self, socket: zmq.Socket[bytes], message: m.Message) -> None:
        socket.send_multipart([m.encode(message)])

    def _hear_all(self, wait_ms: int) -> None:
        """Takes in whatever has come; a worker that has nothing to send says that it lives."""
        for frames in self._session.due(perf_counter()):
            self._worker.send_multipart(frames)
        for socket, _ in self._poller.poll(wait_ms):
            hear = self._hear[socket]
            while True:
                try:
                    head, *frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                hear(m.decode_outbound(head), frames)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = perf_counter() + PATIENCE_S
        while not done():
            if perf_counter() > deadline:
                raise TimeoutError(f"{what} did not come within {PATIENCE_S:g} s")
            self._hear_all(10)
