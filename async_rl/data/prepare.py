"""Renders and tokenizes the prompts of a run once: `python -m async_rl.data.prepare --run DIR`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from async_rl import process
from async_rl.config import Config, DataConfig
from async_rl.data import sources
from async_rl.data.prompts import Prompts
from async_rl.environments.protocol import find
from async_rl.errors import ConfigError, DataError, RewardError
from async_rl.rewards.runner import process_of
from async_rl.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REMEDY = "Start from the folder that holds the module, or install it"


def render(row: sources.Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of one row's prompt, up to where the response begins."""
    prompt = row[config.prompt_column]
    if not config.chat_template and not isinstance(prompt, str):
        raise DataError(f"data.chat_template = False: {config.prompt_column!r} holds {prompt!r}, not text")
    if not isinstance(prompt, str | list):
        raise DataError(f"data.prompt_column = {config.prompt_column!r} holds {prompt!r}, neither text nor messages")
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
    empty = next((row for row, ids in zip(found, tokens, strict=True) if not ids.size), None)
    if empty is not None:
        raise DataError(
            f"data.prompt_column = {config.data.prompt_column!r}: the prompt of {str(empty)[:200]} is empty"
        )
    longest = max(range(len(tokens)), key=lambda i: tokens[i].size)
    if tokens[longest].size > config.data.max_prompt_tokens:
        raise DataError(
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens}: a prompt has {tokens[longest].size} tokens, "
            f"that of {str(found[longest])[:200]}. Raise the limit or leave the prompt out"
        )
    return Prompts(tokens, [json.dumps(row, default=str).encode() for row in found], sources.fingerprint(found))


def check_reward(config: Config) -> None:
    """Loads every reward once, so that one that cannot be loaded is known before engines start."""
    for name, each in config.reward.functions.items():
        path = "reward.function" if name == "reward" else f"reward.others.{name}.function"
        reward = process_of(each.function, config.reward, config.data.prompt_column)
        try:
            if each.function != "environment":
                reward.start()
        except RewardError as error:
            raise ConfigError(path, each.function, f"it cannot be loaded: {error}", REMEDY) from error
        finally:
            reward.close()


def check_environment(config: Config, row: sources.Row) -> None:
    """Makes an environment once, for the same reason, and compares what it says of itself with the configuration."""
    name, params = config.environment.name, config.environment.params
    if name is None:
        return
    try:
        environment = find(name)(row, **params)
        replayable = environment.replayable
    except Exception as error:
        raise ConfigError("environment.name", name, f"it cannot be made: {error!r}", REMEDY) from error
    if config.environment.replayable and not replayable:
        raise ConfigError(
            "environment.replayable", True, f"{name} says of itself that it is not",
            "Set environment.replayable: false; its trajectories then start again when their worker dies",
        )  # fmt: skip


def main() -> None:
    run = process.start("prepare")
    check_reward(run.config)
    train, held_out = sources.split(sources.rows(run.config.data), run.config.data)
    check_environment(run.config, train[0])
    tokenizer = tokenizer_of(run.config.model.path)
    if held_out:
        prepare(run.config, held_out, tokenizer).write(run.folder / "heldout.npz")
    prepare(run.config, train, tokenizer).write(run.folder / "prompts.npz")


if __name__ == "__main__":
    process.guard(main)
