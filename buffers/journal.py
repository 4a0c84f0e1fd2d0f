"""Every accepted message on disk before it is acknowledged.

    journal/00000001.journal     magic | group | group | ...
    group                        mark, entries, bytes, CRC-32 | entry | entry | ...
    entry                        lengths | peer | frames of one message

A file begins with a snapshot of the core (`buffers/snapshot.py`) and goes on with the messages since: that is all it
takes to bring the core back, and every trajectory that is committed within a file is in it whole. When a file has grown
to twice what is live and `segment_bytes` more, the next one begins; a file goes when a checkpoint contains all that was
committed in it. A group is written and synced at once, in a thread of its own, while the next one collects. Only the
last group can be torn by a crash, and nothing in it was acknowledged: recovery cuts it off. Damage anywhere else is an
error.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from buffers import messages as m
from buffers import snapshot
from buffers.core import Core
from buffers.errors import JournalError
from buffers.pool import Floats, Int32s, Pool, Span
from buffers.records import Settings, Trajectory
from buffers.store import SELF, Send

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
    return [_entry_head(peer, [len(frame) for frame in frames]), *frames]


def _entry_head(peer: str, sizes: list[int]) -> bytes:
    name = peer.encode("latin-1")
    return struct.pack(f"<HH{len(sizes)}Q", len(name), len(sizes), *sizes) + name


def seal(parts: list[bytes | memoryview], count: int) -> bytes:
    """A group of `count` entries, ready to be written."""
    body = b"".join(parts)
    return GROUP.pack(MARK, count, len(body), _checksum(count, len(body), [body])) + body


def _checksum(count: int, size: int, parts: Sequence[bytes | memoryview]) -> int:
    checksum = zlib.crc32(struct.pack("<IQ", count, size))
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


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
                f"{self.path} is damaged at byte {self.good}: the group there does not match its checksum, but it is not "
                "the last that was written. Restore the file from a copy, or go on without the journal from the last checkpoint by "
                f"removing {self.path.parent}"
            )


def _whole(data: memoryview, at: int) -> int | None:
    """End of the whole group at `at`, None if there is none."""
    if at + GROUP.size > len(data):
        return None
    mark, count, size, checksum = GROUP.unpack_from(data, at)
    end = at + GROUP.size + size
    if mark != MARK or end > len(data) or _checksum(count, size, [data[at + GROUP.size : end]]) != checksum:
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


def segments(folder: Path) -> list[Segment]:
    """The files of a journal, oldest first."""
    paths = sorted(folder.glob("????????.journal"))
    return [Segment(path, newest=path == paths[-1]) for path in paths]


def replay(core: Core, entry: Entry) -> int:
    """Lets the core see a journalled message again; returns the tokens it carried."""
    message = m.decode_inbound(entry.head)
    core.receive(entry.peer, message, entry.frames)
    return message.tokens if isinstance(message, m.Append) else 0


# --- the journal of a running server -----------------------------------------------------------------------------


@dataclass
class _Group:
    parts: list[bytes | memoryview] = field(default_factory=list[bytes | memoryview])
    count: int = 0
    size: int = 0


class Journal:
    """Written by the server's thread (`add`, `flush`) and by the thread that syncs.

    `handed` counts the groups given to the disk, `durable` those that are on it; `woken` is readable when `durable` has
    grown or a write has failed.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder
        self.handed = self.durable = 0
        self.bytes_written = 0
        self._segment_bytes = segment_bytes
        self._first_commit: dict[int, int] = {}
        """For each file, the number of commits before it."""
        self._number = 0
        self._file = -1
        self._size = self._snapshot_size = 0
        self._group = _Group()
        self._given: _Group | None = None
        self._error: OSError | None = None
        self._work = threading.Condition()
        self.woken, self._wake = os.pipe()
        os.set_blocking(self.woken, False)
        self._closing = False
        self._thread = threading.Thread(target=self._sync, name="journal", daemon=True)
        self._thread.start()

    # --- opening -----------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: Path, settings: Settings, segment_bytes: int) -> tuple[Journal, Core, Findings | None]:
        """The journal in `folder` and the core it brings back, or a new one (and no findings) if there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*.partial"):
            partial.unlink()
        files = segments(folder)
        core, findings = recover(files) if files else (Core(settings), None)
        journal = cls(folder, segment_bytes)
        if not files:
            journal.begin(core)
            return journal, core, None
        journal._first_commit = {file.number: first_commit(file) for file in files}
        journal._continue(files[-1])
        if core.settings != settings:
            core = snapshot.restore(*snapshot.take(core), settings)
            journal.begin(core)
        return journal, core, findings

    def _continue(self, file: Segment) -> None:
        self._file = os.open(file.path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._file, file.good)
        os.fdatasync(self._file)
        self._number, self._size = file.number, file.good

    def begin(self, core: Core) -> None:
        """Starts a new file with the state of `core`, which all that was added before has led to and is on disk."""
        assert not self._group.count
        assert self.durable == self.handed
        head, frames = snapshot.pieces(core)
        pieces = [[msgspec.msgpack.encode(head)], *frames]
        parts = [_entry_head(SELF, [sum(map(len, frame)) for frame in pieces]), *(p for frame in pieces for p in frame)]
        size = sum(map(len, parts))
        number = self._number + 1
        final = self.folder / f"{number:08d}.journal"
        partial = final.with_suffix(".partial")
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            # Piece by piece: what is live may be a good part of the memory.
            _write(file, MAGIC + GROUP.pack(MARK, 1, size, _checksum(1, size, parts)))
            for part in parts:
                _write(file, part)
            os.fdatasync(file)
            partial.rename(final)
            _sync_folder(self.folder)
        except OSError as error:
            raise JournalError(f"the journal {final} cannot be written: {error}") from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self._number = file, number
        self._size = self._snapshot_size = len(MAGIC) + GROUP.size + size
        self._first_commit[number] = core.offering.commits

    # --- writing -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Messages added and not handed to the disk."""
        return self._group.count

    @property
    def full(self) -> bool:
        return self._group.size >= GROUP_BYTES

    @property
    def idle(self) -> bool:
        """Everything handed over is on disk. Raises `JournalError` if a write has failed."""
        if self._error is not None:
            raise JournalError(f"the journal in {self.folder} cannot be written: {self._error}") from self._error
        return self.durable == self.handed

    @property
    def long(self) -> bool:
        """Whether the next file should begin."""
        return self._size > 2 * self._snapshot_size + self._segment_bytes

    def add(self, peer: str, frames: Sequence[bytes | memoryview]) -> None:
        parts = pack(peer, frames)
        self._group.parts += parts
        self._group.count += 1
        self._group.size += sum(map(len, parts))

    def flush(self) -> None:
        """Hands what has been added to the disk; only when `idle`."""
        with self._work:
            self._given, self._group = self._group, _Group()
            self.handed += 1
            self._work.notify()

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until everything handed over is on disk."""
        with self._work:
            done = self._work.wait_for(lambda: self.durable == self.handed or self._error is not None, timeout_s)
        if not done:
            raise JournalError(f"the disk of {self.folder} did not take a write within {timeout_s:g} s")
        assert self.idle

    def cut(self, oldest_needed: int) -> None:
        """Removes the files whose commits all have numbers below `oldest_needed`, except the newest."""
        for number in removable(self._first_commit, oldest_needed):
            (self.folder / f"{number:08d}.journal").unlink(missing_ok=True)
            del self._first_commit[number]

    def _sync(self) -> None:
        """The thread: one group at a time."""
        while True:
            with self._work:
                self._work.wait_for(lambda: self._given is not None or self._closing)
                group = self._given
            if group is None:
                return
            try:
                data = seal(group.parts, group.count)
                _write(self._file, data)
                os.fdatasync(self._file)
                self._size += len(data)
                self.bytes_written += len(data)
            except OSError as error:
                self._error = error
            with self._work:
                self._given = None
                if self._error is None:
                    self.durable = self.handed
                self._work.notify_all()
            os.write(self._wake, b"x")

    def close(self) -> None:
        with self._work:
            self._closing = True
            self._work.notify_all()
        self._thread.join()
        for file in (self._file, self.woken, self._wake):
            os.close(file)

    # --- reading back ------------------------------------------------------------------------------------------

    def find(self, tickets: list[int]) -> tuple[m.Reloaded, list[memoryview]]:
        """Committed trajectories: each is whole in the newest file that has it."""
        return find(segments(self.folder), tickets)


def removable(first_commit: Mapping[int, int], oldest_needed: int) -> list[int]:
    """Numbers of the files that hold nothing but commits before `oldest_needed`; never the newest.

    `first_commit` gives for each file the number of commits before it began.
    """
    return [number for number, later in pairwise(sorted(first_commit)) if first_commit[later] <= oldest_needed]


class Outbox:
    """Answers that wait until what they answer is durable, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, list[Send]]] = deque()

    def hold(self, group: int, sends: list[Send]) -> None:
        """Until group number `group` is on disk."""
        if sends:
            self._waiting.append((group, sends))

    def release(self, durable: int) -> list[Send]:
        """Those that may go out when groups up to `durable` are on disk."""
        out: list[Send] = []
        while self._waiting and self._waiting[0][0] <= durable:
            out += self._waiting.popleft()[1]
        return out

    def __len__(self) -> int:
        return len(self._waiting)


