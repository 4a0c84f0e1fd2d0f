"""What a checkpoint knows beside tensors. Torch-free, so that every process can ask where a run stands."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from async_rl.errors import AsyncRLError
from staleness.versions import Lineage

LATEST = "latest"
STATE = "state.json"


class State(Struct, frozen=True):
    """`forks` is the lineage of the learner that saved; `cursor` counts the prompts that have ended, in order of issue;
    `fingerprint` is that of the training rows."""

    step: int
    forks: tuple[int, ...]
    cursor: int
    fingerprint: str

    @property
    def lineage(self) -> Lineage:
        """The lineage of a learner that restores this checkpoint: a new incarnation."""
        return Lineage((*self.forks, self.step))


def latest(checkpoints: Path) -> tuple[Path, State] | None:
    """The newest complete checkpoint, or None if there is none."""
    pointer = checkpoints / LATEST
    if not pointer.is_file():
        return None
    path = checkpoints / pointer.read_text().strip()
    try:
        return path, msgspec.json.decode((path / STATE).read_bytes(), type=State)
    except (OSError, msgspec.DecodeError) as error:
        raise AsyncRLError(f"{pointer} names {path.name}, which is not a complete checkpoint: {error}") from error
