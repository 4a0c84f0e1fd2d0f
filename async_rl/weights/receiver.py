"""The worker's side of the weights' plane: the newest version into the engine, and the proof that it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from async_rl.errors import WeightsError, WeightsLate
from async_rl.weights import shm
from async_rl.weights.client import Replaced, WeightsClient
from async_rl.weights.manifest import MANIFEST, REHEARSAL, Manifest

PROBE_LIMITS = {"bfloat16": 0.1, "float32": 1e-3}
"""Largest mean |learner - engine| log-prob of a probe, by the engine's compute type. Two honest bfloat16 passes over a
135M model are .03 to .05 apart on prompt tokens (measured); a head that was not updated is several times that."""


BROADCAST_S = 150.0
"""Longest time for a version to come over NCCL; more than the learner gives it."""


@runtime_checkable
class Joinable(Protocol):
    """An engine that can make a communicator with the learner: of so many ranks."""

    @property
    def ranks(self) -> int: ...

    async def join(self, init: dict[str, Any]) -> None: ...


class Updatable(Protocol):
    async def update(self, manifest: Manifest) -> float: ...

    async def relabel(self, version: int) -> None: ...

    async def score(self, tokens: list[int]) -> list[float]: ...


@dataclass(frozen=True)
class Receipt:
    """`pause_s`: how long generation stood still. `probe_error`: mean |learner - engine|, None if not probed. `newest`:
    whether nothing newer was there when it was asked for."""

    version: int
    pause_s: float
    probe_error: float | None
    newest: bool = True


class Source(Protocol):
    """Where publications come from. The segment of what it gives is on this host."""

    async def rehearsal(self) -> Manifest | None: ...

    async def newest(self) -> tuple[Manifest, bool]:
        """And whether there is no newer one."""
        ...

    def held(self, manifest: Manifest) -> AbstractAsyncContextManager[None]:
        """For the length of the block an engine can load it; raises `Overtaken` if it is too late."""
        ...


class Here:
    """From a learner on this host, by its manifests in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def rehearsal(self) -> Manifest | None:
        path = self._folder / REHEARSAL
        return Manifest.read(path) if path.exists() else None

    async def newest(self) -> tuple[Manifest, bool]:
        return Manifest.read(self._folder / MANIFEST), True

    @asynccontextmanager
    async def held(self, manifest: Manifest) -> AsyncIterator[None]:
        async with _verified(manifest):
            yield


@asynccontextmanager
async def _verified(manifest: Manifest) -> AsyncIterator[None]:
    """A segment of this host. Generation goes on while checksums are compared."""
    with shm.hold(manifest):
        await asyncio.to_thread(shm.verify, manifest)
        yield


class Elsewhere:
    """From a learner on another host. `connect` before the first question, and when the learner has moved."""

    def __init__(self, client: WeightsClient) -> None:
        self.client = client

    async def rehearsal(self) -> Manifest | None:
        return (await self.client.pull(rehearsal=True)).manifest

    async def newest(self) -> tuple[Manifest, bool]:
        offer = await self.client.pull()
        if offer.manifest is None:
            raise WeightsError("a version was announced, and the learner has none")
        return offer.manifest, offer.newest

    @asynccontextmanager
    async def held(self, manifest: Manifest) -> AsyncIterator[None]:
        async with _verified(manifest):
            yield


class Broadcast:
    """From the GPU of a learner to that of this worker's engine, which takes part in a communicator with it."""

    def __init__(self, client: WeightsClient, worker: str, engine: Joinable) -> None:
        self.client = client
        self._worker, self._engine = worker, engine

    async def rehearsal(self) -> Manifest | None:
        return (await self.client.offered(rehearsal=True)).manifest

    async def newest(self) -> tuple[Manifest, bool]:
        offer = await self.client.offered()
        if offer.manifest is None:
            raise WeightsError("a version was announced, and the learner has none")
        return offer.manifest, offer.newest

    @asynccontextmanager
    async def held(self, manifest: Manifest) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(BROADCAST_S):
                if not self.client.joined:
                    await self._engine.join(await self.client.join(self._worker, self._engine.ranks))
                    self.client.joined = True
                await self.client.send(self._worker, manifest.version)
                yield
        except Replaced as error:
            raise shm.Overtaken(str(error)) from error
        except TimeoutError as error:
            raise WeightsLate(f"version {manifest.version} did not arrive over NCCL in {BROADCAST_S:g} s") from error


class Receiver:
    """Brings an engine to the newest published version."""

    def __init__(self, engine: Updatable, source: Source, dtype: str) -> None:
        self._engine = engine
        self._source = source
        self._limit = PROBE_LIMITS[dtype]

    async def rehearse(self) -> float | None:
        """Loads the rehearsal and proves it; None if a worker comes too late for it."""
        manifest = await self._source.rehearsal()
        if manifest is None:
            return None
        try:
            await self._update(manifest)
        except shm.Overtaken:
            return None
        return await self._prove(manifest)

    async def pull(self, on_version: Callable[[int], Awaitable[None]]) -> Receipt:
        """Loads the newest version; `on_version` hears of it before the probe runs."""
        while True:
            manifest, newest = await self._source.newest()
            try:
                pause = await self._update(manifest)
            except shm.Overtaken:
                await asyncio.sleep(0.01)
                continue
            await on_version(manifest.version)
            return Receipt(manifest.version, pause, await self._prove(manifest), newest)

    async def _update(self, manifest: Manifest) -> float:
        """Seconds of pause."""
        async with self._source.held(manifest):
            return await self._engine.update(manifest)

    async def _prove(self, manifest: Manifest) -> float | None:
        if manifest.probe is None or not manifest.probe.logprobs:
            return None
        engine = np.asarray(await self._engine.score(manifest.probe.tokens))
        error = np.abs(engine - np.asarray(manifest.probe.logprobs))
        if not error.mean() <= self._limit:
            raise WeightsError(
                f"version {manifest.version} was loaded, but its log-probs are not the learner's: mean difference "
                f"{error.mean():.4f} over {error.size} tokens, limit {self._limit}. Likely causes: a tied tensor that "
                "was not updated, other weights, another precision"
            )
        return float(error.mean())
