"""An engine that can be told to rest in mid-response: whoever waits for its tokens notices nothing but the pause."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from async_rl.rollout.engines.protocol import Delta, Engine, Request
from async_rl.weights.manifest import Manifest


class YieldingEngine:
    """Around another engine. `rest` ends its requests and frees their memory; `resume` asks again for the remainder of
    each, after the tokens that had come. Tokens that were sampled and had not come are sampled again."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self._awake, self._resting = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loading = asyncio.Lock()
        """Held while the engine rests, or loads weights: one of them at a time."""

    async def rest(self) -> None:
        """Returns when no request runs and the engine has let go of its memory."""
        await self._loading.acquire()
        self._awake.clear()
        self._resting.set()
        await self._idle.wait()
        await self._inner.sleep()

    async def resume(self) -> None:
        await self._inner.wake()
        self._resting.clear()
        self._awake.set()
        self._loading.release()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        tokens: list[int] = []
        versions: list[int] = []
        part = 0
        while True:
            await self._awake.wait()
            before = len(tokens)
            name = f"{request.id}~{part}" if part else request.id
            rest = replace(
                request, id=name, prompt=request.prompt + tokens, max_tokens=request.max_tokens - len(tokens)
            )
            async with contextlib.aclosing(self._until_rest(rest)) as deltas:
                async for delta in deltas:
                    tokens += delta.tokens
                    versions += delta.versions
                    if delta.finish_reason is not None:
                        # Of what an engine did not finish its record are the tags.
                        spans = [(version, i, i + 1) for i, version in enumerate(versions[:before])]
                        spans += [(version, before + start, before + end) for version, start, end in delta.spans or []]
                        yield replace(delta, spans=spans)
                        return
                    yield delta
            part += 1

    async def _until_rest(self, request: Request) -> AsyncIterator[Delta]:
        """The deltas of a request, to its end or until the engine is to rest."""
        self._streams += 1
        self._idle.clear()
        stream = self._inner.generate(request)
        resting = asyncio.ensure_future(self._resting.wait())
        try:
            while not self._resting.is_set():
                coming = asyncio.ensure_future(anext(stream))
                try:
                    await asyncio.wait({coming, resting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.wait({coming})
                if coming.cancelled():
                    return  # the engine rests
                try:
                    delta = coming.result()
                except StopAsyncIteration:
                    return
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            resting.cancel()
            await stream.aclose()  # type: ignore[attr-defined]
            self._streams -= 1
            if not self._streams:
                self._idle.set()

    # --- the rest of the protocol ------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._inner.start()

    async def update(self, manifest: Manifest) -> float:
        async with self._loading:
            return await self._inner.update(manifest)

    async def relabel(self, version: int) -> None:
        async with self._loading:
            await self._inner.relabel(version)

    async def score(self, tokens: list[int]) -> list[float]:
        async with self._loading:
            return await self._inner.score(tokens)

    async def stop(self) -> None:
        await self._inner.stop()
