"""The buffer's state machine. Messages in, messages out; no I/O, no clock, no randomness.

    running ──finished──▶ ready ──take──▶ leased ──commit──▶ trained
       │                    │
       └──failed            └──expired (older than the bound)

    core = Core(Settings(batch=2, group=2, max_staleness=0, max_tokens=8))
    core.handle("feeder", Hello("feeder"))
    core.handle("w", Hello("worker", slots=2))
    core.handle("rank0", Published(0))             # -> Credit(total=1) to the feeder
    core.handle("feeder", Submit([prompt]))        # -> Tickets to "w"
    core.append("w", 1, chunks)                    # -> Ack
    core.handle("w", Outcomes([...]))              # both members: the group is ready
    core.handle("rank0", Take(0))                  # -> Batch
    core.handle("rank0", Commit(lease, 1))         # -> Committed, News to "w", Credit to the feeder

Every ticket is in one state, and `issued = trained + expired + failed + cancelled + in flight` after every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from buffers import appends, sampler
from buffers import messages as m
from buffers.errors import ProtocolError
from buffers.pool import Pool
from buffers.records import Chunk, Group, Lease, Settings, State, Trajectory, Worker
from staleness import bounds
from staleness.versions import show

Scalar = TypeVar("Scalar", bound=np.generic)


class Send(NamedTuple):
    """A message to a peer, with the token frames that follow it."""

    to: str
    message: m.Message
    frames: Sequence[memoryview] = ()


class Core:
    """See the module. `handle` and `append` return what is to be sent; a `ProtocolError` leaves the state untouched."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = Pool(settings.limit, settings.max_tokens)
        self.trajectories: dict[int, Trajectory] = {}
        self.groups: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}
        self.workers: dict[str, Worker] = {}
        self.feeder: str | None = None
        self.leases: dict[int, Lease] = {}
        self.version: int | None = None
        self.counts: dict[State, int] = dict.fromkeys(
            ("running", "ready", "leased", "trained", "expired", "failed", "cancelled"), 0
        )
        self.submitted = 0
        self.tokens = self.chunks = self.refused_chunks = self.refused_messages = 0
        self.masked_stale = self.masked_nonfinite = 0
        self.multi_version = self.span_mismatches = 0
        self.failed_groups = self._failed_in_a_row = 0
        self.last_error = ""
        self._issued = 0
        self._leased_ever = 0
        self._waiting: deque[Trajectory] = deque()
        self._take: tuple[str, int] | None = None
        self._credited = 0
        self._out: list[Send] = []

    # --- events ------------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: m.Message) -> list[Send]:
        """Acts on any message but `Append` and returns what is to be sent."""
        match message:
            case m.Hello():
                self._hello(peer, message)
            case m.Submit(prompts):
                self._submit(peer, prompts)
            case m.Outcomes(outcomes):
                self._check_outcomes(peer, outcomes)
                for outcome in outcomes:
                    self._outcome(peer, outcome)
            case m.Published(version):
                self._publish(version, changed=True)
            case m.Take(version):
                self._request(peer, version)
            case m.Fetch(lease, tickets):
                self._fetch(peer, lease, tickets)
            case m.Commit():
                self._commit(peer, message)
            case m.Status():
                self._send(peer, m.StatusReply(self.stats()))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for the buffer")
        return self._settle()

    def append(self, peer: str, seq: int, chunks: m.Chunks) -> list[Send]:
        """Stores the chunks that fit, refuses the others one by one, acknowledges the message.

        See `buffers/appends.py` for what fits. A gap is refused with the offset to resend from; a ticket that is not
        the sender's (any more) is `fenced`.
        """
        # A version can be pulled a moment before its commit arrives here.
        newest = -1 if self.version is None else self.version + 1
        held = self.workers[peer].tickets if peer in self.workers else set[int]()
        stored, refused = appends.store(self.pool, chunks, newest, held)
        columns = (chunks.ticket, chunks.offset, chunks.length, chunks.version)
        for ticket, *chunk in zip(*(column[stored].tolist() for column in columns), strict=True):
            self.trajectories[ticket].chunks.append(Chunk(*chunk))
        self.chunks += stored.size
        self.tokens += int(chunks.length[stored].sum())
        self.refused_chunks += len(refused)
        self._send(peer, m.Ack(seq, refused))
        return self._settle()

    # --- life of a trajectory ----------------------------------------------------------------------------------

    def _hello(self, peer: str, hello: m.Hello) -> None:
        if hello.role == "worker":
            if hello.slots < 1:
                raise ProtocolError(f"worker {peer!r} offers {hello.slots} slots; at least 1 is needed")
            self.workers[peer] = Worker(hello.slots)
            if self.version is not None:
                self._send(peer, m.News(self.version, changed=True))
        elif hello.role == "feeder":
            self.feeder = peer

    def _submit(self, peer: str, prompts: list[m.Prompt]) -> None:
        if peer != self.feeder:
            raise ProtocolError(f"{peer!r} is not the feeder")
        allowed = self._allowed_groups()
        if len(prompts) > allowed:
            raise ProtocolError(f"{len(prompts)} prompts submitted on a credit of {allowed}")
        for prompt in prompts:
            self._issue(prompt)

    def _issue(self, prompt: m.Prompt) -> None:
        assert self.version is not None
        group = Group(self.submitted, prompt, self.version)
        self.submitted += 1
        self.groups[group.serial] = group
        for member in range(self.settings.group):
            trajectory = Trajectory(self.pool.open(attempt=1), group, member)
            group.members.append(trajectory)
            self.trajectories[trajectory.ticket] = trajectory
            self._issued += 1
            self.counts["running"] += 1
            self._waiting.append(trajectory)

    def _check_outcomes(self, peer: str, outcomes: list[m.Outcome]) -> None:
        tickets = self.workers[peer].tickets if peer in self.workers else set[int]()
        wrong = [o.ticket for o in outcomes if o.ticket not in tickets or o.attempt != self._attempt(o.ticket)]
        if wrong or len({outcome.ticket for outcome in outcomes}) < len(outcomes):
            raise ProtocolError(f"tickets {wrong[:4]} are not running at {peer!r} under that attempt, or came twice")

    def _attempt(self, ticket: int) -> int:
        return int(self.pool.attempt[self.pool.row(ticket)])

    def _outcome(self, peer: str, outcome: m.Outcome) -> None:
        trajectory = self.trajectories[outcome.ticket]
        row = self.pool.row(outcome.ticket)
        length = int(self.pool.length[row])
        self.pool.seal(outcome.ticket)
        self.workers[peer].tickets.discard(outcome.ticket)
        self.span_mismatches += outcome.span_mismatch
        status, error = outcome.status, outcome.error
        if status == "finished" and outcome.length != length:
            status, error = "failed", f"{length} tokens stored, the worker counts {outcome.length}"
        if status == "finished" and length == 0:
            status, error = "failed", "the response is empty"
        if status == "finished" and not np.isfinite(self.pool.logprobs[row, :length]).any():
            self.masked_nonfinite += length
            status, error = "failed", "the engine gave no token a finite log-prob"
        if status == "finished" and (outcome.reward is None or not np.isfinite(outcome.reward)):
            status, error = "failed", f"the reward is {outcome.reward}"
        if status == "finished":
            trajectory.reward = outcome.reward
            self._move(trajectory, "ready")
        else:
            self.last_error = error
            self._move(trajectory, "failed")
        if trajectory.group.complete:
            self._complete(trajectory.group)

    def _complete(self, group: Group) -> None:
        if group.having("ready"):
            self._failed_in_a_row = 0
            self.ready[group.serial] = group
            return
        self.failed_groups += 1
        self._failed_in_a_row += 1
        self._forget(group)
        if self._failed_in_a_row >= self.settings.max_consecutive_failed_groups:
            reason = f"{self._failed_in_a_row} groups in a row failed entirely; the last error: {self.last_error}"
            if self.feeder is not None:
                self._send(self.feeder, m.Fatal(reason, self.stats()))

    def _move(self, trajectory: Trajectory, state: State) -> None:
        self.counts[trajectory.state] -= 1
        self.counts[state] += 1
        trajectory.state = state
        if state in ("trained", "expired", "failed", "cancelled"):
            self.pool.close(trajectory.ticket)
            del self.trajectories[trajectory.ticket]

    def _forget(self, group: Group) -> None:
        del self.groups[group.serial]
        self.ready.pop(group.serial, None)

    # --- leases ------------------------------------------------------------------------------------------------

    def _request(self, peer: str, version: int) -> None:
        if self._take is not None:
            raise ProtocolError("a take is already waiting; one batch at most is prefetched")
        if self.version is None or version not in (self.version, self.version + 1):
            newest = "none" if self.version is None else show(self.version)
            raise ProtocolError(
                f"a batch for version {show(version)} was asked for, but the newest published is {newest}"
            )
        self._take = (peer, version)

    def _offer(self) -> None:
        """Answers the waiting `take` if a batch can be offered; trajectories found fully stale expire on the way."""
        if self._take is None:
            return
        peer, version = self._take
        if not (self._ready_count() >= self.settings.batch or self._stalled()):
            return
        offerable: list[tuple[Group, int]] = []
        for group in list(self.ready.values()):
            trainable = self._mask(group, version)
            if trainable:
                offerable.append((group, trainable))
            else:
                self._forget(group)
        if sum(count for _, count in offerable) < self.settings.batch and not self._stalled():
            return
        chosen = [self.ready.pop(serial) for serial in sampler.oldest(offerable, self.settings.batch)]
        if chosen:
            self._take = None
            self._lease(peer, version, chosen)

    def _mask(self, group: Group, version: int) -> int:
        """Applies the bound to a ready group; returns how many of its members may be trained on."""
        for trajectory in group.having("ready"):
            row = self.pool.row(trajectory.ticket)
            length = self.pool.length[row]
            ages = self.settings.lineage.age(version, self.pool.versions[row, :length])
            usable = np.isfinite(self.pool.logprobs[row, :length])
            trajectory.mask = bounds.trainable(
                ages, usable, max_staleness=self.settings.max_staleness, on_stale=self.settings.on_stale
            )
            if not trajectory.mask.any():
                self._move(trajectory, "expired")
        return len(group.having("ready"))

    def _lease(self, peer: str, version: int, groups: list[Group]) -> None:
        rows: list[m.BatchRow] = []
        members = [(index, member) for index, group in enumerate(groups) for member in group.having("ready")]
        for index, member in members:
            row = self.pool.row(member.ticket)
            length = int(self.pool.length[row])
            assert member.mask is not None
            assert member.reward is not None
            trainable = int(member.mask.sum())
            nonfinite = int((~np.isfinite(self.pool.logprobs[row, :length])).sum())
            self.masked_nonfinite += nonfinite
            self.masked_stale += length - trainable - nonfinite
            prompt = len(member.group.prompt.tokens)
            rows.append(m.BatchRow(member.ticket, index, member.member, prompt, length, trainable, member.reward))
            self._move(member, "leased")
        lease = Lease(self._leased_ever, version, [member for _, member in members])
        self._leased_ever += 1
        self.leases[lease.id] = lease
        self._send(peer, m.Batch(lease.id, version, rows, [group.rewards for group in groups], self.stats()))

    def _fetch(self, peer: str, lease_id: int, tickets: list[int]) -> None:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise ProtocolError(f"lease {lease_id} is not outstanding")
        held = {trajectory.ticket: trajectory for trajectory in lease.trajectories}
        foreign = [ticket for ticket in tickets if ticket not in held]
        if foreign:
            raise ProtocolError(f"tickets {foreign[:4]} are not of lease {lease_id}")
        rows = [self.pool.row(ticket) for ticket in tickets]
        spans = [(row, slice(0, int(self.pool.length[row]))) for row in rows]
        groups = dict.fromkeys(held[ticket].group for ticket in tickets)
        masks = [held[ticket].mask for ticket in tickets]
        arrays = m.SampleArrays(
            tokens=_concatenate([self.pool.tokens[row, span] for row, span in spans], np.int32),
            logprobs=_concatenate([self.pool.logprobs[row, span] for row, span in spans], np.float32),
            versions=_concatenate([self.pool.versions[row, span] for row, span in spans], np.int64),
            mask=_concatenate([mask.view(np.uint8) for mask in masks if mask is not None], np.uint8),
            prompts=_concatenate([np.asarray(group.prompt.tokens, np.int32) for group in groups], np.int32),
        )
        self._send(peer, m.Samples(lease_id), arrays.to_frames())

    def _commit(self, peer: str, commit: m.Commit) -> None:
        lease = self.leases.get(commit.lease)
        if lease is None:
            raise ProtocolError(
                f"lease {commit.lease} is not outstanding: it was committed before, or never handed out"
            )
        self._check_version(commit.version)
        del self.leases[lease.id]
        for trajectory in lease.trajectories:
            self.multi_version += trajectory.versions > 1
            self._move(trajectory, "trained")
        for group in {trajectory.group for trajectory in lease.trajectories}:
            self._forget(group)
        self._publish(commit.version, commit.changed)
        self._send(peer, m.Committed(lease.id, self.cursor()))

    def _publish(self, version: int, changed: bool) -> None:
        self._check_version(version)
        self.version = version
        for worker in self.workers:
            self._send(worker, m.News(version, changed))

    def _check_version(self, version: int) -> None:
        if self.version is not None and version <= self.version:
            raise ProtocolError(f"version {show(version)} is not newer than {show(self.version)}")

    # --- what follows from every event -------------------------------------------------------------------------

    def _settle(self) -> list[Send]:
        self._offer()
        self._assign()
        self._credit()
        out, self._out = self._out, []
        return out

    def _assign(self) -> None:
        """Hands waiting tickets to the workers with most free slots."""
        given: dict[str, list[m.Ticket]] = {}
        free = {name: worker.slots - len(worker.tickets) for name, worker in self.workers.items()}
        while self._waiting and free and max(free.values()) > 0:
            name = max(free, key=lambda peer: free[peer])
            trajectory = self._waiting.popleft()
            trajectory.worker = name
            self.workers[name].tickets.add(trajectory.ticket)
            free[name] -= 1
            prompt = trajectory.group.prompt
            given.setdefault(name, []).append(
                m.Ticket(
                    id=trajectory.ticket,
                    attempt=1,
                    member=trajectory.member,
                    key=prompt.key,
                    prompt=prompt.tokens,
                    row=prompt.row,
                    min_version=trajectory.group.issued_at,
                    max_tokens=self.settings.max_tokens,
                )
            )
        for name, tickets in given.items():
            self._send(name, m.Tickets(tickets))

    def _credit(self) -> None:
        total = self.submitted + self._allowed_groups()
        if self.feeder is not None and total > self._credited:
            self._credited = total
            self._send(self.feeder, m.Credit(total))

    def _allowed_groups(self) -> int:
        if self.version is None:
            return 0
        return bounds.admissible_groups(in_flight=self.in_flight, group=self.settings.group, limit=self.settings.limit)

    def _ready_count(self) -> int:
        return sum(len(group.having("ready")) for group in self.ready.values())

    def _stalled(self) -> bool:
        """Nothing more can become ready before the next commit: a batch short of B is better than none."""
        return self.counts["running"] == 0 and not self.leases and self._allowed_groups() == 0

    def _send(self, to: str, message: m.Message, frames: Sequence[memoryview] = ()) -> None:
        self._out.append(Send(to, message, frames))

    # --- accounts ----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self.counts["running"] + self.counts["ready"] + self.counts["leased"]

    def cursor(self) -> int:
        """Number of prompts, in order of issue, of which none is in flight: where a restart continues."""
        return min(self.groups, default=self.submitted)

    def stats(self) -> m.Stats:
        return m.Stats(
            issued=self._issued,
            limit=self.settings.limit,
            tokens=self.tokens,
            chunks=self.chunks,
            masked_stale_tokens=self.masked_stale,
            masked_nonfinite_tokens=self.masked_nonfinite,
            multi_version=self.multi_version,
            span_mismatches=self.span_mismatches,
            refused_chunks=self.refused_chunks,
            refused_messages=self.refused_messages,
            failed_groups=self.failed_groups,
            version=-1 if self.version is None else self.version,
            last_error=self.last_error,
            **self.counts,
        )

    def check(self) -> None:
        """Raises AssertionError if the accounts do not add up; for tests and the simulator."""
        assert self._issued == sum(self.counts.values()), self.counts
        assert self.in_flight == len(self.trajectories) == self.pool.rows - self.pool.free_rows
        assert self.in_flight <= self.settings.limit
        states = [trajectory.state for trajectory in self.trajectories.values()]
        for state in ("running", "ready", "leased"):
            assert states.count(state) == self.counts[state], state
        assert self.counts["leased"] == sum(len(lease.trajectories) for lease in self.leases.values())


def _concatenate(parts: list[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
