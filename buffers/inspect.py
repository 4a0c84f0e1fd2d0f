"""What a journal says the buffer holds: a line a trajectory, and one trajectory chunk by chunk.

    show(run / "journal")               what is in flight, and the trajectory of most versions in full
    show(run / "journal", ticket=7)     that one, also if it has ended in a file that is still there

Only reads files, so the run may be going on; a write that is in progress is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffers import messages as m
from buffers import segments
from buffers.core import Core
from buffers.errors import JournalError
from buffers.pool import ROW_BITS, Pool, Span
from buffers.records import IN_FLIGHT, STATES, State, Trajectory
from buffers.segments import Entry, Segment, begin_with_snapshot, recover, replay
from staleness.versions import INJECTED
from staleness.versions import show as show_version


class Piece(NamedTuple):
    """Tokens of one version, from `offset` on: a chunk as it was sent, or all that is known, a run of one version."""

    offset: int
    length: int
    version: int
    chunk: bool


@dataclass(frozen=True)
class Record:
    """A trajectory with its tokens, outside the core. `versions` has one entry a token, packed or `INJECTED`.

    `step` is that of the batch that it was trained in, None if it was not.
    """

    ticket: int
    group: int
    member: int
    attempt: int
    prompt: m.Prompt
    state: State
    reward: float | None
    finish_reason: str
    step: int | None
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    spans: list[Span]

    @classmethod
    def of(cls, trajectory: Trajectory, pool: Pool) -> Record:
        row = pool.row(trajectory.ticket)
        length, spans = int(pool.length[row]), pool.spans_of(row)
        return cls(
            ticket=trajectory.ticket,
            group=trajectory.group.serial,
            member=trajectory.member,
            attempt=trajectory.attempt,
            prompt=trajectory.group.prompt,
            state=trajectory.state,
            reward=trajectory.reward,
            finish_reason=trajectory.finish_reason,
            step=trajectory.step if trajectory.state == "trained" else None,
            tokens=pool.tokens[row, :length].copy(),
            logprobs=pool.logprobs[row, :length].copy(),
            versions=np.repeat(np.asarray([span.version for span in spans], np.int64), pool.span_lengths(row)),
            spans=spans,
        )


# --- reading -----------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[Segment]:
    """The files of a run's journal, oldest first, each as long as it is now. `JournalError` if there are none."""
    while True:
        try:
            found = segments.of(folder)
        except FileNotFoundError:
            continue  # a checkpoint has let go of a file between its listing and the look at its size
        if not found:
            raise JournalError(
                f"there is no journal in {folder}: the run has not started, or it keeps none "
                "(buffer.durability: none keeps none)"
            )
        return found


def opened(found: list[Segment]) -> Iterator[tuple[Core, Iterator[Entry]]]:
    """Each file's core as the file begins, and its messages; files that a checkpoint has let go of are left out."""
    for file in found:
        try:
            core, entries = begin_with_snapshot(file)
        except FileNotFoundError:
            continue
        yield core, entries


def undone(found: list[Segment], core: Core) -> tuple[set[int], set[int]]:
    """Trained tickets of which a learner knows nothing any more, because it has gone back to an earlier checkpoint.

    Those that wait to be read from the journal (`parked` in `core`, the newest), and those that go on under another
    ticket.
    """
    parked = {trajectory.ticket for trajectory in (*core.offering.parked, *core.offering.loading.values())}
    renamed: set[int] = set()
    for _, entries in opened(found):
        for entry in entries:
            message = m.decode_inbound(entry.head)
            if isinstance(message, m.Reloaded):
                renamed.update(message.wanted)
    return parked, renamed


def follow(found: list[Segment], tickets: set[int]) -> dict[int, tuple[Record, list[Piece]]]:
    """Trajectories and how they came about: those that end in a file, and those live at the end of the newest.

    Pieces are chunks as they were sent where the files have them. What came before the oldest file, or was brought back
    from the journal under a new ticket, is told by its versions only.
    """
    pieces: dict[int, list[Piece]] = {ticket: [] for ticket in tickets}
    records: dict[int, Record] = {}
    core: Core | None = None
    for core, entries in opened(_from_issue(found, min(tickets, default=0))):
        pool = core.store.pool

        def keep(trajectory: Trajectory, pool: Pool = pool) -> None:
            if trajectory.ticket in pieces:
                records[trajectory.ticket] = Record.of(trajectory, pool)

        core.store.ended = keep
        for ticket in pieces.keys() & core.store.trajectories.keys():
            pieces[ticket] = _complete(pieces[ticket], pool.spans_of(pool.row(ticket)), _length(pool, ticket))
        for entry in entries:
            _replay(core, entry, pieces)
    if core is not None:
        live = pieces.keys() & core.store.trajectories.keys()
        records |= {ticket: Record.of(core.store.trajectories[ticket], core.store.pool) for ticket in live}
    return {t: (record, _complete(pieces[t], record.spans, record.tokens.size)) for t, record in records.items()}


def _from_issue(found: list[Segment], ticket: int) -> list[Segment]:
    """The files from that on in which `ticket` was issued; all of them if it is older."""
    for place in reversed(range(len(found))):
        for core, _ in opened(found[place : place + 1]):
            if core.store.pool.serial <= ticket >> ROW_BITS:
                return found[place:]
    return found


