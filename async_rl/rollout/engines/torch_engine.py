"""A small continuous-batching engine on transformers, for machines without vLLM and for fast tests.

One thread runs steps: admit waiting requests into free slots (each prefilled alone), then decode all slots together.
KV lives in one tensor per layer, a row per slot. Updates happen between two steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from async_rl.config import Config
from async_rl.errors import EngineError, RequestRefused
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.weights import shm
from async_rl.weights.manifest import Manifest, check_names


class SlotCache(Cache):
    """KV of all slots; `rows` and `at` say which slots a forward pass writes, and where."""

    def __init__(self, layers: int, slots: int, heads: int, length: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        shape = (slots, heads, length, width)
        self._keys = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self._rows = torch.zeros(0, dtype=torch.long)
        self._at = torch.zeros(0, 0, dtype=torch.long)

    def aim(self, rows: Tensor, at: Tensor) -> None:
        """The next pass holds tokens of slots `rows` (batch,) at positions `at` (batch, new)."""
        self._rows, self._at = rows, at

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores (batch, heads, new, width) and returns the slots' KV up to the longest of them."""
        rows, at = self._rows, self._at
        self._keys[layer][rows[:, None], :, at] = keys.transpose(1, 2)
        self._values[layer][rows[:, None], :, at] = values.transpose(1, 2)
        longest = int(at.max()) + 1
        return self._keys[layer][rows, :, :longest], self._values[layer][rows, :, :longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._at.min()) if self._at.numel() else 0


@dataclass(eq=False)
class _Running:
    request: Request
    out: asyncio.Queue[Delta | Exception]
    slot: int = -1
    length: int = 0
    last: int = 0
    versions: list[int] = field(default_factory=list)
    generator: torch.Generator | None = None
    dropped: bool = False
    """Whoever asked for it does not want it any more."""


class TorchEngine:
    """See the module, and `protocol.Engine` for the contract."""

    def __init__(self, config: Config, *, model: str, max_model_tokens: int, seed: int) -> None:
        self._config = config
        self._path = model
        self._length = max_model_tokens
        self._seed = seed
        self._dtype = getattr(torch, config.rollout.dtype)
        self._slots = config.rollout.slots
        self._waiting: deque[_Running] = deque()
        self._running: dict[int, _Running] = {}
        self._free = list(range(self._slots))
        self._version = 0
        self._work = asyncio.Event()
        self._boundary = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._in_thread(self._load)
        self._loop_task = asyncio.create_task(self._run())

    def _load(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype).eval()
        config = self._model.config
        self._length = min(self._length, config.max_position_embeddings)
        self._names = {name for name, _ in self._model.named_parameters()}
        stops = self._model.generation_config.eos_token_id
        self._stops = set(stops if isinstance(stops, list) else [stops])
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache = SlotCache(
            config.num_hidden_layers, self._slots, config.num_key_value_heads, self._length, width, self._dtype
        )
        self._generator = torch.Generator().manual_seed(self._seed)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # --- protocol ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        if len(request.prompt) + request.max_tokens > self._length:
            raise RequestRefused(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones exceed the engine's "
                f"{self._length}"
            )
        running = _Running(request, asyncio.Queue())
        if request.seed is not None:
            running.generator = torch.Generator().manual_seed(request.seed)
        self._waiting.append(running)
        self._work.set()
        try:
            while True:
                delta = await running.out.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            running.dropped = True

    async def update(self, manifest: Manifest) -> float:
        start = perf_counter()
        async with self._boundary:
            await self._in_thread(self._assign, manifest)
            self._version = manifest.version
        return perf_counter() - start

    def _assign(self, manifest: Manifest) -> None:
        published = dict(shm.read(manifest))
        check_names(set(published), self._names)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(published[name])

    async def relabel(self, version: int) -> None:
        async with self._boundary:
            self._version = version

    async def score(self, tokens: list[int]) -> list[float]:
        async with self._boundary:
            return await self._in_thread(self._score, tokens)

    def _score(self, tokens: list[int]) -> list[float]:
        ids = torch.tensor(tokens)
        with torch.inference_mode():
            logprobs = self._model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[1:, None])[:, 0].tolist()

    async def stop(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._thread.shutdown()

    # --- steps -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """The engine's loop; an error ends every request with it."""
        try:
            while True:
                await self._work.wait()
                async with self._boundary:
                    for running, delta in await self._in_thread(self._step):
                        running.out.put_nowait(delta)
                if not self._running and not self._waiting:
                    self._work.clear()
                await asyncio.sleep(0)
        except Exception as error:
            for running in [*self._running.values(), *self._waiting]:
                running.out.put_nowait(EngineError(f"the torch engine failed: {error!r}"))
            raise

    def _step(self) -> list[tuple[_Running, Delta]]:
        with torch.inference_mode():
            out: list[tuple[_Running, Delta]] = []
            for running in [running for running in self._running.values() if running.dropped]:
                self._leave(running)
            while self._waiting and self._free:
                running = self._waiting.popleft()
                if running.dropped:
                    continue
                running.slot = self._free.pop()
                self._running[running.slot] = running
                out += self._advance([running], torch.tensor([running.request.prompt]), 0)
            decoding = list(self._running.values())
            if decoding:
                out += self._advance(decoding, torch.tensor([[running.last] for running in decoding]), None)
            return out

    def _advance(self, batch: list[_Running], tokens: Tensor, start: int | None) -> list[tuple[_Running, Delta]]:
        """One forward pass over `tokens` (batch, new), then one sampled token for each."""
        new = tokens.shape[1]
        firsts = [running.length if start is None else start for running in batch]
        at = torch.tensor(firsts)[:, None] + torch.arange(new)
        self._cache.aim(torch.tensor([running.slot for running in batch]), at)
        mask = (torch.arange(int(at.max()) + 1) <= at[..., None])[:, None]
        logits = self._model(
            tokens, position_ids=at, attention_mask=mask, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        logprobs = (logits.float() / self._config.rollout.temperature).log_softmax(-1)
        return [(running, self._take(running, row, new)) for running, row in zip(batch, logprobs, strict=True)]

    def _take(self, running: _Running, logprobs: Tensor, new: int) -> Delta:
        running.length += new
        if running.request.greedy:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=running.generator or self._generator))
        running.last = token
        running.versions.append(self._version)
        reason = None
        if token in self._stops:
            reason = "stop"
        elif len(running.versions) >= running.request.max_tokens:
            reason = "length"
        if reason is not None:
            self._leave(running)
        spans = _spans(running.versions) if reason is not None else None
        return Delta([token], [float(logprobs[token])], [self._version], reason, spans)

    def _leave(self, running: _Running) -> None:
        self._free.append(running.slot)
        del self._running[running.slot]


def _spans(versions: list[int]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    at = 0
    for version, run in groupby(versions):
        size = len(list(run))
        out.append((version, at, at + size))
        at += size
    return out
