"""The other end of the buffer's socket: a blocking client for ranks and the feeder, an asyncio client for workers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeVar

import zmq
import zmq.asyncio

from buffers import messages as m
from buffers.errors import BufferGone, ProtocolError

Reply = TypeVar("Reply", bound=m.Message)
TIMEOUT_S = 60.0
"""Longest wait for an answer that the buffer owes at once."""


def read_endpoint(file: Path) -> str:
    """The address a server wrote when it was ready."""
    return file.read_text().strip()


def _options(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, name: str) -> None:
    socket.setsockopt(zmq.IDENTITY, f"{name}#{uuid.uuid4().hex[:8]}".encode())
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def _raise(message: m.Message) -> None:
    if isinstance(message, m.Rejected):
        raise ProtocolError(f"the buffer refused a message: {message.reason}")


class Client:
    """Blocking request and reply, for one thread.

    client = Client(endpoint, "rank0", "learner")
    batch = client.ask(m.Take(version), m.Batch, until=stopping)
    """

    def __init__(self, endpoint: str, name: str, role: m.Role) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        _options(self._socket, name)
        self._socket.connect(endpoint)
        self.send(m.Hello(role))

    def send(self, message: m.Message, frames: Sequence[memoryview] = ()) -> None:
        self._socket.send_multipart([m.encode(message), *frames])

    def poll(self, timeout_s: float) -> tuple[m.Outbound, list[bytes]] | None:
        """The next message, or None if none comes in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        head, *frames = self._socket.recv_multipart()
        return m.decode_outbound(head), frames

    def ask(self, message: m.Message, reply: type[Reply], *, until: Callable[[], bool] | None = None) -> Reply | None:
        """Sends and waits for the reply; with `until`, as long as that is False, and then returns None."""
        found = self._exchange(message, reply, until)
        return None if found is None else found[0]

    def fetch(self, message: m.Fetch) -> m.SampleArrays:
        """The tokens of leased trajectories."""
        found = self._exchange(message, m.Samples, None)
        assert found is not None
        return m.SampleArrays.from_frames(found[1])

    def _exchange(
        self, message: m.Message, reply: type[Reply], until: Callable[[], bool] | None
    ) -> tuple[Reply, list[bytes]] | None:
        self.send(message)
        deadline = monotonic() + TIMEOUT_S
        while until is not None or monotonic() < deadline:
            if until is not None and until():
                return None
            received = self.poll(0.2)
            if received is None:
                continue
            answer, frames = received
            _raise(answer)
            if isinstance(answer, reply):
                return answer, frames
            raise ProtocolError(f"expected {reply.__name__}, got {type(answer).__name__}")
        raise BufferGone(f"the buffer did not answer {type(message).__name__} within {TIMEOUT_S:g} s")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class AsyncClient:
    """A worker's connection: appends are windowed, everything else is sent as it comes.

    At most `window` appends are unacknowledged; `append` then waits, which slows generation down and loses nothing.
    """

    def __init__(self, endpoint: str, name: str, slots: int, window: int = 16) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _options(self._socket, name)
        self._socket.connect(endpoint)
        self._window = asyncio.Semaphore(window)
        self._sending = asyncio.Lock()
        self._seq = 0
        self._slots = slots
        self.unacknowledged = 0

    async def hello(self) -> None:
        await self.send(m.Hello("worker", self._slots))

    async def send(self, message: m.Message, frames: Sequence[memoryview] = ()) -> None:
        async with self._sending:
            await self._socket.send_multipart([m.encode(message), *frames])  # pyright: ignore[reportUnknownMemberType]

    async def append(self, chunks: m.Chunks) -> None:
        await self._window.acquire()
        self._seq += 1
        self.unacknowledged += 1
        await self.send(m.Append(self._seq), chunks.to_frames())

    async def receive(self) -> m.Outbound:
        """The next message that concerns the worker; acknowledgements are dealt with here."""
        while True:
            head, *_ = await self._socket.recv_multipart()
            message = m.decode_outbound(head)
            _raise(message)
            if not isinstance(message, m.Ack):
                return message
            self.unacknowledged -= 1
            self._window.release()
            if message.refused:
                raise ProtocolError(
                    f"the buffer refused chunks of {len(message.refused)} tickets: {message.refused[:3]}"
                )

    def close(self) -> None:
        self._socket.close()
        self._context.term()
