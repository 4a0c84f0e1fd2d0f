"""The other end of the buffer's socket: a blocking client for ranks and the feeder, an asyncio client for workers.

Both outlive the buffer's process: ZeroMQ reconnects, and what was not answered is said again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, thread_time
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from buffers import keys as curve
from buffers import messages as m
from buffers.errors import BufferGone, ProtocolError
from buffers.session import Frames, WorkerSession

Reply = TypeVar("Reply", m.Batch, m.Samples, m.Committed, m.Done, m.StatusReply)
TIMEOUT_S = 120.0
"""Longest wait for an answer that the buffer owes at once, its restart included."""
RETRY_S = 3.0
HEARTBEAT_S = 2.0


def read_endpoint(file: Path) -> str:
    """The address a server wrote when it was ready."""
    return file.read_text().strip()


def _options(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, name: str, keys: Path | None) -> None:
    socket.setsockopt(zmq.IDENTITY, f"{name}#{os.getpid()}.{uuid.uuid4().hex[:8]}".encode())
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if keys is not None:
        curve.secure_client(socket, keys)


class Client:
    """Blocking request and reply, for one thread; or, for the feeder, a mailbox with a heartbeat.

    client = Client(endpoint, "rank0", "learner")
    batch = client.ask(m.Take(version), m.Batch, until=stopping)
    """

    def __init__(self, endpoint: str, name: str, role: m.Role, keys: Path | None = None) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        _options(self._socket, name, keys)
        self._socket.connect(endpoint)
        self._hello = m.Hello(role)
        self._greeted_at = monotonic()
        self._requests = 0
        self.send(self._hello)

    def send(self, message: m.Message, frames: Sequence[memoryview] = ()) -> None:
        """Without a promise that it arrives."""
        self._socket.send_multipart([m.encode(message), *frames])

    def poll(self, timeout_s: float) -> tuple[m.Outbound, list[bytes]] | None:
        """The next message, or None if none comes in time."""
        if self._hello.role == "feeder" and monotonic() - self._greeted_at > HEARTBEAT_S:
            self._greeted_at = monotonic()
            self.send(self._hello)
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        head, *frames = self._socket.recv_multipart()
        return m.decode_outbound(head), frames

    def ask(self, message: m.Request, reply: type[Reply], *, until: Callable[[], bool] | None = None) -> Reply | None:
        """Sends and waits for the reply, repeating the message where it may have been lost.

        With `until`, waits as long as that is False and then returns None. Raises `ProtocolError` if the buffer refuses
        the message, `BufferGone` if it owes an answer at once and gives none within `TIMEOUT_S`.
        """
        found = self._exchange(message, reply, until)
        return None if found is None else found[0]

    def fetch(self, message: m.Fetch) -> m.SampleArrays:
        """The tokens of leased trajectories."""
        found = self._exchange(message, m.Samples, None)
        assert found is not None
        return m.SampleArrays.from_frames(found[1])

    def _exchange(
        self, message: m.Request, reply: type[Reply], until: Callable[[], bool] | None
    ) -> tuple[Reply, list[bytes]] | None:
        self._requests += 1
        message = msgspec.structs.replace(message, request=self._requests)
        deadline = monotonic() + TIMEOUT_S
        again = 0.0
        while until is not None or monotonic() < deadline:
            if until is not None and until():
                return None
            if monotonic() >= again:
                again = monotonic() + RETRY_S
                self.send(message)
            received = self.poll(0.2)
            if received is None:
                continue
            answer, frames = received
            if isinstance(answer, m.Rejected) and answer.request in (0, self._requests):
                raise ProtocolError(f"the buffer refused a message: {answer.reason}")
            if isinstance(answer, reply) and answer.request == self._requests:
                return answer, frames
            # A welcome, or the answer to an earlier repeat.
        raise BufferGone(f"the buffer did not answer {type(message).__name__} within {TIMEOUT_S:g} s")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Meter:
    """Adds up the processor time that this thread spends in its blocks, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += thread_time() - self._since


class AsyncClient:
    """A worker's connection. Appends and outcomes are kept until acknowledged (`buffers/session.py`).

    At most `window` messages are unacknowledged; sending then waits, which slows generation down and loses nothing.
    """

    def __init__(self, endpoint: str, name: str, slots: int, window: int = 16, keys: Path | None = None) -> None:
        self.session = WorkerSession(slots, window=window)
        self.spent = Meter()
        """Of this thread, on messages; waiting for the socket is not in it."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _options(self._socket, name, keys)
        self._socket.connect(endpoint)
        self._sending = asyncio.Lock()
        self._acknowledged = asyncio.Event()
        self._inbox: deque[m.Outbound] = deque()

    @property
    def unacknowledged(self) -> int:
        return self.session.unacknowledged

    async def hello(self) -> None:
        await self._send(self.session.hello(monotonic()))

    async def flush(self, take: Callable[[], m.Chunks | None]) -> None:
        """Sends what `take` gives, once there is room: whoever is cancelled before that has taken nothing."""
        async with self._sending:
            await self._room()
            with self.spent:
                chunks = take()
                frames = None if chunks is None else self.session.append(chunks)
            if frames is not None:
                await self._send(frames)

    async def outcomes(self, outcomes: list[m.Outcome], *, busy_s: float = 0.0, overhead_s: float = 0.0) -> None:
        async with self._sending:
            await self._room()
            with self.spent:
                frames = self.session.outcomes(outcomes, busy_s=busy_s, overhead_s=overhead_s)
            await self._send(frames)

    async def say(self, message: m.Passed) -> None:
        """Without a promise that it arrives."""
        await self._send([m.encode(message)])

    async def receive(self) -> m.Outbound:
        """The next message that concerns the worker; heartbeats, acknowledgements and repeats are dealt with here."""
        while not self._inbox:
            for frames in self.session.due(monotonic()):
                await self._send(frames)
            if not await self._socket.poll(500):
                continue
            head, *_ = await self._socket.recv_multipart()
            with self.spent:
                news, again = self.session.received(m.decode_outbound(head), monotonic())
            self._acknowledged.set()
            for frames in again:
                await self._send(frames)
            self._inbox += news
        return self._inbox.popleft()

    async def leave(self, take: Callable[[], m.Chunks | None], limit_s: float) -> None:
        """Sends what `take` gives, waits until all that was said is acknowledged, for both at most `limit_s`, and takes
        leave. Nobody else receives any more."""
        listening = asyncio.create_task(self._hear_out())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.flush(take)
                while self.unacknowledged:
                    await self._something_acknowledged()
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
        await self._send([m.encode(m.Leave())])

    async def _hear_out(self) -> None:
        """For the sake of acknowledgements: what else comes is for somebody who stays."""
        while True:
            await self.receive()

    async def _room(self) -> None:
        while not self.session.open:
            await self._something_acknowledged()

    async def _something_acknowledged(self) -> None:
        self._acknowledged.clear()
        await self._acknowledged.wait()

    async def _send(self, frames: Frames) -> None:
        with self.spent:
            sent = self._socket.send_multipart(frames)  # pyright: ignore[reportUnknownMemberType]
        await sent

    def close(self) -> None:
        self._socket.close()
        self._context.term()
