"""Where a run stands: its checkpoints and its lineage. Torch-free, so that every process can ask."""

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
    that of the training rows; `reward` the mean of the steps since the checkpoint before, None if no step had any."""

    step: int
    cursor: int
    fingerprint: str
    reward: float | None = None


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(checkpoints: Path) -> list[State]:
    """The states of all checkpoints that are complete, oldest first."""
    return [found for path in sorted(checkpoints.glob("step-????????")) if (found := _read(path))]


def latest(checkpoints: Path) -> tuple[Path, State] | None:
    """The newest complete checkpoint, or None if none was ever made; an error if none of those made is complete."""
    pointer = checkpoints / LATEST
    if found := complete(checkpoints):
        return checkpoints / folder_name(found[-1].step), found[-1]
    if not pointer.is_file():
        return None
    raise AsyncRLError(f"{pointer} names {pointer.read_text()}, but no checkpoint in {checkpoints} is complete")


def superfluous(states: list[State], *, last: int, best: bool) -> list[int]:
    """Steps of the checkpoints to remove: all but the `last` newest and, if asked for, that of the highest reward."""
    states = sorted(states, key=lambda found: found.step)
    kept = {found.step for found in states[-last:]}
    rated = [found for found in states if found.reward is not None]
    if best and rated:
        kept.add(max(rated, key=lambda found: (found.reward, found.step)).step)
    return [found.step for found in states if found.step not in kept]


def _read(path: Path) -> State | None:
    """None if the checkpoint is incomplete."""
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        return None


def lineage(folder: Path) -> Lineage:
    """The lineage of the learner that runs now; `restored` has extended it if it restores a checkpoint."""
    path = folder / LINEAGE
    return Lineage(tuple(msgspec.json.decode(path.read_bytes(), type=list[int]))) if path.is_file() else Lineage()


def restored(folder: Path, step: int) -> None:
    """Notes that a new incarnation starts from the checkpoint of `step`, whether or not it ever saves one itself."""
    partial = folder / f"{LINEAGE}.partial"
    partial.write_bytes(msgspec.json.encode([*lineage(folder).forks, step]))
    partial.rename(folder / LINEAGE)
