"""What is acknowledged is on disk, and what is on disk brings the same core back.

1  recovery equals the live core bit for bit after any events, across files and crashes
2  a torn end loses only what was never acknowledged, wherever it is torn; whoever goes on writes behind it
3  damage anywhere else is an error that names file and byte
4  other settings on reopening: sizes and policies may change, no token is lost
5  `find` returns committed trajectories exactly, from any file; `cut` removes only what nobody can ask for
6  a write that fails is an error and acknowledges nothing
"""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import msgspec
import pytest

from buffers import messages as m
from buffers import segments, snapshot
from buffers.core import Core
from buffers.errors import JournalError
from buffers.journal import Journal
from buffers.records import Settings
from buffers.segments import GROUP, MAGIC, recover
from buffers.store import SELF
from tests.buffers.driver import chunks, prompt
from tests.buffers.world import World

SETTINGS = Settings(
    batch=4,
    group=2,
    max_staleness=3,
    max_tokens=10,
    retain=True,
    on_failed="replace",
    max_consecutive_failed_groups=999,
)
POLICIES = ("whole", "deadline_versions", "split")


def some_settings(seed: int) -> Settings:
    rng = random.Random(seed)
    return msgspec.structs.replace(
        SETTINGS,
        max_staleness=rng.choice([1, 3]),
        group_policy=POLICIES[seed % 3],
        deadline_versions=2,
        on_failed=("replace", "shrink", "fail_group")[seed // 3 % 3],
        on_stale=rng.choice(["mask", "drop"]),
        sampler=rng.choice(["oldest", "uniform", "prioritized"]),
        replayable=rng.random() < 0.7,
    )


def opened(folder: Path, settings: Settings = SETTINGS) -> tuple[Journal, Core]:
    journal, core, _ = Journal.open(folder, settings, 1 << 20)
    return journal, core


# --- 1 recovery --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_recovery_equals_the_live_core_after_any_events(tmp_path: Path, seed: int) -> None:
    """`World` checks what `find` returns against what was fetched whenever its learner is restored."""
    journal, core = opened(tmp_path, some_settings(seed))
    world = World(some_settings(seed), seed, core=core, journal=journal)
    rng = random.Random(seed)
    for i in range(320):
        world.step()
        if i % 100 == 70:
            world.restore()
        if rng.random() < 0.05:
            world.sync()
        if i % 130 == 120:
            world.sync()
            journal.begin(world.core)
        if i % 40 == 39:
            world.sync()
            again, findings = recover(segments.of(tmp_path))
            assert findings.torn_bytes == 0
            assert snapshot.digest(again) == snapshot.digest(world.core)
    assert segments.of(tmp_path)[-1].number > 2
    assert world.core.stats().trained == len(world.trained) > 0
    journal.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_run_goes_on_from_crash_to_crash(tmp_path: Path, seed: int) -> None:
    """The recovered core is the one that continues: with a journal that was reopened, on the same seed."""
    settings = some_settings(3 * seed)
    journal, core = opened(tmp_path, settings)
    world = World(settings, seed, core=core, journal=journal)
    for _ in range(6):
        for _ in range(50):
            world.step()
        world.sync()
        before = snapshot.digest(world.core)
        journal.close()
        journal, core, findings = Journal.open(tmp_path, settings, 1 << 20)
        assert findings is not None
        assert snapshot.digest(core) == before
        core.check()
        world.core, world.journal = core, journal
        if seed < 2:
            world.new_life()
            world.sync()
        if seed % 2:
            journal.begin(core)
            journal.cut(core.offering.oldest_needed())
    assert world.core.stats().trained == len(world.trained) > 0
    journal.close()


def test_a_reload_that_a_crash_interrupted_is_asked_for_again(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, on_failed="shrink")
    journal, core = opened(tmp_path, settings)
    world = World(settings, 1, core=core, journal=journal)
    world.reloading = False
    while len(world.history) < 3:
        world.stream()
        world.end(faults=False)
        world.learn()
        world.feed()
    for name, work in list(world.workers.items()):
        failed = [m.Outcome(one.ticket.id, one.ticket.attempt, 0, "failed", error="x") for one in work.values()]
        world.say(name, m.Outcomes(1, failed))
    world.restore()
    assert core.offering.loading
    world.sync()
    again, _ = recover(segments.of(tmp_path))
    assert list(again.offering.loading) == list(core.offering.loading)
    assert again.offering.reload_request() == core.offering.reload_request()
    assert snapshot.digest(again) == snapshot.digest(core)
    journal.close()


def test_a_snapshot_read_and_taken_again_is_the_same() -> None:
    for seed in range(12):
        settings = some_settings(seed)
        world = World(settings, seed)
        for _ in range(150):
            world.step()
        world.reloading = False
        world.restore()
        head, frames = snapshot.take(world.core)
        again = snapshot.restore(snapshot.decode(msgspec.msgpack.encode(head)), frames)
        assert snapshot.digest(again) == snapshot.digest(world.core)
        again.check()


def test_two_cores_of_the_same_messages_differ_as_soon_as_one_message_does() -> None:
    """The digest can fail: else the tests above prove nothing."""
    one, two = World(SETTINGS, 5), World(SETTINGS, 5)
    for _ in range(100):
        one.step()
        two.step()
    assert snapshot.digest(one.core) == snapshot.digest(two.core)
    work = next(work for work in one.workers.values() if work)
    ticket = next(iter(work.values()))
    name = next(name for name, held in one.workers.items() if held is work)
    outcome = m.Outcome(ticket.ticket.id, ticket.ticket.attempt, ticket.length, "generated", "stop")
    one.say(name, m.Outcomes(1, [outcome]))
    assert snapshot.digest(one.core) != snapshot.digest(two.core)


# --- 2 a torn end ------------------------------------------------------------------------------------------------


def small(folder: Path) -> tuple[Journal, Core, list[bytes]]:
    """A journal of a snapshot and three groups, each on disk before the next; and the digests after each."""
    settings = Settings(batch=2, group=2, max_staleness=1, max_tokens=8)
    journal, core = opened(folder, settings)
    digests = [snapshot.digest(core)]

    def say(peer: str, message: m.Message, *frames: bytes) -> None:
        head = m.encode(message)
        core.receive(peer, m.decode_inbound(head), frames)
        journal.add(peer, [head, *frames])

    def sync() -> None:
        journal.flush()
        journal.wait()
        digests.append(snapshot.digest(core))

    say("feeder", m.Hello("feeder"))
    say("w", m.Hello("worker", 4))
    say("rank0", m.Published(0))
    sync()
    say("feeder", m.Submit(0, [prompt(0), prompt(1)]))
    sync()
    tickets = sorted(core.store.trajectories)
    columns = chunks([(ticket, 0, 0, [5, 6]) for ticket in tickets])
    say("w", columns.header(1), columns.to_frame())
    say("w", m.Outcomes(2, [m.Outcome(tickets[0], 1, 2, "finished", "stop", 0.5)]))
    sync()
    return journal, core, digests


def ends(data: bytes) -> list[int]:
    """Where each group of a file ends."""
    at, found = len(MAGIC), []
    while at < len(data):
        _, _, size, _ = GROUP.unpack_from(data, at)
        at += GROUP.size + size
        found.append(at)
    return found


def test_a_group_torn_at_any_byte_loses_only_itself(tmp_path: Path) -> None:
    journal, _, digests = small(tmp_path)
    journal.close()
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    *_, before, last = ends(data)
    assert last == len(data)
    for end in range(before, last):
        file.write_bytes(data[:end])
        core, findings = recover(segments.of(tmp_path))
        assert snapshot.digest(core) == digests[2]
        assert findings.torn_bytes == end - before
        file.write_bytes(data[:end] + b"\0" * (last - end))  # a size that was written before the data
        core, _ = recover(segments.of(tmp_path))
        assert snapshot.digest(core) == (digests[3] if not any(data[end:]) else digests[2])


@pytest.mark.parametrize("kept", [0, 1, 19, 20, 21, 60])
def test_after_a_torn_end_the_journal_goes_on_and_nothing_later_is_lost(tmp_path: Path, kept: int) -> None:
    journal, _, digests = small(tmp_path)
    journal.close()
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    before = ends(data)[-2]
    file.write_bytes(data[: before + kept])
    journal, core, findings = Journal.open(tmp_path, Settings(batch=2, group=2, max_staleness=1, max_tokens=8), 1 << 20)
    assert findings is not None
    assert findings.torn_bytes == kept
    assert snapshot.digest(core) == digests[2]
    ticket = min(core.store.trajectories)
    columns = chunks([(ticket, 0, 0, [1, 2, 3])])
    core.append("w", 1, columns)
    journal.add("w", [m.encode(columns.header(1)), columns.to_frame()])
    journal.flush()
    journal.wait()
    journal.close()
    again, findings = recover(segments.of(tmp_path))
    assert findings.torn_bytes == 0
    assert snapshot.digest(again) == snapshot.digest(core)
    assert again.stats().tokens == 3


def test_a_file_that_was_never_finished_is_not_a_file(tmp_path: Path) -> None:
    journal, core, _ = small(tmp_path)
    journal.close()
    (tmp_path / "00000002.partial").write_bytes(b"half")
    journal, again = opened(tmp_path, core.settings)
    assert snapshot.digest(again) == snapshot.digest(core)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["00000001.journal"]
    journal.close()


# --- 3 damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 1, 2])
def test_damage_before_the_last_group_is_an_error_that_says_where(tmp_path: Path, group: int) -> None:
    journal, core, _ = small(tmp_path)
    journal.close()
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    start = [len(MAGIC), *ends(data)][group]
    end = ends(data)[group]
    step = max(1, (end - start) // 40)
    for at in [*range(start, start + GROUP.size), *range(start + GROUP.size, end, step), end - 1]:
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(JournalError, match=f"{file.name} is damaged at byte {start}:"):
            recover(segments.of(tmp_path))
    with pytest.raises(JournalError, match="is damaged"):
        Journal.open(tmp_path, core.settings, 1 << 20)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 1 << 20])
