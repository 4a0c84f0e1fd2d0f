"""What the core keeps: trajectories, groups, leases, workers; and the settings it is made with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from buffers import messages as m
from buffers.config import GroupPolicy, OnFailed, SamplerName
from staleness import bounds
from staleness.bounds import OnStale

State = Literal["running", "ready", "leased", "parked", "trained", "expired", "failed", "cancelled"]
STATES: tuple[State, ...] = ("running", "ready", "leased", "parked", "trained", "expired", "failed", "cancelled")
IN_FLIGHT: tuple[State, ...] = ("running", "ready", "leased", "parked")
"""`parked`: trained after the checkpoint that a learner has gone back to; in the journal, to be offered again."""


class Settings(Struct, frozen=True):
    """Sizes in trajectories, lengths in tokens; see `buffers/config.py` and `staleness/config.py`.

    `retain` keeps committed trajectories on record until a checkpoint contains them, which needs a journal.
    `regenerate` has what no checkpoint contains generated again from its first token after a restore.
    """

    batch: int
    group: int
    max_staleness: int
    max_tokens: int
    slack: int = 0
    on_stale: OnStale = "mask"
    group_policy: GroupPolicy = "whole"
    deadline_versions: int = 1
    min_group: int = 1
    on_failed: OnFailed = "shrink"
    max_attempts: int = 3
    max_consecutive_failed_groups: int = 8
    replayable: bool = True
    sampler: SamplerName = "oldest"
    priority_exponent: float = 1.0
    seed: int = 0
    dynamic_sampling: bool = False
    max_consecutive_filtered: int = 256
    segments: int | None = None
    retain: bool = False
    regenerate: bool = False

    @property
    def limit(self) -> int:
        """Most trajectories in memory."""
        return bounds.capacity(max_staleness=self.max_staleness, batch=self.batch, slack=self.slack)


class Earlier(Struct, frozen=True, array_like=True):
    """A segment of a trajectory that was trained on while the trajectory went on: in the batch of `step`, from token
    `start` on; and what its commit added to the counters of stale tokens and of those without a finite log-prob."""

    step: int
    start: int
    stale: int
    nonfinite: int


@dataclass(eq=False)
class Trajectory:
    """One ticket and what is known of it; the tokens are in the pool.

    `step` is that of the batch that it was trained in and `commit` the number of that commit, for one that is retained
    or parked. `parts` are what the reward was made of; for `turns` and `baseline` see `messages.Outcome`. `deaths`
    counts the workers that died while they had it. `finish_reason` is known as soon as the response is complete, before
    its reward. `born` is the newest version when the ticket was issued. `counted` is what its commit added to the
    counters: stale tokens, tokens without a finite log-prob, and whether its tokens are of several versions. `usable`
    is the mask computed for version `usable_at`. What is before `start` has been handed out in the segments `earlier`,
    or in those of a lease.
    """

    ticket: int
    group: Group
    member: int
    attempt: int = 1
    deaths: int = 0
    state: State = "running"
    worker: str | None = None
    reward: float | None = None
    parts: list[float] = field(default_factory=list[float])
    turns: list[m.Turn] = field(default_factory=list[m.Turn])
    baseline: float | None = None
    finish_reason: str = ""
    step: int = -1
    commit: int = -1
    born: int = -1
    counted: tuple[int, int, bool] = (0, 0, False)
    usable: NDArray[np.bool_] | None = None
    usable_at: int = -1
    start: int = 0
    earlier: list[Earlier] = field(default_factory=list[Earlier])


@dataclass(eq=False)
class Group:
    """The n trajectories of one prompt.

    `serial` counts groups in order of issue, `index` is the prompt's place in the order of all prompts. `members` has
    one trajectory a slot: a replacement takes the slot of the failed one.
    """

    serial: int
    index: int
    prompt: m.Prompt
    issued_at: int
    members: list[Trajectory] = field(default_factory=list[Trajectory])
    tickets_of: list[int] = field(default_factory=list[int])
    """Tickets issued for each slot."""

    def having(self, *states: State) -> list[Trajectory]:
        return [member for member in self.members if member.state in states]

    @property
    def rewards(self) -> list[float]:
        """Every reward known: also those of members that have expired or been trained on."""
        return [member.reward for member in self.members if member.reward is not None]

    @property
    def baseline(self) -> float | None:
        """Reward of the greedy response, if a member has found it out."""
        return next((member.baseline for member in self.members if member.baseline is not None), None)

    @property
    def ended(self) -> bool:
        return not self.having(*IN_FLIGHT)


@dataclass(eq=False)
class Worker:
    """`number` is what the pool knows it by."""

    number: int
    slots: int
    tickets: dict[int, None] = field(default_factory=dict[int, None])


@dataclass(frozen=True)
class Excerpt:
    """A segment of a trajectory that goes on, in a batch: a copy, since the trajectory may end before the lease does.

    Tokens `[start, end)` are to be trained on where `usable`. The columns begin with the response and have the token at
    `end` too, whose state is where the segment was cut.
    """

    trajectory: Trajectory
    start: int
    end: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    usable: NDArray[np.bool_]
    span_lengths: list[int]
    versions: list[int]


@dataclass(frozen=True)
class Lease:
    """A batch handed out. `batch` is the message it went out with."""

    id: int
    version: int
    holder: str
    trajectories: list[Trajectory]
    excerpts: list[Excerpt]
    batch: m.Batch
