"""Groups by a stated policy, never by accident.

1  `whole`: offered when all members have ended; a failed one is never a silent zero
2  `replace`: the failed slot gets another ticket, `max_attempts` in all; `refused` is never tried again
3  `shrink`, `fail_group`: the others go on, or the group ends and is counted once; too many in a row end the run
4  `deadline_versions`: some steps after the issue the finished ones are offered, the rest cancelled
5  `split`: members as they finish, each lease with the rewards known then; exactly B
6  failures.md 10: a slow prompt is trained or counted, under every policy; 12: the budget of a continuation
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from buffers import messages as m
from buffers.groups import verdict
from buffers.records import Group, Settings, Trajectory
from tests.buffers.driver import Driver, chunks, prompt


def members(driver: Driver, index: int) -> list[m.Ticket]:
    """The outstanding tickets of a prompt, by member."""
    return sorted((t for t in driver.tickets if t.key[1] == index), key=lambda t: t.member)


def refuse(driver: Driver, ticket: m.Ticket) -> None:
    driver.outcome(m.Outcome(ticket.id, ticket.attempt, 0, "refused", error="HTTP 400"))
    driver.tickets.remove(ticket)


def publish(driver: Driver, version: int) -> None:
    driver.send("rank0", m.Published(version))
    driver.version = version


def batches(driver: Driver) -> list[m.Batch]:
    return driver.of(m.Batch)


# --- 1 whole -----------------------------------------------------------------------------------------------------


def test_a_whole_group_waits_for_its_last_member_and_goes_with_all_rewards() -> None:
    """failures.md 3: 2 members are never treated as 4, whatever the versions do."""
    driver = Driver(batch=4, group=4, max_staleness=3)
    driver.feed()
    driver.take(0)
    for i, ticket in enumerate(members(driver, 0)):
        assert batches(driver) == []
        driver.finish(ticket, reward=i / 4)
    (batch,) = batches(driver)
    assert [row.member for row in batch.rows] == [0, 1, 2, 3]
    assert [row.reward for row in batch.rows] == [0, 0.25, 0.5, 0.75]
    assert batch.group_rewards == [[0, 0.25, 0.5, 0.75]]


def test_a_batch_of_several_groups_says_which_row_is_of_which_group() -> None:
    driver = Driver(batch=4, group=2, max_staleness=1)
    driver.feed()
    for ticket in list(driver.tickets):
        driver.finish(ticket, reward=ticket.key[1] + ticket.member / 8)
    batch = driver.take()
    assert batch is not None
    assert [row.group for row in batch.rows] == [0, 0, 1, 1]
    assert batch.group_rewards == [[0, 0.125], [1, 1.125]]
    assert all(batch.group_rewards[row.group][row.member] == row.reward for row in batch.rows)


# --- 2 replace ---------------------------------------------------------------------------------------------------


def test_a_replacement_takes_the_slot_and_the_group_waits_for_it() -> None:
    driver = Driver(batch=4, group=4, max_staleness=0, on_failed="replace")
    driver.feed()
    first = members(driver, 0)
    driver.take()
    driver.append(chunks([(first[1].id, 0, 0, [5, 6])]))
    for ticket in (first[0], first[2], first[3]):
        driver.finish(ticket, reward=1.0)
    driver.fail(first[1])
    (again,) = members(driver, 0)
    assert (again.member, again.key, again.attempt, again.prefix, again.max_tokens) == (1, (0, 0), 1, [], 8)
    assert again.id != first[1].id
    assert batches(driver) == []
    driver.finish(again, reward=0.5)
    (batch,) = batches(driver)
    assert batch.group_rewards == [[1.0, 0.5, 1.0, 1.0]]
    assert [row.ticket for row in batch.rows] == [first[0].id, again.id, first[2].id, first[3].id]
    stats = driver.core.stats()
    assert (stats.issued, stats.failed, stats.leased, stats.failed_groups) == (5, 1, 4, 0)


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_slot_gets_at_most_max_attempts_tickets(max_attempts: int) -> None:
    driver = Driver(batch=2, group=2, max_staleness=0, on_failed="replace", max_attempts=max_attempts)
    driver.feed()
    good, _ = members(driver, 0)
    driver.finish(good, reward=0.5)
    for _ in range(max_attempts):
        (bad,) = members(driver, 0)
        assert bad.member == 1
        driver.fail(bad, "HTTP 503")
    stats = driver.core.stats()
    assert (stats.failed, stats.issued, stats.running) == (max_attempts, 1 + max_attempts, 0)
    batch = driver.take()
    assert batch is not None
    assert batch.group_rewards == [[0.5]]
    assert [row.reward for row in batch.rows] == [0.5]


def test_a_group_all_of_whose_slots_are_out_of_tickets_has_failed_once() -> None:
    driver = Driver(batch=2, group=2, max_staleness=0, on_failed="replace", max_attempts=2)
    driver.feed()
    for _ in range(4):
        driver.fail(members(driver, 0)[0])
    stats = driver.core.stats()
    assert (stats.failed, stats.failed_groups, stats.running, stats.in_flight) == (4, 1, 0, 0)
    assert driver.credit == 2


def test_what_was_refused_is_never_tried_again() -> None:
    driver = Driver(batch=2, group=2, max_staleness=0, on_failed="replace")
    driver.feed()
    good, bad = members(driver, 0)
    refuse(driver, bad)
    assert members(driver, 0) == [good]
    driver.finish(good, reward=0.5)
    batch = driver.take()
    assert batch is not None
    assert batch.group_rewards == [[0.5]]
    stats = driver.core.stats()
    assert (stats.failed, stats.issued, stats.last_error) == (1, 2, "HTTP 400")


@pytest.mark.parametrize("reward", [None, float("nan")])
def test_a_missing_reward_is_replaced_like_any_other_failure(reward: float | None) -> None:
    driver = Driver(batch=2, group=2, max_staleness=0, on_failed="replace")
    driver.feed()
    driver.finish(members(driver, 0)[0], reward=reward)
    assert len(members(driver, 0)) == 2
    driver.finish_all(reward=0.25)
    batch = driver.take()
    assert batch is not None
    assert batch.group_rewards == [[0.25, 0.25]]


def test_a_replacement_is_not_born_stale() -> None:
    """DESIGN 5.7: a ticket names the newest version that could be pulled when it was issued, and it is issued now."""
    driver = Driver(batch=2, group=2, max_staleness=1, on_failed="replace")
    driver.feed()
    late = members(driver, 0)[0]
    publish(driver, 1)
    publish(driver, 2)
    driver.fail(late)
    again = members(driver, 0)[0]
    assert again.id != late.id
    assert again.min_version == 2


# --- 3 shrink and fail_group -------------------------------------------------------------------------------------


def test_a_failed_member_shrinks_its_group() -> None:
    driver = Driver(batch=3, group=3, max_staleness=0, on_failed="shrink", min_group=2)
    driver.feed()
    one, two, three = members(driver, 0)
    driver.finish(one, reward=0.25)
    driver.fail(two)
    driver.take()
    assert batches(driver) == []
    driver.finish(three, reward=0.75)
    (batch,) = batches(driver)
    assert [row.member for row in batch.rows] == [0, 2]
    assert batch.group_rewards == [[0.25, 0.75]]
    assert driver.core.stats().failed_groups == 0


def test_fewer_than_min_group_is_a_failed_group() -> None:
    driver = Driver(batch=3, group=3, max_staleness=0, on_failed="shrink", min_group=2)
    driver.feed()
    one, two, three = members(driver, 0)
    driver.fail(one)
    driver.finish(two, reward=0.75)
    driver.fail(three)
    stats = driver.core.stats()
    assert (stats.failed, stats.cancelled, stats.ready, stats.failed_groups) == (2, 1, 0, 1)
    assert driver.credit == 2


def test_min_group_above_the_group_size_means_all_of_them() -> None:
    driver = Driver(batch=2, group=2, max_staleness=0, on_failed="shrink", min_group=5)
    driver.feed()
    driver.finish_all()
    assert driver.core.stats().ready == 2
    assert driver.take() is not None


def test_fail_group_ends_the_others_at_once_and_counts_the_group_once() -> None:
    driver = Driver(batch=4, group=4, max_staleness=0, on_failed="fail_group")
    driver.feed()
    one, two, three, four = members(driver, 0)
    driver.finish(one)
    driver.fail(two, "broken")
    stats = driver.core.stats()
    assert (stats.failed, stats.cancelled, stats.failed_groups, stats.in_flight) == (1, 3, 1, 0)
    stopped = {held.ticket for cancel in driver.of(m.Cancel) for held in cancel.tickets}
    assert stopped == {three.id, four.id}
    ack = driver.outcome(m.Outcome(three.id, 1, 0, "failed"))
    assert ack.refused == [m.Refusal(three.id, 1, "fenced", 0)]
    assert driver.core.stats().failed_groups == 1
    assert driver.credit == 2


def test_a_lost_worker_fails_a_group_once() -> None:
    driver = Driver(slots=4, batch=4, group=4, max_staleness=0, on_failed="fail_group", max_attempts=1)
    driver.feed()
    driver.send("feeder", m.Lost("w"))
    stats = driver.core.stats()
    assert (stats.failed, stats.cancelled, stats.failed_groups) == (1, 3, 1)


def test_failed_groups_in_a_row_end_the_run_and_a_good_one_between_starts_the_count_again() -> None:
    driver = Driver(batch=2, group=2, max_staleness=3, on_failed="fail_group", max_consecutive_failed_groups=2)
    driver.feed()
    driver.fail(members(driver, 0)[0])
    for ticket in members(driver, 1):
        driver.finish(ticket)
    driver.fail(members(driver, 2)[1])
    assert driver.of(m.Fatal) == []
    driver.fail(members(driver, 3)[1], "HTTP 500")
    (fatal,) = driver.of(m.Fatal)
    assert "2 groups in a row" in fatal.reason
    assert "HTTP 500" in fatal.reason
    assert fatal.stats.failed_groups == 3
    assert [s.to for s in driver.sent if isinstance(s.message, m.Fatal)] == ["feeder"]


def test_members_of_several_groups_that_fail_in_one_message_count_per_group() -> None:
    driver = Driver(batch=4, group=2, max_staleness=0, on_failed="shrink")
    driver.feed()
    driver.outcome(*[m.Outcome(t.id, 1, 0, "failed", error="x") for t in driver.tickets])
    assert (driver.core.stats().failed, driver.core.stats().failed_groups) == (4, 2)


# --- 4 deadline --------------------------------------------------------------------------------------------------


def deadline(**settings: object) -> Driver:
    return Driver(
        **(
            {
                "batch": 4,
                "group": 4,
                "max_staleness": 3,
                "group_policy": "deadline_versions",
                "deadline_versions": 2,
                "min_group": 2,
            }
            | settings
        )
    )


def test_at_the_deadline_the_finished_are_offered_and_the_rest_cancelled() -> None:
    driver = deadline()
    driver.feed()
    tickets = members(driver, 0)
    for ticket in tickets[:2]:
        driver.finish(ticket, reward=ticket.member / 4)
    publish(driver, 1)
    assert driver.core.stats().cancelled == 0
    publish(driver, 2)
    stats = driver.core.stats()
    assert (stats.cancelled, stats.ready) == (2, 2)
    cancelled = [(s.to, held) for s in driver.sent if isinstance(s.message, m.Cancel) for held in s.message.tickets]
    assert cancelled == [("w", m.Held(t.id, 1)) for t in tickets[2:]]
    assert driver.outcome(m.Outcome(tickets[2].id, 1, 0, "failed")).refused[0].reason == "fenced"
    driver.tickets = [t for t in driver.tickets if t not in tickets]
    for ticket in members(driver, 1):
        driver.finish(ticket)
    batch = driver.take(2)
    assert batch is not None
    assert [row.member for row in batch.rows if row.group == 0] == [0, 1]
    assert batch.group_rewards[0] == [0, 0.25]
    assert driver.core.stats().failed_groups == 0


def test_after_the_deadline_the_group_goes_as_soon_as_min_group_have_finished() -> None:
    driver = deadline()
    driver.feed()
    tickets = members(driver, 0)
    driver.finish(tickets[0])
    publish(driver, 2)
    publish(driver, 3)
    assert driver.core.stats().cancelled == 0
    driver.finish(tickets[3])
    assert (driver.core.stats().cancelled, driver.core.stats().ready) == (2, 2)


def test_all_finished_before_the_deadline_are_offered_at_once() -> None:
    driver = deadline()
    driver.feed()
    driver.take()
    for ticket in members(driver, 0):
        driver.finish(ticket)
    assert len(batches(driver)) == 1
    publish(driver, 1)
    publish(driver, 2)
    assert driver.core.stats().cancelled == 0


def test_a_failure_after_the_deadline_is_not_replaced_when_the_others_do() -> None:
    driver = deadline(on_failed="replace")
    driver.feed()
    tickets = members(driver, 0)
    driver.finish(tickets[0])
    publish(driver, 2)
    driver.finish(tickets[1])  # cuts
    assert driver.core.stats().cancelled == 2
    assert driver.core.stats().issued == 16
    assert [t for t in members(driver, 0) if t not in tickets] == []


def test_a_commit_moves_the_deadline_like_any_version() -> None:
    driver = deadline(deadline_versions=1, min_group=1)
    driver.feed()
    for ticket in members(driver, 0):
        driver.finish(ticket)
    driver.finish(members(driver, 1)[0])
    batch = driver.take()
    assert batch is not None
    assert driver.core.stats().cancelled == 0
    driver.commit(batch)
    assert driver.core.stats().cancelled == 3
    assert driver.core.stats().ready == 1


# --- 5 split -----------------------------------------------------------------------------------------------------


def split(**settings: object) -> Driver:
    return Driver(**({"batch": 4, "group": 4, "max_staleness": 2, "group_policy": "split", "min_group": 2} | settings))


def test_split_offers_members_as_they_finish_in_batches_of_exactly_b() -> None:
    driver = split()
    driver.feed()
    driver.take()
    for index in (0, 1):
        driver.finish(members(driver, index)[0], reward=1.0)
    driver.finish(members(driver, 0)[0], reward=0.0)  # group 0 has two rewards: offered
    driver.finish(members(driver, 0)[0], reward=0.5)
    assert batches(driver) == []
    driver.finish(members(driver, 1)[0], reward=0.0)  # group 1 too: 5 ready
    (batch,) = batches(driver)
    assert len(batch.rows) == 4
    assert [row.group for row in batch.rows] == [0, 0, 0, 1]
    assert batch.group_rewards == [[1.0, 0.0, 0.5], [1.0, 0.0]]
    assert driver.core.stats().ready == 1


def test_the_statistics_of_a_lease_are_frozen_and_the_next_one_has_all_rewards() -> None:
    driver = split(batch=4, group=4, max_staleness=1)
    driver.feed()
    for ticket in members(driver, 0)[:3]:
        driver.finish(ticket, reward=ticket.member / 4)
    for ticket in members(driver, 1)[:2]:
        driver.finish(ticket, reward=1.0)
    first = driver.take()
    assert first is not None
    assert first.group_rewards == [[0, 0.25, 0.5], [1.0, 1.0]]
    driver.finish(members(driver, 0)[0], reward=0.75)
    out = driver.send("rank0", m.Take(0, request=9))
    assert [s.message.group_rewards for s in out if isinstance(s.message, m.Batch)] == [first.group_rewards]
    driver.commit(first)
    for ticket in members(driver, 1):
        driver.finish(ticket, reward=0.0)
    second = driver.take()
    assert second is not None
    # Trained members' rewards are kept until the last one has ended.
    assert second.group_rewards == [[0, 0.25, 0.5, 0.75], [1.0, 1.0, 0.0, 0.0]]
    assert [(row.group, row.member) for row in second.rows] == [(0, 3), (1, 1), (1, 2), (1, 3)]
    driver.commit(second)
    assert driver.core.stats().trained == 8
    assert {group.index for group in driver.core.store.groups.values()}.isdisjoint({0, 1})


def test_split_takes_no_member_twice_over_many_batches() -> None:
    driver = split(batch=4, group=4, max_staleness=2, slots=5)
    trained: Counter[int] = Counter()
    rng = np.random.default_rng(3)
    for _ in range(60):
        driver.feed()
        for _ in range(3):
            driver.finish(driver.tickets[int(rng.integers(len(driver.tickets)))], reward=float(rng.integers(2)))
        if not driver.core.offering.leases and driver.core.offering.take is None:
            driver.take()
        for lease in list(driver.core.offering.leases.values()):
            assert len(lease.batch.rows) == 4
            trained.update(row.ticket for row in lease.batch.rows)
            driver.commit(lease.batch)
    assert sum(trained.values()) == len(trained) == driver.core.stats().trained > 100


def test_split_needs_fewer_rewards_when_fewer_can_come() -> None:
    driver = split(batch=4, group=4, max_staleness=0, min_group=3, on_failed="shrink")
    driver.feed()
    one, two, three, four = members(driver, 0)
    driver.finish(one)
    driver.finish(two)
    driver.take()
    assert driver.core.offering.ready == {}
    driver.fail(three)
    assert driver.core.offering.ready == {}  # three can still be
    driver.fail(four)
    (batch,) = batches(driver)
    assert [row.member for row in batch.rows] == [0, 1]


def test_split_with_every_member_failed_is_one_failed_group() -> None:
    driver = split(on_failed="shrink")
    driver.feed()
    for ticket in members(driver, 0):
        driver.fail(ticket)
    assert driver.core.stats().failed_groups == 1


def test_fail_group_under_split_lets_what_is_leased_go_on() -> None:
    driver = split(batch=4, group=4, max_staleness=1, on_failed="fail_group")
    driver.feed()
    for index in (0, 1):
        for ticket in members(driver, index)[:2]:
            driver.finish(ticket)
    batch = driver.take()
    assert batch is not None
    driver.finish(members(driver, 0)[0])
    driver.fail(members(driver, 0)[0])
    stats = driver.core.stats()
    assert (stats.leased, stats.failed, stats.cancelled, stats.failed_groups) == (4, 1, 1, 1)
    driver.fail(members(driver, 1)[0])
    stats = driver.core.stats()
    assert (stats.leased, stats.failed, stats.cancelled, stats.failed_groups) == (4, 2, 2, 2)
    driver.commit(batch)
    assert driver.core.stats().trained == 4
    assert driver.core.stats().in_flight == 0


# --- the decision itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["whole", "deadline_versions", "split"])
@pytest.mark.parametrize("min_group", [1, 2, 4])
def test_every_verdict_equals_the_design_in_words(policy: str, min_group: int) -> None:
    """All states of a group of four, before and at its deadline."""
    settings = Settings(4, 4, 1, 8, group_policy=policy, min_group=min_group, deadline_versions=2)
    for running in range(5):
        for finished in range(5 - running):
            for age in (1, 2):
                failed = 4 - running - finished
                group = Group(0, 0, prompt(0), 0)
                states = ["running"] * running + ["ready"] * finished + ["failed"] * failed
                for i, state in enumerate(states):
                    reward = 1.0 if state == "ready" else None
                    group.members.append(Trajectory(i, group, i, state=state, reward=reward))
                least = min(min_group, 4 - failed) if policy == "split" else min_group
                enough = finished >= max(1, least)
                if running == 0:
                    expected = "offer" if enough else "fail"
                elif policy == "split" and enough:
                    expected = "offer"
                elif policy == "deadline_versions" and age >= 2 and enough:
                    expected = "cut"
                else:
                    expected = "wait"
                assert verdict(group, settings, age) == expected, (running, finished, failed, age)


# --- 6 a slow prompt, a continuation -----------------------------------------------------------------------------


def epoch_with_a_slow_prompt(**settings: object) -> tuple[Driver, Counter[tuple[int, int]], set[int]]:
    """Ten prompts, the fourth of which has 2 tokens at every version and ends at version 6; then a second epoch.

    Returns what was trained by (prompt, member) of the first epoch, and the versions trained on of the slow one.
    """
    driver = Driver(**({"batch": 2, "group": 1, "max_staleness": 1, "max_tokens": 64} | settings))
    n = driver.core.settings.group
    trained: Counter[tuple[int, int]] = Counter()
    slow_versions: set[int] = set()
    slow_length = 0
    for _ in range(40):
        count = driver.credit - driver.submitted
        prompts = [prompt(i % 10, epoch=i // 10) for i in range(driver.submitted, driver.submitted + count)]
        driver.send("feeder", m.Submit(driver.submitted, prompts))
        driver.submitted += count
        for ticket in list(driver.tickets):
            if (ticket.key, ticket.member) != ((0, 3), n - 1):
                driver.finish(ticket, tokens=2)
            elif ticket.id in driver.core.store.trajectories and driver.version < 6:
                if driver.core.store.pool.length[driver.core.store.pool.row(ticket.id)] <= 2 * driver.version:
                    driver.append(chunks([(ticket.id, slow_length, driver.version, [3, 3])]))
                    slow_length += 2
            elif ticket.id in driver.core.store.trajectories:
                driver.outcome(m.Outcome(ticket.id, 1, slow_length, "finished", "stop", 1.0))
                driver.tickets.remove(ticket)
            else:
                driver.tickets.remove(ticket)
        batch = driver.take() if driver.core.offering.take is None else None
        batch = batch or next((lease.batch for lease in driver.core.offering.leases.values()), None)
        if batch is None and settings.get("on_stale") == "pace":
            # Nobody advances: the slow one goes on by itself.
            (slow,) = [t for t in driver.tickets if t.key == (0, 3)]
            driver.append(chunks([(slow.id, slow_length, driver.version, [3, 3])]))
            slow_length += 2
            driver.outcome(m.Outcome(slow.id, 1, slow_length, "finished", "stop", 1.0))
            driver.tickets.remove(slow)
            (batch,) = driver.of(m.Batch)[-1:]
        if batch is None:
            continue
        for row in batch.rows:
            group = driver.core.store.trajectories[row.ticket].group
            if group.prompt.key[0] == 0:
                trained[group.prompt.key[1], row.member] += 1
            if (group.prompt.key, row.member) == ((0, 3), n - 1):
                (samples,) = driver.send("rank0", m.Fetch(batch.lease, [row.ticket]))
                arrays = m.SampleArrays.from_frames(samples.frames)
                slow_versions |= {batch.version - v for v in arrays.versions[arrays.mask == 1].tolist()}
        driver.commit(batch)
    return driver, trained, slow_versions


def test_a_slow_prompt_is_trained_on_its_fresh_tokens_under_mask() -> None:
    """failures.md 10."""
    driver, trained, ages = epoch_with_a_slow_prompt(on_stale="mask")
    assert trained == {(i, 0): 1 for i in range(10)}
    assert ages == {1}
    assert driver.core.stats().expired == 0
    assert driver.core.stats().masked_stale_tokens == 10


def test_a_slow_prompt_is_dropped_and_counted_with_its_length_under_drop() -> None:
    """failures.md 10: what is lost is the long one, and the counts say so."""
    driver, trained, _ = epoch_with_a_slow_prompt(on_stale="drop")
    assert trained == {(i, 0): 1 for i in range(10) if i != 3}
    stats = driver.core.stats()
    assert stats.expired == 1
    assert stats.expired_lengths == [0, 0, 0, 0, 1, *[0] * 19]  # 12 tokens: 8 <= 12 < 16


def test_a_slow_prompt_is_waited_for_under_pace() -> None:
    """failures.md 10."""
    driver, trained, ages = epoch_with_a_slow_prompt(on_stale="pace")
    assert trained == {(i, 0): 1 for i in range(10)}
    assert max(ages) <= 1
    stats = driver.core.stats()
    assert (stats.expired, stats.masked_stale_tokens, stats.late_groups) == (0, 0, 0)


def test_a_slow_member_is_cancelled_at_the_deadline_and_its_siblings_train() -> None:
    """failures.md 10: no bias against the siblings of the slow one; it is counted."""
    driver, trained, _ = epoch_with_a_slow_prompt(
        group=2, group_policy="deadline_versions", deadline_versions=1, on_stale="drop"
    )
    assert trained == {(i, member): 1 for i in range(10) for member in (0, 1) if (i, member) != (3, 1)}
    stats = driver.core.stats()
    assert (stats.cancelled, stats.expired) == (1, 0)


def test_a_slow_member_costs_nobody_else_anything_under_split() -> None:
    driver, trained, _ = epoch_with_a_slow_prompt(group=2, group_policy="split", min_group=1, on_stale="drop")
    assert trained == {(i, member): 1 for i in range(10) for member in (0, 1) if (i, member) != (3, 1)}
    assert driver.core.stats().expired == 1
    assert sum(driver.core.stats().expired_lengths) == 1


def test_interrupted_at_10_of_16_the_continuation_has_6_left() -> None:
    """failures.md 12."""
    driver = Driver(batch=1, group=1, max_staleness=0, max_tokens=16)
    driver.feed()
    (ticket,) = driver.tickets
    assert ticket.max_tokens == 16
    driver.append(chunks([(ticket.id, 0, 0, list(range(10)))]))
    driver.send("feeder", m.Lost("w"))
    driver.tickets.clear()
    driver.send("w", m.Hello("worker", 1))
    (again,) = driver.tickets
    assert (again.max_tokens, again.prefix) == (6, list(range(10)))
    assert driver.append(chunks([(again.id, 10, 0, [1] * 7)], attempt=2)).refused[0].reason == "invalid"
    driver.finish(again, tokens=16)
    batch = driver.take()
    assert batch is not None
    (samples,) = driver.send("rank0", m.Fetch(batch.lease, [again.id]))
    arrays = m.SampleArrays.from_frames(samples.frames)
    assert arrays.tokens.size == arrays.logprobs.size == arrays.versions.size == arrays.mask.size == 16


# --- dynamic sampling ------------------------------------------------------------------------------------------------


def test_a_group_of_equal_rewards_is_replaced_within_the_same_admission() -> None:
    driver = Driver(batch=2, group=2, max_staleness=0, dynamic_sampling=True)
    driver.feed()
    driver.finish_all(reward=1.0)
    assert driver.take() is None
    stats = driver.core.stats()
    assert (stats.cancelled, stats.filtered_groups, stats.in_flight) == (2, 1, 0)
    driver.feed()
    first, second = list(driver.tickets)
    driver.finish(first, reward=1.0)
    driver.finish(second, reward=0.0)
    (batch,) = driver.of(m.Batch)
    assert [row.reward for row in batch.rows] == [1.0, 0.0]
    assert driver.core.stats().filtered_groups == 1


def test_without_dynamic_sampling_equal_rewards_are_trained_on() -> None:
    driver = Driver(batch=2, group=2, max_staleness=0)
    driver.feed()
    driver.finish_all(reward=1.0)
    assert driver.take() is not None


def test_a_deadline_that_cuts_a_group_to_equal_rewards_replaces_it_too() -> None:
    """The first group has one reward when its deadline comes: nothing to compare with."""
    driver = Driver(
        batch=2, group=2, max_staleness=3, group_policy="deadline_versions", deadline_versions=1, dynamic_sampling=True
    )
    driver.feed()
    late, other, one, two = list(driver.tickets)[:4]
    driver.finish(late, reward=1.0)
    driver.finish(one, reward=1.0)
    driver.finish(two, reward=0.0)
    batch = driver.take()
    assert batch is not None
    driver.commit(batch)
    stats = driver.core.stats()
    assert stats.filtered_groups == 1
    assert stats.cancelled == 2
    assert driver.core.store.trajectories.get(other.id) is None


def test_too_many_equal_groups_in_a_row_end_the_run() -> None:
    driver = Driver(batch=2, group=2, max_staleness=0, dynamic_sampling=True, max_consecutive_filtered=3)
    for _ in range(3):
        driver.feed()
        driver.finish_all(reward=0.0)
    (fatal,) = driver.of(m.Fatal)
    assert "3 groups in a row had equal rewards" in fatal.reason
