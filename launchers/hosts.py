"""Where processes of a run live. The supervisor sees a `Handle`; this host's is `LocalProcess`, `ray_host` has another.

Every process leads a process group of its own, so that a terminal's Ctrl-C reaches only the supervisor, and dies with
its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from async_rl.config import Config
from async_rl.process import LOOPBACK
from async_rl.weights.transport import SHM
from launchers import devices
from launchers.devices import Place

KILL_S = 5.0
"""Longest time for a killed process to be gone."""


@dataclass(frozen=True)
class Spec:
    """A process to start: `python -m module --run folder --rank rank` with its output in the folder's `logs/`.

    `name` is its role and number, as in its log.
    """

    folder: Path
    role: str
    module: str
    rank: int
    place: Place | None = None
    """None: the host chooses one."""

    @property
    def name(self) -> str:
        return f"{self.role}{self.rank}"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"


class Handle(Protocol):
    """A process that was started."""

    @property
    def identity(self) -> str:
        """What it is called at the buffer, before the part that no one else can know: `worker0#1234`."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        ...

    def signal(self, sig: signal.Signals) -> None: ...

    def kill(self) -> None:
        """SIGKILL to it and what it has started."""
        ...

    def prepare_end(self) -> None:
        """Notes what it will leave behind; before the signal that ends it."""
        ...

    def finish(self, timeout_s: float) -> None:
        """Waits for its end, forces it after `timeout_s`, and removes what it left."""
        ...


class Host(Protocol):
    """Starts processes."""

    def configured(self, config: Config, folder: Path) -> Config:
        """The configuration as the processes are to see it."""
        ...

    def start(self, spec: Spec) -> Handle: ...

    def most_workers(self) -> int | None:
        """How large the pool of workers may grow; None if nothing is known against any size."""
        ...

    def release(self, name: str) -> None:
        """The process of this name has left and will not be started again."""
        ...

    def close(self) -> None: ...


class LocalHost:
    """This machine."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def configured(self, config: Config, folder: Path) -> Config:
        return config

    def start(self, spec: Spec) -> Handle:
        return LocalProcess(replace(spec, place=spec.place or self._place(spec)))

    def _place(self, spec: Spec) -> Place:
        """As if the pool had been as large from the start as it is now."""
        if spec.role not in ("worker", "learner"):
            return Place()
        rollout = self._config.rollout
        rollout = msgspec.structs.replace(
            rollout, workers=max(rollout.workers, spec.rank + 1 if spec.role == "worker" else 0)
        )
        config = msgspec.structs.replace(self._config, rollout=rollout)
        workers, ranks = devices.places(config, devices.here(), devices.gpus_here())
        return (workers if spec.role == "worker" else ranks)[spec.rank]

    def most_workers(self) -> int | None:
        return devices.most_workers(self._config, devices.gpus_here())

    def release(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


class LocalProcess:
    """A child of this process. `address` is where it listens if others are to reach it."""

    def __init__(self, spec: Spec, address: str = LOOPBACK) -> None:
        self._name, self._begun = spec.name, time.time()
        self._family: list[psutil.Process] = []
        self._memory: set[Path] = set()
        command = [sys.executable, "-u", "-m", spec.module, "--run", str(spec.folder), "--rank", str(spec.rank)]
        command += ["--parent", str(os.getpid()), "--address", address]
        place = spec.place or Place()
        if place.cores:
            command += ["--cores", ",".join(map(str, place.cores))]
        spec.log.parent.mkdir(exist_ok=True)
        with spec.log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(place),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def identity(self) -> str:
        return f"{self._name}#{self.pid}"

    def poll(self) -> int | None:
        return self._process.poll()

    def signal(self, sig: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(sig)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def prepare_end(self) -> None:
        self._family = _family(self.pid)
        self._memory = {path for process in self._family for path in _shared_memory(process, self._begun)}

    def finish(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        # Engines that are killed leave the shared memory of their own processes.
        for path in self._memory:
            path.unlink(missing_ok=True)


def _environment(place: Place) -> dict[str, str]:
    threads = str(len(place.cores) or os.cpu_count() or 1)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    return environment


def _family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _shared_memory(process: psutil.Process, since: float) -> set[Path]:
    """Shared memory and semaphores of Python's multiprocessing that a process has mapped, made after `since`."""
    try:
        mapped = {Path(mapping.path) for mapping in process.memory_maps()}
        ours = {path for path in mapped if path.parent == SHM and path.name.startswith(("psm_", "sem."))}
        return {path for path in ours if path.stat().st_ctime >= since}
    except (psutil.Error, FileNotFoundError):
        return set()
