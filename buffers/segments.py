"""The files of a journal: what they consist of, and reading them back.

    journal/00000001.journal     magic | group | group | ...
    group                        mark, entries, bytes, CRC-32 | entry | entry | ...
    entry                        lengths | peer | frames of one message

A file begins with a snapshot of the core (`buffers/snapshot.py`) and goes on with the messages since: that is all it
takes to bring the core back, and every trajectory that is committed within a file is in it whole. Only the last group
of the newest file can be torn by a crash, and nothing in it was acknowledged: it is left out. Damage anywhere else is
an error.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from buffers import messages as m
from buffers import snapshot
from buffers.core import Core
from buffers.errors import JournalError
from buffers.pool import Floats, Int32s, Pool, Span
from buffers.records import Trajectory

MAGIC = b"ARLJRNL\x01"
GROUP = struct.Struct("<4sIQI")
MARK = b"GRUP"
GROUP_BYTES = 4 << 20
"""A group that has reached this is written before anything else is taken in."""


class Entry(NamedTuple):
    """One message as it came."""

    peer: str
    head: memoryview
    frames: list[memoryview]


@dataclass
class Findings:
    """What recovery found. `torn_bytes` were written but never acknowledged, and are cut off."""

    segments: int = 0
    messages: int = 0
    tokens: int = 0
    torn_bytes: int = 0

    def __str__(self) -> str:
        torn = f", {self.torn_bytes} bytes of an unfinished write cut off" if self.torn_bytes else ""
        return f"{self.messages} messages after the snapshot, {self.tokens} tokens{torn}, {self.segments} file(s)"


# --- bytes -------------------------------------------------------------------------------------------------------


def pack(peer: str, frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The parts of one entry."""
    return [entry_head(peer, [len(frame) for frame in frames]), *frames]


def entry_head(peer: str, sizes: list[int]) -> bytes:
    name = peer.encode("latin-1")
    return struct.pack(f"<HH{len(sizes)}Q", len(name), len(sizes), *sizes) + name


def seal(parts: list[bytes | memoryview], count: int) -> bytes:
    """A group of `count` entries, ready to be written."""
    body = b"".join(parts)
    return GROUP.pack(MARK, count, len(body), checksum(count, len(body), [body])) + body


def checksum(count: int, size: int, parts: Sequence[bytes | memoryview]) -> int:
    value = zlib.crc32(struct.pack("<IQ", count, size))
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _entries(body: memoryview, count: int) -> Iterator[Entry]:
    at = 0
    for _ in range(count):
        name_size, frames = struct.unpack_from("<HH", body, at)
        sizes = struct.unpack_from(f"<{frames}Q", body, at + 4)
        at += 4 + 8 * frames
        peer = bytes(body[at : at + name_size]).decode("latin-1")
        at += name_size
        parts: list[memoryview] = []
        for size in sizes:
            parts.append(body[at : at + size])
            at += size
        yield Entry(peer, parts[0], parts[1:])


class Segment:
    """One file, read group by group. `good` is the end of the last whole group once it has been read to its end.

    Only the `newest` file of a journal may have a torn end.
    """

    def __init__(self, path: Path, *, newest: bool = True) -> None:
        self.path = path
        self._newest = newest
        self.number = int(path.stem)
        self.good = len(MAGIC)
        self.size = path.stat().st_size

    def entries(self) -> Iterator[Entry]:
        """All entries up to a torn end. Raises `JournalError` where the file is damaged before that."""
        with self.path.open("rb") as file:
            if self.size < len(MAGIC) or file.read(len(MAGIC)) != MAGIC:
                raise JournalError(f"{self.path} is not a journal of this version")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[: self.size]
        self.good = len(MAGIC)
        while (end := _whole(data, self.good)) is not None:
            _, count, _, _ = GROUP.unpack_from(data, self.good)
            yield from _entries(data[self.good + GROUP.size : end], count)
            self.good = end
        torn = self.good < self.size and not self._newest
        if torn or _goes_on(data, self.good):
            raise JournalError(
                f"{self.path} is damaged at byte {self.good}: the group there does not match its checksum, but it is "
                "not the last that was written. Restore the file from a copy, or go on without the journal from the "
                f"last checkpoint by removing {self.path.parent}"
            )


