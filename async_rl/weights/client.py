"""The receiving host's side of `server.py`: versions are pulled into a segment of shared memory of this host."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from async_rl.errors import WeightsError, WeightsLate
from async_rl.weights import delta, shm, wire
from async_rl.weights.manifest import Manifest
from async_rl.weights.wire import (
    Alone,
    Answer,
    Get,
    Gone,
    Join,
    Joined,
    Offer,
    Part,
    Piece,
    Question,
    Send,
    Sending,
    Soon,
    Wanted,
)
from buffers import keys as curve

PART = 4 << 20
"""Bytes asked for at a time."""
AHEAD = 4
"""Parts asked for and not yet there."""
RETRY_S = 3.0
SOON_S = 0.1
LIMIT_S = 300.0
"""Longest time without any answer."""


class Replaced(WeightsError):
    """A piece is gone: ask again what is there."""


class Pulled:
    """What a client has brought over a connection, in bytes, and how often a piece was gone."""

    def __init__(self) -> None:
        self.whole = self.deltas = self.gone = 0


class WeightsClient:
    """Brings versions of one server into the segment of the given name. For one asyncio program."""

    def __init__(self, name: str, keys: Path | None = None) -> None:
        self._path = shm.SHM / f"async-rl-{name}"
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._endpoint = self._wanted = ""
        self.joined = False
        """Whether the learner shares a communicator with this host's engine."""
        self._requests = 0
        self._held: Manifest | None = None
        self.pulled = Pulled()

    def connect(self, endpoint: str) -> None:
        """A learner that is started again listens elsewhere: a pull in progress begins anew there."""
        self._wanted = endpoint

    def _connected(self) -> zmq.asyncio.Socket:
        if self._socket is not None and self._endpoint == self._wanted:
            return self._socket
        self._disconnect()
        self._endpoint = self._wanted
        self.joined = False
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{os.getpid()}.{uuid.uuid4().hex[:8]}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            curve.secure_client(self._socket, self._keys)
        self._socket.connect(self._endpoint)
        return self._socket

    async def pull(self, *, rehearsal: bool = False) -> Offer:
        """The newest version, with the manifest of its copy on this host. Another one that comes while this one is on
        its way is brought in its place."""
        while True:
            have = None if self._held is None else self._held.version
            try:
                offer = await self.offered(rehearsal=rehearsal, have=have)
                if offer.manifest is None:
                    return offer
                here = msgspec.structs.replace(offer.manifest, segment=str(self._path))
                if have != here.version:
                    await self._bring(offer.pieces, here)
            except Replaced:
                self.pulled.gone += 1
                continue
            self._held = here
            return msgspec.structs.replace(offer, manifest=here)

    async def offered(self, *, rehearsal: bool = False, have: int | None = None) -> Offer:
        """What the learner has."""
        offer = await self._ask(lambda request: Wanted(request, have, rehearsal))
        if not isinstance(offer, Offer):
            raise WeightsError(f"the learner at {self._endpoint} answers with {type(offer).__name__}")
        return offer

    async def join(self, worker: str, engine_ranks: int) -> dict[str, Any]:
        """What an engine needs to know to make a communicator with the learner, who is making it."""
        answer = await self._ask(lambda request: Join(request, worker, engine_ranks))
        if not isinstance(answer, Joined):
            raise WeightsError(f"the learner at {self._endpoint} sends no weights over NCCL")
        return msgspec.json.decode(answer.init)

    async def send(self, worker: str, version: int) -> None:
        """Returns when the learner takes part in the broadcast of a version; raises `Replaced` if it will not."""
        answer = await self._ask(lambda request: Send(request, worker, version))
        if not isinstance(answer, Sending):
            self.joined = self.joined and not isinstance(answer, Alone)
            raise Replaced(f"version {version} is not sent: {type(answer).__name__}")

    async def _bring(self, pieces: list[Piece], here: Manifest) -> None:
        """Gets the pieces into this host's segment, and proves the checksums of what they come to."""
        for piece in pieces:
            parts: dict[int, bytes] = {}
            if piece.base is not None:
                await self._download(piece, parts.__setitem__)
            self._held = None  # until the segment is whole again
            with shm.writing(here) as target:
                if piece.base is None:
                    await self._download(piece, partial(_put, target))
                    self.pulled.whole += piece.size
                else:
                    step = b"".join(parts[offset] for offset in sorted(parts))
                    await asyncio.to_thread(delta.apply, step, delta.words(target, shm.itemsize(here)))
                    self.pulled.deltas += piece.size
        await asyncio.to_thread(shm.verify, here)

    async def _download(self, piece: Piece, put: Callable[[int, bytes], None]) -> None:
        """Asks for parts, a few ahead, until all are there."""
        missing = {offset: min(PART, piece.size - offset) for offset in range(0, piece.size, PART)}
        asked: dict[int, int] = {}
        """The offset of every request, those asked for again too: over a slow link an answer may be late."""
        due: dict[int, float] = {}
        """When to ask again, by offset, for what is on its way."""
        heard = monotonic()
        while missing:
            now = monotonic()
            due = {offset: at for offset, at in due.items() if offset in missing and now < at}
            for offset in [offset for offset in missing if offset not in due][: AHEAD - len(due)]:
                self._requests += 1
                asked[self._requests], due[offset] = offset, now + RETRY_S
                await self._send(Get(self._requests, piece.version, piece.base, offset, missing[offset]))
            answer, frames = await self._hear()
            if answer is None:
                if now - heard > LIMIT_S:
                    raise WeightsLate(f"the learner at {self._endpoint} has sent nothing for {LIMIT_S:g} s")
                continue
            heard = now
            if answer.request not in asked:
                continue
            offset = asked[answer.request]
            due.pop(offset, None)  # wrong bytes are asked for again at once
            if isinstance(answer, Gone):
                raise Replaced(f"version {piece.version} has been replaced while it was being pulled")
            if isinstance(answer, Part) and offset in missing and crc32(frames[0]) == answer.crc:
                if len(frames[0]) != missing.pop(offset):
                    raise WeightsError(f"a part at {offset} of version {piece.version} has {len(frames[0])} bytes")
                put(offset, frames[0])

    async def _ask(self, asking: Callable[[int], Question]) -> Answer:
        """The answer to a question, asked again now and then; not `Soon`."""
        self._connected()
        self._requests += 1
        question = asking(self._requests)
        begun, again = monotonic(), 0.0
        while monotonic() - begun < LIMIT_S:
            if monotonic() >= again:
                again = monotonic() + RETRY_S
                await self._send(question)
            answer, _ = await self._hear()
            if answer is None or answer.request != question.request:
                continue
            if not isinstance(answer, Soon):
                return answer
            begun, again = monotonic(), monotonic() + SOON_S
            await asyncio.sleep(SOON_S)
        raise WeightsLate(f"the learner at {self._endpoint} has not answered for {LIMIT_S:g} s")

    async def _send(self, question: Question) -> None:
        assert self._socket is not None
        await self._socket.send_multipart([wire.encode(question)])

    async def _hear(self) -> tuple[Answer | None, list[bytes]]:
        assert self._socket is not None
        if not await self._socket.poll(200):
            if self._wanted != self._endpoint:
                raise Replaced(f"the learner has moved from {self._endpoint} to {self._wanted}")
            return None, []
        head, *frames = await self._socket.recv_multipart()
        return wire.answer(head), frames

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._disconnect()
        self._context.term()
        self._path.unlink(missing_ok=True)


def _put(target: NDArray[np.uint8], offset: int, data: bytes) -> None:
    target[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
