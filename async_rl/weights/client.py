"""The receiving host's side of `server.py`: versions are pulled into a segment of shared memory of this host."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from zlib import crc32

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from async_rl.errors import WeightsError
from async_rl.weights import delta, shm, wire
from async_rl.weights.manifest import Manifest
from async_rl.weights.wire import Answer, Get, Gone, Offer, Part, Piece, Question, Wanted
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
        self._endpoint = ""
        self._requests = 0
        self._held: Manifest | None = None
        self.pulled = Pulled()

    def connect(self, endpoint: str) -> None:
        """A learner that is started again listens elsewhere."""
        if endpoint == self._endpoint:
            return
        self._disconnect()
        self._endpoint = endpoint
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{os.getpid()}.{uuid.uuid4().hex[:8]}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            curve.secure_client(self._socket, self._keys)
        self._socket.connect(endpoint)

    async def pull(self, *, rehearsal: bool = False) -> Offer:
        """The newest version, with the manifest of its copy on this host. Another one that comes while this one is on
        its way is brought in its place."""
        while True:
            have = None if self._held is None else self._held.version
            self._requests += 1
            offer = await self._ask(Wanted(self._requests, have, rehearsal))
            if offer.manifest is None:
                return offer
            here = msgspec.structs.replace(offer.manifest, segment=str(self._path))
            if have != here.version:
                try:
                    await self._bring(offer.pieces, here)
                except Replaced:
                    self.pulled.gone += 1
                    continue
            self._held = here
            return msgspec.structs.replace(offer, manifest=here)

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
        asked: dict[int, tuple[int, float]] = {}
        heard = monotonic()
        while missing:
            now = monotonic()
            asked = {request: (offset, at) for request, (offset, at) in asked.items() if now - at < RETRY_S}
            on_the_way = {offset for offset, _ in asked.values()}
            for offset in [offset for offset in missing if offset not in on_the_way][: AHEAD - len(asked)]:
                self._requests += 1
                asked[self._requests] = offset, now
                await self._send(Get(self._requests, piece.version, piece.base, offset, missing[offset]))
            answer, frames = await self._hear()
            if answer is None:
                if now - heard > LIMIT_S:
                    raise WeightsError(f"the learner at {self._endpoint} has sent nothing for {LIMIT_S:g} s")
                continue
            heard = now
            if answer.request not in asked:
                continue
            offset, _ = asked.pop(answer.request)
            if isinstance(answer, Gone):
                raise Replaced(f"version {piece.version} has been replaced while it was being pulled")
            if isinstance(answer, Part) and offset in missing and crc32(frames[0]) == answer.crc:
                if len(frames[0]) != missing.pop(offset):
                    raise WeightsError(f"a part at {offset} of version {piece.version} has {len(frames[0])} bytes")
                put(offset, frames[0])

    async def _ask(self, question: Wanted) -> Offer:
        begun, again = monotonic(), 0.0
        while monotonic() - begun < LIMIT_S:
            if monotonic() >= again:
                again = monotonic() + RETRY_S
                await self._send(question)
            answer, _ = await self._hear()
            if answer is None or answer.request != question.request:
                continue
            if isinstance(answer, Offer):
                return answer
            begun, again = monotonic(), monotonic() + SOON_S
            await asyncio.sleep(SOON_S)
        raise WeightsError(f"the learner at {self._endpoint} has not answered for {LIMIT_S:g} s")

    async def _send(self, question: Question) -> None:
        assert self._socket is not None
        await self._socket.send_multipart([wire.encode(question)])

    async def _hear(self) -> tuple[Answer | None, list[bytes]]:
        assert self._socket is not None
        if not await self._socket.poll(200):
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
