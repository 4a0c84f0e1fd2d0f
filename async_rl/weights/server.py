"""Weights for other hosts: a thread beside the learner that serves what is in shared memory, to whoever asks.

Receivers pull: they ask what is there, then for one part after the other, again if an answer is lost. Nothing is kept
of them here, so that one may come, go, or start anew at any time, and a slow one skips to the newest version.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec
import zmq
import zmq.auth.thread

from async_rl.errors import WeightsError
from async_rl.weights import delta, shm, wire
from async_rl.weights.manifest import REHEARSED, Manifest
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
    Send,
    Sending,
    Soon,
    Wanted,
)
from buffers import keys as curve

if TYPE_CHECKING:
    from async_rl.weights.nccl import Sender

KEPT = 8
"""Deltas that are kept: a receiver that is no more than so many versions behind needs no whole segment."""
PINNED_S = 15.0
"""Time after the last question for which a segment that is being downloaded is kept from being written to."""
POLL_MS = 200


class Shelf:
    """What can be had: the newest manifest, the rehearsal, and deltas between versions that followed each other."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self.newest: Manifest | None = None
        self.rehearsal: Manifest | None = None
        self._deltas: dict[int, tuple[int, bytes]] = {}
        """By the version that a delta starts from: the one it leads to, and its bytes."""

    def add(self, manifest: Manifest, step: bytes | None) -> None:
        """A new version; `step` leads to it from the one before, None if that is not known."""
        if step is None or self.newest is None:
            self._deltas.clear()
        else:
            self._deltas[self.newest.version] = manifest.version, step
            # More than the whole of them nobody would take.
            while len(self._deltas) > self._kept or self._bytes() > shm.size(manifest):
                del self._deltas[next(iter(self._deltas))]
        self.newest = manifest

    def _bytes(self) -> int:
        return sum(len(step) for _, step in self._deltas.values())

    def offer(self, wanted: Wanted, pinned: Manifest | None = None) -> Offer:
        """Deltas from what the asker has, if they are smaller than the whole; else the whole and, if that is `pinned`
        at an older version, the deltas from there."""
        manifest = self.rehearsal if wanted.rehearsal else self.newest
        if manifest is None:
            return Offer(wanted.request, None)
        if wanted.rehearsal:
            return Offer(wanted.request, manifest, [_whole(manifest)])
        chain = self._chain(wanted.have, manifest)
        if chain is not None and sum(piece.size for piece in chain) < shm.size(manifest):
            return Offer(wanted.request, manifest, chain)
        start = manifest if pinned is None or pinned.version in (wanted.have, REHEARSED) else pinned
        chain = self._chain(start.version, manifest)
        if chain is None:
            return Offer(wanted.request, start, [_whole(start)], newest=False)
        return Offer(wanted.request, manifest, [_whole(start), *chain])

    def _chain(self, version: int | None, to: Manifest) -> list[Piece] | None:
        """The deltas from one version to another; None if one of them is missing."""
        chain: list[Piece] = []
        while version is not None and version != to.version:
            following, step = self._deltas.get(version, (None, b""))
            if following is not None:
                chain.append(Piece(following, version, len(step)))
            version = following
        return None if version is None else chain

    def step(self, get: Get) -> bytes | None:
        """Bytes of a delta; None if it is gone."""
        assert get.base is not None
        version, step = self._deltas.get(get.base, (None, b""))
        return step[get.offset : get.offset + get.length] if version == get.version else None


def _whole(manifest: Manifest) -> Piece:
    return Piece(manifest.version, None, shm.size(manifest))


