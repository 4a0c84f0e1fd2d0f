"""Greedy answers to the held-out prompts, before against after training: `python -m async_rl.evaluation --run DIR`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from async_rl import model, process
from async_rl.config import load
from async_rl.data.prompts import Prompts
from async_rl.errors import ConfigError, RewardError
from async_rl.rewards.runner import RewardProcess, process_of
from async_rl.tokenizer import tokenizer_of

BATCH = 25


def answers(path: str, prompts: Prompts, max_tokens: int) -> list[str]:
    """Greedy responses of a model to all prompts, float32."""
    tokenizer = tokenizer_of(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    policy = AutoModelForCausalLM.from_pretrained(model.resolve(path), dtype=torch.float32).eval()
    out: list[str] = []
    for start in range(0, len(prompts), BATCH):
        rows = [tokens.tolist() for tokens in prompts.tokens[start : start + BATCH]]
        padded = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            tokens = policy.generate(**padded, do_sample=False, max_new_tokens=max_tokens)
        out += tokenizer.batch_decode(tokens[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
    return out


def mean_reward(responses: list[str], prompts: Prompts, reward: RewardProcess) -> float:
    """Mean over the responses that could be scored; how many could not is said."""
    scores: list[float] = []
    for response, row in zip(responses, prompts.rows, strict=True):
        try:
            scores.append(reward.score(response, row))
        except RewardError as error:
            last = error
    if len(scores) < len(responses):
        print(f"warning: {len(responses) - len(scores)} responses could not be scored; the last error: {last}")
    return sum(scores) / len(scores) if scores else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(prog="async-rl eval", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    folder: Path = parser.parse_args().run
    config = load(folder / "config.yaml")
    if not (folder / "heldout.npz").is_file():
        raise ConfigError(
            "data.holdout", config.data.holdout, "this run held no prompts out", "Set data.holdout and train"
        )
    if not (folder / "model" / "config.json").is_file():
        raise ConfigError("RUN", str(folder), "it has no exported model: it did not finish", "Resume it first")
    if config.environment.name is not None:
        raise ConfigError(
            "environment.name", config.environment.name, "answers are judged without an environment here",
            "Read the reward of the run instead",
        )  # fmt: skip
    prompts = Prompts.read(folder / "heldout.npz")
    reward = process_of(config.reward.function, config.reward, config.data.prompt_column)
    scores: dict[str, float] = {}
    for when, path in (("before", config.model.path), ("after", str(folder / "model"))):
        scores[when] = mean_reward(answers(path, prompts, config.rollout.max_tokens), prompts, reward)
        print(f"{when:>6}: mean reward {scores[when]:.3f} on {len(prompts)} held-out prompts, greedy", flush=True)
    reward.close()
    (folder / "eval.json").write_text(json.dumps({**scores, "prompts": len(prompts)}) + "\n")


if __name__ == "__main__":
    process.guard(main)