def test_a_group_that_says_another_number_of_entries_is_damaged(tmp_path: Path, count: int) -> None:
    """The checksum covers the header too: messages must not go missing because a number says so."""
    journal, _, _ = small(tmp_path)
    journal.close()
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    second = ends(bytes(data))[0]
    assert GROUP.unpack_from(data, second)[1] == 3
    struct.pack_into("<I", data, second + 4, count)
    file.write_bytes(data)
    with pytest.raises(JournalError, match=f"damaged at byte {second}:"):
        recover(segments.of(tmp_path))


def test_a_hole_of_zeros_in_the_middle_is_damage(tmp_path: Path) -> None:
    journal, _, _ = small(tmp_path)
    journal.close()
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    one, two = ends(data)[:2]
    file.write_bytes(data[:one] + b"\0" * (two - one) + data[two:])
    with pytest.raises(JournalError, match=f"damaged at byte {one}"):
        recover(segments.of(tmp_path))


def test_what_is_no_journal_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "00000001.journal").write_bytes(b"something else entirely")
    with pytest.raises(JournalError, match=r"00000001.journal is not a journal of this version"):
        Journal.open(tmp_path, SETTINGS, 1 << 20)
    (tmp_path / "00000001.journal").write_bytes(b"")
    with pytest.raises(JournalError, match="is not a journal of this version"):
        Journal.open(tmp_path, SETTINGS, 1 << 20)
    (tmp_path / "00000001.journal").write_bytes(MAGIC)
    with pytest.raises(JournalError, match="no whole group"):
        Journal.open(tmp_path, SETTINGS, 1 << 20)


