"""What reads a journal from outside: inspect, verify, export.

1  inspect shows what is in flight, chunk by chunk as it was sent, over files, repeats, deaths and restores
2  verify finds every kind of damage, with file and byte, and nothing in a journal that is as it should be
3  export has every trajectory once, number by number
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet
import pytest

from buffers import export, inspect, verify
from buffers import messages as m
from buffers.core import Send
from buffers.errors import JournalError
from buffers.journal import Journal
from buffers.records import Settings
from buffers.segments import Segment
from buffers.store import SELF
from staleness.versions import INJECTED, pack
from tests.buffers.driver import Driver, chunks

SETTINGS = {"batch": 4, "group": 2, "max_staleness": 1, "max_tokens": 8, "retain": True}


class Recorded(Driver):
    """A driver with a journal, that remembers what it has streamed: (token, log-prob, version) of each ticket."""

    def __init__(self, folder: Path, **settings: object) -> None:
        settings = SETTINGS | settings
        self.journal, _, _ = Journal.open(folder, Settings(**settings), 1 << 30)  # type: ignore[arg-type]
        self.messages = 0
        self.streamed: dict[int, list[tuple[int, float, int]]] = {}
        self._rng = np.random.default_rng(0)
        super().__init__(**settings)
        self.sync()

    def send(self, peer: str, message: m.Message) -> list[Send]:
        out = super().send(peer, message)
        self._keep(peer, [m.encode(message)])
        for to, reload, _ in out:
            if to == SELF and isinstance(reload, m.Reload):
                self.sync()
                reloaded, frames = self.journal.find(reload.tickets)
                self._note(self.core.receive(SELF, reloaded, frames))
                self._keep(SELF, [m.encode(reloaded), *frames])
        return out

    def append(self, columns: m.Chunks) -> m.Ack:
        ack = super().append(columns)
        self._keep("w", [m.encode(columns.header(self.seq)), columns.to_frame()])
        return ack

    def _keep(self, peer: str, frames: list[bytes | memoryview]) -> None:
        self.journal.add(peer, frames)
        self.messages += 1

    def stream(self, ticket: m.Ticket, *parts: tuple[int, list[int]]) -> None:
        """Parts of (version, tokens), each a chunk of one message, with log-probs like no others."""
        known = self.streamed.setdefault(ticket.id, [])
        rows: list[tuple[int, int, int, list[int]]] = []
        for version, tokens in parts:
            rows.append((ticket.id, len(known), version, tokens))
            known += [(token, float(np.float32(-self._rng.exponential())), version) for token in tokens]
        new = known[rows[0][1] :]
        columns = chunks(rows, attempt=ticket.attempt)
        logprobs = np.asarray([logprob for _, logprob, _ in new], np.float32)
        assert self.append(dataclasses.replace(columns, logprobs=logprobs)).refused == []

    def done(self, ticket: m.Ticket, reward: float) -> None:
        length = len(self.streamed[ticket.id])
        self.outcome(m.Outcome(ticket.id, ticket.attempt, length, "finished", "stop", reward))
        self.tickets.remove(ticket)

    def sync(self) -> Path:
        """Everything said so far is a group on disk; returns the newest file."""
        if self.journal.pending:
            self.journal.flush()
            self.journal.wait()
        return max(self.journal.folder.glob("*.journal"))

    def next_file(self) -> None:
        self.sync()
        self.journal.begin(self.core)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "journal"
    for thread in threading.enumerate():
        assert thread.name != "journal", "a test has left its journal open"


@pytest.fixture
def run(folder: Path) -> Iterator[Recorded]:
    run = Recorded(folder)
    yield run
    run.journal.close()


def shown(capsys: pytest.CaptureFixture[str], folder: Path, ticket: int | None = None) -> list[str]:
    inspect.show(folder, ticket)
    return capsys.readouterr().out.splitlines()


def row_of(lines: list[str], ticket: int) -> list[str]:
    (row,) = [line.split() for line in lines if line.split()[:1] == [str(ticket)]]
    return row


def chunk_lines(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if line.startswith(("  chunk", "  span"))]


# --- 1 inspect ---------------------------------------------------------------------------------------------------


def test_the_overview_has_a_line_for_each_trajectory_in_flight_and_accounts_for_the_others(
    run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.feed()
    one, two, three, four, failing, *rest = run.tickets
    for ticket, reward in ((one, 1.0), (two, 0.25), (three, 0.0), (four, 1.0)):
        run.stream(ticket, (0, [5, 6]))
        run.done(ticket, reward)
    run.commit(run.take())
    run.stream(rest[0], (0, [1, 2]), (1, [3]))
    run.stream(rest[0], (1, [4]))
    run.stream(rest[1], (1, [7]))
    run.done(rest[1], 0.125)
    run.stream(rest[2], (1, [4, 5, 6]), (INJECTED, [9, 9]))
    run.fail(failing)
    run.sync()
    lines = shown(capsys, folder)
    counts = run.core.store.counts
    assert (counts["trained"], counts["failed"], counts["ready"]) == (4, 1, 1)
    assert lines[2] == (
        "issued 8 = trained 4 + expired 0 + failed 1 + cancelled 0 + in flight 3 "
        "(running 2, ready 1, leased 0, parked 0)"
    )
    assert lines[3] == "newest version 1"
    assert row_of(lines, rest[0].id) == [str(rest[0].id), "0/2", "1", "running", "1", "4", "3", "-", "0,1"]
    assert row_of(lines, rest[1].id) == [str(rest[1].id), "0/3", "0", "ready", "1", "1", "1", "0.125", "1"]
    assert row_of(lines, rest[2].id) == [str(rest[2].id), "0/3", "1", "running", "1", "5", "2", "-", "injected,1"]
    # The trajectory of most versions, injected text being none, is shown in full.
    assert f"ticket {rest[0].id}, prompt 0/2, member 1, attempt 1, running" in lines
    assert chunk_lines(lines) == [
        "chunk at 0, 2 tokens, version 0",
        "chunk at 2, 1 tokens, version 1",
        "chunk at 3, 1 tokens, version 1",
    ]


def test_every_token_is_shown_with_its_log_prob(
    run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.feed()
    ticket = run.tickets[3]
    run.stream(ticket, (0, [11, 12]), (INJECTED, [13]))
    run.sync()
    (_, first, _), (_, second, _), _ = run.streamed[ticket.id]
    lines = shown(capsys, folder, ticket.id)
    assert lines[0] == f"ticket {ticket.id}, prompt 0/1, member 1, attempt 1, running"
    assert lines[1] == "  prompt of 3 tokens, response of 3 tokens, no reward"
    assert lines[3] == f"    11:{first:.3f} 12:{second:.3f}"
    assert lines[5] == "    13"
    assert len(lines) == 6


def test_chunks_are_those_that_were_stored_over_all_files(
    run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.feed()
    ticket = run.tickets[0]
    run.stream(ticket, (0, [1, 2]))
    run.next_file()
    run.append(chunks([(ticket.id, 0, 0, [1, 2])]))  # a repeat
    run.append(chunks([(ticket.id, 5, 0, [8])]))  # a gap
    run.append(chunks([(ticket.id, 2, 0, [9])], attempt=2))  # an attempt that is not its
    run.append(chunks([(ticket.id, 2, 5, [9])]))  # a version that does not exist
    both = chunks([(ticket.id, 2, 0, [9, 9]), (ticket.id, 2, 0, [6]), (ticket.id, 3, 0, [7])])
    both.attempt[0] = 2
    run.append(both)
    run.streamed[ticket.id] += [(6, -1.0, 0), (7, -1.0, 0)]
    run.stream(ticket, (0, [4, 5]))
    run.next_file()
    run.stream(ticket, (0, [6]))
    run.sync()
    expected = [
        "chunk at 0, 2 tokens, version 0",
        "chunk at 2, 1 tokens, version 0",
        "chunk at 3, 1 tokens, version 0",
        "chunk at 4, 2 tokens, version 0",
        "chunk at 6, 1 tokens, version 0",
    ]
    assert chunk_lines(shown(capsys, folder, ticket.id)) == expected
    assert row_of(shown(capsys, folder), ticket.id)[5:7] == ["7", "5"]
    # Without the first file nobody knows the chunks in it; without the second, those in both.
    (folder / "00000001.journal").unlink()
    lost = "span (its chunks are not in the journal) at 0, {} tokens, version 0"
    assert chunk_lines(shown(capsys, folder, ticket.id)) == [lost.format(2), *expected[1:]]
    assert row_of(shown(capsys, folder), ticket.id)[5:7] == ["7", ">=5"]
    (folder / "00000002.journal").unlink()
    assert chunk_lines(shown(capsys, folder, ticket.id)) == [lost.format(6), *expected[4:]]


def test_a_trajectory_that_goes_on_at_another_worker_keeps_its_chunks(
    run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.feed()
    ticket = run.tickets[0]
    run.stream(ticket, (0, [1, 2]))
    run.send("feeder", m.Lost("w"))
    run.send("w", m.Hello("worker", 64))
    (again,) = [other for other in run.tickets if other.id == ticket.id and other.attempt == 2]
    assert again.prefix == [1, 2]
    run.stream(again, (0, [3]))
    run.sync()
    lines = shown(capsys, folder, ticket.id)
    assert lines[0].endswith("attempt 2, running")
    assert chunk_lines(lines) == ["chunk at 0, 2 tokens, version 0", "chunk at 2, 1 tokens, version 0"]


def test_a_trajectory_that_begins_again_has_the_chunks_of_its_last_attempt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Recorded(folder, replayable=False)
    run.feed()
    ticket = run.tickets[0]
    run.stream(ticket, (0, [1, 2]), (0, [3]))
    run.send("feeder", m.Lost("w"))
    run.send("w", m.Hello("worker", 64))
    (again,) = [other for other in run.tickets if other.id == ticket.id and other.attempt == 2]
    run.sync()
    lines = shown(capsys, folder, ticket.id)
    assert lines[1].startswith("  prompt of 3 tokens, response of 0 tokens")
    assert chunk_lines(lines) == []
    run.streamed[ticket.id] = []
    run.stream(again, (0, [4, 5, 6]))
    run.sync()
    lines = shown(capsys, folder, ticket.id)
    assert chunk_lines(lines) == ["chunk at 0, 3 tokens, version 0"]
    assert [token.split(":")[0] for token in lines[-1].split()] == ["4", "5", "6"]
    run.journal.close()


def test_a_ticket_that_has_ended_can_be_shown_while_its_file_is_kept(
    run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.feed()
    ticket = run.tickets[0]
    for other in run.tickets[:4]:
        run.stream(other, (0, [3, 4]))
        run.done(other, 0.5)
    run.next_file()
    run.commit(run.take())
    run.next_file()
    lines = shown(capsys, folder, ticket.id)
    assert lines[0].endswith("attempt 1, trained in step 0")
    assert lines[1] == "  prompt of 3 tokens, response of 2 tokens, reward 0.5, ended by 'stop'"
    assert chunk_lines(lines) == ["chunk at 0, 2 tokens, version 0"]
    assert str(ticket.id) not in {line.split()[0] for line in shown(capsys, folder) if line.split()}
    for name in ("00000001.journal", "00000002.journal"):
        (folder / name).unlink()
    with pytest.raises(JournalError, match=f"ticket {ticket.id} is not in the journal in {re.escape(str(folder))}"):
        inspect.show(folder, ticket.id)


def test_what_a_restore_brings_back_is_told_under_both_tickets(
    run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = restored(run)
    new = run.core.store.trajectories
    run.sync()
    lines = shown(capsys, folder, old[0].id)
    assert lines[0].endswith("trained in step 0")
    assert lines[-1] == "  a restore has undone that: it goes on under another ticket"
    again = next(trajectory for trajectory in new.values() if trajectory.group.index == 0 and trajectory.member == 0)
    lines = shown(capsys, folder, again.ticket)
    assert lines[0].endswith("ready")
    assert chunk_lines(lines) == ["span (its chunks are not in the journal) at 0, 2 tokens, version 0"]
    assert "parked 0" in "".join(shown(capsys, folder))


def restored(run: Recorded) -> list[m.Ticket]:
    """Two steps, then a learner that goes back to the first version; returns the tickets of the first batch."""
    run.feed()
    batch = run.tickets[:4]
    for ticket in batch:
        run.stream(ticket, (0, [3, ticket.member]))
        run.done(ticket, 0.5)
    run.commit(run.take())
    run.send("rank0", m.Published(pack(1, 0), [0]))
    return batch


def test_a_torn_end_is_left_out(run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.feed()
    ticket = run.tickets[0]
    run.stream(ticket, (0, [1, 2]))
    before = run.sync().stat().st_size
    run.stream(ticket, (0, [3]))
    path = run.sync()
    os.truncate(path, path.stat().st_size - 1)
    torn = path.stat().st_size - before
    assert torn > 0
    lines = shown(capsys, folder)
    assert f"{torn} of them of an unfinished write" in lines[1]
    assert row_of(lines, ticket.id)[5:7] == ["2", "1"]


def test_a_journal_that_is_not_there_names_its_folder(folder: Path) -> None:
    for read in (inspect.show, verify.verify, lambda place: export.export(place, place / "x.parquet")):
        with pytest.raises(JournalError, match=f"no journal in {re.escape(str(folder))}.*durability: none keeps none"):
            read(folder)
    assert not folder.exists()


# --- 2 verify ----------------------------------------------------------------------------------------------------


def three_files(run: Recorded) -> None:
    """Two commits in two files of two groups each, and a third file with some more tokens."""
    run.feed()
    for _ in range(2):
        for ticket in run.tickets[:4]:
            run.stream(ticket, (run.version, [3, 4]), (run.version, [5]))
        run.sync()
        for ticket in run.tickets[:4]:
            run.done(ticket, 0.5)
        run.commit(run.take())
        run.feed()
        run.next_file()
    run.stream(run.tickets[0], (run.version, [3, 4]))
    run.sync()


def test_a_journal_that_is_as_it_should_be(run: Recorded, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_files(run)
    report = verify.verify(folder)
    assert report.damage == []
    assert [file.path.name for file in report.files] == [f"0000000{i}.journal" for i in (1, 2, 3)]
    assert [file.tokens for file in report.files] == [12, 12, 2]
    assert [file.commits for file in report.files] == [1, 1, 0]
    assert [file.bytes for file in report.files] == [file.path.stat().st_size for file in report.files]
    assert sum(file.messages for file in report.files) == run.messages
    assert report.files[2].messages == 1
    assert all(file.torn_bytes == 0 and file.notes == () for file in report.files)
    verify.show(report)
    assert capsys.readouterr().out.splitlines()[-1] == "no damage found"


def test_a_torn_end_of_the_newest_file_is_no_damage(run: Recorded, folder: Path) -> None:
    three_files(run)
    path = run.sync()
    before = path.stat().st_size
    run.stream(run.tickets[0], (run.version, [5]))
    run.sync()
    os.truncate(path, before + 7)
    report = verify.verify(folder)
    assert report.damage == []
    assert [file.torn_bytes for file in report.files] == [0, 0, 7]
    assert report.files[2].tokens == 2


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_named_with_its_file_and_group(folder: Path, run: Recorded) -> None:
    run.feed()
    path = run.sync()
    before = path.stat().st_size
    run.stream(run.tickets[0], (0, [3, 4]))
    run.sync()
    after = path.stat().st_size
    run.stream(run.tickets[0], (0, [5]))
    run.next_file()
    for at in (before, before + 8, (before + after) // 2, after - 1):
        flip(path, at)
        report = verify.verify(folder)
        (damage,) = report.damage
        assert f"{path} is damaged at byte {before}" in damage
        assert "checksum" in damage
        assert report.files[0].tokens == 0
        # The other file is read for itself.
        assert report.files[1].damage == ()
        assert report.files[1].notes == (
            "its beginning was not compared with the end of 00000001.journal: that is not known",
        )
        flip(path, at)
    assert verify.verify(folder).damage == []


def test_a_damaged_end_of_a_file_that_another_follows_is_damage(run: Recorded, folder: Path) -> None:
    run.feed()
    path = run.sync()
    before = path.stat().st_size
    run.stream(run.tickets[0], (0, [3, 4]))
    run.next_file()
    flip(path, before + 40)
    (damage,) = verify.verify(folder).damage
    assert damage.startswith(f"{path} is damaged at byte {before}: ")


def test_a_damaged_beginning_is_damage_at_byte_8(run: Recorded, folder: Path) -> None:
    run.feed()
    path = run.sync()
    flip(path, 40)
    (damage,) = verify.verify(folder).damage
    assert f"{path} is damaged at byte 8" in damage
    flip(path, 40)
    flip(path, 2)
    (damage,) = verify.verify(folder).damage
    assert str(path) in damage
    assert "not a journal" in damage


def test_a_message_that_cannot_be_replayed_is_damage(run: Recorded, folder: Path) -> None:
    run.feed()
    path = run.sync()
    before, messages = path.stat().st_size, run.messages
    run.journal.add("rank0", [m.encode(m.Commit(7, 9))])
    run.sync()
    (damage,) = verify.verify(folder).damage
    assert damage.startswith(f"{path} is damaged at byte {before}: message {messages + 1} of the file, from 'rank0', ")
    assert "lease 7 is not outstanding" in damage


def test_a_file_that_does_not_go_on_from_the_one_before_is_damage(run: Recorded, folder: Path) -> None:
    run.feed()
    run.sync()
    run.core.handle("w", m.Outcomes(99, [], busy_s=3.0))  # not in the journal
    run.next_file()
    (damage,) = verify.verify(folder).damage
    assert damage == (
        f"{folder / '00000002.journal'} is damaged at byte 8: it does not begin with the state that 00000001.journal "
        "ends with; they differ in: usage"
    )


def test_accounts_that_do_not_add_up_are_damage(run: Recorded, folder: Path) -> None:
    run.feed()
    run.core.store.tally.issued += 1
    run.next_file()
    (folder / "00000001.journal").unlink()
    (damage,) = verify.verify(folder).damage
    assert "accounts" in damage
    assert str(folder / "00000002.journal") in damage


@pytest.mark.parametrize("batch", [6, 2])
def test_a_run_that_goes_on_under_other_settings_is_compared_under_them(folder: Path, batch: int) -> None:
    run = Recorded(folder)
    run.feed()
    run.stream(run.tickets[0], (0, [3, 4]))
    run.sync()
    run.journal.close()
    settings = msgspec.structs.replace(run.core.settings, batch=batch)
    journal, core, _ = Journal.open(folder, settings, 1 << 30)
    journal.close()
    assert len(list(folder.iterdir())) == 2
    report = verify.verify(folder)
    assert report.damage == []
    # Half of what is in flight is over the limit of the smaller buffer, until it has ended.
    over = core.store.in_flight > settings.limit
    assert over == (batch == 2)
    assert [len(file.notes) for file in report.files] == [0, 1 if over else 0]
    # What differs beyond the settings is found all the same.
    newest = folder / "00000002.journal"
    newest.unlink()
    core.store.tally.tokens += 1
    journal = Journal(folder, 1 << 30)
    journal._number = 1  # pyright: ignore[reportPrivateUsage]
    journal.begin(core)
    journal.close()
    (damage,) = verify.verify(folder).damage
    assert damage.endswith("they differ in: tally")


def test_a_gap_in_the_numbers_is_said(run: Recorded, folder: Path) -> None:
    three_files(run)
    (folder / "00000002.journal").unlink()
    report = verify.verify(folder)
    assert report.damage == []
    assert [len(file.notes) for file in report.files] == [0, 1]
    assert "the files between are missing" in report.files[1].notes[0]


# --- 3 export ----------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, object]]:
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.fixture
def busy(folder: Path) -> Iterator[tuple[Recorded, dict[int, dict[str, object]]]]:
    """A run with trajectories in every state but parked, over three files, and what their rows should be, by ticket."""
    run = Recorded(folder, batch=2, slack=8, on_failed="replace", max_attempts=2, min_group=2)
    rows: dict[int, dict[str, object]] = {}

    def expect(ticket: m.Ticket, state: str, reward: float | None = None, step: int | None = None) -> None:
        streamed = run.streamed.get(ticket.id, [])
        rows[ticket.id] = {
            "epoch": ticket.key[0],
            "index": ticket.key[1],
            "group": ticket.key[1],
            "member": ticket.member,
            "ticket": ticket.id,
            "attempt": ticket.attempt,
            "state": state,
            "reward": reward,
            "finish_reason": "" if reward is None else "stop",
            "prompt": ticket.prompt,
            "tokens": [token for token, _, _ in streamed],
            "logprobs": [logprob for _, logprob, _ in streamed],
            "versions": [version for _, _, version in streamed],
            "trained_step": step,
        }

    def replacement_of(ticket: m.Ticket) -> m.Ticket:
        place = (ticket.key, ticket.member)
        return next(other for other in run.tickets if (other.key, other.member) == place)

    run.feed()
    a, b, c, d, e, f = (run.tickets[i : i + 2] for i in range(0, 12, 2))
    for ticket in a:
        run.stream(ticket, (0, [ticket.member, 11]))
        run.done(ticket, 1.0)
        expect(ticket, "trained", 1.0, 0)
    run.stream(b[0], (0, [21]))
    run.stream(b[1], (0, [22]), (INJECTED, [500, 501]))
    run.commit(run.take())
    run.next_file()
    for ticket in b:
        run.stream(ticket, (1, [23, ticket.member]))
        run.done(ticket, 0.1)
        expect(ticket, "trained", 0.1, 1)
    run.commit(run.take())
    for ticket in c:
        run.stream(ticket, (0, [31]))
    run.next_file()
    for ticket in c:
        run.done(ticket, 0.3)
        expect(ticket, "expired", 0.3)
    assert run.take() is None
    run.stream(d[0], (0, [41, 42]))
    run.fail(d[0])
    expect(d[0], "failed")
    for ticket in (d[1], replacement_of(d[0])):
        run.stream(ticket, (2, [43, ticket.member]))
        run.done(ticket, -0.4)
        expect(ticket, "leased", -0.4)
    run.stream(e[0], (1, [51]), (2, [52]))
    run.done(e[0], 0.5)
    expect(e[0], "cancelled", 0.5)
    for _ in range(2):
        failing = replacement_of(e[1])
        run.fail(failing)
        expect(failing, "failed")
    run.stream(f[0], (2, [61, 62, 63]))
    expect(f[0], "running")
    run.stream(f[1], (2, [64]))
    run.done(f[1], 0.75)
    expect(f[1], "ready", 0.75)
    run.feed()
    for ticket in run.tickets:
        if ticket.id not in rows:
            expect(ticket, "running")
    run.sync()
    yield run, rows
    run.journal.close()


Busy = tuple[Recorded, dict[int, dict[str, object]]]


def test_every_trajectory_is_exported_once_number_by_number(busy: Busy, folder: Path) -> None:
    run, expected = busy
    target = folder.parent / "out" / "t.parquet"
    written = export.export(folder, target)
    rows = rows_of(target)
    assert {row["ticket"]: row for row in rows} == expected
    assert len(rows) == len(expected) == run.core.store.tally.issued
    assert {state: count for state, count in run.core.store.counts.items() if count} == written
    assert set(written) == {"trained", "expired", "failed", "cancelled", "leased", "ready", "running"}
    assert list(target.parent.iterdir()) == [target]
    types = {field.name: str(field.type) for field in pyarrow.parquet.read_schema(target)}
    assert types["prompt"] == types["tokens"] == "list<element: int32>"
    assert (types["logprobs"], types["versions"]) == ("list<element: float>", "list<element: int64>")


def test_only_what_is_asked_for_is_exported(busy: Busy, folder: Path) -> None:
    _, expected = busy
    target = folder.parent / "t.parquet"
    written = export.export(folder, target, {"trained", "ready"})
    assert written == {"trained": 4, "ready": 1}
    wanted = {ticket: row for ticket, row in expected.items() if row["state"] in ("trained", "ready")}
    assert {row["ticket"]: row for row in rows_of(target)} == wanted
    assert export.export(folder, target, {"parked"}) == {}
    assert rows_of(target) == []


def test_a_file_that_is_gone_takes_what_ended_in_it_along(busy: Busy, folder: Path) -> None:
    _, expected = busy
    (folder / "00000001.journal").unlink()
    target = folder.parent / "t.parquet"
    export.export(folder, target)
    left = {ticket: row for ticket, row in expected.items() if row["trained_step"] != 0}
    assert len(left) == len(expected) - 2
    assert {row["ticket"]: row for row in rows_of(target)} == left


@pytest.mark.parametrize("limits", [(10**6, 4), (12, 10**6)])
def test_row_groups_are_bounded(
    busy: Busy, folder: Path, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = busy
    tokens, rows = limits
    monkeypatch.setattr(export, "GROUP_TOKENS", tokens)
    monkeypatch.setattr(export, "GROUP_ROWS", rows)
    target = folder.parent / "t.parquet"
    export.export(folder, target)
    file = pyarrow.parquet.ParquetFile(target)
    groups = [file.read_row_group(i).to_pylist() for i in range(file.num_row_groups)]
    assert len(groups) > 2
    for group in groups:
        assert len(group) <= rows
        assert sum(len(row["tokens"]) + len(row["prompt"]) for row in group) <= tokens
    assert {row["ticket"]: row for group in groups for row in group} == expected


def test_a_torn_end_is_not_exported(run: Recorded, folder: Path) -> None:
    run.feed()
    run.stream(run.tickets[0], (0, [1, 2]))
    run.sync()
    run.stream(run.tickets[0], (0, [3]))
    path = run.sync()
    os.truncate(path, path.stat().st_size - 1)
    target = folder.parent / "t.parquet"
    export.export(folder, target)
    assert [row["tokens"] for row in rows_of(target) if row["tokens"]] == [[1, 2]]


def test_a_damaged_journal_leaves_the_earlier_export_alone(busy: Busy, folder: Path) -> None:
    target = folder.parent / "t.parquet"
    export.export(folder, target)
    before = target.read_bytes()
    path = folder / "00000001.journal"
    flip(path, path.stat().st_size // 2)
    with pytest.raises(JournalError, match="damaged"):
        export.export(folder, target)
    assert target.read_bytes() == before
    assert [place for place in folder.parent.iterdir() if place.is_file()] == [target]


def test_what_a_restore_brings_back_is_exported_once(run: Recorded, folder: Path) -> None:
    old = restored(run)
    run.sync()
    target = folder.parent / "t.parquet"
    assert export.export(folder, target) == {"ready": 4, "running": 4}
    brought = [row for row in rows_of(target) if row["state"] == "ready"]
    assert not {row["ticket"] for row in brought} & {ticket.id for ticket in old}
    streamed = {(ticket.key[1], ticket.member): run.streamed[ticket.id] for ticket in old}
    for row in brought:
        told = streamed.pop((row["index"], row["member"]))
        assert list(zip(row["tokens"], row["logprobs"], row["versions"], strict=True)) == told
        assert row["trained_step"] is None
    assert not streamed


def test_what_waits_to_be_brought_back_is_exported_as_parked(folder: Path) -> None:
    run = Recorded(folder, batch=4, max_staleness=0)  # as many as a batch in memory
    run.feed()
    batch = list(run.tickets)
    for ticket in batch:
        run.stream(ticket, (0, [3, ticket.member]))
        run.done(ticket, 0.5)
    run.commit(run.take())
    run.next_file()
    run.feed()
    assert run.core.store.pool.free_rows == 0
    run.send("rank0", m.Published(pack(1, 0), [0]))
    run.sync()
    target = folder.parent / "t.parquet"
    assert export.export(folder, target) == {"parked": 4, "running": 4}
    parked = [row for row in rows_of(target) if row["state"] == "parked"]
    assert {row["ticket"]: row["tokens"] for row in parked} == {t.id: [3, t.member] for t in batch}
    assert all(row["trained_step"] is None for row in parked)
    run.journal.close()


def test_an_export_that_fails_at_its_end_leaves_nothing(busy: Busy, folder: Path) -> None:
    target = folder.parent / "t.parquet"
    target.mkdir()
    with pytest.raises(OSError, match=r"t\.parquet"):
        export.export(folder, target)
    assert sorted(folder.parent.iterdir()) == [folder, target]


def test_a_file_that_a_checkpoint_lets_go_of_meanwhile_is_left_out(
    busy: Busy, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = busy
    oldest = folder / "00000001.journal"
    content, files = oldest.read_bytes(), inspect.files

    def files_then_gone(place: Path) -> list[Segment]:
        oldest.write_bytes(content)
        found = files(place)
        oldest.unlink()
        return found

    for module in (inspect, verify, export):
        monkeypatch.setattr(module, "files", files_then_gone)
    report = verify.verify(folder)
    assert report.damage == []
    assert [len(file.notes) for file in report.files] == [1, 1, 0]
    assert "let go of" in report.files[0].notes[0]
    export.export(folder, folder.parent / "t.parquet")
    assert len(rows_of(folder.parent / "t.parquet")) == len(expected) - 2
    live = [ticket for ticket, row in expected.items() if row["state"] in ("running", "ready", "leased")]
    lines = shown(capsys, folder)
    for ticket in live:
        assert row_of(lines, ticket)[5] == str(len(expected[ticket]["tokens"]))
