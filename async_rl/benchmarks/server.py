"""The buffer in a process of its own, as in a run; `ServerProcess` starts, watches and kills it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import msgspec
import psutil

from async_rl.process import die_with_parent
from buffers.client import read_endpoint
from buffers.config import BufferConfig
from buffers.records import Settings
from buffers.server import serve

START_S = 30.0
STOP_S = 10.0
IN_MEMORY = ("tmpfs", "ramfs")


class ServerProcess:
    """A buffer and what the kernel knows of it. `kill` is `kill -9`; `start` after it is what the supervisor does.

    What it prints goes to `server.log` in its folder, beside the journal.
    """

    def __init__(self, folder: Path, settings: Settings, config: BufferConfig) -> None:
        self.folder = folder
        self._arguments = [str(folder), _text(settings), _text(config), str(os.getpid())]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "async_rl.benchmarks.server", *self._arguments]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        deadline = monotonic() + START_S
        while not (self.folder / "buffer.endpoint").exists():
            self._check()
            if monotonic() > deadline:
                raise TimeoutError(f"the buffer process does not listen after {START_S:g} s")
            sleep(0.01)

    def _check(self) -> None:
        if self.process.poll() is not None:
            log = (self.folder / "server.log").read_text()
            raise RuntimeError(f"the buffer process ended with {self.process.returncode}:\n{log}")

    @property
    def endpoint(self) -> str:
        return read_endpoint(self.folder / "buffer.endpoint")

    def kill(self) -> None:
        self._check()
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def cpu_s(self) -> float:
        """Processor seconds used so far, all threads."""
        times = self._seen().cpu_times()
        return times.user + times.system

    def bytes_written(self) -> int:
        """Bytes given to `write` so far: the journal, and 9 bytes a wake-up of a thread. Sockets do not count."""
        return self._seen().io_counters().write_chars

    def rss(self) -> int:
        """Resident memory in bytes."""
        return self._seen().memory_info().rss

    def _seen(self) -> psutil.Process:
        return psutil.Process(self.process.pid)


def _text(struct: msgspec.Struct) -> str:
    return msgspec.json.encode(struct).decode()


@contextmanager
def serving(settings: Settings) -> Iterator[ServerProcess]:
    """A buffer with durability `batch` and its journal in a temporary folder on a disk."""
    with tempfile.TemporaryDirectory(prefix="async-rl-bench-", dir=disk()) as name:
        server = ServerProcess(Path(name), settings, BufferConfig(durability="batch"))
        try:
            yield server
        finally:
            server.close()


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
    folder, settings, config, parent = sys.argv[1:]
    die_with_parent(int(parent))
    serve(msgspec.json.decode(settings, type=Settings), msgspec.json.decode(config, type=BufferConfig), Path(folder))


if __name__ == "__main__":
    main()
