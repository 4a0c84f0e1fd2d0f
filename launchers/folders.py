"""Run folders: new ones, old ones, the lock that keeps a run to one supervisor, what killed runs leave in memory."""

from __future__ import annotations

import contextlib
import fcntl
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.weights.transport import SHM, segment_name

LOCK = "lock"


def new(config: Config) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on where that exists."""
    base = Path(config.folder) / config.name
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def of_name(config: Config) -> list[Path]:
    """The folders that `new` has made for this configuration, oldest first."""
    base = Path(config.folder) / config.name
    numbered = {
        int(path.name.removeprefix(f"{base.name}-")): path
        for path in base.parent.glob(f"{glob.escape(base.name)}-*")
        if path.name.removeprefix(f"{base.name}-").isdecimal()
    }
    every = [base, *(numbered[number] for number in sorted(numbered))]
    return [path for path in every if (path / "config.yaml").is_file()]


def old(run: str, runs: str) -> Path:
    """The folder of a run to resume or look at, given as a path or a name."""
    for folder in (Path(run), Path(runs) / run):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("RUN", run, "there is no run of that name", f"Runs are folders with a config.yaml, in {runs}/")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the run's lock for the length of the block; two supervisors of one run would destroy it.

    Shared memory of the run is removed at the end, and at the start that of runs whose supervisor was killed. What may
    be removed is known by a lock beside the memory itself: whoever cannot see a run's folder cannot judge it by that.
    """
    with (folder / LOCK).open("a") as lock:
        if not _locked(lock):
            raise ConfigError("RUN", str(folder), "this run is going on", "Wait for its end, or stop it")
        sweep()
        owner = SHM / f"async-rl-{segment_name(folder)}.owner"
        with owner.open("a") as mark:
            _locked(mark)
            try:
                yield
            finally:
                _remove(owner)


def going_on(folder: Path) -> bool:
    """Whether a supervisor has the run."""
    with (folder / LOCK).open("a") as lock:
        return not _locked(lock)


def _locked(file: IO[str]) -> bool:
    """Takes an exclusive lock that ends with this process; False if another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def sweep() -> None:
    """Removes the shared memory of runs that nobody supervises any more; leaves what belongs to other users."""
    for owner in SHM.glob("async-rl-*.owner"):
        with contextlib.suppress(FileNotFoundError, PermissionError), owner.open("a") as mark:
            if _locked(mark):
                _remove(owner)


def _remove(owner: Path) -> None:
    for pattern in ("-[0-9]", "-worker[0-9]*", "-device-*"):
        for path in owner.parent.glob(f"{glob.escape(owner.stem)}{pattern}"):
            path.unlink(missing_ok=True)
    owner.unlink(missing_ok=True)
