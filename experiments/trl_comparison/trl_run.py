"""The quickstart's task on TRL's GRPOTrainer, on a CPU."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from async_rl import config as configuration
from async_rl import model
from async_rl.data import sources
from async_rl.rewards.functions import last_integer


class Clock(TrainerCallback):
    """Time and reward of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    source = configuration.find("quickstart")
    config = configuration.load(source, {"data.path": str(sources.resolve("addition.jsonl", source.parent))})
    train, _ = sources.split(sources.rows(config.data), config.data)
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in train]

    def reward(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        return [
            last_integer(completion[0]["content"], {"answer": number})
            for completion, number in zip(completions, answer, strict=True)
        ]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            max_steps=args.steps,
            per_device_train_batch_size=config.buffer.batch_size,
            gradient_accumulation_steps=1,
            num_generations=config.buffer.group_size,
            max_completion_length=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            learning_rate=config.learner.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=config.learner.betas[0],
            adam_beta2=config.learner.betas[1],
            max_grad_norm=config.learner.clip_norm,
            beta=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            seed=config.seed,
        )
        trainer = GRPOTrainer(
            model.resolve(config.model.path),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )
        trainer.train()
    later = (len(clock.ends) - 1) * config.buffer.batch_size
    speed = later / (clock.ends[-1] - clock.ends[0])
    args.out.write_text(json.dumps({"samples_per_s": round(speed, 3), "reward": clock.rewards}))


if __name__ == "__main__":
    main()
