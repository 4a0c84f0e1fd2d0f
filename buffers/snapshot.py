"""The whole state of a core as one message, and back. A journal file begins with one.

A snapshot taken, read and taken again is the same bytes; so are those of two cores that saw the same messages. Tests
and the journal's verification compare cores that way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from buffers import messages as m
from buffers.core import Core
from buffers.errors import JournalError
from buffers.pool import ROW_MASK, SEALED, Pool
from buffers.records import Earlier, Excerpt, Group, Lease, Settings, State, Trajectory, Worker
from buffers.store import Tally
from staleness.versions import Lineage

FORMAT = 5
"""Grows with every change of what is stored or of what the core decides: a replay decides again."""


class TrajectoryRecord(Struct, frozen=True, array_like=True):
    """`length` is -1 for one without a row; the frames hold the tokens and log-probs of the others, in order."""

    ticket: int
    group: int
    member: int
    attempt: int
    deaths: int
    state: State
    worker: str | None
    reward: float | None
    parts: list[float]
    turns: list[m.Turn]
    baseline: float | None
    finish_reason: str
    step: int
    commit: int
    born: int
    counted: tuple[int, int, bool]
    start: int
    earlier: list[Earlier]
    length: int
    sealed: bool
    spans: list[tuple[int, int]]


class GroupRecord(Struct, frozen=True, array_like=True):
    """`members` and everything else that is a trajectory are places in `Snapshot.trajectories`."""

    serial: int
    index: int
    prompt: m.Prompt
    issued_at: int
    members: list[int]
    tickets_of: list[int]
    in_flight: bool


class ExcerptRecord(Struct, frozen=True, array_like=True):
    """`tokens` are int32, `logprobs` float32, `usable` one byte a token."""

    trajectory: int
    start: int
    end: int
    tokens: bytes
    logprobs: bytes
    usable: bytes
    span_lengths: list[int]
    versions: list[int]


class LeaseRecord(Struct, frozen=True, array_like=True):
    id: int
    version: int
    holder: str
    trajectories: list[int]
    excerpts: list[ExcerptRecord]
    batch: m.Batch


class WorkerRecord(Struct, frozen=True, array_like=True):
    name: str
    number: int
    slots: int
    tickets: list[int]


class Snapshot(Struct, frozen=True, tag="Snapshot", tag_field="type"):
    """See `buffers/core.py` and its parts for what the fields are."""

    settings: Settings
    forks: list[int]
    version: int | None
    suspended: bool
    eta: int | None
    source: str
    counts: dict[str, int]
    tally: dict[str, Any]
    usage: dict[str, tuple[float, float]]
    feeder: str | None
    serial: int
    trajectories: list[TrajectoryRecord]
    groups: list[GroupRecord]
    workers: list[WorkerRecord]
    waiting: list[int]
    next_prompt: int | None
    groups_made: int
    workers_seen: int
    credited: int
    ready: list[tuple[int, int]]
    take: tuple[str, int, int] | None
    leases: list[LeaseRecord]
    leased_ever: int
    commits: int
    committed: m.Committed | None
    retained: list[int]
    parked: list[int]
    loading: list[tuple[int, int]]
    format: int = FORMAT


def take(core: Core) -> tuple[Snapshot, list[bytes]]:
    """The snapshot and its two frames: all tokens (int32) and all log-probs (float32) in memory."""
    snapshot, frames = pieces(core)
    return snapshot, [b"".join(parts) for parts in frames]


def pieces(core: Core) -> tuple[Snapshot, list[list[memoryview]]]:
    """`take` without a copy: each frame in parts that are views of the core's own rows, good until it changes."""
    store, issuing, offering = core.store, core.issuing, core.offering
    kept = [*store.trajectories.values(), *offering.retained, *offering.parked, *offering.loading.values()]
    kept += [excerpt.trajectory for lease in offering.leases.values() for excerpt in lease.excerpts]
    groups = dict.fromkeys([*store.groups.values(), *(trajectory.group for trajectory in kept)])
    everything = dict.fromkeys([*kept, *(member for group in groups for member in group.members)])
    place = {trajectory: i for i, trajectory in enumerate(everything)}
    rows = [store.pool.row(trajectory.ticket) for trajectory in store.trajectories.values()]
    lengths = [int(store.pool.length[row]) for row in rows]
    tokens = [store.pool.tokens[row, :length] for row, length in zip(rows, lengths, strict=True) if length]
    logprobs = [store.pool.logprobs[row, :length] for row, length in zip(rows, lengths, strict=True) if length]
    snapshot = Snapshot(
        settings=store.settings,
        forks=list(store.lineage.forks),
        version=store.version,
        suspended=store.suspended,
        eta=store.eta,
        source=store.source,
        counts={str(state): count for state, count in store.counts.items()},
        tally=asdict(store.tally),
        usage=store.usage,
        feeder=store.feeder,
        serial=store.pool.serial,
        trajectories=[_record(store.pool, trajectory) for trajectory in everything],
        groups=[
            GroupRecord(
                group.serial,
                group.index,
                group.prompt,
                group.issued_at,
                [place[member] for member in group.members],
                group.tickets_of,
                group.serial in store.groups,
            )
            for group in groups
        ],
        workers=[WorkerRecord(name, w.number, w.slots, list(w.tickets)) for name, w in issuing.workers.items()],
        waiting=[place[trajectory] for trajectory in issuing.waiting],
        next_prompt=issuing.next_prompt,
        groups_made=issuing.groups_made,
        workers_seen=issuing.workers_seen,
        credited=issuing.credited,
        ready=list(offering.ready.items()),
        take=offering.take,
        leases=[
            LeaseRecord(
                lease.id,
                lease.version,
                lease.holder,
                [place[trajectory] for trajectory in lease.trajectories],
                [_excerpt(place, excerpt) for excerpt in lease.excerpts],
                lease.batch,
            )
            for lease in offering.leases.values()
        ],
        leased_ever=offering.leased_ever,
        commits=offering.commits,
        committed=offering.committed,
        retained=[place[trajectory] for trajectory in offering.retained],
        parked=[place[trajectory] for trajectory in offering.parked],
        loading=[(ticket, place[trajectory]) for ticket, trajectory in offering.loading.items()],
    )
    return snapshot, [[part.view(np.uint8).data for part in parts] for parts in (tokens, logprobs)]


