"""What all parts of the core share: trajectories, groups, the pool, the version, the counters, and the outbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from buffers import messages as m
from buffers.pool import Pool
from buffers.records import IN_FLIGHT, STATES, Group, Settings, State, Trajectory
from staleness import bounds
from staleness.versions import Lineage


class Send(NamedTuple):
    """A message to a peer, with the frames that follow it. `SELF` is the server."""

    to: str
    message: m.Message
    frames: Sequence[memoryview] = ()


SELF = ""


def is_called(peer: str, name: str) -> bool:
    """Identities are `name#process.session`; `name` may be all of it, `name#process`, or the name alone."""
    return peer == name or peer.startswith((f"{name}#", f"{name}."))


@dataclass
class Tally:
    """Counters; see `messages.Stats` for what they count."""

    issued: int = 0
    tokens: int = 0
    chunks: int = 0
    masked_stale: int = 0
    masked_nonfinite: int = 0
    multi_version: int = 0
    span_mismatches: int = 0
    refused_chunks: int = 0
    failed_groups: int = 0
    failed_in_a_row: int = 0
    segments: int = 0
    filtered_groups: int = 0
    filtered_in_a_row: int = 0
    late_groups: int = 0
    lost_workers: int = 0
    reissued: int = 0
    kept_tokens: int = 0
    discarded_tokens: int = 0
    expired_lengths: list[int] = field(default_factory=lambda: [0] * 24)
    last_error: str = ""


class Store:
    """State with no behaviour of its own beyond moving a trajectory from one state to the next."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = Pool(settings.limit, settings.max_tokens)
        self.lineage = Lineage()
        self.version: int | None = None
        self.source = ""
        """Where workers on other hosts pull weights."""
        self.eta: int | None = None
        """Bound that the learner has asked for, below the configured one."""
        self.suspended = False
        """A new life has begun and its learner has published nothing."""
        self.trajectories: dict[int, Trajectory] = {}
        self.groups: dict[int, Group] = {}
        self.counts: dict[State, int] = dict.fromkeys(STATES, 0)
        self.tally = Tally()
        self.usage: dict[str, tuple[float, float]] = {}
        self.feeder: str | None = None
        self.out: list[Send] = []
        self.ended: Callable[[Trajectory], None] | None = None
        """Called with a trajectory that has ended while its tokens are still there; for readers of the journal."""

    def send(self, to: str, message: m.Message, frames: Sequence[memoryview] = ()) -> None:
        self.out.append(Send(to, message, frames))

    @property
    def in_flight(self) -> int:
        return sum(self.counts[state] for state in IN_FLIGHT)

    @property
    def admissible_groups(self) -> int:
        if self.version is None or self.suspended:
            return 0
        settings = self.settings
        eta = settings.max_staleness if self.eta is None else min(self.eta, settings.max_staleness)
        limit = bounds.capacity(max_staleness=eta, batch=settings.batch, slack=settings.slack)
        return bounds.admissible_groups(in_flight=self.in_flight, group=settings.group, limit=limit)

    def age(self, version: int) -> int:
        """Learner steps from `version` to the newest one."""
        assert self.version is not None
        return self.lineage.age_of(self.version, version)

    def add(self, trajectory: Trajectory) -> None:
        self.trajectories[trajectory.ticket] = trajectory
        self.tally.issued += 1
        self.counts[trajectory.state] += 1

    def move(self, trajectory: Trajectory, state: State) -> None:
        """To another state; one that ends it frees its row."""
        if state == "expired":
            length = int(self.pool.length[self.pool.row(trajectory.ticket)])
            self.tally.expired_lengths[min(length.bit_length(), 23)] += 1
        self.counts[trajectory.state] -= 1
        self.counts[state] += 1
        trajectory.state = state
        if state not in IN_FLIGHT:
            if self.ended is not None:
                self.ended(trajectory)
            trajectory.usable = None
            self.pool.close(trajectory.ticket)
            del self.trajectories[trajectory.ticket]

    def forget_if_ended(self, group: Group) -> None:
        if group.ended:
            self.groups.pop(group.serial, None)

    def stats(self) -> m.Stats:
        tally = self.tally
        return m.Stats(
            issued=tally.issued,
            limit=self.settings.limit,
            tokens=tally.tokens,
            chunks=tally.chunks,
            masked_stale_tokens=tally.masked_stale,
            masked_nonfinite_tokens=tally.masked_nonfinite,
            multi_version=tally.multi_version,
            span_mismatches=tally.span_mismatches,
            refused_chunks=tally.refused_chunks,
            failed_groups=tally.failed_groups,
            segments=tally.segments,
            filtered_groups=tally.filtered_groups,
            late_groups=tally.late_groups,
            lost_workers=tally.lost_workers,
            reissued=tally.reissued,
            kept_tokens=tally.kept_tokens,
            discarded_tokens=tally.discarded_tokens,
            expired_lengths=list(tally.expired_lengths),
            version=-1 if self.version is None else self.version,
            worker_busy_s=sum((busy for busy, _ in self.usage.values()), 0.0),
            worker_overhead_s=sum((overhead for _, overhead in self.usage.values()), 0.0),
            last_error=tally.last_error,
            **self.counts,
        )
