"""The whole configuration: one typed tree, read from YAML, overridden from the command line, checked before use.

Every package declares its own part; this module composes them and checks what spans several. Nothing here imports
torch, so a wrong configuration is refused at once.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import yaml
from msgspec import Meta, Struct

from async_rl.algorithms import presets
from async_rl.algorithms.config import COMPARING, AlgorithmConfig, conflict, form
from async_rl.environments.config import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.rewards.config import RewardConfig
from buffers import keys
from buffers.config import BufferConfig
from buffers.errors import KeysError
from buffers.pool import MAX_ROWS
from staleness import bounds
from staleness.config import StalenessConfig

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0, lt=1e12)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The policy."""

    path: str = "smollm2-135m"
    """A Hugging Face folder, a hub name, or the name of a model that `async-rl model fetch` has put in the cache."""


class TaskConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A reasoning-gym task."""

    name: str
    """Name in reasoning-gym, for example `basic_arithmetic`."""
    size: PositiveInt = 1000
    """Number of prompts to make."""
    params: dict[str, Any] = {}
    """Parameters of the task, as reasoning-gym documents them."""


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The prompts: either `path` or `task`."""

    path: str | None = None
    """`.jsonl`, `.json`, `.parquet` or a folder written by datasets' `save_to_disk`."""
    task: TaskConfig | None = None
    """A reasoning-gym task instead of a file."""
    prompt_column: str = "prompt"
    """Column with the user's text (or a list of chat messages)."""
    system_prompt: str | None = None
    """Put before every prompt as the system message."""
    chat_template: bool = True
    """Apply the tokenizer's chat template; false takes the text as it is."""
    holdout: Annotated[int, Meta(ge=0)] = 0
    """Prompts held out for `async-rl eval`, chosen by `seed`, never trained on."""
    shuffle: bool = True
    """A new order each epoch, by `seed`."""
    difficulty_column: str | None = None
    """Column with a number: prompts come in its rising order, equal ones as the seed has them (a curriculum)."""
    curriculum_epochs: PositiveInt = 1
    """Epochs for which `difficulty_column` decides; then the order is that of `shuffle`."""
    seed: int = 0
    """Seed of the hold-out, the order of prompts and a task's instances."""
    wrap: bool = False
    """Allow a data set smaller than one batch, so that a batch holds a prompt more than once."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens; a longer one is refused before the start."""


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Generation."""

    workers: PositiveInt = 1
    """Rollout worker processes."""
    engine: Literal["auto", "vllm", "torch"] = "auto"
    """`auto` takes vLLM if it is installed."""
    slots: PositiveInt = 64
    """Trajectories that one worker generates at once."""
    max_tokens: PositiveInt = 16
    """Longest response in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Behaviour log-probs are under it. Greedy decoding is for evaluation only."""
    chunk_tokens: PositiveInt = 16
    """A trajectory's tokens are sent when this many are waiting, when `flush_ms` have passed, and at its end."""
    flush_ms: PositiveFloat = 100.0
    """Age of the oldest waiting token at which everything is sent, in milliseconds; looked at four times as often."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type of the engine."""
    kv_cache_gib: PositiveInt = 1
    """KV cache of a vLLM engine on a CPU, in GiB."""


class LearnerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Training."""

    ranks: PositiveInt = 1
    """FSDP2 ranks."""
    learning_rate: PositiveFloat = 1e-6
    """AdamW learning rate after warm-up."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps over which the learning rate grows linearly; the first has 1 / (warmup_steps + 1) of it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW moment decay rates."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """AdamW weight decay."""
    clip_norm: PositiveFloat = 1.0
    """Largest global gradient norm."""
    epochs: PositiveInt = 1
    """Optimizer steps per batch. More than one needs `staleness.correction.proximal: recompute`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type; master weights and gradients are always float32."""
    micro_batch_tokens: PositiveInt = 4096
    """Packed tokens per forward pass; a longer group makes a longer pass."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints; there is always one at the end."""


class WeightsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How weights reach the engines."""

    transport: Literal["shm"] = "shm"
    """`shm`: POSIX shared memory of one host."""
    probe_every: PositiveInt = 10
    """Versions between proofs of receipt by probe log-probs; the first two are always proven."""


class TrackingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where metrics go beside the run folder."""

    mlflow: bool = True
    """Record the run in MLflow."""
    uri: str | None = None
    """MLflow tracking URI; the default is a SQLite file beside the runs."""
    experiment: str = "async-rl"
    """MLflow experiment."""


class LaunchConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Processes and devices."""

    launcher: Literal["local"] = "local"
    """`local`: processes on this machine."""
    placement: Literal["disjoint", "colocated"] = "disjoint"
    """Rollout and learner pools on their own devices (cores on a CPU), or sharing them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs if there are any."""
    pin_cores: bool = True
    """Give each pool its own CPU cores."""
    startup_s: PositiveFloat = 600.0
    """Longest time for everything to be ready."""
    max_restarts: Annotated[int, Meta(ge=0)] = 3
    """Times that the buffer, or one rollout worker, is started again after a signal has killed it, without a step
    trained in between; then the run fails. An error of its own fails the run at once."""
    stall_s: PositiveFloat = 600.0
    """Longest time in which neither a token is generated nor a batch trained, before the run fails."""
    shutdown_s: PositiveFloat = 30.0
    """Longest time for an orderly end after the first Ctrl-C."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A run."""

    name: str = "run"
    """Name of the run's folder; a number is added if it exists."""
    folder: str = "runs"
    """Where run folders are made."""
    steps: PositiveInt = 100
    """Learner steps."""
    seed: int = 0
    """Seed of sampling and of the order of everything."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    staleness: StalenessConfig = StalenessConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    tracking: TrackingConfig = TrackingConfig()
    launch: LaunchConfig = LaunchConfig()


PRESETS = Path(__file__).resolve().parent.parent / "configs"


def find(name: str) -> Path:
    """The file of a configuration given as a path or as the name of a shipped preset."""
    for candidate in (Path(name), PRESETS / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    presets = ", ".join(sorted(path.stem for path in PRESETS.glob("*.yaml")))
    raise ConfigError("CONFIG", name, "there is no such file or preset", f"Presets: {presets}")


def load(path: Path, overrides: Mapping[str, object] | None = None) -> Config:
    """Reads a YAML file, applies `a.b` → value overrides, and checks the result."""
    try:
        tree = _yaml(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "...", f"not valid YAML: {error}", "Correct the file") from error
    if not isinstance(tree, dict):
        raise ConfigError(str(path), tree, "a configuration is a mapping", "See configs/quickstart.yaml")
    for key, value in (overrides or {}).items():
        _set(tree, key, value)
    config = parse(tree)
    check(config)
    return config


def _preset(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with what its algorithm's preset sets and it does not set itself."""
    given = dict(_leaves(tree))
    name = given.get("algorithm.preset", AlgorithmConfig().preset)
    preset = presets.PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise ConfigError(
            "algorithm.preset", name, "there is no such preset", f"Choose from {', '.join(sorted(presets.PRESETS))}"
        )
    tree = copy.deepcopy(tree)
    for path, value in presets.defaults(preset, given).items():
        _set(tree, path, value)
    return tree


def parse(tree: dict[str, Any]) -> Config:
    """The typed tree of plain YAML data; refuses unknown keys, wrong types and values out of range."""
    tree = _preset(tree)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise _explain(tree, str(error)) from None


def dump(config: Config) -> str:
    """The resolved configuration as YAML that `load` reads back."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def override(text: str) -> tuple[str, object]:
    """`a.b=value` as a pair; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError("--set", text, "not of the form a.b=value", "Write for example --set rollout.slots=32")
    try:
        return key.strip(), _yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError("--set", text, "the value is not valid YAML", "Quote it") from error


