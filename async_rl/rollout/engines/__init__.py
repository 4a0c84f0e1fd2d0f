"""Generation engines behind one protocol (`protocol.py`): `vllm_engine`, `torch_engine`, `emulated_engine`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.config import Config
    from async_rl.rollout.engines.protocol import Engine


def choose(config: Config) -> str:
    """`auto` is vLLM where it is installed, except in a deterministic run."""
    name = config.rollout.engine
    if name != "auto":
        return name
    return "vllm" if importlib.util.find_spec("vllm") and not config.deterministic else "torch"


def make(config: Config, *, model: str, max_model_tokens: int, cores: list[int], seed: int) -> Engine:
    """The configured engine for a resolved model path, not started yet."""
    if choose(config) == "emulated":
        from async_rl.rollout.engines.emulated_engine import EmulatedEngine
        from async_rl.tokenizer import tokenizer_of

        return EmulatedEngine(config, end=tokenizer_of(model).eos_token_id)
    if choose(config) == "vllm":
        from async_rl.rollout.engines.vllm_engine import VllmEngine

        return VllmEngine(config, model=model, max_model_tokens=max_model_tokens, cores=cores, seed=seed)
    from async_rl.rollout.engines.torch_engine import TorchEngine

    return TorchEngine(config, model=model, max_model_tokens=max_model_tokens, seed=seed)