def _record(pool: Pool, trajectory: Trajectory) -> TrajectoryRecord:
    row = trajectory.ticket & ROW_MASK
    in_memory = row < pool.rows and int(pool.ticket[row]) == trajectory.ticket
    return TrajectoryRecord(
        trajectory.ticket,
        trajectory.group.serial,
        trajectory.member,
        trajectory.attempt,
        trajectory.deaths,
        trajectory.state,
        trajectory.worker,
        trajectory.reward,
        trajectory.parts,
        trajectory.turns,
        trajectory.baseline,
        trajectory.finish_reason,
        trajectory.step,
        trajectory.commit,
        trajectory.born,
        trajectory.counted,
        trajectory.start,
        list(trajectory.earlier),
        int(pool.length[row]) if in_memory else -1,
        in_memory and int(pool.attempt[row]) == SEALED,
        [(span.start, span.version) for span in pool.spans_of(row)] if in_memory else [],
    )


def _excerpt(place: dict[Trajectory, int], excerpt: Excerpt) -> ExcerptRecord:
    columns = excerpt.tokens.tobytes(), excerpt.logprobs.tobytes(), excerpt.usable.tobytes()
    where = place[excerpt.trajectory], excerpt.start, excerpt.end
    return ExcerptRecord(*where, *columns, excerpt.span_lengths, excerpt.versions)


def _restored(trajectories: list[Trajectory], record: ExcerptRecord) -> Excerpt:
    return Excerpt(
        trajectories[record.trajectory],
        record.start,
        record.end,
        np.frombuffer(record.tokens, np.int32),
        np.frombuffer(record.logprobs, np.float32),
        np.frombuffer(record.usable, np.bool_),
        list(record.span_lengths),
        list(record.versions),
    )


