"""Whether a journal is what it should be: every checksum, every message, every file the continuation of the one before.

    report = verify(run / "journal")
    show(report)                        a line a file, and what is damaged, with file and byte

Only reads files, so the run may be going on; the newest file may then end in a write that is in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from buffers import snapshot
from buffers.core import Core
from buffers.errors import JournalError
from buffers.inspect import files
from buffers.segments import Entry, Segment, begin_with_snapshot, replay


@dataclass(frozen=True)
class FileReport:
    """One file: its messages after the snapshot, the tokens they stored, its size, and the commits in it.

    `torn_bytes` at its end are of a write that was never acknowledged. `notes` say what was not checked and why;
    `damage`, what is wrong and where.
    """

    path: Path
    messages: int
    tokens: int
    bytes: int
    torn_bytes: int
    commits: int
    notes: tuple[str, ...]
    damage: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All files of a journal, oldest first."""

    files: tuple[FileReport, ...]

    @property
    def damage(self) -> list[str]:
        return [text for file in self.files for text in file.damage]


def verify(folder: Path) -> Report:
    """Reads and replays every file of the journal in `folder`; `JournalError` if there is none.

    Damage is in the report, not raised: each file is read for itself, as each begins with a snapshot.
    """
    found = files(folder)
    reports: list[FileReport] = []
    before: _Reading | None = None
    for file in found:
        reading = _Reading(file)
        reading.read(before, newest=file is found[-1])
        reports.append(reading.report())
        before = reading
    return Report(tuple(reports))


class _Reading:
    """One file as far as it could be read. `end` is the state that it ends with, None where that is not known."""

    def __init__(self, file: Segment) -> None:
        self.file = file
        self.end: Core | None = None
        self._messages = self._tokens = self._commits = self._torn_bytes = 0
        self._notes: list[str] = []
        self._damage: list[str] = []

    def report(self) -> FileReport:
        return FileReport(
            path=self.file.path,
            messages=self._messages,
            tokens=self._tokens,
            bytes=self.file.size,
            torn_bytes=self._torn_bytes,
            commits=self._commits,
            notes=tuple(self._notes),
            damage=tuple(self._damage),
        )

    def read(self, before: _Reading | None, *, newest: bool) -> None:
        """`before` is the file before it; only the `newest` one may end in the middle of a write."""
        try:
            core, entries = begin_with_snapshot(self.file)
        except FileNotFoundError:
            self._notes.append("not checked: a checkpoint has let go of it meanwhile")
            return
        except Exception as error:  # whatever reading makes of bytes that nobody can have written
            self._damaged(_reason(error))
            return
        if before is not None:
            self._continues(before, core)
        if self._replay(core, entries):
            self._ends(core, newest=newest)

    def _continues(self, before: _Reading, core: Core) -> None:
        """Compares the state that this file begins with, which `core` is in, with that which `before` ends with."""
        last, end = before.file.path.name, before.end
        if before.file.number + 1 != self.file.number:
            self._notes.append(f"its beginning was not compared with the end of {last}: the files between are missing")
            return
        if end is None:
            self._notes.append(f"its beginning was not compared with the end of {last}: that is not known")
            return
        if end.settings != core.settings:
            end = snapshot.restore(*snapshot.take(end), core.settings)
        if snapshot.digest(end) != snapshot.digest(core):
            differ = ", ".join(_differences(end, core))
            self._damaged(f"it does not begin with the state that {last} ends with; they differ in: {differ}")

    def _replay(self, core: Core, entries: Iterator[Entry]) -> bool:
        """Replays the messages; False if one cannot be."""
        tokens, commits = core.store.tally.tokens, core.offering.commits
        entry = None
        try:
            for entry in entries:
                replay(core, entry)
                self._messages += 1
        except JournalError as error:
            self._damaged(_reason(error))
            return False
        except Exception as error:  # whatever the core makes of a message that it cannot have accepted
            peer = "the server itself" if entry is None or not entry.peer else repr(entry.peer)
            self._damaged(
                f"message {self._messages + 1} of the file, from {peer}, cannot be replayed: {_reason(error)}"
            )
            return False
        finally:
            self._tokens = core.store.tally.tokens - tokens
            self._commits = core.offering.commits - commits
        return True

    def _ends(self, core: Core, *, newest: bool) -> None:
        """What must hold at the end."""
        self._torn_bytes = self.file.size - self.file.good
        if self._torn_bytes and not newest:
            self._damaged(f"its last {self._torn_bytes} bytes are no whole group, but another file follows")
            return
        self.end = core
        counts = core.store.counts
        if core.store.in_flight - counts["parked"] > core.settings.limit:
            self._notes.append(
                "its accounts were not checked: more is in flight than its settings allow, as after a "
                "resume with a smaller buffer"
            )
            return
        try:
            core.check()
        except AssertionError as error:
            self._damaged(f"the accounts of the state that it ends with do not add up {error}".rstrip())

    def _damaged(self, why: str) -> None:
        """Notes damage in the group that has been reached."""
        place = f"byte {self.file.good}"
        path = str(self.file.path)
        self._damage.append(why if path in why and place in why else f"{path} is damaged at {place}: {why}")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, JournalError) else f"{type(error).__name__}: {error}"


def _differences(one: Core, other: Core) -> list[str]:
    """The parts of two snapshots that are not the same."""
    (head, frames), (other_head, other_frames) = snapshot.take(one), snapshot.take(other)
    fields = [name for name in head.__struct_fields__ if getattr(head, name) != getattr(other_head, name)]
    return [*fields, *(["tokens or log-probs"] if [*map(bytes, frames)] != [*map(bytes, other_frames)] else [])]


# --- printing ----------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """Prints a line a file, the notes, and what is damaged."""
    print(f"{'file':>16} {'messages':>10} {'tokens':>12} {'commits':>8} {'bytes':>15} {'torn bytes':>10}")
    for file in report.files:
        print(
            f"{file.path.name:>16} {file.messages:>10,} {file.tokens:>12,} {file.commits:>8,} {file.bytes:>15,} "
            f"{file.torn_bytes:>10,}"
        )
    for file in report.files:
        for note in file.notes:
            print(f"note: {file.path.name}: {note}")
        if file.torn_bytes and not file.damage:
            print(f"note: {file.path.name}: the torn bytes were never acknowledged; recovery cuts them off")
    for text in report.damage:
        print(f"damaged: {text}")
    print("damaged" if report.damage else "no damage found")