def check(config: Config) -> None:
    """Refuses combinations that cannot run; each field on its own has been checked already."""
    buffer, correction = config.buffer, config.staleness.correction
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
    if buffer.groups.dynamic_sampling and buffer.groups.policy == "split":
        raise ConfigError(
            "buffer.groups.dynamic_sampling", True,
            "whether all rewards are equal is known when the whole group has ended, and split offers members before",
            "Use buffer.groups.policy: whole",
        )  # fmt: skip
    window = bounds.capacity(max_staleness=config.staleness.max_staleness, batch=buffer.batch_size, slack=buffer.slack)
    if window > MAX_ROWS:
        raise ConfigError(
            "staleness.max_staleness", config.staleness.max_staleness,
            f"{window} trajectories might be in flight, (max_staleness + 1) * batch_size + slack; {MAX_ROWS} can be",
            "Lower it, or buffer.batch_size",
        )  # fmt: skip
    groups = buffer.groups
    if groups.min_group > buffer.group_size:
        raise ConfigError(
            "buffer.groups.min_group", groups.min_group,
            f"larger than buffer.group_size = {buffer.group_size}, so no group could ever be trained on",
            f"Use at most {buffer.group_size}",
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
    if not re.fullmatch(r"(tcp://|ipc://).+", buffer.security.bind):
        raise ConfigError(
            "buffer.security.bind", buffer.security.bind, "not an address ZeroMQ can listen on",
            "Write for example tcp://127.0.0.1:*",
        )  # fmt: skip
    try:
        keys.check(buffer.security.bind, buffer.security.keys)
    except KeysError as error:
        raise ConfigError("buffer.security", buffer.security.bind, str(error), "See `async-rl keys --help`") from error
    if config.data.system_prompt is not None and not config.data.chat_template:
        raise ConfigError(
            "data.system_prompt", config.data.system_prompt, "it is part of a chat, and data.chat_template is false",
            "Put the text into the prompts, or set data.chat_template: true",
        )  # fmt: skip
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
    if config.launch.placement == "colocated":
        raise ConfigError(
            "launch.placement", "colocated",
            "time-sharing of one set of devices by both pools is not built yet",
            "Use disjoint; on one machine the pools get their own cores",
        )  # fmt: skip
    if (config.data.path is None) == (config.data.task is None):
        raise ConfigError(
            "data.path", config.data.path, "exactly one of data.path and data.task says where prompts come from",
            "Set data.path to a file, or data.task.name to a reasoning-gym task",
        )  # fmt: skip
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
    if advantage == "remax" and groups.policy == "split":
        raise ConfigError(
            "buffer.groups.policy", groups.policy, "the member that finds out the greedy response may come last",
            "Use buffer.groups.policy: whole",
        )  # fmt: skip
    paths = {"reward.function": config.reward.function}
    paths |= {f"reward.others.{name}.function": other.function for name, other in config.reward.others.items()}
    for path, function in paths.items():
        _check_reward(path, function, config)
    clip = config.reward.clip
    if clip is not None and clip[0] >= clip[1]:
        raise ConfigError("reward.clip", clip, "the lowest sum is not below the highest", "Write [lowest, highest]")
    if "reward" in config.reward.others:
        raise ConfigError(
            "reward.others", "reward", "that is the name of reward.function itself", "Choose another name"
        )
    if not re.fullmatch(r"\w[\w.\-]{0,99}", config.name):
        raise ConfigError("name", config.name, "it names a folder", "Use up to 100 letters, digits, '.', '_' and '-'")


def _check_reward(path: str, function: str, config: Config) -> None:
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


def fields(struct: type[Struct] = Config, prefix: str = "") -> list[tuple[str, type[Any]]]:
    """Every settable path and its type."""
    out: list[tuple[str, type[Any]]] = []
    for name, kind in get_type_hints(struct).items():
        if isinstance(kind, type) and issubclass(kind, Struct):
            out += fields(kind, f"{prefix}{name}.")
        else:
            out.append((prefix + name, kind))
    return out


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-5 for text; everybody means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$"), list("+-0123456789")
)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(path, value) of everything that is set."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(tree: dict[str, Any], key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(key, value, f"{parent!r} holds {child!r}, not a section", "Correct the path")
        tree = child
    tree[leaf] = value


def _explain(tree: dict[str, Any], message: str) -> ConfigError:
    """A `ConfigError` for msgspec's message, which ends in the path ("... - at `$.rollout.workers`")."""
    what, _, at = message.partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(\w+)`", what)
    if unknown:
        field = f"{path}.{unknown[1]}".lstrip(".")
        close = difflib.get_close_matches(field, [name for name, _ in fields()], n=1, cutoff=0.5)
        remedy = f"Did you mean {close[0]}?" if close else "`async-rl train --help` lists what there is"
        return ConfigError(field, _get(tree, field), "there is no such setting", remedy)
    return ConfigError(path or "configuration", _get(tree, path), what[:1].lower() + what[1:], "Correct the value")


def _get(tree: object, path: str) -> object:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else tree
    return tree