class WeightsServer:
    """Serves until closed. `endpoint` is where; `publish` is called by the learner and returns at once."""

    def __init__(self, bind: str, keys: Path | None, *, deltas: bool, sender: Sender | None = None) -> None:
        """`sender`: over NCCL, where receivers ask here and get it there."""
        self._shelf, self._deltas, self._sender = Shelf(), deltas and sender is None, sender
        self._lock = threading.Condition()
        self._waiting: Manifest | None = None
        """A version that is being compared with the one before, or will be."""
        self._closing = False
        self._pins = {False: Pin(), True: Pin()}
        """Of versions, and of the rehearsal."""
        self._begun: dict[bytes, tuple[int, Answer]] = {}
        """What each receiver last asked of NCCL, and the answer: it may ask again, and begins one thing."""
        self._error: Exception | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._guard: zmq.auth.thread.ThreadAuthenticator | None = None
        if keys is not None:
            self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve("*", str(keys / curve.ADMITTED))
            curve.secure_server(self._socket, keys)
        self._socket.bind(bind)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._threads = [
            threading.Thread(target=self._guarded, args=(target,), name=f"weights{target.__name__}", daemon=True)
            for target in (self._serve, self._compare)
        ]
        for thread in self._threads:
            thread.start()

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            traceback.print_exc()
            self._error = error

    def check(self) -> None:
        """Raises `WeightsError` if it serves no more."""
        if self._error is not None:
            raise WeightsError(f"the server of weights has failed: {self._error!r}") from self._error

    def rehearse(self, manifest: Manifest) -> None:
        with self._lock:
            self._shelf.rehearsal = manifest

    def publish(self, manifest: Manifest) -> None:
        """Whoever asks from now on gets this version, or a newer one."""
        self.check()
        with self._lock:
            if self._deltas and self._shelf.newest is not None:
                self._waiting = manifest
                self._lock.notify()
            else:
                self._shelf.add(manifest, None)

    def _compare(self) -> None:
        """Makes deltas. Versions that come while one is made are skipped but for the newest."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting is not None or self._closing)
                if self._closing:
                    return
                before, manifest = self._shelf.newest, self._waiting
            assert before is not None
            assert manifest is not None
            step = difference(before, manifest)
            with self._lock:
                self._shelf.add(manifest, step)
                if self._waiting is manifest:
                    self._waiting = None

    def _serve(self) -> None:
        while not self._closing:
            if not self._socket.poll(POLL_MS):
                with self._lock:
                    for pin in self._pins.values():
                        pin.expire()
                continue
            peer, *frames = self._socket.recv_multipart()
            try:
                asked = wire.question(frames[0])
            except (msgspec.DecodeError, IndexError) as error:
                print(f"weights: a message that cannot be read: {error}", file=sys.stderr, flush=True)
                continue
            if isinstance(asked, Join | Send):
                if self._begun.get(peer, (0,))[0] != asked.request:
                    self._begun[peer] = asked.request, self._by_nccl(asked)
                self._socket.send_multipart([peer, wire.encode(self._begun[peer][1])])
            else:
                self._socket.send_multipart([peer, *self._answer(asked)])

    def _answer(self, asked: Wanted | Get) -> list[bytes]:
        with self._lock:
            if isinstance(asked, Get):
                found = self._shelf.step(asked) if asked.base is not None else self._pinned(asked.version).part(asked)
                return [wire.encode(Gone(asked.request))] if found is None else _part(asked, found)
            if self._waiting is not None and not asked.rehearsal:
                return [wire.encode(Soon(asked.request))]
            if self._sender is not None:
                there = self._shelf.rehearsal if asked.rehearsal else self._shelf.newest
                return [wire.encode(Offer(asked.request, there))]
            offer = self._shelf.offer(asked, self._pins[False].manifest)
            for piece in offer.pieces:
                if piece.base is None and not self._pinned(piece.version).take(piece.version, self._shelf):
                    return [wire.encode(Offer(asked.request, None))]
            return [wire.encode(offer)]

    def _pinned(self, version: int) -> Pin:
        return self._pins[version == REHEARSED]

    def _by_nccl(self, asked: Join | Send) -> Answer:
        if self._sender is None:
            return Alone(asked.request)
        if isinstance(asked, Join):
            return Joined(asked.request, msgspec.json.encode(self._sender.join(asked.worker, asked.engine_ranks)))
        with self._lock:
            known = {each.version: each for each in (self._shelf.rehearsal, self._shelf.newest) if each is not None}
        if asked.version not in known:
            return Gone(asked.request)
        try:
            begun = self._sender.send(asked.worker, known[asked.version])
        except WeightsError as error:
            print(f"weights: {error}", file=sys.stderr, flush=True)
            return Alone(asked.request)
        return Sending(asked.request) if begun else Gone(asked.request)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify()
        for thread in self._threads:
            thread.join()
        if self._guard is not None:
            self._guard.stop()
        if self._sender is not None:
            self._sender.close()
        for pin in self._pins.values():
            pin.release()
        self._socket.close()
        self._context.term()


class Pin:
    """The segment that is being downloaded, kept from being written to until nobody has asked for a while."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self._held = contextlib.ExitStack()
        self._until = 0.0

    def take(self, version: int, shelf: Shelf) -> bool:
        """False if the version has been written over."""
        self._until = monotonic() + PINNED_S
        if self.manifest is not None and self.manifest.version == version:
            return True
        self.release()
        for manifest in (shelf.newest, shelf.rehearsal):
            if manifest is not None and manifest.version == version:
                try:
                    self._held.enter_context(shm.hold(manifest))
                except shm.Overtaken:
                    return False
                self.manifest = manifest
        return self.manifest is not None

    def part(self, get: Get) -> bytes | None:
        if self.manifest is None or self.manifest.version != get.version:
            return None
        self._until = monotonic() + PINNED_S
        return shm.data(self.manifest)[get.offset : get.offset + get.length].tobytes()

    def expire(self) -> None:
        if self.manifest is not None and monotonic() > self._until:
            self.release()

    def release(self) -> None:
        self._held.close()
        self.manifest = None


def difference(before: Manifest, manifest: Manifest) -> bytes | None:
    """The delta between two publications; None if they are not alike, or the older one is gone."""
    if not shm.alike(before, manifest):
        return None
    try:
        with shm.hold(before), shm.hold(manifest):
            itemsize = shm.itemsize(manifest)
            return delta.encode(*(delta.words(shm.data(each), itemsize) for each in (before, manifest)))
    except shm.Overtaken:
        return None


def _part(asked: Get, data: bytes) -> list[bytes]:
    return [wire.encode(Part(asked.request, crc32(data))), data]