def _write(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- recovery ----------------------------------------------------------------------------------------------------


def begin_with_snapshot(file: Segment) -> tuple[Core, Iterator[Entry]]:
    """The core as it was when the file began, and the messages after that."""
    entries = file.entries()
    first = next(entries, None)
    if first is None:
        raise JournalError(f"{file.path} has no whole group; a file is complete before it gets its name")
    return snapshot.restore(snapshot.decode(first.head), first.frames), entries


def first_commit(file: Segment) -> int:
    """Number of commits before the file began."""
    first = next(Segment(file.path).entries(), None)
    if first is None:
        raise JournalError(f"{file.path} has no whole group; a file is complete before it gets its name")
    return snapshot.decode(first.head).commits


def recover(files: list[Segment], seen: Callable[[Entry], None] | None = None) -> tuple[Core, Findings]:
    """The core as the newest file leaves it."""
    findings = Findings(segments=len(files))
    core, entries = begin_with_snapshot(files[-1])
    for entry in entries:
        findings.tokens += replay(core, entry)
        findings.messages += 1
        if seen is not None:
            seen(entry)
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


def bound(settings: Settings, *, checkpoint_steps: int, segment_bytes: int, chunk_tokens: int) -> int:
    """Most bytes that the journal of a run takes on disk, if a checkpoint is made every so many steps.

    What was trained since the last checkpoint and what is in flight, in chunks of `chunk_tokens`; the oldest file that
    holds some of it and the newest, each at most twice its snapshot and `segment_bytes` long; and the snapshots between
    them, which are at most half as long as what they divide. Prompts and headers count 10% of the tokens.
    """
    token = 1.1 * (m.TOKEN_BYTES + m.ROW_BYTES / chunk_tokens)
    live = settings.limit * settings.max_tokens * token
    since = checkpoint_steps * settings.batch * settings.max_tokens * token
    return int(1.5 * (since + live) + 2 * (3 * live + segment_bytes + 2 * GROUP_BYTES))
