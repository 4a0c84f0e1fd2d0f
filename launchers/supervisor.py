"""The life of a run's processes: start, watch, end. A death is never silent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from launchers.devices import Place
from launchers.errors import ComponentDied

ANYWHERE = Place()
RESTARTED = ("buffer", "worker")
SHM = Path("/dev/shm")
KILL_S = 5.0
"""Longest time between the decision to end everything and its end."""


@dataclass(frozen=True)
class Child:
    """A process of the run. `name` is its role and number, as in its log."""

    name: str
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    module: str
    rank: int
    place: Place


class Supervisor:
    """Starts each process in a group of its own, so that a terminal's Ctrl-C reaches only the supervisor.

    A buffer or worker that a signal has killed is started again, each at most `max_restarts` times between two calls of
    `progress`.
    """

    def __init__(self, folder: Path, max_restarts: int = 0, restarted: tuple[str, ...] = RESTARTED) -> None:
        self.folder = folder
        self._restarted = restarted
        self._max_restarts = max_restarts
        self._restarts: Counter[str] = Counter()
        self.children: list[Child] = []
        self._begun = time.time()
        (folder / "logs").mkdir(exist_ok=True)

    def start(self, role: str, module: str, rank: int, place: Place = ANYWHERE) -> Child:
        """Starts `python -m module --run FOLDER` with its output in `logs/`."""
        name = f"{role}{rank}"
        log = self.folder / "logs" / f"{name}.log"
        command = [sys.executable, "-u", "-m", module, "--run", str(self.folder), "--rank", str(rank)]
        command += ["--parent", str(os.getpid())]
        if place.cores:
            command += ["--cores", ",".join(map(str, place.cores))]
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(place),
                start_new_session=True,
            )
        child = Child(name, role, process, log, module, rank, place)
        self.children.append(child)
        return child

    def check(self) -> list[Child]:
        """Starts again what can be and returns what had died. Raises `ComponentDied` if another process has ended with
        an error, or at all where it should not."""
        again: list[Child] = []
        for child in list(self.children):
            code = child.process.poll()
            if code is None or (code == 0 and child.role not in RESTARTED):
                continue
            if code < 0 and child.role in self._restarted and self._restarts[child.name] < self._max_restarts:
                self._restart(child)
                again.append(child)
                continue
            raise ComponentDied(f"{child.name} {how_it_ended(code)}{self._first_error(child)}")
        return again

    def progress(self) -> None:
        """The run has come further: what has died so far did not stop it."""
        self._restarts.clear()

    def _restart(self, child: Child) -> None:
        _kill_group(child.process.pid)  # an engine's own processes
        self.children.remove(child)
        self._restarts[child.name] += 1
        with child.log.open("a") as log:
            print(f"--- {child.name} was killed by a signal and is started again", file=log)
        self.start(child.role, child.module, child.rank, child.place)

    def forget(self, role: str) -> None:
        """Drops processes that have ended well; their ids may be given to others."""
        self.children = [child for child in self.children if child.role != role]

    def done(self, role: str) -> bool:
        """All processes of a role have ended well."""
        return all(child.process.poll() == 0 for child in self.children if child.role == role)

    def signal(self, role: str, sig: signal.Signals) -> None:
        for child in self.children:
            if child.role == role and child.process.poll() is None:
                child.process.send_signal(sig)

    def end(self) -> None:
        """Ends everything within `KILL_S`: SIGTERM to all, then SIGKILL to whole groups and to what they left."""
        living = [child for child in self.children if child.process.poll() is None]
        family = [process for child in living for process in _family(child.process.pid)]
        memory = {path for process in family for path in _shared_memory(process, self._begun)}
        for child in living:
            child.process.terminate()
        deadline = time.monotonic() + KILL_S / 2
        for child in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.05, deadline - time.monotonic()))
            _kill_group(child.process.pid)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in living:
            child.process.wait(KILL_S)
        # Engines that are killed leave the shared memory of their own processes.
        for path in memory:
            path.unlink(missing_ok=True)

    def _first_error(self, died: Child) -> str:
        """The oldest recorded error of any process, else the end of the dead one's log."""
        found = [path for path in (self.folder / "errors").glob("*.txt") if path.stat().st_size]  # empty: a full disk
        errors = sorted(found, key=lambda path: path.stat().st_mtime)
        if errors:
            return f"; the first error, of {errors[0].stem}:\n{errors[0].read_text().rstrip()}"
        tail = died.log.read_text(errors="replace").splitlines()[-15:]
        return f"; the end of {died.log}:\n" + "\n".join(tail)


def how_it_ended(code: int) -> str:
    """`was killed by SIGKILL` or `ended with exit code 1`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


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


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
