"""A buffer process that tests kill and start again: `python -m tests.processes.server FOLDER SETTINGS CONFIG`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from async_rl.process import die_with_parent
from buffers.config import BufferConfig
from buffers.records import Settings
from buffers.server import serve


class ServerProcess:
    """`kill` is `kill -9`; `start` after it is what the supervisor does."""

    def __init__(self, folder: Path, settings: Settings, config: BufferConfig) -> None:
        self.folder = folder
        self._arguments = [
            str(folder),
            msgspec.json.encode(settings).decode(),
            msgspec.json.encode(config).decode(),
            str(os.getpid()),
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        log = (self.folder / "server.log").open("ab")
        command = [sys.executable, "-m", "tests.processes.server", *self._arguments]
        self.process = subprocess.Popen(command, stderr=log)
        file, deadline = self.folder / "buffer.endpoint", time.monotonic() + 30
        while not file.exists():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.01)

    @property
    def endpoint(self) -> str:
        return (self.folder / "buffer.endpoint").read_text().strip()

    def kill(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def rss(self) -> int:
        """Resident memory in bytes."""
        assert self.process is not None
        return psutil.Process(self.process.pid).memory_info().rss

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(20)


def main() -> None:
    folder, settings, config, parent = sys.argv[1:]
    die_with_parent(int(parent))
    serve(msgspec.json.decode(settings, type=Settings), msgspec.json.decode(config, type=BufferConfig), Path(folder))


if __name__ == "__main__":
    main()
