"""Which way weights go, and what their memory is called. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.config import Config

SHM = Path("/dev/shm")
"""Where a host's processes share memory and locks."""


def served(config: Config) -> bool:
    """Whether workers ask the learner for weights, and do not find them on its host."""
    return config.weights.transport in ("zmq", "nccl")


def on_devices(config: Config) -> bool:
    """Whether what is published stays in the memory of GPUs."""
    return config.weights.transport in ("nccl", "ipc")


def device_name(folder: Path) -> str:
    """Name of the baton of this process's devices, which the pools of a colocated run share."""
    return f"{segment_name(folder)}-device-{os.environ.get('CUDA_VISIBLE_DEVICES') or 'cpu'}"


def segment_name(folder: Path) -> str:
    """Name of a run's shared memory: unique on this host while the folder exists. The supervisor removes it."""
    return f"{folder.name}-{folder.stat().st_ino}"
