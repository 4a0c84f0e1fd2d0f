"""Which way weights go, and what their memory is called. Torch-free."""

from __future__ import annotations

from pathlib import Path

from async_rl.config import Config


def over_network(config: Config) -> bool:
    """Whether workers pull weights over the network, not from shared memory of the learner's host."""
    return config.weights.transport == "zmq"


def segment_name(folder: Path) -> str:
    """Name of a run's shared memory: unique on this host while the folder exists. The supervisor removes it."""
    return f"{folder.name}-{folder.stat().st_ino}"
