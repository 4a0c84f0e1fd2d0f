"""Every accepted message on disk before it is acknowledged: the journal of a running server.

Its files are described in `buffers/segments.py`. A group of messages is written and synced at once, in a thread of its
own, while the next one collects. When a file has grown to twice what is live and `segment_bytes` more, the next one
begins; a file goes when a checkpoint contains all that was committed in it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import sleep

import msgspec

from buffers import disk, segments, snapshot
from buffers import messages as m
from buffers.core import Core
from buffers.errors import JournalError
from buffers.records import Settings
from buffers.segments import GROUP, GROUP_BYTES, MAGIC, MARK, Findings, Segment
from buffers.store import SELF, Send

FREE_BYTES, FREE_PAUSE_S = 8 << 20, 0.02


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
        self._cutting: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._sync, name="journal", daemon=True)
        self._thread.start()

    # --- opening -----------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: Path, settings: Settings, segment_bytes: int) -> tuple[Journal, Core, Findings | None]:
        """The journal in `folder` and the core it brings back, or a new one (and no findings) if there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        for left in (*folder.glob("*.partial"), *folder.glob("*.gone")):
            left.unlink()
        files = segments.of(folder)
        core, findings = segments.recover(files) if files else (Core(settings), None)
        journal = cls(folder, segment_bytes)
        if not files:
            journal.begin(core)
            return journal, core, None
        journal._first_commit = {file.number: segments.first_commit(file) for file in files}
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
        parts = [
            segments.entry_head(SELF, [sum(map(len, frame)) for frame in pieces]),
            *(p for frame in pieces for p in frame),
        ]
        size = sum(map(len, parts))
        number = self._number + 1
        final = self.folder / f"{number:08d}.journal"
        partial = final.with_suffix(".partial")
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            # Piece by piece: what is live may be a good part of the memory.
            _write(file, MAGIC + GROUP.pack(MARK, 1, size, segments.checksum(1, size, parts)))
            for part in parts:
                _write(file, part)
            os.fdatasync(file)
            partial.rename(final)
            disk.sync(self.folder)
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
        self._check()
        return self.durable == self.handed

    def _check(self) -> None:
        if self._error is not None:
            raise JournalError(
                f"the journal in {self.folder} cannot be written: {self._error}. Nothing acknowledged is lost: free "
                "the disk and resume the run"
            ) from self._error

    @property
    def long(self) -> bool:
        """Whether the next file should begin."""
        return self._size > 2 * self._snapshot_size + self._segment_bytes

    def add(self, peer: str, frames: Sequence[bytes | memoryview]) -> None:
        parts = segments.pack(peer, frames)
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
        self._check()

    def cut(self, oldest_needed: int) -> None:
        """Removes the files whose commits all have numbers below `oldest_needed`, except the newest."""
        for number in removable(self._first_commit, oldest_needed):
            path = self.folder / f"{number:08d}.journal"
            gone = path.rename(path.with_suffix(".gone"))
            del self._first_commit[number]
            thread = threading.Thread(target=_free, args=(gone,), name="journal-cut", daemon=True)
            thread.start()
            self._cutting = [*(cut for cut in self._cutting if cut.is_alive()), thread]

    def _sync(self) -> None:
        """The thread: one group at a time."""
        while True:
            with self._work:
                self._work.wait_for(lambda: self._given is not None or self._closing)
                group = self._given
            if group is None:
                return
            try:
                data = segments.seal(group.parts, group.count)
                _write(self._file, data)
                os.fdatasync(self._file)
                self._size += len(data)
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
        for cutting in self._cutting:
            cutting.join()
        for file in (self._file, self.woken, self._wake):
            os.close(file)

    # --- reading back ------------------------------------------------------------------------------------------

    def find(self, tickets: list[int]) -> tuple[m.Reloaded, list[memoryview]]:
        """Committed trajectories: each is whole in the newest file that has it."""
        return segments.find(segments.of(self.folder), tickets)


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
        return _fewer_acks(out)

    def __len__(self) -> int:
        return len(self._waiting)


def _fewer_acks(sends: list[Send]) -> list[Send]:
    """The acknowledgements of a peer in one: the first that refuses nothing takes the others in."""
    plain = [send for send in sends if isinstance(send.message, m.Ack) and not send.message.refused]
    if len(plain) < 2:
        return sends
    seqs: dict[str, list[int]] = {}
    for send in plain:
        assert isinstance(send.message, m.Ack)
        seqs.setdefault(send.to, []).append(send.message.seq)
    out: list[Send] = []
    for send in sends:
        if not isinstance(send.message, m.Ack) or send.message.refused:
            out.append(send)
        elif send.to in seqs:
            *before, last = seqs.pop(send.to)
            out.append(Send(send.to, m.Ack(last, before=before)))
    return out


def _write(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _free(path: Path) -> None:
    """Removes a file little by little: to free a gigabyte at once holds up a file system, and with it every sync."""
    size = path.stat().st_size
    while size > 0:
        size = max(0, size - FREE_BYTES)
        os.truncate(path, size)
        sleep(FREE_PAUSE_S)
    path.unlink()


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
