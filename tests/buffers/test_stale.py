"""What happens to tokens older than the bound: the three policies, with injected text between the sampled tokens.

1  `mask` and `drop`, for every pattern of versions, against the rule written out (failures.md 9)
2  injected tokens are never trained on, never stale, never counted; a response without a sampled token is a failure
3  `pace`: the batch at step v waits for every group started at or before v - eta, and nothing is masked
4  who is waited for too long is given up, dropped and counted, and nobody else
5  failures.md 8: after a resume at 100 the bound holds for tokens of older versions too
6  a chunk from a version that is not published yet harms nobody
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from buffers import messages as m
from staleness.versions import INJECTED
from tests.buffers.driver import Driver, chunks


def one(versions: list[int], logprobs: list[float] | None = None, *, at: int = 5, **settings: object) -> Driver:
    """One trajectory of one token a version, finished; the newest version is `at`."""
    driver = Driver(**({"batch": 1, "group": 1, "max_staleness": 2, "max_tokens": 16} | settings))
    if at:
        driver.send("rank0", m.Published(at))
    driver.version = at
    driver.feed()
    ticket = driver.tickets.pop(0)
    columns = chunks([(ticket.id, i, version, [7]) for i, version in enumerate(versions)])
    if logprobs is not None:
        columns.logprobs[:] = logprobs
    driver.append(columns)
    driver.outcome(m.Outcome(ticket.id, 1, len(versions), "finished", "stop", 1.0))
    return driver


def mask_of(driver: Driver, batch: m.Batch | None) -> list[int] | None:
    if batch is None:
        return None
    (out,) = driver.send("rank0", m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
    return m.SampleArrays.from_frames(out.frames).mask.tolist()


# --- 1 mask and drop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
def test_every_pattern_of_versions(on_stale: str) -> None:
    """Ages 5, 2, 0 and injected text, bound 2; all patterns of up to three tokens that hold a sampled one."""
    patterns = [p for n in (1, 2, 3) for p in itertools.product([0, 3, 5, INJECTED], repeat=n)]
    for pattern in patterns:
        if set(pattern) == {INJECTED}:
            continue
        driver = one(list(pattern), on_stale=on_stale)
        stale = sum(version == 0 for version in pattern)
        fresh = [int(version in (3, 5)) for version in pattern]
        trained = sum(fresh) > 0 and not (on_stale == "drop" and stale)
        batch = driver.take()
        assert mask_of(driver, batch) == (fresh if trained else None), pattern
        stats = driver.core.stats()
        if trained:
            assert batch is not None
            assert batch.rows[0].trainable == sum(fresh)
            driver.commit(batch)
            stats = driver.core.stats()
            assert (stats.trained, stats.expired, stats.masked_stale_tokens) == (1, 0, stale)
        else:
            assert (stats.trained, stats.expired, stats.ready) == (0, 1, 0)
            assert stats.expired_lengths[len(pattern).bit_length()] == 1
        assert stats.masked_nonfinite_tokens == 0


@pytest.mark.parametrize(("bound", "mask"), [(0, [0, 0, 1]), (2, [0, 0, 1]), (4, [0, 0, 1]), (5, [1, 1, 1])])
def test_the_bound_is_the_largest_age_that_trains(bound: int, mask: list[int]) -> None:
    """failures.md 9: [0, 0, 5] at 5."""
    driver = one([0, 0, 5], max_staleness=bound)
    assert mask_of(driver, driver.take()) == mask


def test_a_prefetched_batch_is_judged_by_the_version_that_trains_it() -> None:
    driver = one([3, 3, 4])
    assert mask_of(driver, driver.take(6)) == [0, 0, 1]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 15, 16])
def test_what_is_dropped_is_counted_by_length(length: int) -> None:
    driver = one([0] * length, on_stale="drop")
    driver.take()
    counts = driver.core.stats().expired_lengths
    (place,) = [i for i, count in enumerate(counts) if count]
    assert counts[place] == 1
    assert 2 ** (place - 1) <= length < 2**place


def test_stale_and_nonfinite_tokens_are_told_apart() -> None:
    driver = one([0, 0, 4, 4, 5, INJECTED], [np.nan, -1, np.nan, -np.inf, -1, np.nan])
    batch = driver.take()
    assert mask_of(driver, batch) == [0, 0, 0, 0, 1, 0]
    assert batch is not None
    driver.commit(batch)
    stats = driver.core.stats()
    assert stats.masked_stale_tokens + stats.masked_nonfinite_tokens == 4
    assert stats.masked_nonfinite_tokens == 3
    assert stats.masked_stale_tokens == 1


# --- 2 injected text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
@pytest.mark.parametrize("logprob", [0.0, -1.0, float("nan"), float("-inf")])
def test_injected_tokens_are_context_whatever_their_logprob(on_stale: str, logprob: float) -> None:
    driver = one([5, INJECTED, INJECTED, 5], [-1, logprob, logprob, -1], on_stale=on_stale)
    batch = driver.take()
    assert mask_of(driver, batch) == [1, 0, 0, 1]
    assert batch is not None
    assert (batch.rows[0].length, batch.rows[0].trainable) == (4, 2)
    driver.commit(batch)
    stats = driver.core.stats()
    assert (stats.masked_stale_tokens, stats.masked_nonfinite_tokens, stats.multi_version) == (0, 0, 0)
    assert stats.tokens == 4


def test_old_injected_text_does_not_drop_a_trajectory() -> None:
    """It has no age: nobody sampled it."""
    driver = one([INJECTED, 3], on_stale="drop", at=0)
    assert driver.core.stats().ready == 0  # version 3 is not published: refused
    driver = one([INJECTED, INJECTED, 0], on_stale="drop", at=0, max_staleness=3)
    driver.send("rank0", m.Published(3))
    assert mask_of(driver, driver.take(3)) == [0, 0, 1]


def test_a_response_of_which_no_sampled_token_has_a_logprob_is_a_failure_though_injected_ones_do() -> None:
    """failures.md 20: it is not stale, and it is not to be counted as such; injected tokens are not counted at all."""
    driver = one([5, INJECTED, 5], [np.nan, 0.0, np.nan])
    driver.take()
    stats = driver.core.stats()
    assert (stats.failed, stats.expired) == (1, 0)
    assert stats.masked_nonfinite_tokens == 2


def test_injected_tokens_are_not_counted_as_nonfinite_in_a_failed_response() -> None:
    driver = one([5, INJECTED, 5], [np.nan, np.nan, np.nan])
    stats = driver.core.stats()
    assert (stats.failed, stats.masked_nonfinite_tokens) == (1, 2)


def test_a_response_without_a_sampled_token_is_a_failure() -> None:
    """Nothing of it can ever be trained on, at any age: an empty response, not an expired one."""
    driver = one([INJECTED, INJECTED])
    driver.take()
    assert (driver.core.stats().failed, driver.core.stats().expired) == (1, 0)


# --- 3 pace ------------------------------------------------------------------------------------------------------


def pace(**settings: object) -> Driver:
    """Limit 4 groups of 2: batches of one group each, bound 3."""
    driver = Driver(**({"batch": 2, "group": 2, "max_staleness": 3, "on_stale": "pace"} | settings))
    driver.feed()
    return driver


def members(driver: Driver, index: int) -> list[m.Ticket]:
    return [ticket for ticket in driver.tickets if ticket.key[1] == index]


def finish_group(driver: Driver, index: int) -> None:
    for ticket in members(driver, index):
        driver.finish(ticket)


def advance(driver: Driver, index: int) -> None:
    """Group `index` finishes and is trained."""
    finish_group(driver, index)
    batch = driver.take()
    assert batch is not None
    driver.commit(batch)


def test_a_batch_waits_for_the_groups_at_the_edge_of_the_window() -> None:
    driver = pace()
    for index in (1, 2, 3):
        advance(driver, index)  # group 0, of version 0, is not late before step 3
    driver.feed()
    finish_group(driver, 4)
    assert driver.take() is None  # step 3: version 0 is at the edge
    assert driver.core.offering.late() == [0]
    slow, other = members(driver, 0)
    driver.finish(other, version=0)
    assert driver.of(m.Batch)[-1].version == 2
    driver.finish(slow, version=0)
    (batch,) = driver.of(m.Batch)[3:]
    assert {driver.core.store.trajectories[row.ticket].group.index for row in batch.rows} == {0}
    assert [row.trainable for row in batch.rows] == [2, 2]
    driver.commit(batch)
    assert (driver.core.stats().masked_stale_tokens, driver.core.stats().expired) == (0, 0)


def test_under_pace_a_prefetched_batch_waits_a_step_earlier() -> None:
    driver = pace()
    for index in (1, 2):
        advance(driver, index)
    driver.feed()
    finish_group(driver, 3)
    batch = driver.take(2)
    assert batch is not None
    finish_group(driver, 4)
    driver.send("rank0", m.Take(3))
    assert driver.core.offering.late() == [0]
    assert len(driver.of(m.Batch)) == 3
    finish_group(driver, 0)
    assert driver.of(m.Batch)[-1].version == 3


def test_nobody_is_late_unless_a_batch_could_go_without_them() -> None:
    driver = pace(max_staleness=0)
    assert driver.core.offering.late() == []
    driver.take()
    assert driver.core.offering.late() == []


def test_under_pace_no_more_than_a_batch_of_old_groups_is_left_for_the_last_step() -> None:
    """Three groups of version 0 and batches of one group: each of the steps 0, 1, 2 must train one of them, or the last
    one goes stale however long step 2 waits."""
    driver = pace(max_staleness=2)
    advance(driver, 0)
    driver.feed()
    finish_group(driver, 3)  # of version 1, fast; 1 and 2 are slow
    driver.take()
    for index in (1, 2):
        for ticket in members(driver, index):
            driver.finish(ticket, version=0)
    for _ in range(3):
        for lease in list(driver.core.offering.leases.values()):
            driver.commit(lease.batch)
        if driver.core.offering.take is None:
            driver.take()
    stats = driver.core.stats()
    assert (stats.trained, stats.expired, stats.masked_stale_tokens) == (8, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_under_pace_nothing_is_ever_masked_or_expired(seed: int) -> None:
    """Whatever the order in which trajectories end; workers start with the newest version, as tickets ask."""
    rng = np.random.default_rng(seed)
    driver = Driver(slots=99, batch=4, group=2, max_staleness=2, on_stale="pace", max_tokens=50)
    length: dict[int, int] = {}
    for _ in range(3000):
        driver.feed()
        pick = driver.tickets[int(rng.integers(len(driver.tickets)))]
        at = length.get(pick.id, 0)
        if at < 49:
            driver.append(chunks([(pick.id, at, driver.version, [1])]))
            length[pick.id] = at + 1
        if rng.random() < 0.3:
            driver.outcome(m.Outcome(pick.id, 1, length[pick.id], "finished", "stop", 1.0))
            driver.tickets.remove(pick)
        if driver.core.offering.take is None and not driver.core.offering.leases:
            driver.take()
        for lease in list(driver.core.offering.leases.values()):
            assert [row.trainable for row in lease.batch.rows] == [row.length for row in lease.batch.rows]
            driver.commit(lease.batch)
    stats = driver.core.stats()
    assert (stats.expired, stats.masked_stale_tokens, stats.late_groups, stats.cancelled) == (0, 0, 0, 0)
    assert stats.trained > 40
    assert stats.multi_version > 10


# --- 4 giving up -------------------------------------------------------------------------------------------------


def test_giving_up_drops_the_late_group_counts_it_and_goes_on() -> None:
    driver = pace()
    for index in (1, 2, 3):
        advance(driver, index)
    driver.feed()
    slow, other = members(driver, 0)
    driver.finish(other, tokens=4, version=0)
    finish_group(driver, 4)
    assert driver.take() is None
    driver.send("", m.GiveUp([0]))
    stats = driver.core.stats()
    assert (stats.late_groups, stats.expired, stats.cancelled) == (1, 1, 1)
    assert stats.expired_lengths[3] == 1  # of 4 tokens
    assert (stats.masked_stale_tokens, stats.failed_groups) == (0, 0)
    assert [held for cancel in driver.of(m.Cancel) for held in cancel.tickets] == [m.Held(slow.id, 1)]
    batch = driver.of(m.Batch)[-1]
    assert {driver.core.store.trajectories[row.ticket].group.index for row in batch.rows} == {4}
    assert driver.credit > driver.submitted  # capacity of what was dropped returns at once
    assert driver.outcome(m.Outcome(slow.id, 1, 0, "failed")).refused[0].reason == "fenced"


def test_only_a_group_that_is_late_can_be_given_up() -> None:
    driver = pace()
    before = driver.core.stats()
    driver.send("", m.GiveUp([0, 1, 99]))  # nobody waits
    assert driver.core.stats() == before
    driver.take()
    driver.send("", m.GiveUp([0]))  # somebody waits, but at step 0 nobody is at the edge
    assert driver.core.stats() == before
    for index in (1, 2, 3):
        finish_group(driver, index)
        driver.commit(driver.of(m.Batch)[-1])
        driver.take()
    driver.feed()
    finish_group(driver, 0)
    driver.send("", m.GiveUp([0]))  # it came at the last moment
    assert driver.core.stats().late_groups == 0
    assert {driver.core.store.trajectories[row.ticket].group.index for row in driver.of(m.Batch)[-1].rows} == {0}


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
def test_the_other_policies_wait_for_nobody(on_stale: str) -> None:
    driver = pace(on_stale=on_stale)
    for index in (1, 2, 3):
        advance(driver, index)
    driver.feed()
    finish_group(driver, 4)
    assert driver.take() is not None
    assert driver.core.offering.late() == []


# --- 5 a resume --------------------------------------------------------------------------------------------------


def test_after_a_resume_at_100_at_most_8_train_before_the_next_publish_and_none_is_too_old() -> None:
    """failures.md 8: bound 1, batch 4."""
    driver = Driver(batch=4, group=2, max_staleness=1)
    driver.send("rank0", m.Published(100))
    driver.version = 100
    driver.feed()
    assert len(driver.tickets) == 8
    assert {ticket.min_version for ticket in driver.tickets} == {100}
    for i, ticket in enumerate(list(driver.tickets)):
        driver.finish(ticket, version=98 + i // 2)  # two groups too old, two fresh
        if i // 2 == 2:
            break
    driver.send("feeder", m.Submit(driver.submitted, [m.Prompt((0, 99), [1], b"{}")]))  # beyond the credit
    driver.tickets.clear()
    assert driver.take() is None  # of version 98: expired; 99 and 100: not a batch yet
    assert driver.core.stats().expired == 2
    assert driver.core.stats().issued == 8


# --- 6 a version from the future ---------------------------------------------------------------------------------


def test_a_token_of_the_next_version_does_not_stop_a_batch_for_this_one() -> None:
    """The next version is accepted since its commit may be on its way. A worker that is wrong about it must not be able
    to bring the buffer to a halt: what it said is refused or not trained on, and the other trajectories are."""
    driver = Driver(batch=2, group=1, max_staleness=1)
    driver.feed()
    liar, *honest = list(driver.tickets)
    driver.append(chunks([(liar.id, 0, 1, [1, 2])]))
    driver.outcome(m.Outcome(liar.id, 1, 2, "finished", "stop", 1.0))
    for ticket in honest[:2]:
        driver.finish(ticket, version=0)
    batch = driver.take(0)
    assert batch is not None
    assert [row.ticket for row in batch.rows if row.ticket != liar.id]
    driver.commit(batch)
    assert driver.core.stats().version == 1
