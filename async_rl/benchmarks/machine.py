"""Where a benchmark ran: processor, memory, versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil
from msgspec import Struct

PACKAGES = ("async-rl", "numpy", "pyzmq", "msgspec", "ray", "TransferQueue", "torch", "transformers")


class Machine(Struct, frozen=True):
    """`cores` are those this process may use; memory in GiB."""

    cores: int
    cpu: str
    memory_gib: float
    python: str
    system: str


def describe() -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def versions() -> dict[str, str | None]:
    """Of the packages that matter here; None for one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
