"""The whole configuration: one typed tree, read from YAML, overridden from the command line, checked before use.

Every package declares its own part; this module composes them, `checks` says what goes together. Nothing here imports
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
from async_rl.algorithms.config import AlgorithmConfig
from async_rl.checks import check, notes
from async_rl.emulation import EmulationConfig
from async_rl.environments.config import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.rewards.config import RewardConfig
from buffers.config import BufferConfig
from staleness.config import StalenessConfig

__all__ = ["Config", "ConfigError", "check", "dump", "fields", "find", "load", "notes", "override", "parse"]

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
    engine: Literal["auto", "vllm", "torch", "emulated"] = "auto"
    """`auto` takes vLLM if it is installed; `emulated` generates nothing, at the pace that `emulation` says."""
    slots: PositiveInt = 64
    """Trajectories that one worker generates at once."""
    max_tokens: PositiveInt = 16
    """Longest response in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Behaviour log-probs are under it. Greedy decoding is for evaluation only."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Samples from the likeliest tokens that hold this much of the probability. 1: from all."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Samples from so many of the likeliest tokens. 0: from all."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Samples from tokens at least this share as likely as the likeliest. 0: from all."""
    allow_truncated_sampling: bool = False
    """Accepts the three above, though the learner's distribution is over all tokens. The mass that the current policy
    gives to what could be sampled is then in the metrics, as `surviving_mass`."""
    chunk_tokens: PositiveInt = 16
    """A trajectory's tokens are sent when this many are waiting, when `flush_ms` have passed, and at its end."""
    flush_ms: PositiveFloat = 100.0
    """Age of the oldest waiting token at which everything is sent, in milliseconds; looked at four times as often."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share the model of one worker, by vLLM's tensor parallelism."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type of the engine."""
    engine_timeout_s: PositiveFloat = 300.0
    """Longest time in which an engine with running requests yields no token; then its worker is started again."""
    gpu_memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that a vLLM engine takes; less of it with `launch.placement: concurrent`."""
    kv_cache_gib: PositiveInt = 1
    """KV cache of a vLLM engine on a CPU, in GiB."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class ParallelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the learner's ranks share beside the batch: `ranks` is a multiple of the product of these."""

    replicas: PositiveInt = 1
    """Copies of the model (HSDP); each is sharded over ranks / replicas / tensor."""
    sequence: PositiveInt = 1
    """Ranks that share each sequence, by all-to-all over attention heads. For long sequences."""
    tensor: PositiveInt = 1
    """Ranks that share each matrix, by the model's tensor-parallel plan."""


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Low-rank adapters in place of all weights; only they are trained, published and kept in checkpoints."""

    rank: Annotated[int, Meta(ge=0)] = 0
    """Width of the adapters; 0 trains all weights."""
    alpha: PositiveFloat = 16.0
    """Their output counts alpha / rank."""
    targets: list[str] = []
    """Names of the layers that get one, as `q_proj`; all linear layers but the head if empty."""


class LearnerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Training."""

    ranks: PositiveInt = 1
    """Ranks, on a device each; FSDP2 shards parameters, gradients and moments over them."""
    parallel: ParallelConfig = ParallelConfig()
    lora: LoraConfig = LoraConfig()
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
    micro_batch_tokens: PositiveInt | Literal["auto"] = 4096
    """Packed tokens per forward pass; a longer response makes a longer pass. `auto`: as many as memory takes."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """How packed rows are attended to: `flex` computes only the blocks that are not masked; `auto` is that on GPUs."""
    fused_kernels: bool = True
    """Liger's kernels in the learner's model, on GPUs."""
    recompute: bool = False
    """Compute activations again in the backward pass in place of keeping them: a third more time, a fraction of the
    memory."""
    reshard: bool = False
    """Shard weights and gradients again after every micro-batch, not once a step: less memory, more communication."""
    offload: bool = False
    """Keep weights, gradients and moments in the host's memory while they are not needed, on GPUs."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints; there is always one at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Keep the checkpoint of the highest mean reward as well, over the steps since the one before it."""


class WeightsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How weights reach the engines."""

    transport: Literal["auto", "shm", "zmq", "nccl", "ipc"] = "auto"
    """`shm`: shared memory of one host. `zmq`: pulled over the network, in deltas where they are smaller. `nccl`: from
    GPU to GPU, for disjoint pools. `ipc`: within the GPUs that pools share. `auto` is shm for a run on one host."""
    bind: str = "tcp://{host}:*"
    """Address at which the learner serves weights over zmq, or is asked for them with nccl. `{host}`: that of its host,
    on one machine 127.0.0.1."""
    deltas: bool = True
    """Over zmq, send what changed since a version that the receiver has; exact."""
    kv_after_update: Literal["keep", "recompute"] = "keep"
    """What running requests have of their past: `keep` the KV of the weights that made it, or `recompute` it with the
    new ones before they go on."""
    probe_every: PositiveInt = 10
    """Versions between proofs of receipt by probe log-probs; the first two are always proven."""


class EvaluationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Held-out prompts (`data.holdout`), answered greedily by the rollout workers while the run trains."""

    every: Annotated[int, Meta(ge=0)] = 0
    """Steps between two evaluations, the first of the initial model. 0: none."""
    prompts: Annotated[int, Meta(ge=0)] = 0
    """Held-out prompts that are asked, the first ones; 0: all."""
    slots: PositiveInt = 8
    """Prompts that one worker answers at once, beside the trajectories that are trained on, which go first."""
    hold_s: PositiveFloat = 60.0
    """Longest time for which a worker leaves a new version aside until the prompts that it answers under the one before
    are done. What is not done then is not counted."""


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

    launcher: Literal["local", "ray"] = "local"
    """`local`: processes on this machine. `ray`: on the nodes of a Ray cluster, which share the run's folder."""
    ray_address: str | None = None
    """Address of a cluster, `auto` for the one this machine belongs to; None starts one on this machine."""
    worker_cpus: PositiveInt = 1
    """CPUs that Ray is asked for, for each rollout worker."""
    rank_cpus: PositiveInt = 1
    """The same for each learner rank."""
    worker_gpus: Annotated[float, Meta(ge=0)] | None = None
    """GPUs that Ray is asked for, for each rollout worker. None: one, if the cluster has some and `device` allows."""
    rank_gpus: Annotated[float, Meta(ge=0)] | None = None
    """The same for each learner rank."""
    worker_resources: dict[str, float] = {}
    """Other resources of Ray's, for each rollout worker: by these a pool can be bound to some nodes."""
    rank_resources: dict[str, float] = {}
    """The same for each learner rank."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment: env_vars, pip, working_dir ..."""
    placement: Literal["disjoint", "colocated", "concurrent"] = "disjoint"
    """Pools on their own devices (cores on a CPU); `colocated` on the same, in turns; `concurrent` on the same at once,
    where memory allows."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs if there are any."""
    pin_cores: bool = True
    """Give each pool its own CPU cores."""
    startup_s: PositiveFloat = 600.0
    """Longest time for everything to be ready."""
    max_restarts: Annotated[int, Meta(ge=0)] = 3
    """Times that the buffer, one rollout worker, or the learner's ranks together, are started again after a signal has
    killed them, without a step trained in between; then the run fails. So does an error of their own, at once."""
    stall_s: PositiveFloat = 600.0
    """Longest time in which neither a token is generated nor a batch trained. Then a learner that has a batch is
    started again, once; after the same time once more the run fails."""
    heartbeat_s: PositiveFloat = 60.0
    """Longest silence of the buffer; then it is started again, if it has a journal."""
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
    deterministic: bool = False
    """Final weights that are the same to the last bit, however often the run is interrupted. Slow: needs
    `staleness.max_staleness: 0` and generates token by token on the torch engine."""
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
    evaluation: EvaluationConfig = EvaluationConfig()
    launch: LaunchConfig = LaunchConfig()
    emulation: EmulationConfig = EmulationConfig()

    @property
    def engine_slots(self) -> int:
        """Requests that an engine runs at once."""
        return self.rollout.slots + (self.evaluation.slots if self.evaluation.every else 0)


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
