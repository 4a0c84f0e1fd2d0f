"""The rollout pool while a run goes on: what was asked for, and what to do about it.

`async-rl scale RUN --rollout-workers N` leaves a file in the run's folder, which its supervisor reads once a second.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = "scale.json"


class Wanted(Struct, frozen=True):
    """Sizes of pools."""

    rollout_workers: int


def ask(folder: Path, workers: int) -> None:
    """Asks the supervisor of the run in `folder` for so many rollout workers."""
    partial = folder / f"{FILE}.partial"
    partial.write_bytes(msgspec.json.encode(Wanted(workers)))
    partial.rename(folder / FILE)


def asked(folder: Path) -> int | None:
    """How many rollout workers were asked for since the start; None if nobody has."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Wanted).rollout_workers
    except FileNotFoundError:
        return None


def changes(staying: Collection[int], taken: Collection[int], wanted: int) -> tuple[list[int], list[int]]:
    """Numbers of the workers to start, and of those to dismiss, for a pool of `wanted`.

    `staying`: those that are there, or are about to be started again; `taken` has those that are still leaving too.
    """
    free = (number for number in range(wanted + len(taken)) if number not in taken)
    start = [next(free) for _ in range(wanted - len(staying))]
    return start, sorted(staying)[wanted:]
