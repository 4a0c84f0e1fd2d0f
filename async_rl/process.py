"""What every process of a run does first and last: find its run folder, pin itself, die with its parent, tell why.

A process that fails writes `errors/NAME.txt` before it exits, so that the supervisor can print the first cause.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import Config, load
from async_rl.errors import ConfigError, DataError, EngineStuck, WeightsLate
from buffers.client import Client, read_endpoint
from buffers.errors import BufferGone, JournalError, KeysError
from buffers.messages import Role

_PR_SET_PDEATHSIG = 1
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Run:
    """A run as one of its processes sees it. `rank` counts the processes of one role; `address` is that of this host,
    as the others reach it."""

    folder: Path
    config: Config
    role: str
    rank: int
    address: str

    @property
    def name(self) -> str:
        return f"{self.role}{self.rank}"


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, however it ends; ends at once if that has happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start(role: str) -> Run:
    """Reads `--run DIR [--rank R] [--cores 0,1]` and sets this process up."""
    parser = argparse.ArgumentParser(description=f"The {role} process of a run; started by `async-rl train`.")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--rank", type=int, default=0, help="which one of its role")
    parser.add_argument("--cores", default="", help="CPU cores to stay on, comma-separated")
    parser.add_argument("--address", default=LOOPBACK, help="of this host, for processes on others")
    parser.add_argument("--parent", type=int, required=True, help="process to end with")
    args = parser.parse_args()
    die_with_parent(args.parent)
    faulthandler.register(signal.SIGUSR2)  # `kill -USR2`: where every thread is, into the log
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    run = Run(args.run, load(args.run / "config.yaml"), role, args.rank, args.address)
    _current.append(run)
    return run


def bound(address: str, run: Run) -> str:
    """An address to listen on, with that of this host in the place of `{host}`."""
    return address.replace("{host}", run.address)


def client(folder: Path, config: Config, name: str, role: Role) -> Client:
    """A connection to the buffer of the run in `folder`."""
    return Client(read_endpoint(folder / "buffer.endpoint"), name, role, keys(config))


def keys(config: Config) -> Path | None:
    """The folder of the keys that connections to the buffer need, if they need any."""
    return Path(config.buffer.security.keys) if config.buffer.security.keys else None


_current: list[Run] = []


def guard(main: Callable[[], None]) -> None:
    """Runs `main`; a failure is recorded where the supervisor looks, printed, and ends the process with 1."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (EngineStuck, WeightsLate) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(os.EX_TEMPFAIL)
    except Exception as error:
        text = (
            f"error: {error}"
            if isinstance(error, ConfigError | DataError | JournalError | KeysError | BufferGone)
            else traceback.format_exc()
        )
        print(text, file=sys.stderr, flush=True)
        if _current:
            errors = _current[0].folder / "errors"
            errors.mkdir(exist_ok=True)
            (errors / f"{_current[0].name}.txt").write_text(text)
        sys.stderr.flush()
        # Not sys.exit: an engine's threads may never join.
        os._exit(1)
