"""An engine whose tokens mean nothing and come at a fixed rate: `async_rl/emulation.py` behind the protocol."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator
from zlib import crc32

from async_rl.config import Config
from async_rl.emulation import DeviceClock, length
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.weights import shm
from async_rl.weights.manifest import Manifest

TICK_S = 0.05
"""Longest time for which tokens of a request collect."""
TOKENS = range(2, 250)
"""What is sampled from: bytes of the tiny model's tokenizer."""


class EmulatedEngine:
    """Every request has a slot of its own. A token carries the version that was loaded when its time came."""

    def __init__(self, config: Config, *, end: int) -> None:
        """`end`: the token that ends a turn."""
        self._config, self._end = config.emulation, end
        self._clock = DeviceClock(time.monotonic)
        self._since = [0.0]
        """Device times from which on each of `_versions` is loaded."""
        self._versions = [0]
        self._going = asyncio.Event()
        self._going.set()
        self._done: dict[str, int] = {}
        """Tokens of turns that were ended in between; whoever asks again goes on after them."""
        self._probe: list[float] = []

    async def start(self) -> None:
        pass

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        ticket, _, turn = request.id.partition("~")[0].split(".")
        key = f"{ticket}.{turn}"
        first = sent = self._done.pop(key, 0)
        whole = length(self._config, key)
        total = min(whole, first + request.max_tokens)
        begun = self._clock.now()
        spans: list[tuple[int, int, int]] = []
        try:
            while True:
                left = begun + (total - first) / self._config.tokens_per_s - self._clock.now()
                await asyncio.sleep(max(0.0, min(TICK_S, left)))
                await self._going.wait()
                now = self._clock.now()
                due = min(total, first + int((now - begun) * self._config.tokens_per_s + 1e-6))
                if due == sent and due < total:
                    continue
                for version, count in self._runs(begun, sent - first, due - first):
                    spans.append((version, sent - first, sent - first + count))
                    sent += count
                    tokens = [TOKENS[crc32(f"{key}.{sent}".encode()) % len(TOKENS)]] * count
                    if sent == whole:
                        tokens[-1] = self._end
                    reason = None if sent < total else "stop" if sent == whole else "length"
                    yield Delta(tokens, [-1.0] * count, [version] * count, reason, spans if reason else None)
                if sent == total:
                    return
        finally:
            if sent < whole:
                self._done[key] = sent

    def _runs(self, begun: float, start: int, stop: int) -> list[tuple[int, int]]:
        """(version, how many) of the tokens from `start` to `stop` of a request."""
        runs: list[tuple[int, int]] = []
        place = bisect_right(self._since, begun + (start + 1) / self._config.tokens_per_s) - 1
        for version, until in zip(self._versions[place:], [*self._since[place + 1 :], None], strict=True):
            upto = stop if until is None else min(stop, int((until - begun) * self._config.tokens_per_s))
            if upto > start:
                runs.append((version, upto - start))
                start = upto
        return runs

    async def update(self, manifest: Manifest) -> float:
        begun = time.perf_counter()
        await self._load(manifest.version, read=manifest)
        self._probe = manifest.probe.logprobs if manifest.probe else []
        return time.perf_counter() - begun

    async def relabel(self, version: int) -> None:
        await self._load(version)

    async def _load(self, version: int, read: Manifest | None = None) -> None:
        self._going.clear()
        self._clock.stop()
        if read is not None:
            shm.read(read)
            await asyncio.sleep(self._config.update_s)
        self._since.append(self._clock.now())
        self._versions.append(version)
        del self._since[:-64], self._versions[:-64]
        self._clock.go()
        self._going.set()

    async def score(self, tokens: list[int]) -> list[float]:
        """There is no model that could tell: the probe's own numbers."""
        return self._probe

    async def sleep(self) -> None:
        """There is nothing that anybody else could use."""

    async def wake(self) -> None:
        pass

    async def stop(self) -> None:
        pass
