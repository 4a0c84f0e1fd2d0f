"""How much memory a learner rank will want, known before anything starts. Torch-free.

model = read(path)                      # from config.json and the headers of the safetensors files
wanted = learner(model, config)         # bytes by what they are for
tokens = micro_batch(model, config, free=bytes, longest=tokens)
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from async_rl.config import Config

CHUNK = 1024
"""Tokens whose logits exist at once, as in `learner/logprobs.py`."""
LOGITS = 4
"""float32 copies of these logits at the peak: logits, their exponentials, the slope, its product."""
MOST_TOKENS = 65536
SPARE = 0.8
"""Share of free memory that is planned with: the rest is for the allocator, the runtime and what is not counted."""


class Model(NamedTuple):
    """Sizes of a decoder; `parameters` are counted once where they are tied."""

    parameters: int
    layers: int
    width: int
    heads_width: int
    kv_width: int
    inner: int
    vocabulary: int
    head: int
    """Parameters of the output head."""


class Wanted(NamedTuple):
    """Bytes of a learner rank. `per_token` is for each token of a micro-batch, the others do not depend on it."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    frozen: int
    logits: int
    per_token: int

    def total(self, tokens: int) -> int:
        return sum(self[:-1]) + tokens * self.per_token


def read(path: str) -> Model | None:
    """Of a resolved path; None for a hub name, and for a model that is not described in the usual words."""
    folder = Path(path)
    try:
        told = json.loads((folder / "config.json").read_text())
        heads, width = told["num_attention_heads"], told["hidden_size"]
        each = told.get("head_dim") or width // heads
        if not files(folder):
            return None
        return Model(
            parameters(path),
            told["num_hidden_layers"],
            width,
            heads * each,
            told.get("num_key_value_heads", heads) * each,
            told["intermediate_size"],
            told["vocab_size"],
            told["vocab_size"] * width,
        )
    except (OSError, ValueError, KeyError):
        return None


def window(path: str) -> int | None:
    """The sliding window that attention of a model keeps to, if it does."""
    try:
        told = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    told = told.get("text_config", told)
    return told.get("sliding_window") if told.get("use_sliding_window", True) else None


def parameters(path: str) -> int:
    """Of the safetensors files of a model's folder."""
    return sum(math.prod(shape) for shape in shapes(path).values())


def shapes(path: str) -> dict[str, list[int]]:
    """Of the tensors in the safetensors files of a folder; a header is JSON behind eight bytes of length."""
    found: dict[str, list[int]] = {}
    for file in files(Path(path)):
        with file.open("rb") as data:
            (length,) = struct.unpack("<Q", data.read(8))
            header = json.loads(data.read(length))
        found |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return found


def files(folder: Path) -> list[Path]:
    """The safetensors files that a model is loaded from: those of its index, if it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("model*.safetensors"))


def learner(model: Model, config: Config) -> Wanted:
    """Master weights, gradients and moments are float32 and sharded. Until the last micro-batch of a step a rank keeps
    the gathered weights and its own gradient of all of them, unless `learner.reshard`.

    Activations are those that a gated decoder layer keeps for its backward pass: the inputs of two norms, of the
    projections and of the activation, queries, keys, values and the result of attention; with `learner.recompute` only
    the input of each layer, and all of one layer's. With `learner.offload` what is not in use is not on the device.
    """
    settings, parallel = config.learner, config.learner.parallel
    shards = settings.ranks // (parallel.replicas * parallel.tensor)
    size = 2 if settings.dtype == "bfloat16" else 4
    mine = model.parameters // parallel.tensor
    trained, whole = mine, mine
    if settings.lora.rank:
        trained = settings.lora.rank * adapter_widths(model) * model.layers
        whole = trained
    alone = shards == 1
    gathered = 0 if alone and size == 4 else mine * size
    if settings.reshard and not alone:
        gathered, whole = (mine - model.head) * size // model.layers + model.head * size, trained // shards
    extra = config.algorithm.critic and config.algorithm.value.trunk == "own"
    frozen = 4 * mine // shards if config.algorithm.kl.coefficient and not settings.lora.rank else 0
    copies = 2 if extra else 1
    layer = size * (6 * model.width + 2 * model.heads_width + 2 * model.kv_width + 4 * model.inner) // parallel.tensor
    kept = model.layers * layer if not settings.recompute else model.layers * size * model.width + layer
    kept_here = 0 if settings.offload else 1
    return Wanted(
        weights=kept_here * (copies * 4 * mine // shards + (4 * trained // shards if settings.lora.rank else 0)),
        gradients=copies * 4 * (whole if not alone else trained),
        moments=kept_here * copies * 8 * trained // shards,
        gathered=copies * gathered,
        frozen=kept_here * frozen,
        logits=LOGITS * 4 * CHUNK * model.vocabulary + (0 if settings.lora.rank else 4 * model.head),
        per_token=kept // parallel.sequence,
    )


def adapter_widths(model: Model) -> int:
    """What a layer's adapters have for each unit of rank: both sides of all its matrices."""
    q = o = model.width + model.heads_width
    return q + o + 2 * (model.width + model.kv_width) + 3 * (model.width + model.inner)


def micro_batch(model: Model, config: Config, *, free: int, longest: int) -> int:
    """Tokens of a micro-batch for a rank with `free` bytes; a row of `longest` tokens has to fit.

    Raises `ConfigError` if it does not.
    """
    wanted = learner(model, config)
    room = int(free * SPARE) - wanted.total(0)
    tokens = room // wanted.per_token
    if tokens < longest:
        raise ConfigError(
            "learner.micro_batch_tokens", "auto",
            f"a row of {longest} tokens wants {show(wanted.total(longest))} and {SPARE:.0%} of {show(free)} is free",
            "Use more learner.ranks, learner.recompute, .reshard, .offload or .lora, or shorter responses",
        )  # fmt: skip
    return min(MOST_TOKENS, tokens)


def show(size: float) -> str:
    """In GiB, or MiB if it is less than one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def table(model: Model, config: Config, tokens: int) -> list[str]:
    """Lines for people: a rank's memory with micro-batches of so many tokens."""
    wanted = learner(model, config)
    parts = {
        "weights (float32)": wanted.weights,
        "gradients": wanted.gradients,
        "moments": wanted.moments,
        f"gathered weights ({config.learner.dtype})": wanted.gathered,
        "reference": wanted.frozen,
        "logits in chunks": wanted.logits,
        f"activations of {tokens} tokens": tokens * wanted.per_token,
    }
    lines = [f"a learner rank of {config.learner.ranks}, about {show(wanted.total(tokens))}:"]
    return lines + [f"  {show(size):>9}  {name}" for name, size in parts.items() if size]
