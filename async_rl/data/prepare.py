"""Renders and tokenizes the prompts of a run once: `python -m async_rl.data.prepare --run DIR`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from async_rl import process
from async_rl.config import Config, DataConfig
from async_rl.data import sources
from async_rl.data.prompts import Prompts
from async_rl.errors import DataError
from async_rl.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(row: sources.Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of one row's prompt, up to where the response begins."""
    prompt = row[config.prompt_column]
    if not config.chat_template:
        return tokenizer(str(prompt))["input_ids"]
    if tokenizer.chat_template is None:
        raise DataError("data.chat_template = True: this tokenizer has no chat template. Set it to false")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    if config.system_prompt is not None:
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prepare(config: Config, found: list[sources.Row], tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Tokens and rows of `found`; refuses prompts over `data.max_prompt_tokens`."""
    tokens = [np.asarray(render(row, config.data, tokenizer), np.int32) for row in found]
    longest = max(range(len(tokens)), key=lambda i: tokens[i].size)
    if tokens[longest].size > config.data.max_prompt_tokens:
        raise DataError(
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens}: prompt {longest} has {tokens[longest].size} "
            "tokens. Raise the limit or leave the prompt out"
        )
    return Prompts(tokens, [json.dumps(row, default=str).encode() for row in found], sources.fingerprint(found))


def main() -> None:
    run = process.start("prepare")
    train, held_out = sources.split(sources.rows(run.config.data), run.config.data)
    tokenizer = tokenizer_of(run.config.model.path)
    if held_out:
        prepare(run.config, held_out, tokenizer).write(run.folder / "heldout.npz")
    prepare(run.config, train, tokenizer).write(run.folder / "prompts.npz")


if __name__ == "__main__":
    process.guard(main)
