"""Which settings go together. Each field on its own has been checked when the configuration was read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from async_rl.algorithms.config import COMPARING, conflict, form
from async_rl.errors import ConfigError
from buffers import keys
from buffers.errors import KeysError
from buffers.pool import MAX_ROWS
from staleness import bounds

if TYPE_CHECKING:
    from async_rl.config import Config


WIDEST_ADAPTER = 512


def check(config: Config) -> None:
    """Raises the first `ConfigError` of a combination that cannot run."""
    for part in CHECKS:
        part(config)


def _batch(config: Config) -> None:
    buffer, groups = config.buffer, config.buffer.groups
    if buffer.batch_size % buffer.group_size:
        raise ConfigError(
            "buffer.batch_size", buffer.batch_size,
            f"not a multiple of buffer.group_size = {buffer.group_size}, and a batch holds whole groups",
            f"Use {max(1, buffer.batch_size // buffer.group_size) * buffer.group_size}",
        )  # fmt: skip
    if buffer.group_size == 1 and config.algorithm.advantage in COMPARING:
        raise ConfigError(
            "buffer.group_size", 1, "advantages compare the members of a group, so a group of one never trains",
            "Use at least 2, or an advantage that compares nobody: gae, vtrace, reinforce++, rloo",
        )  # fmt: skip
    if groups.min_group > buffer.group_size:
        raise ConfigError(
            "buffer.groups.min_group", groups.min_group,
            f"larger than buffer.group_size = {buffer.group_size}, so no group could ever be trained on",
            f"Use at most {buffer.group_size}",
        )  # fmt: skip
    window = bounds.capacity(max_staleness=config.staleness.max_staleness, batch=buffer.batch_size, slack=buffer.slack)
    if window > MAX_ROWS:
        raise ConfigError(
            "staleness.max_staleness", config.staleness.max_staleness,
            f"{window} trajectories might be in flight, (max_staleness + 1) * batch_size + slack; {MAX_ROWS} can be",
            "Lower it, or buffer.batch_size",
        )  # fmt: skip


def _groups(config: Config) -> None:
    buffer, groups = config.buffer, config.buffer.groups
    if groups.dynamic_sampling and groups.policy == "split":
        raise ConfigError(
            "buffer.groups.dynamic_sampling", True,
            "whether all rewards are equal is known when the whole group has ended, and split offers members before",
            "Use buffer.groups.policy: whole",
        )  # fmt: skip
    if config.algorithm.advantage == "remax" and groups.policy == "split":
        raise ConfigError(
            "buffer.groups.policy", groups.policy, "the member that finds out the greedy response may come last",
            "Use buffer.groups.policy: whole",
        )  # fmt: skip
    if config.staleness.on_stale == "pace":
        for path, value, wanted in (
            ("buffer.sampler.name", buffer.sampler.name, "oldest"),
            ("buffer.slack", buffer.slack, 0),
            ("buffer.groups.policy", groups.policy, "whole"),
        ):
            if value != wanted:
                raise ConfigError(
                    path, value, "staleness.on_stale: pace holds each batch for its oldest groups, which needs "
                    f"{wanted!r} here", f"Set {path}={wanted}, or staleness.on_stale: mask",
                )  # fmt: skip


def _segments(config: Config) -> None:
    segments, policy = config.staleness.segments, config.buffer.groups.policy
    if segments is None:
        return
    if not config.algorithm.critic:
        raise ConfigError(
            "staleness.segments", segments,
            f"advantage {config.algorithm.advantage} needs the reward, and a trajectory that goes on has none yet",
            "Use algorithm.preset: vtrace or ppo, whose value model stands for what is still to come",
        )  # fmt: skip
    if policy != "split":
        raise ConfigError(
            "staleness.segments", segments,
            f"buffer.groups.policy: {policy} holds a trajectory back until others of its group have ended",
            "Use buffer.groups.policy: split",
        )  # fmt: skip
    if segments >= config.rollout.max_tokens:
        raise ConfigError(
            "staleness.segments", segments,
            f"no response is longer than rollout.max_tokens = {config.rollout.max_tokens}, so there would be none",
            "Lower it, or leave it out",
        )  # fmt: skip


def _addresses(config: Config) -> None:
    security = config.buffer.security
    if not re.fullmatch(r"(tcp://|ipc://).+", security.bind):
        raise ConfigError(
            "buffer.security.bind", security.bind, "not an address ZeroMQ can listen on",
            "Write for example tcp://127.0.0.1:*",
        )  # fmt: skip
    try:
        keys.check(security.bind, security.keys)
    except KeysError as error:
        raise ConfigError("buffer.security", security.bind, str(error), "See `async-rl keys --help`") from error
    bind = config.weights.bind
    try:
        if "{host}" not in bind:  # that of a run on one machine is its own; a cluster's launcher makes keys
            keys.check(bind, security.keys)
    except KeysError as error:
        raise ConfigError("weights.bind", bind, str(error), "See `async-rl keys --help`") from error


def _learning(config: Config) -> None:
    correction = config.staleness.correction
    wrong = conflict(config.algorithm, correction)
    if wrong is not None:
        raise ConfigError(*wrong)
    anchored = form(config.algorithm, correction) == "coupled" or correction.proximal == "recompute"
    if config.learner.epochs > 1 and not anchored:
        raise ConfigError(
            "learner.epochs", config.learner.epochs,
            "several optimizer steps on a batch need an anchor that stays in place while the policy moves",
            "Set algorithm.loss: ppo and staleness.correction.proximal: recompute, or epochs: 1",
        )  # fmt: skip


def _sampling(config: Config) -> None:
    rollout = config.rollout
    for name, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0), ("min_p", rollout.min_p, 0.0)):
        if value != off and not rollout.allow_truncated_sampling:
            raise ConfigError(
                f"rollout.{name}", value,
                "the engine then samples from some tokens only and the learner's distribution is over all, so every "
                "ratio between them is off by the mass of those left out",
                f"Leave it at {off}, or set rollout.allow_truncated_sampling: true, which puts the mass in the metrics",
            )  # fmt: skip


def _data(config: Config) -> None:
    data = config.data
    if data.system_prompt is not None and not data.chat_template:
        raise ConfigError(
            "data.system_prompt", data.system_prompt, "it is part of a chat, and data.chat_template is false",
            "Put the text into the prompts, or set data.chat_template: true",
        )  # fmt: skip
    if (data.path is None) == (data.task is None):
        raise ConfigError(
            "data.path", data.path, "exactly one of data.path and data.task says where prompts come from",
            "Set data.path to a file, or data.task.name to a reasoning-gym task",
        )  # fmt: skip


def _environment(config: Config) -> None:
    environment, advantage = config.environment, config.algorithm.advantage
    if environment.name is not None and not re.fullmatch(r"calculator|[\w.]+:\w+", environment.name):
        raise ConfigError(
            "environment.name", environment.name, "neither calculator nor of the form module:factory",
            "Write for example my_environments:Shell",
        )  # fmt: skip
    if "{text}" not in environment.template:
        raise ConfigError(
            "environment.template", environment.template, "the environment's answer has no place in it", "Put {text} in"
        )
    if advantage == "gigpo" and environment.name is None:
        raise ConfigError(
            "algorithm.advantage", advantage, "it compares turns in an environment, and there is none",
            "Set environment.name, or algorithm.advantage: grpo",
        )  # fmt: skip


def _rewards(config: Config) -> None:
    reward = config.reward
    functions = {"reward.function": reward.function}
    functions |= {f"reward.others.{name}.function": other.function for name, other in reward.others.items()}
    for path, function in functions.items():
        _reward(path, function, config)
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        raise ConfigError(
            "reward.clip", reward.clip, "the lowest sum is not below the highest", "Use [lowest, highest]"
        )
    if "reward" in reward.others:
        raise ConfigError(
            "reward.others", "reward", "that is the name of reward.function itself", "Choose another name"
        )


def _reward(path: str, function: str, config: Config) -> None:
    if function == "reasoning_gym" and config.data.task is None:
        raise ConfigError(
            path, function, "its scorer belongs to a reasoning-gym task, and there is none",
            "Set data.task, or reward.function to your own module:function",
        )  # fmt: skip
    if function == "environment" and config.environment.name is None:
        raise ConfigError(path, function, "there is no environment", "Set environment.name, or another function")
    if not re.fullmatch(r"reasoning_gym|environment|model:.+|[\w.]+:\w+", function):
        raise ConfigError(
            path, function, "neither of the form module:function nor model:PATH",
            "Write for example my_rewards:exact_match",
        )  # fmt: skip


def _parallel(config: Config) -> None:
    ranks, parallel = config.learner.ranks, config.learner.parallel
    least = parallel.replicas * parallel.sequence * parallel.tensor
    if ranks % least:
        raise ConfigError(
            "learner.ranks", ranks,
            f"not a multiple of learner.parallel's replicas x sequence x tensor = {parallel.replicas} x "
            f"{parallel.sequence} x {parallel.tensor}",
            f"Use {-(-ranks // least) * least}",
        )  # fmt: skip


def _lora(config: Config) -> None:
    lora = config.learner.lora
    if lora.rank > WIDEST_ADAPTER:
        raise ConfigError(
            "learner.lora.rank", lora.rank, f"engines take adapters up to {WIDEST_ADAPTER} wide", "Lower it"
        )
    whole = [name for name in lora.targets if name in ("lm_head", "embed_tokens", "wte", "embed_out")]
    if whole:
        raise ConfigError(
            "learner.lora.targets", lora.targets, f"{whole[0]} is used as a matrix, which no adapter reaches",
            "Name layers of the decoder, or none for all of them",
        )  # fmt: skip
    if lora.rank and config.learner.parallel.tensor > 1:
        raise ConfigError(
            "learner.lora.rank", lora.rank, "the layers of an adapter are in no tensor-parallel plan",
            "Set learner.parallel.tensor=1",
        )  # fmt: skip


def _deterministic(config: Config) -> None:
    if not config.deterministic:
        return
    for path, value, wanted in (
        ("rollout.engine", config.rollout.engine, ("torch", "auto")),
        ("staleness.max_staleness", config.staleness.max_staleness, (0,)),
        ("buffer.slack", config.buffer.slack, (0,)),
        ("buffer.groups.policy", config.buffer.groups.policy, ("whole",)),
        ("buffer.groups.dynamic_sampling", config.buffer.groups.dynamic_sampling, (False,)),
        ("buffer.sampler.name", config.buffer.sampler.name, ("oldest",)),
    ):
        if value not in wanted:
            raise ConfigError(
                path, value, "the clock would decide what is trained on, and deterministic: true leaves it nothing",
                f"Set {path}={wanted[0]}, or leave deterministic out",
            )  # fmt: skip
    if config.staleness.controller.target_ess is not None:
        raise ConfigError(
            "staleness.controller.target_ess", config.staleness.controller.target_ess,
            "no checkpoint has what the controller has come to, so that a restore would go on otherwise",
            "Leave it out, or deterministic",
        )  # fmt: skip
    if config.learner.micro_batch_tokens == "auto":
        raise ConfigError(
            "learner.micro_batch_tokens", "auto", "free memory would decide in what order gradients are added up",
            "Set a number, or leave deterministic out",
        )  # fmt: skip


def _evaluation(config: Config) -> None:
    if config.evaluation.every and not config.data.holdout:
        raise ConfigError(
            "evaluation.every", config.evaluation.every, "no prompts are held out", "Set data.holdout, or leave it out"
        )


def _attention(config: Config) -> None:
    if config.learner.attention == "flex" and config.learner.parallel.sequence > 1:
        raise ConfigError(
            "learner.attention", "flex", "ranks that share sequences have an attention of their own", "Use auto"
        )


def _emulation(config: Config) -> None:
    emulation = config.emulation
    if config.rollout.engine == "emulated" and not (emulation.tokens_per_s and emulation.mean_tokens):
        raise ConfigError(
            "rollout.engine", "emulated", "nothing says how fast and how long it would generate",
            "Set emulation.tokens_per_s and emulation.mean_tokens",
        )  # fmt: skip
    if emulation.train_s and config.rollout.engine != "emulated":
        raise ConfigError(
            "emulation.train_s", emulation.train_s, "the learner would train nothing on what a real engine generates",
            "Set rollout.engine=emulated too",
        )  # fmt: skip


def _weights(config: Config) -> None:
    transport = config.weights.transport
    wrong: list[tuple[bool, str, str]] = []
    if transport in ("nccl", "ipc"):
        wrong += [
            (config.launch.device == "cpu", "it moves weights between GPUs", "Use shm"),
            (
                config.rollout.engine not in ("auto", "vllm"),
                "it ends in vLLM's own receiver",
                "Use rollout.engine=vllm",
            ),
            (config.learner.lora.rank > 0, "vLLM loads adapters from files", "Use shm or zmq"),
        ]
    placed = config.launch.placement == "disjoint"
    wrong += [
        (transport == "nccl" and not placed, "NCCL connects GPUs, not one with itself", "Use ipc"),
        (transport == "ipc" and placed, "the learner's memory is on other GPUs", "Use nccl, or pools that share GPUs"),
        (transport == "shm" and config.launch.ray_address is not None, "a cluster has several hosts", "Use zmq"),
    ]
    for is_wrong, why, remedy in wrong:
        if is_wrong:
            raise ConfigError("weights.transport", transport, why, remedy)
    if config.rollout.tensor_parallel > 1:
        if config.rollout.engine not in ("auto", "vllm"):
            raise ConfigError(
                "rollout.tensor_parallel", config.rollout.tensor_parallel, "only vLLM's engine has it", "Use 1"
            )
        if config.launch.placement != "disjoint":
            raise ConfigError(
                "rollout.tensor_parallel", config.rollout.tensor_parallel,
                "pools that share devices share them one by one", "Use 1, or launch.placement=disjoint",
            )  # fmt: skip


def _ray(config: Config) -> None:
    launch = config.launch
    if launch.ray_address is not None and launch.launcher != "ray":
        raise ConfigError(
            "launch.ray_address", launch.ray_address, f"launch.launcher: {launch.launcher} starts no process there",
            "Set launch.launcher=ray (--launcher ray)",
        )  # fmt: skip


def _run(config: Config) -> None:
    if config.launch.placement != "disjoint" and config.launch.launcher == "ray":
        raise ConfigError(
            "launch.placement", config.launch.placement, "on Ray each pool has places of its own",
            "Use disjoint, or launch.launcher=local",
        )  # fmt: skip
    if not re.fullmatch(r"\w[\w.\-]{0,99}", config.name):
        raise ConfigError("name", config.name, "it names a folder", "Use up to 100 letters, digits, '.', '_' and '-'")


CHECKS: list[Callable[[Config], None]] = [
    _batch, _groups, _segments, _addresses, _learning, _sampling, _data, _environment, _rewards, _parallel, _lora,
    _attention, _deterministic, _emulation, _evaluation, _weights, _ray, _run,
]  # fmt: skip


def notes(config: Config) -> list[str]:
    """What a user should know about a valid configuration before it runs."""
    out: list[str] = []
    correction = config.staleness.correction
    anchored = correction.proximal in ("loglinear", "behaviour")
    if config.algorithm.loss == "ppo" and config.learner.epochs == 1 and not anchored:
        out.append("one optimizer step per batch: the PPO ratio is 1, so clipping does nothing; the correction is all")
    ignored = correction.name == "none" and form(config.algorithm, correction) != "coupled"
    if ignored and config.algorithm.advantage != "vtrace" and config.staleness.max_staleness > 0:
        out.append("staleness.correction.name: none ignores the difference between the sampling and trained policy")
    if config.buffer.group_size == 1 and config.algorithm.advantage == "rloo":
        out.append("groups of one: the advantage of rloo is the reward itself, without a baseline")
    groups = config.buffer.groups
    if groups.policy == "deadline_versions" and groups.deadline_versions > config.staleness.max_staleness:
        out.append(
            f"groups are cut {groups.deadline_versions} steps after their issue, but tokens older than "
            f"{config.staleness.max_staleness} are not trained on: early members may have gone stale by then"
        )
    slots = config.rollout.workers * config.rollout.slots
    window = (config.staleness.max_staleness + 1) * config.buffer.batch_size + config.buffer.slack
    if slots > window:
        out.append(f"{slots} slots, but at most {window} trajectories may be in flight: some slots stay empty")
    return out
