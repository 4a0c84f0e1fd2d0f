"""What the core keeps: trajectories, groups, leases, workers; and the sizes it is made with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffers import messages as m
from staleness import bounds
from staleness.bounds import OnStale
from staleness.versions import Lineage

State = Literal["running", "ready", "leased", "trained", "expired", "failed", "cancelled"]


@dataclass(frozen=True)
class Settings:
    """Sizes in trajectories, lengths in tokens; see `buffers/config.py` and `staleness/config.py`."""

    batch: int
    group: int
    max_staleness: int
    max_tokens: int
    slack: int = 0
    on_stale: OnStale = "mask"
    max_consecutive_failed_groups: int = 8
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def limit(self) -> int:
        """Most trajectories in flight."""
        return bounds.capacity(max_staleness=self.max_staleness, batch=self.batch, slack=self.slack)


class Chunk(NamedTuple):
    """One accepted append: where it starts, how many tokens, sampled at which version."""

    offset: int
    length: int
    version: int


@dataclass(eq=False)
class Trajectory:
    """One ticket and what has been streamed for it; the tokens are in the pool."""

    ticket: int
    group: Group
    member: int
    state: State = "running"
    worker: str | None = None
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    reward: float | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def versions(self) -> int:
        return len({chunk.version for chunk in self.chunks})


@dataclass(eq=False)
class Group:
    """The n trajectories of one prompt. `serial` counts groups in order of issue."""

    serial: int
    prompt: m.Prompt
    issued_at: int
    members: list[Trajectory] = field(default_factory=list[Trajectory])

    @property
    def complete(self) -> bool:
        return all(member.state != "running" for member in self.members)

    def having(self, state: State) -> list[Trajectory]:
        return [member for member in self.members if member.state == state]

    @property
    def rewards(self) -> list[float]:
        return [member.reward for member in self.members if member.reward is not None]


@dataclass(eq=False)
class Worker:
    slots: int
    tickets: set[int] = field(default_factory=set[int])


@dataclass(frozen=True)
class Lease:
    id: int
    version: int
    trajectories: list[Trajectory]
