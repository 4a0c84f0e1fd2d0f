"""Where a run stands: its newest checkpoint and its lineage. Torch-free, so that every process can ask."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from async_rl.errors import AsyncRLError
from staleness.versions import Lineage

LATEST = "latest"
STATE = "state.json"
LINEAGE = "lineage.json"


class State(Struct, frozen=True):
    """`cursor` counts the prompts that have ended, in order of issue, since the run was first started; `fingerprint` is
    that of the training rows."""

    step: int
    cursor: int
    fingerprint: str


def latest(checkpoints: Path) -> tuple[Path, State] | None:
    """The newest complete checkpoint, or None if none was ever made.

    If the one that `latest` names is damaged, the newest other complete one; an error if there is none.
    """
    pointer = checkpoints / LATEST
    if not pointer.is_file():
        return None
    named = checkpoints / pointer.read_text().strip()
    others = sorted(checkpoints.glob("step-????????"), reverse=True)
    for path in (named, *others):
        try:
            return path, msgspec.json.decode((path / STATE).read_bytes(), type=State)
        except (OSError, msgspec.DecodeError):
            continue
    raise AsyncRLError(f"{pointer} names {named.name}, but no checkpoint in {checkpoints} is complete")


def lineage(folder: Path) -> Lineage:
    """The lineage of the learner that runs now; `restored` has extended it if it restores a checkpoint."""
    path = folder / LINEAGE
    return Lineage(tuple(msgspec.json.decode(path.read_bytes(), type=list[int]))) if path.is_file() else Lineage()


def restored(folder: Path, step: int) -> None:
    """Notes that a new incarnation starts from the checkpoint of `step`, whether or not it ever saves one itself."""
    partial = folder / f"{LINEAGE}.partial"
    partial.write_bytes(msgspec.json.encode([*lineage(folder).forks, step]))
    partial.rename(folder / LINEAGE)