def _replay(core: Core, entry: Entry, pieces: dict[int, list[Piece]]) -> None:
    """Replays a message; the chunks in it that are stored go to `pieces`."""
    message = m.decode_inbound(entry.head)
    if not isinstance(message, m.Append):
        replay(core, entry)
        return
    chunks = m.Chunks.from_frames(message, entry.frames)
    live = core.store.trajectories
    wanted = [(i, ticket) for i, ticket in enumerate(chunks.ticket.tolist()) if ticket in pieces and ticket in live]
    ends = {ticket: _length(core.store.pool, ticket) for _, ticket in wanted}
    replay(core, entry)
    for i, ticket in wanted:
        piece = Piece(int(chunks.offset[i]), int(chunks.length[i]), int(chunks.version[i]), chunk=True)
        end = piece.offset + piece.length
        # What is stored makes the trajectory longer; a repeat, a gap and a fenced attempt do not.
        if (
            piece.offset == ends[ticket]
            and end <= _length(core.store.pool, ticket)
            and int(chunks.attempt[i]) == live[ticket].attempt
        ):
            if piece.offset == 0:  # also one that could not go on at another worker and has begun again
                pieces[ticket] = []
            pieces[ticket].append(piece)
            ends[ticket] = end


def _length(pool: Pool, ticket: int) -> int:
    return int(pool.length[pool.row(ticket)])


def _complete(pieces: list[Piece], spans: list[Span], length: int) -> list[Piece]:
    """The pieces if they are all of the trajectory, else its spans."""
    if sum(piece.length for piece in pieces) == length:
        return pieces
    lengths = np.diff([span.start for span in spans], append=length).tolist()
    return [Piece(span.start, size, span.version, chunk=False) for span, size in zip(spans, lengths, strict=True)]


# --- printing ----------------------------------------------------------------------------------------------------


def show(folder: Path, ticket: int | None = None) -> None:
    """Prints what the buffer holds according to the journal in `folder`; with `ticket` that trajectory only.

    `JournalError` if there is no journal, a file of it is damaged, or no file has the ticket.
    """
    found = files(folder)
    if ticket is None:
        _overview(folder, found)
    else:
        _one(folder, found, ticket)


def _overview(folder: Path, found: list[Segment]) -> None:
    core, findings = recover(found)
    told = follow(found, set(core.store.trajectories))
    print(f"journal in {folder}")
    for file in found:
        torn = findings.torn_bytes if file is found[-1] else 0
        note = f", {torn:,} of them of an unfinished write" if torn else ""
        print(f"  {file.path.name}  {file.size:>13,} bytes{note}")
    print(_accounts(core))
    if not told:
        return
    print()
    print(
        f"{'ticket':>14} {'prompt':>10} {'member':>6} {'state':>7} {'attempt':>7} {'tokens':>6} {'chunks':>6} "
        f"{'reward':>7}  versions"
    )
    for ticket in sorted(told):
        _line(*told[ticket])
    print()
    _detail(*max(told.values(), key=lambda pair: (_sampled_versions(pair[0]), pair[0].tokens.size)))


def _accounts(core: Core) -> str:
    """Where every ticket ever issued is."""
    counts = core.store.counts
    ended = " + ".join(f"{state} {counts[state]}" for state in STATES if state not in IN_FLIGHT)
    live = ", ".join(f"{state} {counts[state]}" for state in IN_FLIGHT)
    version = core.store.version
    newest = "none" if version is None else _version(version)
    return (
        f"issued {core.store.tally.issued} = {ended} + in flight {core.store.in_flight} ({live})\n"
        f"newest version {newest}"
    )


def _line(record: Record, pieces: list[Piece]) -> None:
    reward = "-" if record.reward is None else f"{record.reward:.3f}"
    versions = ",".join(map(_version, sorted({span.version for span in record.spans}))) or "-"
    # Spans stand for chunks that nobody can count any more.
    least = "" if all(piece.chunk for piece in pieces) else ">="
    print(
        f"{record.ticket:>14} {_key(record):>10} {record.member:>6} {record.state:>7} {record.attempt:>7} "
        f"{record.tokens.size:>6} {f'{least}{len(pieces)}':>6} {reward:>7}  {versions}"
    )


def _one(folder: Path, found: list[Segment], ticket: int) -> None:
    told = follow(found, {ticket})
    if ticket not in told:
        raise JournalError(
            f"ticket {ticket} is not in the journal in {folder}: it was never issued, or it has ended in a file that a "
            "checkpoint has let go of. Without --ticket, inspect lists the tickets in flight"
        )
    record, pieces = told[ticket]
    _detail(record, pieces)
    if record.state == "trained":
        parked, renamed = undone(found, recover(found)[0])
        if ticket in parked:
            print("  a restore has undone that: it is parked, to be offered again")
        if ticket in renamed:
            print("  a restore has undone that: it goes on under another ticket")


def _detail(record: Record, pieces: list[Piece]) -> None:
    print(
        f"ticket {record.ticket}, prompt {_key(record)}, member {record.member}, attempt {record.attempt}, "
        f"{record.state}{'' if record.step is None else f' in step {record.step}'}"
    )
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    ended = f", ended by {record.finish_reason!r}" if record.finish_reason else ""
    print(f"  prompt of {len(record.prompt.tokens)} tokens, response of {record.tokens.size} tokens, {reward}{ended}")
    for piece in pieces:
        part = slice(piece.offset, piece.offset + piece.length)
        what = "chunk" if piece.chunk else "span (its chunks are not in the journal)"
        print(f"  {what} at {piece.offset}, {piece.length} tokens, version {_version(piece.version)}")
        tokens, logprobs = record.tokens[part].tolist(), record.logprobs[part].tolist()
        if piece.version == INJECTED:
            print("    " + " ".join(map(str, tokens)))
        else:
            pairs = zip(tokens, logprobs, strict=True)
            print("    " + " ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs))


def _key(record: Record) -> str:
    return f"{record.prompt.key[0]}/{record.prompt.key[1]}"


def _version(version: int) -> str:
    return "injected" if version == INJECTED else show_version(version)


def _sampled_versions(record: Record) -> int:
    return len({span.version for span in record.spans} - {INJECTED})
