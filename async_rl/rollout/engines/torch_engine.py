"""A small engine on transformers, for machines without vLLM and for fast tests: `decoder.py` behind the protocol.

One thread runs the decoder's steps; updates happen between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import ParamSpec, TypeVar

from async_rl.config import Config
from async_rl.errors import EngineError
from async_rl.rollout.engines.decoder import Decoder, Running
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.weights import shm
from async_rl.weights.manifest import Manifest

P = ParamSpec("P")
T = TypeVar("T")


class TorchEngine:
    """See the module, and `protocol.Engine` for the contract."""

    def __init__(self, config: Config, *, model: str, max_model_tokens: int, seed: int) -> None:
        self._config = config
        self._path, self._length, self._seed = model, max_model_tokens, seed
        self._outs: dict[Running, asyncio.Queue[Delta | Exception]] = {}
        self._work = asyncio.Event()
        self._boundary = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._decoder = await self._in_thread(self._load)
        self._loop_task = asyncio.create_task(self._run())

    def _load(self) -> Decoder:
        config = self._config
        return Decoder(
            self._path,
            config.rollout,
            length=self._length,
            seed=self._seed,
            slots=config.engine_slots,
            alone=config.deterministic,
            lora=config.learner.lora,
        )

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self._decoder.check(request)
        running = self._decoder.submit(request)
        out = self._outs[running] = asyncio.Queue()
        self._work.set()
        try:
            while True:
                delta = await out.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            running.dropped = True
            del self._outs[running]

    async def update(self, manifest: Manifest) -> float:
        start = perf_counter()
        async with self._boundary:
            recompute = self._config.weights.kv_after_update == "recompute"
            await self._in_thread(lambda: self._decoder.load(shm.read(manifest), manifest.version, recompute=recompute))
        return perf_counter() - start

    async def relabel(self, version: int) -> None:
        async with self._boundary:
            self._decoder.version = version

    async def score(self, tokens: list[int]) -> list[float]:
        async with self._boundary:
            return await self._in_thread(self._decoder.score, tokens)

    async def sleep(self) -> None:
        """There is nothing that anybody else could use."""

    async def wake(self) -> None:
        pass

    async def stop(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._thread.shutdown()

    async def _run(self) -> None:
        """The engine's loop; an error ends every request with it."""
        try:
            while True:
                await self._work.wait()
                async with self._boundary:
                    for running, delta in await self._in_thread(self._decoder.step):
                        if running in self._outs:
                            self._outs[running].put_nowait(delta)
                if not self._decoder.busy:
                    self._work.clear()
                await asyncio.sleep(0)
        except Exception as error:
            for out in self._outs.values():
                out.put_nowait(EngineError(f"the torch engine failed: {error!r}"))
            raise
