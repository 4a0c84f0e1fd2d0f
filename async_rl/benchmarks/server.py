"""The buffer in a process of its own, as in a run: `python -m async_rl.benchmarks.server FOLDER SETTINGS`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import msgspec
import psutil

from async_rl.process import die_with_parent
from buffers.config import BufferConfig
from buffers.records import Settings
from buffers.server import serve

START_S = 30.0
STOP_S = 10.0
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Serving:
    """A running buffer process and what the kernel knows of it."""

    endpoint: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Processor seconds used so far, all threads."""
        times = self.process.cpu_times()
        return times.user + times.system

    def bytes_written(self) -> int:
        """Bytes given to `write` so far: the journal, and 9 bytes a wake-up of a thread. Sockets do not count."""
        return self.process.io_counters().write_chars


@contextmanager
def serving(settings: Settings) -> Iterator[Serving]:
    """A buffer with durability `batch` and its journal in a temporary folder on a disk."""
    with tempfile.TemporaryDirectory(prefix="async-rl-bench-", dir=disk()) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "async_rl.benchmarks.server", name, msgspec.json.encode(settings).decode()]
        process = subprocess.Popen([*command, str(os.getpid())])
        try:
            yield Serving(_endpoint(folder, process), psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _endpoint(folder: Path, process: subprocess.Popen[bytes]) -> str:
    file = folder / "buffer.endpoint"
    deadline = monotonic() + START_S
    while not file.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the buffer process ended with {process.returncode} before it listened")
        if monotonic() > deadline:
            raise TimeoutError(f"the buffer process does not listen after {START_S:g} s")
        sleep(0.01)
    return file.read_text().strip()


def disk() -> str:
    """A folder for temporary files that is not in memory: the system's own, or else the working directory."""
    for folder in (tempfile.gettempdir(), os.getcwd()):
        if _filesystem(Path(folder).resolve()) not in IN_MEMORY:
            return folder
    raise RuntimeError("temporary files and the working directory are both in memory; set TMPDIR to a folder on a disk")


def _filesystem(folder: Path) -> str:
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    for parent in (folder, *folder.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return ""


def main() -> None:
    folder, settings, parent = sys.argv[1:]
    die_with_parent(int(parent))
    serve(msgspec.json.decode(settings, type=Settings), BufferConfig(durability="batch"), Path(folder))


if __name__ == "__main__":
    main()
