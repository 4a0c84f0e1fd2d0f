"""A journal on a simulated disk: a group is there once its sync has ended; a crash loses the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from buffers import journal, segments, snapshot
from buffers import messages as m
from buffers.core import Core
from buffers.segments import Entry
from buffers.store import SELF


@dataclass
class File:
    """Stands for `segments.Segment`; its entries are all whole."""

    number: int
    written: list[Entry] = field(default_factory=list)
    size = good = 0
    path = "simulated"

    def entries(self) -> Iterator[Entry]:
        yield from list(self.written)


def entry(peer: str, frames: Sequence[bytes | memoryview]) -> Entry:
    views = [memoryview(bytes(frame)) for frame in frames]
    return Entry(peer, views[0], views[1:])


class Disk:
    """Files, oldest first. `group` is what has been added since the last sync began."""

    def __init__(self, file_entries: int) -> None:
        self.files: list[File] = []
        self.first_commit: dict[int, int] = {}
        self.group: list[Entry] = []
        self.syncing: list[Entry] = []
        self._file_entries = file_entries

    def begin(self, core: Core) -> None:
        assert not self.group
        assert not self.syncing
        head, frames = snapshot.take(core)
        number = self.files[-1].number + 1 if self.files else 1
        self.files.append(File(number, [entry(SELF, [msgspec.msgpack.encode(head), *frames])]))
        self.first_commit[number] = core.offering.commits

    @property
    def long(self) -> bool:
        return len(self.files[-1].written) > self._file_entries

    def add(self, peer: str, frames: Sequence[bytes | memoryview]) -> None:
        self.group.append(entry(peer, frames))

    def start_sync(self) -> None:
        self.syncing, self.group = self.group, []

    def end_sync(self) -> None:
        self.files[-1].written += self.syncing
        self.syncing = []

    def crash(self, *, written: bool) -> None:
        """What was being written may or may not be there; nobody was told of it."""
        if written:
            self.end_sync()
        self.syncing, self.group = [], []

    def cut(self, oldest_needed: int) -> None:
        for number in journal.removable(self.first_commit, oldest_needed):
            self.files = [file for file in self.files if file.number != number]
            del self.first_commit[number]

    def recover(self) -> Core:
        return segments.recover(self.files)[0]  # type: ignore[arg-type]

    def find(self, tickets: list[int]) -> tuple[m.Reloaded, list[memoryview]]:
        return segments.find(self.files, tickets)  # type: ignore[arg-type]
