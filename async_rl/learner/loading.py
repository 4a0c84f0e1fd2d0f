"""Models from disk: whole, or sharded first and filled after that, so that no rank ever holds all of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from async_rl.memory import shapes


def whole(path: str, attention: str, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """With float32 weights. `kind` is an auto class of transformers, `attention` an `attn_implementation`."""
    return _still(kind.from_pretrained(path, dtype=torch.float32, attn_implementation=attention))


def hollow(path: str, attention: str, kind: Any = AutoModelForCausalLM) -> PreTrainedModel | None:
    """Without memory for its parameters, for `fill`; None if no file on this disk has them under the model's names."""
    stored = shapes(path)
    with init_empty_weights():
        model = kind.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32, attn_implementation=attention)
    model.tie_weights()
    if any(list(parameter.shape) != stored.get(name) for name, parameter in stored_names(model, stored)):
        return None
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return _still(model)


def fill(module: nn.Module, model: PreTrainedModel, path: str, device: torch.device) -> None:
    """Gives a sharded module memory and each rank its part of the tensors in the files of `path`; what `module` has
    beside the `model` becomes 0. Collective."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        for parameter in module.parameters():
            parameter.zero_()
    named = {name: parameter.detach() for name, parameter in stored_names(model, shapes(path))}
    dcp.load(named, storage_reader=HuggingFaceStorageReader(path))


def stored_names(model: PreTrainedModel, stored: dict[str, list[int]]) -> list[tuple[str, nn.Parameter]]:
    """A model's parameters under the names of the files: a trunk alone lacks the prefix that it has there."""
    prefix = f"{model.base_model_prefix}."
    return [(name if name in stored else prefix + name, parameter) for name, parameter in model.named_parameters()]


def _still(model: PreTrainedModel) -> PreTrainedModel:
    """No dropout: a log-prob is a number. Gradients do not need training mode."""
    return model.eval()
