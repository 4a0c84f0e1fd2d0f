"""vLLM's AsyncLLM behind the engine protocol."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from async_rl import adapters
from async_rl.config import Config
from async_rl.errors import EngineError, RequestRefused
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.weights import shm
from async_rl.weights.manifest import Manifest
from async_rl.weights.transport import on_devices

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

NAN = float("nan")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Widths of adapters that vLLM makes room for."""


class VllmEngine:
    """One AsyncLLM with its engine process.

    Tags. The engine process labels the outputs of every step with the version of its weights; `_record` keeps these
    labels token by token as they arrive, since a delta may hold tokens of two versions. The spans that vLLM reports at
    the end of a request are its own account of the same thing, and the worker compares the two.
    """

    def __init__(self, config: Config, *, model: str, max_model_tokens: int, cores: list[int], seed: int) -> None:
        self._config = config
        self._model = model
        self._max_model_tokens = max_model_tokens
        self._cores = cores
        self._seed = seed
        self._version = 0
        self._labels: dict[str, deque[int]] = {}
        self._sleeps = False
        """Whether there is memory that another process may use meanwhile."""
        self._engine: AsyncLLM | None = None
        self._adapter: LoRARequest | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    async def start(self) -> None:
        rollout = self._config.rollout
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(rollout.kv_cache_gib)
        os.environ["ASYNC_RL_WORKER_PID"] = str(os.getpid())
        if self._cores:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._cores))
        from vllm import AsyncEngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        lora = self._config.learner.lora
        self._sleeps = self._config.launch.placement == "colocated" and not current_platform.is_cpu()
        arguments = AsyncEngineArgs(
            model=self._model,
            dtype=rollout.dtype,
            max_model_len=self._max_model_tokens,
            max_num_seqs=self._config.engine_slots + 1,
            scheduling_policy="priority",
            enforce_eager=current_platform.is_cpu(),
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            enable_sleep_mode=self._sleeps,
            gpu_memory_utilization=rollout.gpu_memory_share,
            disable_log_stats=True,
            seed=self._seed,
            tensor_parallel_size=rollout.tensor_parallel,
            weight_transfer_config=WeightTransferConfig(backend=self._backend),
            enable_lora=bool(lora.rank),
            max_lora_rank=next(rank for rank in RANKS if rank >= lora.rank),
            # Without it vLLM wraps the head too, and then cannot score prompts.
            lora_target_modules=adapters.targets(self._model, lora) if lora.rank else None,
        )
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._watch(self._engine)
        if self._config.weights.transport != "nccl":
            await self._init_transfer({})
        await self._engine.update_weight_version(str(self._version))

    @property
    def _backend(self) -> str:
        transport = self._config.weights.transport
        return f"async_rl_{transport}" if on_devices(self._config) else "async_rl_shm"

    @property
    def ranks(self) -> int:
        return self._config.rollout.tensor_parallel

    async def join(self, init: dict[str, Any]) -> None:
        """Takes part in a communicator with the learner, in the place of an earlier one."""
        await self.running.shutdown_weight_transfer_engine()
        await self._init_transfer(init)

    async def _init_transfer(self, init: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.running.init_weight_transfer_engine(WeightTransferInitRequest(init))

    @property
    def running(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineError("the engine has not been started")
        return self._engine

    def _watch(self, engine: AsyncLLM) -> None:
        """Records the label of every token before vLLM merges outputs into deltas."""
        processor = engine.output_processor
        inner = processor.process_outputs

        def process_outputs(outputs: list[Any], *args: Any, weight_version: str | None = None, **kwargs: Any) -> Any:
            for output in outputs:
                state = processor.request_states.get(output.request_id)
                labels = self._labels.get(state.external_req_id) if state else None
                if labels is not None and output.new_token_ids:
                    if weight_version is None:
                        raise EngineError("vLLM gave no weight version with its tokens")
                    labels.extend([int(weight_version)] * len(output.new_token_ids))
            return inner(outputs, *args, weight_version=weight_version, **kwargs)

        processor.process_outputs = process_outputs

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        if len(request.prompt) + request.max_tokens > self._max_model_tokens:
            raise RequestRefused(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones exceed the engine's "
                f"{self._max_model_tokens}"
            )
        # A request made during an update would carry the old version's salt and run with the new weights.
        await self._settled.wait()
        rollout = self._config.rollout
        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0 if request.greedy else rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            seed=request.seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt, "cache_salt": str(self._version)}
        labels = self._labels[request.id] = deque()
        try:
            async for output in self.running.generate(
                prompt, sampling, request.id, lora_request=self._adapter, priority=request.priority
            ):
                yield _delta(output.outputs[0], labels)
        except (ValueError, VLLMValidationError) as error:
            raise RequestRefused(str(error)) from error
        finally:
            del self._labels[request.id]

    async def update(self, manifest: Manifest) -> float:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        start = perf_counter()
        if self._config.learner.lora.rank:
            await self._update_adapter(manifest)
            return perf_counter() - start
        async with self.paused(recompute=self._config.weights.kv_after_update == "recompute"):
            await self.running.start_weight_update()
            await self.running.update_weights(WeightTransferUpdateRequest({"manifest": msgspec.to_builtins(manifest)}))
            await self.running.finish_weight_update(str(manifest.version))
            self._version = manifest.version
        return perf_counter() - start

    async def _update_adapter(self, manifest: Manifest) -> None:
        """Running requests go on with the new adapter, which takes the place of the old one under the same id."""
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="async-rl-adapter-") as folder:
            adapters.write(Path(folder), shm.read(manifest), self._config.learner.lora)
            async with self.paused(recompute=self._config.weights.kv_after_update == "recompute"):
                await self.running.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
                await self.running.update_weight_version(str(manifest.version))
                self._version = manifest.version
        self._adapter = LoRARequest("policy", 1, folder)

    async def relabel(self, version: int) -> None:
        async with self.paused():
            await self.running.update_weight_version(str(version))
            self._version = version

    @asynccontextmanager
    async def paused(self, *, recompute: bool = False) -> AsyncIterator[None]:
        """Generation stands still at a step boundary for the length of the block; requests are kept. `recompute`: what
        is known of them is forgotten, and computed again when they go on."""
        self._settled.clear()
        await self.running.pause_generation(mode="keep", clear_cache=recompute)
        yield
        await self.running.resume_generation()
        self._settled.set()

    async def score(self, tokens: list[int]) -> list[float]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"probe{self._version}"}
        last = None
        name = f"probe-{self._version}-{perf_counter()}"
        async for output in self.running.generate(prompt, sampling, name, lora_request=self._adapter):
            last = output
        if last is None or last.prompt_logprobs is None:
            raise EngineError("vLLM returned no prompt log-probs for a probe")
        entries = last.prompt_logprobs[1:]
        return [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True) if entry is not None]

    async def sleep(self) -> None:
        """Weights go to the host's memory, KV is forgotten."""
        if self._sleeps:
            await self.running.sleep(level=1)

    async def wake(self) -> None:
        if self._sleeps:
            await self.running.wake_up()

    async def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def _delta(output: CompletionOutput, labels: deque[int]) -> Delta:
    tokens = list(output.token_ids)
    entries = output.logprobs or []
    logprobs = [
        entries[i][token].logprob if i < len(entries) and token in entries[i] else NAN for i, token in enumerate(tokens)
    ]
    if len(labels) < len(tokens):
        raise EngineError(f"{len(tokens)} tokens came with {len(labels)} version labels")
    versions = [labels.popleft() for _ in tokens]
    if output.finish_reason is None:
        return Delta(tokens, logprobs, versions)
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"a request ended with {output.finish_reason!r}, though nobody cancelled it")
    spans = [(int(span.version), span.start, span.end) for span in output.weight_versions or []]
    return Delta(tokens, logprobs, versions, output.finish_reason, spans)