def test_a_snapshot_of_another_format_is_refused() -> None:
    head, _ = snapshot.take(Core(SETTINGS))
    with pytest.raises(JournalError, match=f"format 99; this version reads {snapshot.FORMAT}"):
        snapshot.decode(msgspec.msgpack.encode(msgspec.structs.replace(head, format=99)))
    with pytest.raises(JournalError, match="does not begin with a snapshot"):
        snapshot.decode(b"\x80")


# --- 4 other settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2},
        {"batch": 8},
        {"max_tokens": 4},
        {"max_tokens": 32},
        {"group": 4},
        {"group": 1},
        {"max_staleness": 0},
        {"max_staleness": 9},
        {"group_policy": "split"},
        {"batch": 2, "max_staleness": 0, "max_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_goes_on_under_other_settings(tmp_path: Path, changes: dict[str, object], seed: int) -> None:
    """Everything stored stays; the new sizes hold as what was in flight goes; recovery equals the live core again."""
    settings = msgspec.structs.replace(SETTINGS, on_failed="shrink")
    journal, core = opened(tmp_path, settings)
    world = World(settings, seed, core=core, journal=journal)
    for _ in range(120):
        world.step()
    world.sync()
    journal.close()
    other = msgspec.structs.replace(settings, **changes)
    journal, again = opened(tmp_path, other)
    assert again.settings == other
    assert again.stats() == msgspec.structs.replace(core.stats(), limit=other.limit)
    for ticket in core.store.trajectories:
        one, two = core.store.pool, again.store.pool
        row = one.row(ticket)
        assert two.row(ticket) == row
        assert two.length[row] == one.length[row]
        assert two.tokens[row, : one.length[row]].tolist() == one.tokens[row, : one.length[row]].tolist()
        assert two.spans_of(row) == one.spans_of(row)
    assert len(segments.of(tmp_path)) == 2
    assert snapshot.digest(recover(segments.of(tmp_path))[0]) == snapshot.digest(again)

    def say(peer: str, message: m.Message, *frames: bytes | memoryview) -> list:
        head = m.encode(message)
        sends = again.receive(peer, m.decode_inbound(head), frames)
        journal.add(peer, [head, *frames])
        return sends

    # The run starts again: new workers, and a learner that goes on from the last checkpoint.
    for name in list(world.workers):
        say("feeder", m.Lost(name))
    say("rank0#9", m.Published(world.learner.version + (1 << 32), [*world.learner.forks, world.saved]))
    for send in say("v", m.Hello("worker", 64)):
        for ticket in send.message.tickets if isinstance(send.message, m.Tickets) else []:
            assert ticket.max_tokens == max(0, other.max_tokens - len(ticket.prefix))
            assert bool(ticket.finish_reason) >= (ticket.max_tokens == 0)
    while again.offering.loading:
        journal.flush()
        journal.wait()
        wanted = list(again.offering.loading)
        message, frames = journal.find(wanted)
        assert message.tickets == wanted
        for send in say(SELF, message, *frames):
            assert isinstance(send.message, m.Message)
    journal.flush()
    journal.wait()
    assert again.stats().parked == len(again.offering.parked)
    assert snapshot.digest(recover(segments.of(tmp_path))[0]) == snapshot.digest(again)
    journal.begin(again)
    for trajectory in list(again.store.trajectories.values()):
        if trajectory.state == "running" and trajectory.worker is not None:
            outcome = m.Outcome(trajectory.ticket, trajectory.attempt, 0, "failed", error="end")
            say(trajectory.worker, m.Outcomes(1, [outcome]))
    journal.flush()
    journal.wait()
    recovered = recover(segments.of(tmp_path))[0]
    assert snapshot.digest(recovered) == snapshot.digest(again)
    journal.close()


def test_a_smaller_run_reloads_the_same_after_a_crash_as_without_one(tmp_path: Path) -> None:
    """The rows of the old, larger run are there until the process ends: recovery must have them as well."""
    large = msgspec.structs.replace(SETTINGS, batch=4, max_staleness=3)
    journal, core = opened(tmp_path, large)
    world = World(large, 3, core=core, journal=journal)
    world.reloading = False
    while len(world.history) < 6:
        world.stream()
        world.end(faults=False)
        world.learn()
        world.feed()
    world.sync()
    journal.close()
    journal, core = opened(tmp_path, msgspec.structs.replace(large, batch=2, max_staleness=0))
    world.core, world.journal = core, journal
    while core.store.in_flight > 2:
        world.stream()
        world.end(faults=False)
        world.learn()
    world.sync()
    journal.begin(core)
    world.restore()
    world.sync()
    again, _ = recover(segments.of(tmp_path))
    assert list(again.offering.loading) == list(core.offering.loading)
    assert snapshot.digest(again) == snapshot.digest(core)
    journal.close()


# --- 5 find and cut ----------------------------------------------------------------------------------------------


def trained_over_files(folder: Path, every: int = 40) -> tuple[Journal, World]:
    """A run of several files without restores."""
    journal, core = opened(folder)
    world = World(SETTINGS, 11, core=core, journal=journal)
    for i in range(400):
        world.stream()
        world.end()
        world.learn()
        world.feed()
        if i % every == every - 1:
            world.sync()
            journal.begin(core)
    world.sync()
    return journal, world


def test_find_returns_what_was_fetched_from_whichever_file(tmp_path: Path) -> None:
    journal, world = trained_over_files(tmp_path)
    retained = world.core.offering.retained
    assert len(segments.of(tmp_path)) == 11
    assert len({trajectory.commit for trajectory in retained}) > 20
    tickets = [trajectory.ticket for trajectory in retained]
    random.Random(0).shuffle(tickets)
    message, frames = journal.find([*tickets, 77 << 20])
    assert message.tickets == tickets
    assert message.wanted == [*tickets, 77 << 20]
    whole = [world.archive[ticket] for ticket in tickets]
    assert message.lengths == [len(one.tokens) for one in whole]
    assert message.spans == [one.spans for one in whole]
    assert memoryview(frames[0]).cast("B").cast("i").tolist() == [x for one in whole for x in one.tokens]
    assert memoryview(frames[1]).cast("B").cast("f").tolist() == [x for one in whole for x in one.logprobs]
    assert journal.find([])[0].tickets == []
    journal.close()


def test_a_trajectory_that_was_not_trained_is_not_found(tmp_path: Path) -> None:
    journal, world = trained_over_files(tmp_path, every=200)
    alive = list(world.core.store.trajectories)
    assert alive
    assert journal.find(alive)[0].tickets == []
    journal.close()


def test_cut_keeps_what_can_still_be_asked_for(tmp_path: Path) -> None:
    journal, world = trained_over_files(tmp_path)
    core = world.core
    numbers = [file.number for file in segments.of(tmp_path)]
    journal.cut(core.offering.oldest_needed())
    assert [file.number for file in segments.of(tmp_path)] == numbers  # no checkpoint yet: all are needed
    last = 0
    for step in range(1, len(world.history) + 1):
        world.saved = step
        world.say("rank0#0", m.Checkpointed(step))
        journal.cut(core.offering.oldest_needed())
        left = [file.number for file in segments.of(tmp_path)]
        assert left == numbers[len(numbers) - len(left) :]
        if len(left) != last:
            tickets = [trajectory.ticket for trajectory in core.offering.retained]
            message, _ = journal.find(tickets)
            assert message.tickets == tickets
            # And no more than is needed: the oldest file holds something that can be asked for, or is the newest.
            if len(left) > 1:
                assert segments.first_commit(segments.of(tmp_path)[1]) > core.offering.oldest_needed()
            assert [message.spans[i] for i in range(len(message.tickets))] == [
                world.archive[ticket].spans for ticket in message.tickets
            ]
        last = len(left)
    assert [file.number for file in segments.of(tmp_path)] == numbers[-1:]
    world.sync()
    assert snapshot.digest(recover(segments.of(tmp_path))[0]) == snapshot.digest(core)
    journal.close()


def test_a_reopened_journal_knows_what_its_old_files_hold(tmp_path: Path) -> None:
    journal, world = trained_over_files(tmp_path)
    journal.close()
    before = [file.number for file in segments.of(tmp_path)]
    journal, core = opened(tmp_path)
    journal.cut(core.offering.oldest_needed())
    assert [file.number for file in segments.of(tmp_path)] == before
    core.offering.checkpointed(len(world.history) // 2)
    journal.cut(core.offering.oldest_needed())
    left = [file.number for file in segments.of(tmp_path)]
    assert 1 < len(left) < len(before)
    tickets = [trajectory.ticket for trajectory in core.offering.retained]
    assert journal.find(tickets)[0].tickets == tickets
    journal.close()


def test_a_file_is_long_when_it_has_outgrown_its_snapshot(tmp_path: Path) -> None:
    journal, core, _ = Journal.open(tmp_path, SETTINGS, 2000)
    world = World(SETTINGS, 2, core=core, journal=journal)
    for _ in range(400):
        world.step()
        world.sync()
        if journal.long:
            journal.begin(core)
            assert not journal.long
            journal.cut(core.offering.oldest_needed())
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert max(segment.number for segment in segments.of(tmp_path)) > 2
    assert max(sizes) < 200_000
    assert snapshot.digest(recover(segments.of(tmp_path))[0]) == snapshot.digest(core)
    journal.close()


# --- 6 writes that fail ------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_acknowledges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, core, digests = small(tmp_path)
    (file,) = tmp_path.iterdir()
    real = os.write
    left = 50

    def full(handle: int, data: bytes) -> int:
        nonlocal left
        if handle != journal._file:
            return real(handle, data)
        if left <= 0:
            raise OSError(28, "No space left on device")
        written = real(handle, bytes(data[:left]))
        left -= written
        return written

    monkeypatch.setattr(os, "write", full)
    durable = journal.durable
    ticket = min(t for t, trajectory in core.store.trajectories.items() if trajectory.state == "running")
    columns = chunks([(ticket, 2, 0, [9])])
    core.append("w", 3, columns)
    journal.add("w", [m.encode(columns.header(3)), columns.to_frame()])
    journal.flush()
    with pytest.raises(JournalError, match=f"the journal in {tmp_path} cannot be written: .*No space left"):
        journal.wait()
    assert journal.durable == durable < journal.handed
    for _ in range(2):
        with pytest.raises(JournalError, match="No space left"):
            _ = journal.idle
    assert journal.durable == durable
    monkeypatch.undo()
    journal.close()
    assert file.stat().st_size == ends(file.read_bytes()[:-50])[-1] + 50  # half a group: torn
    again, findings = recover(segments.of(tmp_path))
    assert findings.torn_bytes == 50
    assert snapshot.digest(again) == digests[-1]


def test_a_disk_that_does_not_sync_acknowledges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _, _ = small(tmp_path)
    durable = journal.durable

    def broken(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    journal.add("x", [m.encode(m.Checkpointed(1))])
    journal.flush()
    with pytest.raises(JournalError, match="Input/output error"):
        journal.wait()
    assert journal.durable == durable
    monkeypatch.undo()
    journal.close()


def test_a_new_file_that_cannot_be_written_is_an_error_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, core, _ = small(tmp_path)

    def broken(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(JournalError, match=r"00000002.journal cannot be written: .*No space left"):
        journal.begin(core)
    monkeypatch.undo()
    assert [file.number for file in segments.of(tmp_path)] == [1]
    assert snapshot.digest(recover(segments.of(tmp_path))[0]) == snapshot.digest(core)
    journal.close()


def test_writes_of_a_few_bytes_at_a_time_make_a_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, core, _ = small(tmp_path)
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data[:3])))
    ticket = min(t for t, trajectory in core.store.trajectories.items() if trajectory.state == "running")
    columns = chunks([(ticket, 2, 0, [9, 10])])
    core.append("w", 3, columns)
    journal.add("w", [m.encode(columns.header(3)), columns.to_frame()])
    journal.flush()
    journal.wait()
    monkeypatch.undo()
    journal.close()
    again, findings = recover(segments.of(tmp_path))
    assert findings.torn_bytes == 0
    assert snapshot.digest(again) == snapshot.digest(core)


def test_the_format_is_what_the_module_says(tmp_path: Path) -> None:
    """Magic; mark, entries, bytes, CRC-32; then length of peer and number of frames, lengths, peer, frames."""
    journal, _, _ = small(tmp_path)
    journal.close()
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    assert data[:8] == b"ARLJRNL\x01"
    _, one, two, three = ends(data)
    mark, entries, size, _ = struct.unpack_from("<4sIQI", data, one)
    assert (mark, entries, two - one) == (b"GRUP", 1, 20 + size)
    name, frames, head = struct.unpack_from("<HHQ", data, one + 20)
    assert (name, frames) == (6, 1)
    assert data[one + 32 : one + 38] == b"feeder"
    assert m.decode_inbound(data[one + 38 : one + 38 + head]) == m.Submit(0, [prompt(0), prompt(1)])
    assert three == len(data)
