"""LoRA adapters: into a model (peft), out of it for engines and for a merged export.

A layer with an adapter is `layer.base_layer`, frozen, beside `layer.lora_A.default` and `layer.lora_B.default`; its
output is `base(x) + alpha / rank * B A x` (Hu et al., 2021).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_rl.config import LoraConfig
from async_rl.memory import shapes

BASE, A, B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"


def inject(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freezes the model and gives its layers adapters that change nothing yet; the same on every rank."""
    model.requires_grad_(requires_grad=False)
    peft = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets or "all-linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(peft, model)


def targets(path: str, lora: LoraConfig) -> list[str] | None:
    """Names of the layers that get an adapter; None if the model of `path` is not on this disk."""
    if lora.targets:
        return lora.targets
    names = {name.split(".")[-2] for name, shape in shapes(path).items() if ".layers." in name and len(shape) == 2}
    return sorted(names) or None


@contextmanager
def off(module: nn.Module) -> Iterator[None]:
    """The model is its base for the length of the block."""
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # not `enable_adapters`, which changes what is trained
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(tensors: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """A model's whole tensors with its adapters in its weights, under the names that it had before."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((A, B)):
            continue
        layer, found, rest = name.partition(BASE)
        if found and rest == ".weight":
            tensor = tensor.float() + lora.alpha / lora.rank * (tensors[layer + B].float() @ tensors[layer + A].float())
        out[layer + rest if found else name] = tensor
    return out


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], lora: LoraConfig) -> None:
    """A folder as peft saves an adapter, for an engine to load."""
    named = {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in tensors}
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in named})
    described = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(described))