def _whole(data: memoryview, at: int) -> int | None:
    """End of the whole group at `at`, None if there is none."""
    if at + GROUP.size > len(data):
        return None
    mark, count, size, found = GROUP.unpack_from(data, at)
    end = at + GROUP.size + size
    if mark != MARK or end > len(data) or checksum(count, size, [data[at + GROUP.size : end]]) != found:
        return None
    return end


def _goes_on(data: memoryview, at: int) -> bool:
    """Whether a whole group begins anywhere after `at`: then what is at `at` was not the last write."""
    found = at
    while (found := _find(data, found + 1)) >= 0:
        if _whole(data, found) is not None:
            return True
    return False


def _find(data: memoryview, at: int) -> int:
    for start in range(at, len(data), GROUP_BYTES):
        place = bytes(data[start : start + GROUP_BYTES + len(MARK)]).find(MARK)
        if place >= 0:
            return start + place
    return -1


def of(folder: Path) -> list[Segment]:
    """The files of a journal, oldest first."""
    paths = sorted(folder.glob("????????.journal"))
    return [Segment(path, newest=path == paths[-1]) for path in paths]


def replay(core: Core, entry: Entry) -> int:
    """Lets the core see a journalled message again; returns the tokens it carried."""
    message = m.decode_inbound(entry.head)
    core.receive(entry.peer, message, entry.frames)
    return message.tokens if isinstance(message, m.Append) else 0


# --- recovery ----------------------------------------------------------------------------------------------------


def begin_with_snapshot(file: Segment) -> tuple[Core, Iterator[Entry]]:
    """The core as it was when the file began, and the messages after that."""
    entries = file.entries()
    first = _first(file, entries)
    return snapshot.restore(snapshot.decode(first.head), first.frames), entries


def first_commit(file: Segment) -> int:
    """Number of commits before the file began."""
    return snapshot.decode(_first(file, Segment(file.path).entries()).head).commits


def _first(file: Segment, entries: Iterator[Entry]) -> Entry:
    """The snapshot."""
    first = next(entries, None)
    if first is None:
        raise JournalError(f"{file.path} has no whole group; a file is complete before it gets its name")
    return first


def recover(files: list[Segment]) -> tuple[Core, Findings]:
    """The core as the newest file leaves it."""
    findings = Findings(segments=len(files))
    core, entries = begin_with_snapshot(files[-1])
    for entry in entries:
        findings.tokens += replay(core, entry)
        findings.messages += 1
    findings.torn_bytes = files[-1].size - files[-1].good
    return core, findings


def find(files: list[Segment], tickets: list[int]) -> tuple[m.Reloaded, list[memoryview]]:
    """Tokens, log-probs and versions of committed trajectories, looked for from the newest file back."""
    spans: dict[int, list[Span]] = {}
    tokens: dict[int, Int32s] = {}
    logprobs: dict[int, Floats] = {}

    for file in reversed(files):
        wanted = set(tickets) - set(spans)
        if not wanted:
            break
        core, entries = begin_with_snapshot(file)

        def keep(trajectory: Trajectory, pool: Pool = core.store.pool, wanted: set[int] = wanted) -> None:
            if trajectory.ticket in wanted and trajectory.state == "trained":
                row = pool.row(trajectory.ticket)
                length = int(pool.length[row])
                spans[trajectory.ticket] = pool.spans_of(row)
                tokens[trajectory.ticket] = pool.tokens[row, :length].copy()
                logprobs[trajectory.ticket] = pool.logprobs[row, :length].copy()

        core.store.ended = keep
        for entry in entries:
            replay(core, entry)
    order = [ticket for ticket in tickets if ticket in spans]
    reloaded = m.Reloaded(
        tickets=order,
        lengths=[tokens[ticket].size for ticket in order],
        spans=[[(span.start, span.version) for span in spans[ticket]] for ticket in order],
        wanted=list(tickets),
    )
    flat_tokens = np.concatenate([np.empty(0, np.int32), *(tokens[ticket] for ticket in order)])
    flat_logprobs = np.concatenate([np.empty(0, np.float32), *(logprobs[ticket] for ticket in order)])
    return reloaded, [flat_tokens.view(np.uint8).data, flat_logprobs.view(np.uint8).data]
