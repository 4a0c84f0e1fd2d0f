"""Segments: trajectories that are trained on in parts while they go on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from buffers import messages as m
from buffers import snapshot
from staleness.versions import INJECTED, pack
from tests.buffers.driver import Driver, chunks

LEAST = 3


def segmented(**settings: object) -> Driver:
    driver = Driver(
        **{"batch": 2, "max_tokens": 16, "group_policy": "split", "min_group": 1, "segments": LEAST, "retain": True}
        | settings
    )
    driver.feed()
    return driver


def stream(driver: Driver, ticket: m.Ticket, at: int, count: int, version: int | None = None) -> None:
    """`count` more tokens, each of the value of its place."""
    version = driver.version if version is None else version
    driver.append(chunks([(ticket.id, at, version, list(range(at, at + count)))], attempt=ticket.attempt))


def fetched(driver: Driver, batch: m.Batch) -> list[tuple[list[int], list[int]]]:
    """Of each row its tokens, and the places that may be trained on."""
    out = driver.send("rank0", m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
    arrays = m.SampleArrays.from_frames(out[0].frames)
    edges = np.cumsum([0, *(row.length for row in batch.rows)])
    parts = [slice(edges[i], edges[i + 1]) for i in range(len(batch.rows))]
    return [(arrays.tokens[part].tolist(), np.flatnonzero(arrays.mask[part]).tolist()) for part in parts]


def test_a_batch_is_filled_with_parts_of_what_goes_on() -> None:
    driver = segmented()
    first, second = driver.tickets[:2]
    driver.take()
    stream(driver, first, 0, LEAST + 1)
    assert not driver.of(m.Batch)
    stream(driver, second, 0, LEAST + 2)
    (batch,) = driver.of(m.Batch)
    assert [(row.ticket, row.start, row.length, row.trainable, row.goes_on) for row in batch.rows] == [
        (first.id, 0, 4, 3, True),
        (second.id, 0, 5, 4, True),
    ]
    assert fetched(driver, batch) == [([0, 1, 2, 3], [0, 1, 2]), ([0, 1, 2, 3, 4], [0, 1, 2, 3])]
    assert driver.core.stats().running == len(driver.tickets)


def test_the_next_batch_goes_on_where_the_last_one_ended() -> None:
    driver = segmented()
    first, second = driver.tickets[:2]
    for ticket in (first, second):
        stream(driver, ticket, 0, 4)
    batch = driver.take()
    assert batch is not None
    driver.commit(batch)
    stream(driver, first, 4, 4)
    stream(driver, second, 4, 2)
    driver.outcome(m.Outcome(second.id, 1, 6, "finished", "stop", 1.0))
    again = driver.take()
    assert again is not None
    assert [(row.ticket, row.start, row.length, row.trainable, row.goes_on, row.reward) for row in again.rows] == [
        (second.id, 3, 6, 3, False, 1.0),
        (first.id, 3, 8, 4, True, 0.0),
    ]
    assert fetched(driver, again) == [(list(range(6)), [3, 4, 5]), (list(range(8)), [3, 4, 5, 6])]
    driver.commit(again)
    assert driver.core.stats().segments == 3
    assert driver.core.stats().trained == 1


def test_what_is_complete_comes_before_parts_of_the_same_group() -> None:
    driver = segmented(batch=4, group=4, max_staleness=0)
    for ticket in driver.tickets:
        stream(driver, ticket, 0, 4)
    last = driver.tickets[-1]
    driver.outcome(m.Outcome(last.id, 1, 4, "finished", "stop", 1.0))
    batch = driver.take()
    assert batch is not None
    assert [row.goes_on for row in batch.rows] == [False, True, True, True]
    assert batch.rows[0].ticket == last.id


def test_a_segment_ends_where_the_newest_turn_begins() -> None:
    driver = segmented(batch=1, group=1)
    (ticket, *_) = driver.tickets
    stream(driver, ticket, 0, 4)
    stream(driver, ticket, 4, 2, INJECTED)
    stream(driver, ticket, 6, 3)
    batch = driver.take()
    assert batch is not None
    assert (batch.rows[0].length, batch.rows[0].trainable) == (7, 4)
    assert fetched(driver, batch) == [(list(range(7)), [0, 1, 2, 3])]


def test_stale_tokens_of_a_segment_are_context() -> None:
    """Those of version 0 are too old at version 2, and counted as masked."""
    driver = segmented(batch=1, group=1, max_staleness=1, segments=6)
    ticket, *others = driver.tickets
    stream(driver, ticket, 0, 4)
    for _ in range(2):
        driver.finish(others.pop(0), tokens=2)
        batch = driver.take()
        assert batch is not None
        driver.commit(batch)
        driver.feed()
        others = [each for each in driver.tickets if each.id != ticket.id]
    stream(driver, ticket, 4, 5)
    batch = driver.take()
    assert batch is not None
    assert (batch.rows[0].ticket, batch.rows[0].trainable) == (ticket.id, 4)
    assert fetched(driver, batch)[0][1] == [4, 5, 6, 7]
    driver.commit(batch)
    assert driver.core.stats().masked_stale_tokens == 4


def test_a_learner_that_dies_gives_its_segments_back() -> None:
    driver = segmented()
    first, second = driver.tickets[:2]
    for ticket in (first, second):
        stream(driver, ticket, 0, 4)
    batch = driver.take()
    driver.send("feeder", m.Lost("rank0"))
    stream(driver, first, 4, 2)
    again = driver.take()
    assert batch is not None
    assert again is not None
    assert [(row.ticket, row.start, row.length) for row in again.rows] == [(first.id, 0, 6), (second.id, 0, 4)]


def test_a_trajectory_that_fails_leaves_its_segment_to_the_batch_that_has_it() -> None:
    driver = segmented(on_failed="shrink")
    first, second = driver.tickets[:2]
    for ticket in (first, second):
        stream(driver, ticket, 0, 4)
    batch = driver.take()
    assert batch is not None
    driver.fail(first)
    assert fetched(driver, batch) == [([0, 1, 2, 3], [0, 1, 2])] * 2
    core = snapshot.restore(*snapshot.take(driver.core))
    assert snapshot.digest(core) == snapshot.digest(driver.core)
    driver.core = core
    assert fetched(driver, batch) == [([0, 1, 2, 3], [0, 1, 2])] * 2
    driver.commit(batch)
    assert driver.core.stats().failed == 1


def test_after_a_restore_segments_of_undone_steps_come_again_and_earlier_ones_do_not() -> None:
    driver = segmented(batch=1, group=1)
    ticket, *_ = driver.tickets
    for step in range(3):
        stream(driver, ticket, 4 * step, 4)
        batch = driver.take()
        assert batch is not None
        driver.commit(batch)
    driver.send("rank0", m.Checkpointed(1))
    assert driver.core.stats().segments == 3
    driver.send("feeder", m.Lost("rank0"))
    driver.version = pack(1, 1)
    driver.send("rank0", m.Published(driver.version, [1]))
    assert driver.core.stats().segments == 1
    batch = driver.take()
    assert batch is not None
    assert [(row.ticket, row.start, row.length) for row in batch.rows] == [(ticket.id, 3, 12)]


@pytest.mark.parametrize("replayable", [True, False])
def test_what_cannot_be_replayed_fails_with_its_worker_once_a_part_was_handed_out(replayable: bool) -> None:
    driver = segmented(replayable=replayable, on_failed="shrink")
    first, second = driver.tickets[:2]
    for ticket in (first, second):
        stream(driver, ticket, 0, 4)
    assert driver.take() is not None
    driver.send("feeder", m.Lost("w"))
    stats = driver.core.stats()
    assert stats.failed == (0 if replayable else 2)
    assert ("cannot be replayed" in stats.last_error) == (not replayable)


def test_without_the_setting_nothing_is_cut() -> None:
    driver = segmented(segments=None)
    for ticket in driver.tickets[:2]:
        stream(driver, ticket, 0, 10)
    assert driver.take() is None
    assert msgspec.structs.asdict(driver.core.stats())["segments"] == 0