def restore(snapshot: Snapshot, frames: Sequence[bytes | memoryview], settings: Settings | None = None) -> Core:
    """The core of a snapshot; with `settings`, one that goes on under those (other sizes and policies)."""
    core = Core(settings or snapshot.settings)
    store, issuing, offering = core.store, core.issuing, core.offering
    rows = [record.ticket & ROW_MASK for record in snapshot.trajectories if record.length >= 0]
    longest = max((record.length for record in snapshot.trajectories), default=0)
    largest = max((len(group.members) for group in snapshot.groups), default=0)
    size = max([store.settings.limit, largest, *(row + 1 for row in rows)])
    width = max(store.settings.max_tokens, longest)
    store.pool = pool = Pool(size, width, snapshot.serial)
    store.lineage = Lineage(tuple(snapshot.forks))
    store.version = snapshot.version
    store.suspended = snapshot.suspended
    store.eta = snapshot.eta
    store.source = snapshot.source
    store.counts.update({state: snapshot.counts[state] for state in store.counts})
    store.tally = Tally(**snapshot.tally)
    store.usage = dict(snapshot.usage)
    store.feeder = snapshot.feeder
    groups = {g.serial: Group(g.serial, g.index, g.prompt, g.issued_at) for g in snapshot.groups}
    trajectories = [
        Trajectory(
            r.ticket,
            groups[r.group],
            r.member,
            r.attempt,
            r.deaths,
            r.state,
            r.worker,
            r.reward,
            list(r.parts),
            list(r.turns),
            r.baseline,
            r.finish_reason,
            r.step,
            r.commit,
            r.born,
            r.counted,
            start=r.start,
            earlier=list(r.earlier),
        )
        for r in snapshot.trajectories
    ]
    for record in snapshot.groups:
        group = groups[record.serial]
        group.members = [trajectories[i] for i in record.members]
        group.tickets_of = list(record.tickets_of)
        if record.in_flight:
            store.groups[group.serial] = group
    tokens, logprobs = np.frombuffer(frames[0], np.int32), np.frombuffer(frames[1], np.float32)
    at = 0
    for record, trajectory in zip(snapshot.trajectories, trajectories, strict=True):
        if record.length < 0:
            continue
        store.trajectories[record.ticket] = trajectory
        row = pool.place(record.ticket, SEALED if record.sealed else record.attempt)
        part = slice(at, at + record.length)
        at = part.stop
        pool.fill(row, tokens[part], logprobs[part], record.spans)
    pool.count_free()
    for record in snapshot.workers:
        issuing.workers[record.name] = Worker(record.number, record.slots, dict.fromkeys(record.tickets))
        for ticket in record.tickets:
            pool.owner[pool.row(ticket)] = record.number
    issuing.waiting = deque(trajectories[i] for i in snapshot.waiting)
    issuing.next_prompt = snapshot.next_prompt
    issuing.groups_made = snapshot.groups_made
    issuing.workers_seen = snapshot.workers_seen
    issuing.credited = snapshot.credited
    offering.ready = dict(snapshot.ready)
    offering.take = snapshot.take
    for record in snapshot.leases:
        members = [trajectories[i] for i in record.trajectories]
        parts = [_restored(trajectories, excerpt) for excerpt in record.excerpts]
        offering.leases[record.id] = Lease(record.id, record.version, record.holder, members, parts, record.batch)
    offering.leased_ever = snapshot.leased_ever
    offering.commits = snapshot.commits
    offering.committed = snapshot.committed
    offering.retained = [trajectories[i] for i in snapshot.retained]
    offering.parked = [trajectories[i] for i in snapshot.parked]
    offering.loading = {ticket: trajectories[i] for ticket, i in snapshot.loading}
    for lease in offering.leases.values():
        for trajectory in lease.trajectories:
            offering.usable(trajectory, lease.version)
    return core


_decoder = msgspec.msgpack.Decoder(Snapshot)


def decode(frame: bytes | memoryview) -> Snapshot:
    """The snapshot at the beginning of a journal file. Raises `JournalError` if it is none, or of another format."""
    try:
        snapshot = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalError(f"a journal file does not begin with a snapshot this version can read: {error}") from error
    if snapshot.format != FORMAT:
        raise JournalError(f"the journal has snapshot format {snapshot.format}; this version reads {FORMAT}")
    return snapshot


def digest(core: Core) -> bytes:
    """The same for two cores exactly if their states are."""
    snapshot, frames = take(core)
    return msgspec.msgpack.encode(snapshot) + b"".join(frames)
