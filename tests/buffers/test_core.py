"""The buffer's promises, one by one.

1  appends are contiguous, fenced by attempt, refused row by row
2  tickets are the only way in, by whole groups, up to (eta + 1) B + slack
3  no token over the bound is ever handed out
4  a group is offered whole, with the rewards of all its members
5  a lease is committed once; capacity of trained trajectories returns then
6  the accounts add up after every event
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers import messages as m
from buffers import snapshot
from buffers.errors import ProtocolError
from tests.buffers.driver import Driver, chunks, prompt


def sent(driver: Driver, kind: type[m.Message]) -> list[m.Message]:
    return [send.message for send in driver.sent if isinstance(send.message, kind)]


# --- 1 appends ---------------------------------------------------------------------------------------------------


def test_chunks_build_a_trajectory_with_versions() -> None:
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0].id
    assert driver.append(chunks([(ticket, 0, 0, [5, 6]), (ticket, 2, 0, [7])])).refused == []
    row = driver.core.store.pool.row(ticket)
    assert driver.core.store.pool.tokens[row, :3].tolist() == [5, 6, 7]
    assert driver.core.store.pool.spans_of(row) == [(0, 0)]


def test_a_repeat_is_acknowledged_and_ignored() -> None:
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0].id
    driver.append(chunks([(ticket, 0, 0, [5, 6])]))
    assert driver.append(chunks([(ticket, 0, 0, [8, 9])])).refused == []
    assert driver.core.store.pool.tokens[driver.core.store.pool.row(ticket), :2].tolist() == [5, 6]
    assert driver.core.store.tally.tokens == 2


def test_a_gap_is_refused_with_the_offset_to_resend_from_and_its_neighbours_are_stored() -> None:
    driver = Driver()
    driver.feed()
    one, two = driver.tickets[0].id, driver.tickets[1].id
    ack = driver.append(chunks([(one, 3, 0, [5]), (two, 0, 0, [6, 7])]))
    assert ack.refused == [m.Refusal(one, 1, "gap", 0)]
    assert driver.core.store.pool.length[driver.core.store.pool.row(two)] == 2


@pytest.mark.parametrize("attempt", [2, 7])
def test_another_attempt_is_fenced(attempt: int) -> None:
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0].id
    assert driver.append(chunks([(ticket, 0, 0, [5])], attempt=attempt)).refused == [
        m.Refusal(ticket, attempt, "fenced", 0)
    ]


def test_a_finished_or_ended_trajectory_is_closed() -> None:
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0]
    driver.finish(ticket)
    assert [r.reason for r in driver.append(chunks([(ticket.id, 2, 0, [5])])).refused] == ["fenced"]
    other = driver.tickets[0]
    driver.fail(other)
    assert [r.reason for r in driver.append(chunks([(other.id, 0, 0, [5])])).refused] == ["fenced"]


def test_tokens_beyond_the_budget_or_from_the_future_are_invalid() -> None:
    driver = Driver(max_tokens=4)
    driver.feed()
    ticket = driver.tickets[0].id
    assert driver.append(chunks([(ticket, 0, 0, [1] * 5)])).refused[0].reason == "invalid"
    assert driver.append(chunks([(ticket, 0, 2, [1])])).refused[0].reason == "invalid"


def test_chunks_and_outcomes_of_a_stranger_are_refused() -> None:
    driver = Driver(slots=2)
    driver.feed()
    driver.send("other", m.Hello("worker", 1))
    ticket = driver.tickets[0].id
    out = driver.core.append("other", 1, chunks([(ticket, 0, 0, [5])]))
    assert [send.message.refused[0].reason for send in out if isinstance(send.message, m.Ack)] == ["fenced"]
    ack = driver.outcome(m.Outcome(ticket, 1, 0, "failed"), worker="other")
    assert ack.refused == [m.Refusal(ticket, 1, "fenced", 0)]
    assert driver.core.stats().failed == 0


def test_one_bad_outcome_leaves_the_others_of_its_message_untouched() -> None:
    driver = Driver()
    driver.feed()
    one, two = driver.tickets[:2]
    ack = driver.outcome(m.Outcome(one.id, 1, 0, "failed"), m.Outcome(two.id, 9, 0, "failed"))
    assert ack.refused == [m.Refusal(two.id, 9, "fenced", 0)]
    assert driver.core.stats().failed == 1


def test_an_outcome_said_twice_counts_once() -> None:
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0]
    driver.append(chunks([(ticket.id, 0, 0, [5])]))
    outcome = m.Outcome(ticket.id, 1, 1, "finished", "stop", 1.0)
    assert driver.outcome(outcome).refused == []
    assert driver.outcome(outcome).refused == [m.Refusal(ticket.id, 1, "fenced", 0)]
    assert driver.core.stats().ready == 1


def test_tokens_of_the_version_whose_commit_is_on_its_way_are_stored() -> None:
    driver = Driver(batch=2, group=2)
    driver.feed()
    driver.finish(driver.tickets[0])
    driver.finish(driver.tickets[0])
    batch = driver.take()
    assert batch is not None
    ticket = driver.tickets[0].id
    assert driver.append(chunks([(ticket, 0, 1, [5])])).refused == []
    driver.commit(batch)


def test_a_response_without_any_finite_logprob_is_a_failure() -> None:
    """failures.md 20: it must not be generated for ever."""
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0]
    driver.append(chunks([(ticket.id, 0, 0, [1, 2])], logprob=float("nan")))
    driver.outcome(m.Outcome(ticket.id, 1, 2, "finished", "stop", 1.0))
    assert driver.core.stats().failed == 1
    assert driver.core.stats().masked_nonfinite_tokens == 2


def test_an_outcome_ahead_of_its_chunks_waits_for_them() -> None:
    """Its chunks were lost on the way: the worker repeats them, then the outcome."""
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0]
    driver.append(chunks([(ticket.id, 0, 0, [5])]))
    ahead = m.Outcome(ticket.id, 1, 2, "finished", "stop", 1.0)
    assert driver.outcome(ahead).refused == [m.Refusal(ticket.id, 1, "gap", 1)]
    driver.append(chunks([(ticket.id, 1, 0, [6])]))
    assert driver.outcome(ahead).refused == []
    assert driver.core.stats().ready == 1


def test_an_outcome_that_counts_fewer_tokens_than_stored_fails_the_trajectory() -> None:
    driver = Driver()
    driver.feed()
    ticket = driver.tickets[0]
    driver.append(chunks([(ticket.id, 0, 0, [5, 6])]))
    driver.outcome(m.Outcome(ticket.id, 1, 1, "finished", "stop", 1.0))
    assert driver.core.stats().failed == 1
    assert "2 tokens stored, the worker counts 1" in driver.core.stats().last_error


# --- 2 admission -------------------------------------------------------------------------------------------------


def test_nothing_is_issued_before_the_first_version_is_published() -> None:
    from buffers.core import Core
    from buffers.records import Settings

    core = Core(Settings(batch=4, group=2, max_staleness=1, max_tokens=8))
    assert core.handle("feeder", m.Hello("feeder"))[0].message == m.Credit(0)
    assert core.handle("feeder", m.Submit(0, [prompt(0)]))[0].message == m.Credit(0)
    assert core.stats().issued == 0


def test_at_most_eta_plus_one_batches_are_in_flight() -> None:
    driver = Driver(batch=4, group=2, max_staleness=1)
    driver.feed()
    assert (driver.credit, len(driver.tickets)) == (4, 8)
    for first in (4, 9):  # beyond the credit, and ahead of its turn
        assert driver.send("feeder", m.Submit(first, [prompt(9)]))[0].message == m.Credit(4, 4)
    assert driver.core.stats().issued == 8


def test_after_a_resume_at_version_100_with_bound_1_at_most_8_are_admitted_before_the_next_publish() -> None:
    """failures.md 8."""
    driver = Driver(batch=4, group=2, max_staleness=1)
    driver.send("rank0", m.Published(100))
    driver.version = 100
    driver.feed()
    driver.finish_all()
    batch = driver.take()
    assert batch is not None
    driver.feed()
    assert driver.core.stats().issued == 8


def test_capacity_returns_at_commit_for_trained_and_at_once_for_failed() -> None:
    driver = Driver(batch=4, group=2, max_staleness=0)
    driver.feed()
    for ticket in driver.tickets[:2]:
        driver.fail(ticket)
    assert driver.credit == 3
    driver.feed()
    driver.finish_all()
    batch = driver.take()
    assert batch is not None
    assert driver.credit == 3
    driver.commit(batch)
    assert driver.credit == 5


def test_tickets_wait_for_free_slots_and_carry_the_newest_version() -> None:
    driver = Driver(slots=3)
    driver.feed()
    assert len(driver.tickets) == 3
    driver.finish(driver.tickets[0])
    assert len(driver.tickets) == 3
    assert {ticket.min_version for ticket in driver.tickets} == {0}


def test_with_eta_0_tickets_of_the_next_batch_wait_for_the_next_version() -> None:
    driver = Driver(max_staleness=0)
    for version in range(3):
        driver.feed()
        assert {ticket.min_version for ticket in driver.tickets} == {version}
        driver.finish_all()
        batch = driver.take()
        assert batch is not None
        driver.commit(batch)


# --- 3 the bound -------------------------------------------------------------------------------------------------


def stale_driver(versions: list[int], *, bound: int, on_stale: str) -> tuple[Driver, m.Batch | None]:
    """One group of one, sampled at the given versions, taken at step 5."""
    driver = Driver(batch=1, group=1, max_staleness=bound, on_stale=on_stale)
    driver.send("rank0", m.Published(5))
    driver.version = 5
    driver.feed()
    ticket = driver.tickets[0]
    for offset, version in enumerate(versions):
        driver.append(chunks([(ticket.id, offset, version, [7])]))
    driver.outcome(m.Outcome(ticket.id, 1, len(versions), "finished", "stop", 1.0))
    driver.tickets.remove(ticket)
    return driver, driver.take(5)


def mask_of(driver: Driver, batch: m.Batch) -> list[int]:
    out = driver.send("rank0", m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
    return m.SampleArrays.from_frames(out[0].frames).mask.tolist()


def test_token_versions_0_0_5_at_step_5() -> None:
    """failures.md 9."""
    driver, batch = stale_driver([0, 0, 5], bound=2, on_stale="mask")
    assert batch is not None
    assert mask_of(driver, batch) == [0, 0, 1]
    driver.commit(batch)
    assert driver.core.stats().masked_stale_tokens == 2
    driver, batch = stale_driver([0, 0, 5], bound=2, on_stale="drop")
    assert batch is None
    assert driver.core.stats().expired == 1
    driver, batch = stale_driver([0, 0, 5], bound=5, on_stale="mask")
    assert batch is not None
    assert mask_of(driver, batch) == [1, 1, 1]


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
def test_token_versions_0_0_0_are_never_trained(on_stale: str) -> None:
    driver, batch = stale_driver([0, 0, 0], bound=2, on_stale=on_stale)
    assert batch is None
    assert driver.core.stats().expired == 1


def test_non_finite_logprobs_are_masked_and_counted() -> None:
    """failures.md 20: [-1, None, nan, -inf] arrives as [-1, nan, nan, -inf]."""
    driver = Driver(batch=1, group=1)
    driver.feed()
    ticket = driver.tickets[0]
    columns = chunks([(ticket.id, 0, 0, [1, 2, 3, 4])])
    columns.logprobs[:] = [-1.0, np.nan, np.nan, -np.inf]
    driver.append(columns)
    driver.outcome(m.Outcome(ticket.id, 1, 4, "finished", "stop", 1.0))
    batch = driver.take()
    assert batch is not None
    assert mask_of(driver, batch) == [1, 0, 0, 0]
    driver.commit(batch)
    assert driver.core.stats().masked_nonfinite_tokens == 3
    assert batch.rows[0].trainable == 1


# --- 4 groups ----------------------------------------------------------------------------------------------------


def test_a_group_is_offered_whole_though_the_version_moved_between_its_members() -> None:
    """failures.md 3: the version advances after 2 of 4 members were dispatched."""
    driver = Driver(batch=4, group=4, max_staleness=3, slots=2)
    driver.feed()
    first = list(driver.tickets)
    driver.send("rank0", m.Published(1))
    assert driver.take(1) is None
    for ticket in first:
        driver.finish(ticket, version=0)
    while driver.core.store.counts["running"] > 12:
        driver.finish(driver.tickets[0], version=1)
    batches = sent(driver, m.Batch)
    assert len(batches) == 1
    assert len(batches[0].rows) == 4  # type: ignore[attr-defined]
    assert {row.group for row in batches[0].rows} == {0}  # type: ignore[attr-defined]


def test_a_failed_member_leaves_its_group_with_the_others_and_takes_no_part() -> None:
    """failures.md 2: never a silent zero."""
    driver = Driver(batch=2, group=2, max_staleness=0)
    driver.feed()
    driver.fail(driver.tickets[0])
    driver.finish(driver.tickets[0], reward=0.5)
    batch = driver.take()
    assert batch is not None  # nothing else can become ready: short of B beats waiting for ever
    assert [row.reward for row in batch.rows] == [0.5]
    assert batch.group_rewards == [[0.5]]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_missing_reward_is_a_failure(reward: float | None) -> None:
    driver = Driver()
    driver.feed()
    driver.finish(driver.tickets[0], reward=reward)
    assert driver.core.stats().failed == 1


def test_the_reward_of_a_fully_stale_member_still_counts_in_its_group() -> None:
    driver = Driver(batch=1, group=2, max_staleness=1)
    driver.send("rank0", m.Published(5))
    driver.version = 5
    driver.feed()
    one, two = driver.tickets[0], driver.tickets[1]
    driver.finish(one, reward=0.25, version=0)
    driver.finish(two, reward=0.75, version=5)
    batch = driver.take(5)
    assert batch is not None
    assert [row.ticket for row in batch.rows] == [two.id]
    assert sorted(batch.group_rewards[0]) == [0.25, 0.75]
    assert driver.core.stats().expired == 1


def test_the_oldest_groups_go_first() -> None:
    driver = Driver(batch=2, group=2, max_staleness=2)
    driver.feed()
    for ticket in [*driver.tickets[4:], *driver.tickets[:4]]:
        driver.finish(ticket)
    batch = driver.take()
    assert batch is not None
    assert {driver.core.store.trajectories[row.ticket].group.serial for row in batch.rows} == {0}


def test_groups_that_fail_entirely_one_after_another_end_the_run() -> None:
    driver = Driver(max_consecutive_failed_groups=2)
    driver.feed()
    for ticket in list(driver.tickets)[:4]:
        driver.fail(ticket, "HTTP 400")
    (fatal,) = sent(driver, m.Fatal)
    assert "2 groups in a row" in fatal.reason  # type: ignore[attr-defined]
    assert "HTTP 400" in fatal.reason  # type: ignore[attr-defined]


# --- 5 leases ----------------------------------------------------------------------------------------------------


def test_a_take_waits_and_is_answered_when_the_batch_is_complete() -> None:
    driver = Driver(batch=4, group=2)
    driver.feed()
    assert driver.take() is None
    with pytest.raises(ProtocolError, match="already waiting"):
        driver.core.handle("another", m.Take(0))
    driver.finish_all()
    assert len(sent(driver, m.Batch)) == 1


def test_a_commit_may_lower_the_bound_for_what_starts_and_lift_it_again() -> None:
    """Two batches in flight at a bound of 1, one at 0, through a snapshot too; never more than configured."""
    driver = Driver(batch=4, group=2, max_staleness=1)

    def step(bound: int | None) -> int:
        driver.feed()
        driver.finish_all()
        batch = driver.take()
        assert batch is not None
        driver.commit(batch, bound)
        driver.core = snapshot.restore(*snapshot.take(driver.core))
        driver.feed()
        return driver.core.stats().in_flight

    assert step(0) == 4
    assert step(0) == 4
    assert step(None) == 8
    assert step(5) == 8


def test_a_lease_is_committed_once() -> None:
    driver = Driver()
    driver.feed()
    driver.finish_all()
    batch = driver.take()
    assert batch is not None
    driver.commit(batch)
    assert driver.core.stats().trained == 4
    again = driver.send("rank0", m.Commit(batch.lease, 1, request=7))
    assert [send.message.request for send in again if isinstance(send.message, m.Committed)] == [7]
    assert (driver.core.stats().trained, driver.core.stats().version) == (4, 1)
    with pytest.raises(ProtocolError, match="not outstanding"):
        driver.core.handle("rank0", m.Commit(batch.lease + 1, 9))
    with pytest.raises(ProtocolError, match="not outstanding"):
        driver.core.handle("rank0", m.Fetch(batch.lease, []))


def test_a_batch_is_for_the_newest_version_or_the_next() -> None:
    driver = Driver()
    driver.send("rank0", m.Published(3))
    for version in (2, 5):
        with pytest.raises(ProtocolError, match="newest published is 3"):
            driver.core.handle("rank0", m.Take(version))


def test_a_version_is_never_published_twice() -> None:
    driver = Driver()
    driver.send("rank0", m.Published(3))
    driver.send("rank0", m.Published(3))  # the repeat of a message whose answer was lost
    with pytest.raises(ProtocolError, match="not newer"):
        driver.core.handle("rank0", m.Published(2))


def test_only_leased_trajectories_can_be_fetched() -> None:
    driver = Driver()
    driver.feed()
    driver.finish_all()
    batch = driver.take()
    assert batch is not None
    leased = {row.ticket for row in batch.rows}
    other = next(ticket for ticket in driver.core.store.trajectories if ticket not in leased)
    with pytest.raises(ProtocolError, match="not of lease"):
        driver.core.handle("rank0", m.Fetch(batch.lease, [other]))


def test_fetched_columns_follow_the_order_asked_for() -> None:
    driver = Driver(batch=4, group=2)
    driver.feed()
    for i, ticket in enumerate(list(driver.tickets)[:4]):
        driver.finish(ticket, tokens=i + 1)
    batch = driver.take()
    assert batch is not None
    order = [row.ticket for row in batch.rows][::-1]
    arrays = m.SampleArrays.from_frames(driver.send("rank0", m.Fetch(batch.lease, order))[0].frames)
    lengths = {row.ticket: row.length for row in batch.rows}
    assert arrays.tokens.size == sum(lengths.values()) == arrays.logprobs.size == arrays.mask.size
    assert arrays.prompts.tolist() == [0, 1, 2, 0, 1, 2]


# --- 6 accounts --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(1, 8)), min_size=20, max_size=120),
    eta=st.integers(0, 3),
    group=st.sampled_from([1, 2, 4]),
    on_stale=st.sampled_from(["mask", "drop"]),
    slots=st.integers(1, 20),
)
def test_any_order_of_events_keeps_every_promise(
    actions: list[tuple[int, int, int]], eta: int, group: int, on_stale: str, slots: int
) -> None:
    """Random schedules; `Driver` checks the accounts after every event, this checks what was handed out."""
    driver = Driver(slots=slots, batch=4, group=group, max_staleness=eta, on_stale=on_stale)
    lengths: dict[int, int] = {}
    waiting = False
    held: list[m.Batch] = []
    trained: list[int] = []
    for kind, pick, size in actions:
        ticket = driver.tickets[pick % len(driver.tickets)] if driver.tickets else None
        if kind == 0:
            driver.feed()
        elif kind in (1, 2) and ticket is not None:
            at = lengths.get(ticket.id, 0)
            size = min(size, 8 - at)
            if size:
                driver.append(chunks([(ticket.id, at, driver.version, [pick] * size)]))
                lengths[ticket.id] = at + size
        elif kind == 3 and ticket is not None:
            outcome = m.Outcome(ticket.id, 1, lengths.get(ticket.id, 0), "finished", "stop", float(pick % 2))
            driver.outcome(outcome)
            driver.tickets.remove(ticket)
        elif kind == 4 and not waiting and not held:
            driver.take()
            waiting = True
        elif kind == 5 and held:
            driver.commit(held.pop())
        batches = [send.message for send in driver.sent if isinstance(send.message, m.Batch)]
        if waiting and len(batches) > len(trained):
            waiting = False
            batch = batches[-1]
            held.append(batch)
            trained.append(batch.lease)
            fetched = driver.send("rank0", m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
            arrays = m.SampleArrays.from_frames(fetched[-1].frames)
            ages = batch.version - arrays.versions
            assert (ages[arrays.mask == 1] <= eta).all()
            assert all(row.trainable > 0 for row in batch.rows)
    assert driver.core.stats().in_flight <= (eta + 1) * 4
