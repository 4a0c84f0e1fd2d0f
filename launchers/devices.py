"""Which CPU cores or GPUs each process of a run gets. Pure, but for asking what there is."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_rl.config import Config
from async_rl.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """CPU cores to stay on (none: any) and GPUs to see."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


def gpus_here() -> list[str]:
    """Names of the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them; found without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(folder.iterdir())))] if folder.is_dir() else []


def memory_each(config: Config) -> int | None:
    """Bytes for one learner rank: of a GPU, or its part of what is free on this host; None if it cannot be known."""
    gpus = gpus_here()
    if config.launch.device == "cpu" or not gpus:
        return psutil.virtual_memory().available // config.learner.ranks
    asked = ["nvidia-smi", f"--id={gpus[0]}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def check(config: Config, gpus: int) -> None:
    """Refuses a request for GPUs that are not there, what only they can do, and pools that would have to share them."""
    check_kinds(config, gpus)
    pools = config.rollout.workers * config.rollout.tensor_parallel, config.learner.ranks
    wanted = sum(pools) if config.launch.placement == "disjoint" else max(pools)
    if (config.launch.device == "cuda" or (config.launch.device == "auto" and gpus)) and gpus < wanted:
        raise ConfigError(
            "launch.device", config.launch.device,
            f"{config.launch.placement} pools of {config.rollout.workers} rollout workers and "
            f"{config.learner.ranks} learner ranks need "
            f"{wanted} GPUs, and {gpus} are available",
            "Use fewer, or launch.device: cpu",
        )  # fmt: skip


def check_kinds(config: Config, gpus: int) -> None:
    """Refuses what only GPUs can do where there are none."""
    if config.launch.device == "cpu" or not gpus:
        for path, value, why in (
            ("learner.attention", config.learner.attention == "flex", "flex attention has no backward pass on a CPU"),
            ("learner.offload", config.learner.offload, "everything is in the host's memory as it is"),
        ):
            if value:
                raise ConfigError(path, getattr(config.learner, path.split(".")[1]), why, "Leave it out without a GPU")
        for path, value in (
            ("weights.transport", config.weights.transport in ("nccl", "ipc")),
            ("rollout.tensor_parallel", config.rollout.tensor_parallel > 1),
        ):
            if value:
                section, field = path.split(".")
                raise ConfigError(
                    path, getattr(getattr(config, section), field), "it needs GPUs, and there are none here",
                    "Leave it out",
                )  # fmt: skip


def most_workers(config: Config, gpus: list[str]) -> int | None:
    """How large the pool of workers may grow here; None without GPUs, where they share cores."""
    if config.launch.device == "cpu" or not gpus:
        return None
    if config.launch.placement != "disjoint":
        return len(gpus)
    return (len(gpus) - config.learner.ranks) // config.rollout.tensor_parallel


def places(config: Config, cores: list[int], gpus: list[str]) -> tuple[list[Place], list[Place]]:
    """(workers, ranks): a GPU each where there are enough, else disjoint halves of the cores, shared out evenly. Pools
    that are not disjoint begin at the same GPU, or have all cores."""
    workers, ranks = config.rollout.workers, config.learner.ranks
    if config.launch.placement != "disjoint":
        if config.launch.device != "cpu" and len(gpus) >= max(workers, ranks):
            every = [Place(gpus=(gpu,)) for gpu in gpus]
            return every[:workers], every[:ranks]
        everywhere = Place(tuple(cores)) if config.launch.pin_cores else Place()
        return [everywhere] * workers, [everywhere] * ranks
    each = config.rollout.tensor_parallel
    if config.launch.device != "cpu" and len(gpus) >= workers * each + ranks:
        # Ranks first: a pool of workers may grow.
        own, rest = gpus[:ranks], gpus[ranks:]
        return [Place(gpus=tuple(rest[i * each :][:each])) for i in range(workers)], [Place(gpus=(gpu,)) for gpu in own]
    if not config.launch.pin_cores or len(cores) < 2:
        return [Place()] * workers, [Place()] * ranks
    half = max(1, len(cores) // 2)
    return _spread(cores[:half], workers), _spread(cores[half:], ranks)


def _spread(cores: list[int], members: int) -> list[Place]:
    """Equal shares; where there are more members than cores, several share one."""
    if members >= len(cores):
        return [Place((cores[i % len(cores)],)) for i in range(members)]
    share = len(cores) // members
    return [Place(tuple(cores[i * share : (i + 1) * share])) for i in range(members)]


def here() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
