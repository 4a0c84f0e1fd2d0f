"""A trained policy as a Hugging Face folder: at the end of a run, or of any of its checkpoints.

    python -m async_rl.learner.export --run DIR [--step S] [--output DIR] [--dtype float32] [--max-shard-size 5GB]

Sharded safetensors, the tokenizer, the generation configuration and a model card with the run's facts.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import PreTrainedModel

from async_rl import adapters, model, process
from async_rl import config as configuration
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.learner import state
from async_rl.learner.checkpoint import TRAINED, full_tensors, trained_only
from async_rl.learner.policy import Policy, load
from async_rl.tokenizer import tokenizer_of
from async_rl.tracking.metrics import Record, read

SHARD = "5GB"
SIZE = re.compile(r"[1-9]\d*[KMGT]B")
DTYPES = ("bfloat16", "float16", "float32")


def export_live(run: Path, policy: Policy, config: Config, step: int) -> None:
    """The sharded policy in bfloat16 into `run`/model; every rank calls this."""
    dtype = torch.float32 if config.learner.lora.rank else torch.bfloat16  # to be merged before it is rounded
    tensors: dict[str, Tensor] = {}
    for name, tensor in full_tensors(policy):
        if dist.get_rank() == 0:
            tensors[name] = tensor.to("cpu", dtype)
    if dist.get_rank() == 0:
        tensors = _merged(tensors, config, torch.bfloat16)
        write(run / "model", policy.model, tensors, config, card(config, step, read(run)))
    dist.barrier()


def export(run: Path, step: int | None, output: Path | None, dtype: str, shard: str) -> Path:
    """A checkpoint of a run, the newest if `step` is None, in this one process; returns the folder."""
    config = configuration.load(run / "config.yaml")
    path, found = find(run, step)
    output = output or run / f"model-{found.step}"
    if output.exists() and any(output.iterdir()):
        raise ConfigError("--output", str(output), "it exists and is not empty", "Give another folder or remove it")
    policy = load(model.resolve(config.model.path), 1.0, torch.device("cpu"), lora=config.learner.lora)
    tree = {"policy": {"weights": trained_only(policy, get_model_state_dict(policy, options=TRAINED))}}
    dcp.load(tree, checkpoint_id=path, no_dist=True)
    policy.load_state_dict(tree["policy"]["weights"], strict=False)
    tensors = _merged(dict(full_tensors(policy)), config, getattr(torch, dtype))
    records = [record for record in read(run) if record["step"] <= found.step]  # type: ignore[operator]
    write(output, policy.model, tensors, config, card(config, found.step, records), shard)
    return output


def _merged(tensors: dict[str, Tensor], config: Config, dtype: torch.dtype) -> dict[str, Tensor]:
    lora = config.learner.lora
    whole = adapters.merged(tensors, lora) if lora.rank else tensors
    return {name: tensor.to(dtype) for name, tensor in whole.items()}


def find(run: Path, step: int | None) -> tuple[Path, state.State]:
    """The checkpoint of `step`, or the newest."""
    checkpoints = run / "checkpoints"
    there = {found.step: found for found in state.complete(checkpoints)}
    if not there:
        raise ConfigError("RUN", str(run), "it has no checkpoint", "Train it to learner.checkpoint_every steps first")
    wanted = max(there) if step is None else step
    if wanted not in there:
        steps = ", ".join(map(str, there))
        raise ConfigError("--step", step, f"{checkpoints} has none of it", f"There are those of the steps {steps}")
    return checkpoints / state.folder_name(wanted), there[wanted]


def write(
    folder: Path, language_model: PreTrainedModel, tensors: Mapping[str, Tensor], config: Config, text: str,
    shard: str = SHARD,
) -> None:  # fmt: skip
    """`tensors` as the weights of a model like `language_model`; all of one type."""
    language_model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=shard)
    written = copy.deepcopy(language_model.config)
    written.dtype = next(iter(tensors.values())).dtype  # not that of the live model, which saving has put there
    written.save_pretrained(folder)
    tokenizer_of(config.model.path).save_pretrained(folder)
    (folder / "README.md").write_text(text)


def card(config: Config, step: int, records: list[Record]) -> str:
    """A model card with what the run was; names, no paths."""
    base, lora = Path(config.model.path).name, config.learner.lora
    rewards = [record["reward"] for record in records if record.get("reward") is not None]
    ages = [record["age_max"] for record in records if "age_max" in record]
    data = config.data.task.name if config.data.task else Path(str(config.data.path)).name

    def mean(values: list[float | int | list[int]]) -> str:
        numbers = [float(value) for value in values]  # type: ignore[arg-type]
        return f"{sum(numbers) / len(numbers):.3f}" if numbers else "none"

    facts = {
        "Base model": base,
        "Steps": str(step),
        "Prompts": f"{data}, {config.buffer.batch_size} trajectories a step, {config.buffer.group_size} a prompt",
        "Algorithm": f"`{config.algorithm.preset}`, correction `{config.staleness.correction.name}`",
        "Staleness": f"at most {config.staleness.max_staleness} versions" + (f", {max(ages)} seen" if ages else ""),  # type: ignore[type-var]
        "Learning rate": f"{config.learner.learning_rate:g}, weights in float32, compute in {config.learner.dtype}",
        "Trained": f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, merged" if lora.rank else "all weights",
        "Response": f"at most {config.rollout.max_tokens} tokens at temperature {config.rollout.temperature:g}",
        "Mean reward": f"{mean(rewards[:5])} in the first five steps, {mean(rewards[-5:])} in the last five",
        "Seed": str(config.seed),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return (
        f"---\nlibrary_name: transformers\ntags: [reinforcement-learning, async-rl]\n---\n\n# {config.name}\n\n"
        f"Trained from {base} by asynchronous reinforcement learning with async-rl.\n\n"
        f"| what | value |\n| --- | --- |\n{rows}\n\nThe licence of the base model applies.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="async-rl export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--max-shard-size", default=SHARD)
    args = parser.parse_args()
    if not SIZE.fullmatch(args.max_shard_size):
        raise ConfigError("--max-shard-size", args.max_shard_size, "not a size", "Write for example 5GB or 500MB")
    print(export(args.run, args.step, args.output, args.dtype, args.max_shard_size))


if __name__ == "__main__":
    process.guard(main)
