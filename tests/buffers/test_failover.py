"""What the death of a process costs: no token that was stored, and nothing is trained twice.

1  a lost worker's tickets go to others: higher attempt, prefix, the budget that is left, the newest version
2  the old attempt is fenced, for chunks and outcomes; nothing of it is stored any more
3  `max_attempts` deaths end a ticket as failed, and it is not replaced
4  a complete response needs its reward only; `replayable=False` starts again from nothing, and that is counted
5  hello compares what a worker and the buffer hold: missing tickets are sent again, foreign ones are cancelled
6  a newer worker of the same name replaces the older one
7  a lost learner's lease is offered again, once
8  when the whole run starts again, nothing is issued or offered before a learner has published; nobody has died for it
9  any schedule of deaths (failures.md 6): each trajectory holds each token once and is trained once
"""

from __future__ import annotations

import random

import pytest

from buffers import messages as m
from buffers.core import Send
from buffers.errors import ProtocolError
from staleness.versions import pack
from tests.buffers.driver import Driver, chunks


def granted(out: list[Send], to: str) -> list[m.Ticket]:
    return [t for s in out if s.to == to and isinstance(s.message, m.Tickets) for t in s.message.tickets]


def cancelled(out: list[Send], to: str) -> list[m.Held]:
    return [h for s in out if s.to == to and isinstance(s.message, m.Cancel) for h in s.message.tickets]


def append(driver: Driver, peer: str, rows: list[tuple[int, int, int, list[int]]], attempt: int) -> m.Ack:
    out = driver._note(driver.core.append(peer, 1, chunks(rows, attempt=attempt)))
    (ack,) = [send.message for send in out if isinstance(send.message, m.Ack)]
    return ack


def stored(driver: Driver, ticket: int) -> list[int]:
    pool = driver.core.store.pool
    row = pool.row(ticket)
    return pool.tokens[row, : pool.length[row]].tolist()


def streamed(**settings: object) -> tuple[Driver, list[m.Ticket]]:
    """Four tickets at "w", the only worker; the first two have 3 and 1 of 8 tokens; the newest version is 1."""
    driver = Driver(slots=4, **({"batch": 2, "group": 2, "max_staleness": 1} | settings))
    driver.feed()
    one, two = driver.tickets[:2]
    driver.append(chunks([(one.id, 0, 0, [5, 6, 7]), (two.id, 0, 0, [8])]))
    driver.send("rank0", m.Published(1))
    driver.version = 1
    return driver, list(driver.tickets)


# --- 1 tickets go to others --------------------------------------------------------------------------------------


def test_tickets_of_a_lost_worker_go_on_elsewhere() -> None:
    driver, tickets = streamed()
    driver.send("v", m.Hello("worker", 4))
    out = driver.send("feeder", m.Lost("w"))
    again = granted(out, "v")
    assert [t.id for t in again] == [t.id for t in tickets]
    assert [t.attempt for t in again] == [2] * 4
    assert [t.prefix for t in again] == [[5, 6, 7], [8], [], []]
    assert [t.max_tokens for t in again] == [5, 7, 8, 8]
    assert [t.min_version for t in again] == [1] * 4
    assert [t.finish_reason for t in again] == [""] * 4
    assert [(t.key, t.member, t.prompt) for t in again] == [(t.key, t.member, t.prompt) for t in tickets]
    stats = driver.core.stats()
    assert (stats.lost_workers, stats.reissued, stats.kept_tokens, stats.discarded_tokens) == (1, 4, 4, 0)
    assert (stats.issued, stats.running) == (4, 4)


def test_with_no_worker_left_they_wait_and_go_before_fresh_tickets() -> None:
    driver = Driver(slots=2, batch=4, group=2, max_staleness=0)
    driver.feed()
    first = list(driver.tickets)
    assert len(first) == 2
    assert granted(driver.send("feeder", m.Lost("w")), "w") == []
    again = granted(driver.send("v", m.Hello("worker", 3)), "v")
    assert [(t.id, t.attempt) for t in again[:2]] == [(t.id, 2) for t in first]
    assert again[2].attempt == 1
    assert again[2].id not in {t.id for t in first}


def test_they_spread_over_the_survivors_by_free_slots() -> None:
    driver, tickets = streamed()
    driver.send("u", m.Hello("worker", 1))
    driver.send("v", m.Hello("worker", 8))
    out = driver.send("feeder", m.Lost("w"))
    assert {t.id for t in granted(out, "u") + granted(out, "v")} == {t.id for t in tickets}
    assert len(granted(out, "u")) <= 1
    assert all(sum(t.id == one.id for t in granted(out, "u") + granted(out, "v")) == 1 for one in tickets)


def test_a_continued_trajectory_holds_both_parts_with_their_versions() -> None:
    """failures.md 6 and 12: the continuation has 5 of 8 tokens left, and lengths agree."""
    driver, tickets = streamed()
    driver.send("v", m.Hello("worker", 4))
    driver.send("feeder", m.Lost("w"))
    one = tickets[0].id
    assert append(driver, "v", [(one, 3, 1, [9, 10, 11, 12, 13])], 2).refused == []
    assert append(driver, "v", [(one, 8, 1, [1])], 2).refused == [m.Refusal(one, 2, "invalid", 8)]
    pool = driver.core.store.pool
    assert stored(driver, one) == [5, 6, 7, 9, 10, 11, 12, 13]
    assert pool.spans_of(pool.row(one)) == [(0, 0), (3, 1)]
    assert driver.core.stats().tokens == 4 + 5


def test_a_death_said_twice_is_one_death() -> None:
    driver, _ = streamed()
    driver.send("feeder", m.Lost("nobody"))
    assert driver.core.stats().lost_workers == 0
    driver.send("feeder", m.Lost("w"))
    driver.send("feeder", m.Lost("w"))
    assert driver.core.stats().lost_workers == 1


# --- 2 fencing ---------------------------------------------------------------------------------------------------


def test_the_old_attempt_is_fenced_for_chunks_and_outcomes() -> None:
    driver, tickets = streamed()
    driver.send("v", m.Hello("worker", 4))
    driver.send("feeder", m.Lost("w"))
    one = tickets[0].id
    for peer, attempt in [("w", 1), ("w", 2), ("v", 1), ("v", 3), ("stranger", 2)]:
        fenced = [m.Refusal(one, attempt, "fenced", 0)]
        assert append(driver, peer, [(one, 3, 1, [99])], attempt).refused == fenced
        for status in ("finished", "failed", "refused", "generated"):
            outcome = m.Outcome(one, attempt, 3, status, "stop", 1.0)
            assert driver.outcome(outcome, worker=peer).refused == fenced
    assert stored(driver, one) == [5, 6, 7]
    assert driver.core.store.trajectories[one].finish_reason == ""
    assert driver.core.stats().running == 4
    assert append(driver, "v", [(one, 3, 1, [9])], 2).refused == []
    assert driver.outcome(m.Outcome(one, 2, 4, "finished", "stop", 0.5), worker="v").refused == []
    assert driver.core.stats().ready == 1


def test_while_a_ticket_waits_for_a_worker_nobody_may_add_to_it() -> None:
    driver, tickets = streamed()
    driver.send("feeder", m.Lost("w"))
    for attempt in (1, 2):
        assert append(driver, "w", [(tickets[0].id, 3, 1, [9])], attempt).refused[0].reason == "fenced"
        assert (
            driver.outcome(m.Outcome(tickets[0].id, attempt, 3, "finished", "stop", 1.0)).refused[0].reason == "fenced"
        )
    assert stored(driver, tickets[0].id) == [5, 6, 7]


# --- 3 attempts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failed", ["replace", "shrink", "fail_group"])
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_prompt_that_kills_workers_ends_as_failed(on_failed: str, max_attempts: int) -> None:
    driver = Driver(
        slots=2, batch=2, group=2, max_staleness=0, on_failed=on_failed, max_attempts=max_attempts, max_tokens=8
    )
    driver.feed()
    for death in range(max_attempts - 1):
        driver.send(f"w#{death}", m.Hello("worker", 2))  # replaces the worker before it
    assert driver.core.stats().failed == 0
    driver.send("feeder", m.Lost("w"))
    stats = driver.core.stats()
    ended = (stats.failed, stats.cancelled)
    assert ended == ((1, 1) if on_failed == "fail_group" else (2, 0))
    assert (stats.issued, stats.running, stats.failed_groups) == (2, 0, 1)
    assert (stats.lost_workers, stats.reissued) == (max_attempts, 2 * (max_attempts - 1))
    assert f"{max_attempts} workers died" in stats.last_error
    assert driver.credit == 2  # its capacity has returned


def test_a_member_out_of_attempts_leaves_its_group_to_the_others() -> None:
    driver = Driver(slots=2, batch=2, group=2, max_staleness=0, on_failed="replace", max_attempts=2)
    driver.feed()
    poisoned, good = driver.tickets
    driver.finish(good, reward=0.5)
    driver.send("w#2", m.Hello("worker", 2))
    driver.send("feeder", m.Lost("w#2"))
    assert (driver.core.stats().failed, driver.core.stats().failed_groups) == (1, 0)
    batch = driver.take()
    assert batch is not None
    assert [row.ticket for row in batch.rows] == [good.id]
    assert poisoned.id not in driver.core.store.trajectories


# --- 4 complete responses, environments that cannot be replayed --------------------------------------------------


def test_a_complete_response_is_reissued_for_its_reward_only() -> None:
    driver, tickets = streamed()
    one = tickets[0]
    assert driver.outcome(m.Outcome(one.id, 1, 3, "generated", "stop")).refused == []
    assert driver.core.stats().running == 4
    driver.send("v", m.Hello("worker", 4))
    again = granted(driver.send("feeder", m.Lost("w")), "v")[0]
    assert (again.id, again.prefix, again.finish_reason) == (one.id, [5, 6, 7], "stop")
    assert again.max_tokens == 0  # DESIGN 3: zero budget
    driver.outcome(m.Outcome(one.id, 2, 3, "finished", "stop", 0.25), worker="v")
    assert driver.core.store.trajectories[one.id].reward == 0.25
    assert driver.core.stats().ready == 1


def test_a_response_at_its_budget_is_complete_though_nobody_said_so() -> None:
    driver, tickets = streamed()
    one = tickets[0].id
    driver.append(chunks([(one, 3, 0, [1] * 5)]))
    driver.send("v", m.Hello("worker", 4))
    again = granted(driver.send("feeder", m.Lost("w")), "v")[0]
    assert (again.max_tokens, again.finish_reason, len(again.prefix)) == (0, "length", 8)


def test_what_cannot_be_replayed_starts_again_and_what_that_cost_is_counted() -> None:
    driver, tickets = streamed(replayable=False)
    one = tickets[0]
    driver.outcome(m.Outcome(one.id, 1, 3, "generated", "stop"))
    driver.send("v", m.Hello("worker", 4))
    again = granted(driver.send("feeder", m.Lost("w")), "v")
    assert [(t.attempt, t.prefix, t.max_tokens, t.finish_reason) for t in again] == [(2, [], 8, "")] * 4
    stats = driver.core.stats()
    assert (stats.kept_tokens, stats.discarded_tokens, stats.reissued) == (0, 4, 4)
    assert append(driver, "v", [(one.id, 3, 1, [9])], 2).refused == [m.Refusal(one.id, 2, "gap", 0)]
    assert append(driver, "v", [(one.id, 0, 1, [9, 10])], 2).refused == []
    pool = driver.core.store.pool
    assert stored(driver, one.id) == [9, 10]
    assert pool.spans_of(pool.row(one.id)) == [(0, 1)]


# --- 5 hello -----------------------------------------------------------------------------------------------------


def test_hello_sends_missing_tickets_again_and_cancels_foreign_ones() -> None:
    driver, tickets = streamed()
    here = [m.Held(tickets[1].id, 1), m.Held(tickets[2].id, 2), m.Held(12345 << 20, 1)]
    out = driver.send("w", m.Hello("worker", 4, here))
    again = granted(out, "w")
    assert [(t.id, t.attempt) for t in again] == [(tickets[i].id, 1) for i in (0, 2, 3)]
    assert again[0].prefix == [5, 6, 7]
    assert again[0].max_tokens == 5
    assert cancelled(out, "w") == [m.Held(tickets[2].id, 2), m.Held(12345 << 20, 1)]
    assert [s.message for s in out if isinstance(s.message, m.News)] == [m.News(1, changed=True)]
    assert driver.core.stats().running == 4
    out = driver.send("w", m.Hello("worker", 4, [m.Held(t.id, 1) for t in tickets]))
    assert (granted(out, "w"), cancelled(out, "w")) == ([], [])


def test_a_worker_that_was_thought_dead_comes_back_to_nothing() -> None:
    driver, tickets = streamed()
    driver.send("v", m.Hello("worker", 4))
    driver.send("feeder", m.Lost("w"))
    out = driver.send("w", m.Hello("worker", 4, [m.Held(t.id, 1) for t in tickets]))
    assert cancelled(out, "w") == [m.Held(t.id, 1) for t in tickets]
    assert granted(out, "w") == []
    driver.send("feeder", m.Lost("v"))
    assert [t.attempt for t in granted(driver.sent, "w")][-4:] == [3] * 4


def test_tickets_sent_again_to_the_same_worker_are_of_the_new_attempt() -> None:
    driver, tickets = streamed()
    driver.send("feeder", m.Lost("w"))
    out = driver.send("w", m.Hello("worker", 4, [m.Held(t.id, 1) for t in tickets]))
    assert [(t.id, t.attempt) for t in granted(out, "w")] == [(t.id, 2) for t in tickets]
    assert cancelled(out, "w") == [m.Held(t.id, 1) for t in tickets]


def test_a_worker_with_nonsense_for_slots_is_refused_and_replaces_nobody() -> None:
    driver, _ = streamed()
    with pytest.raises(ProtocolError, match="-1 slots"):
        driver.core.handle("w#2", m.Hello("worker", -1))
    assert list(driver.core.issuing.workers) == ["w"]


def test_a_worker_that_gets_ready_hears_of_versions_and_gets_no_tickets_yet() -> None:
    driver, tickets = streamed()
    driver.send("feeder", m.Lost("w"))
    out = driver.send("v", m.Hello("worker", 0))
    assert granted(out, "v") == []
    assert [s.message for s in out if isinstance(s.message, m.News)] == [m.News(1, changed=True)]
    assert not driver.core.is_question("v", m.Hello("worker", 4))
    out = driver.send("v", m.Hello("worker", 4))
    assert [t.id for t in granted(out, "v")] == [t.id for t in tickets]


def test_a_worker_that_leaves_hands_back_what_it_has_and_it_counts_as_no_death() -> None:
    driver, tickets = streamed()
    driver.send("v", m.Hello("worker", 4))
    out = driver.send("w", m.Leave())
    assert [(t.id, t.attempt) for t in granted(out, "v")] == [(t.id, 2) for t in tickets]
    assert [t.prefix for t in granted(out, "v")] == [[5, 6, 7], [8], [], []]
    assert all(driver.core.store.trajectories[t.id].deaths == 0 for t in tickets)
    stats = driver.core.stats()
    assert (stats.lost_workers, stats.reissued) == (0, len(tickets))
    driver.send("w", m.Leave())  # said twice
    assert driver.core.stats().reissued == len(tickets)


# --- 6 names -----------------------------------------------------------------------------------------------------


def test_a_newer_worker_of_the_same_name_replaces_the_older() -> None:
    driver, tickets = streamed()
    out = driver.send("w#2", m.Hello("worker", 4))
    assert [(t.id, t.attempt) for t in granted(out, "w#2")] == [(t.id, 2) for t in tickets]
    assert list(driver.core.issuing.workers) == ["w#2"]
    out = driver.send("w#3", m.Hello("worker", 4))
    assert [(t.id, t.attempt) for t in granted(out, "w#3")] == [(t.id, 3) for t in tickets]
    driver.send("worker#3", m.Hello("worker", 4))
    assert list(driver.core.issuing.workers) == ["w#3", "worker#3"]
    assert driver.core.stats().lost_workers == 2


def test_a_name_stands_for_its_session_and_a_session_only_for_itself() -> None:
    driver, _ = streamed()
    driver.send("w#2", m.Hello("worker", 4))
    driver.send("feeder", m.Lost("w#1"))
    assert list(driver.core.issuing.workers) == ["w#2"]
    driver.send("feeder", m.Lost("w"))
    assert list(driver.core.issuing.workers) == []


# --- 7 the learner -----------------------------------------------------------------------------------------------


def test_the_lease_of_a_lost_learner_is_offered_again_once() -> None:
    driver = Driver(batch=4, group=2, max_staleness=1)
    driver.feed()
    driver.finish_all()
    out = driver.send("rank0#1", m.Take(0))
    (batch,) = [s.message for s in out if isinstance(s.message, m.Batch)]
    driver.send("rank0#1", m.Take(1))
    (ahead,) = [s.message for s in driver.sent[-1:] if isinstance(s.message, m.Batch)]
    assert driver.core.stats().leased == 8
    out = driver.send("feeder", m.Lost("rank0"))
    assert [s for s in out if isinstance(s.message, m.Batch)] == []
    assert (driver.core.stats().leased, driver.core.stats().ready) == (0, 8)
    with pytest.raises(ProtocolError, match="not outstanding"):
        driver.core.handle("rank0#1", m.Commit(batch.lease, 1))
    out = driver.send("rank0#2", m.Take(0))
    (again,) = [s.message for s in out if isinstance(s.message, m.Batch)]
    assert again.rows == batch.rows
    assert again.group_rewards == batch.group_rewards
    assert again.lease not in (batch.lease, ahead.lease)
    driver.send("rank0#2", m.Commit(again.lease, 1))
    (rest,) = [s.message for s in driver.send("rank0#2", m.Take(1)) if isinstance(s.message, m.Batch)]
    assert rest.rows == ahead.rows
    driver.send("rank0#2", m.Commit(rest.lease, 2))
    assert (driver.core.stats().trained, driver.core.stats().ready) == (8, 0)


def test_the_waiting_take_of_a_lost_learner_is_forgotten() -> None:
    driver = Driver(batch=4, group=2)
    driver.feed()
    driver.send("rank0#1", m.Take(0))
    driver.send("feeder", m.Lost("rank0#1"))
    driver.finish_all()
    assert driver.of(m.Batch) == []
    assert driver.core.stats().ready == 8
    driver.send("rank0#2", m.Take(0))
    assert len(driver.of(m.Batch)) == 1


def test_a_take_repeated_by_a_living_learner_gets_the_same_batch() -> None:
    driver = Driver()
    driver.feed()
    driver.finish_all()
    batch = driver.take()
    assert batch is not None
    out = driver.send("rank0", m.Take(0, request=5))
    (again,) = [s.message for s in out if isinstance(s.message, m.Batch)]
    assert (again.lease, again.rows, again.request) == (batch.lease, batch.rows, 5)
    assert driver.core.stats().leased == 4


def test_a_token_masked_in_a_lease_that_returns_is_counted_once() -> None:
    """The counters say what was trained on and what not; a batch that nobody trained on is not part of it."""
    driver = Driver(batch=1, group=1, max_staleness=1)
    driver.send("rank0", m.Published(5))
    driver.feed()
    one = driver.tickets[0]
    columns = chunks([(one.id, 0, 0, [1, 2]), (one.id, 2, 5, [3, 4])])
    columns.logprobs[3] = float("nan")
    driver.append(columns)
    driver.outcome(m.Outcome(one.id, 1, 4, "finished", "stop", 1.0))
    driver.send("rank0#1", m.Take(5))
    driver.send("feeder", m.Lost("rank0"))
    (batch,) = [s.message for s in driver.send("rank0#2", m.Take(5)) if isinstance(s.message, m.Batch)]
    assert batch.rows[0].trainable == 1
    driver.send("rank0#2", m.Commit(batch.lease, 6))
    stats = driver.core.stats()
    assert (stats.masked_stale_tokens, stats.masked_nonfinite_tokens) == (2, 1)


# --- 8 a new life ------------------------------------------------------------------------------------------------


def test_a_new_life_waits_for_the_learner_and_then_goes_on_where_the_old_one_was() -> None:
    driver, tickets = streamed()
    for ticket in tickets[2:]:
        driver.finish(ticket)
    batch = driver.take()
    assert batch is not None
    driver.send("rank0", m.Take(2))
    driver.send("", m.NewLife())
    stats = driver.core.stats()
    assert (stats.running, stats.ready, stats.leased, stats.lost_workers) == (2, 2, 0, 0)
    assert append(driver, "w", [(tickets[0].id, 3, 1, [9])], 1).refused[0].reason == "fenced"
    assert granted(driver.send("w#2", m.Hello("worker", 4)), "w#2") == []
    out = driver.send("feeder#2", m.Hello("feeder"))
    assert [s.message for s in out if isinstance(s.message, m.Credit)] == [m.Credit(2, 2)]
    driver.send("feeder#2", m.Submit(2, [m.Prompt((0, 2), [1], b"{}")]))
    assert driver.core.stats().issued == 4
    out = driver.send("rank0#2", m.Published(pack(1, 0), [0]))
    again = granted(out, "w#2")
    assert [(t.id, t.attempt, t.prefix, t.min_version) for t in again] == [
        (tickets[0].id, 2, [5, 6, 7], pack(1, 0)),
        (tickets[1].id, 2, [8], pack(1, 0)),
    ]
    assert [s.message for s in out if isinstance(s.message, m.News)] == [m.News(pack(1, 0), changed=True)]
    assert [s for s in out if isinstance(s.message, m.Batch)] == []
    (fresh,) = [s.message for s in driver.send("rank0#2", m.Take(pack(1, 0))) if isinstance(s.message, m.Batch)]
    assert [row.ticket for row in fresh.rows] == [row.ticket for row in batch.rows]


def test_new_lives_use_up_no_attempts() -> None:
    driver, _ = streamed(max_attempts=2)
    for life in range(1, 6):
        driver.send("", m.NewLife())
        driver.send("feeder", m.Hello("feeder"))
        driver.send("w", m.Hello("worker", 4))
        driver.send("rank0", m.Published(pack(life, 0), [0] * life))
    stats = driver.core.stats()
    assert (stats.running, stats.failed, stats.lost_workers) == (4, 0, 0)
    driver.send("feeder", m.Lost("w"))
    assert driver.core.stats().failed == 0
    driver.send("w", m.Hello("worker", 4))
    driver.send("feeder", m.Lost("w"))
    assert driver.core.stats().failed == 4


def test_the_same_learner_may_go_on_after_a_new_life_of_the_buffer() -> None:
    """Its version was published before; said again it ends the waiting."""
    driver, _ = streamed()
    driver.send("", m.NewLife())
    driver.send("w", m.Hello("worker", 4))
    before = len(granted(driver.sent, "w"))
    driver.send("rank0", m.Published(pack(1, 1), [1]))
    assert len(granted(driver.sent, "w")) == before + 4
    driver.send("rank0", m.Published(pack(1, 1), [1]))
    assert len(granted(driver.sent, "w")) == before + 4


# --- 9 any schedule ----------------------------------------------------------------------------------------------


def token(ticket: int, place: int) -> int:
    return (ticket * 31 + place * 7) % 50_000


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_deaths_trains_each_token_once(seed: int) -> None:
    """failures.md 6. Workers die, zombies go on talking, learners die; what is trained is what was sampled, once."""
    rng = random.Random(seed)
    on_failed = rng.choice(["replace", "shrink", "fail_group"])
    driver = Driver(
        slots=3, batch=4, group=2, max_staleness=2, max_tokens=6, on_failed=on_failed, max_consecutive_failed_groups=99
    )
    driver.send("rank0#0", m.Published(pack(0, 1)))
    version, learner, sessions = 1, 0, 1
    alive, dead = ["w"], []
    held: dict[str, dict[int, m.Ticket]] = {}
    length: dict[int, int] = {}
    trained: list[int] = []
    batch: m.Batch | None = None
    seen = 0

    def note() -> None:
        nonlocal seen, batch
        for send in driver.sent[seen:]:
            if isinstance(send.message, m.Tickets):
                for ticket in send.message.tickets:
                    assert ticket.prefix == [token(ticket.id, i) for i in range(length.get(ticket.id, 0))]
                    held.setdefault(send.to, {})[ticket.id] = ticket
            elif isinstance(send.message, m.Cancel):
                for one in send.message.tickets:
                    held.get(send.to, {}).pop(one.ticket, None)
            elif isinstance(send.message, m.Batch) and send.to == f"rank0#{learner}":
                batch = send.message
        seen = len(driver.sent)

    for _ in range(500):
        action = rng.random()
        talking = rng.choice(alive) if alive and (not dead or rng.random() < 0.8) else rng.choice(dead or ["w"])
        mine = held.get(talking, {})
        if action < 0.45 and mine:
            ticket = mine[rng.choice(sorted(mine))]
            at = length.get(ticket.id, 0) if talking in alive else len(ticket.prefix) + rng.randrange(3)
            size = min(rng.randint(1, 3), 6 - at)
            if size > 0:
                new = [token(ticket.id, at + i) if talking in alive else 49_999 for i in range(size)]
                ack = append(driver, talking, [(ticket.id, at, version, new)], ticket.attempt)
                if talking in alive:
                    assert ack.refused == []
                    length[ticket.id] = at + size
                else:
                    assert [r.reason for r in ack.refused] == ["fenced"]
        elif action < 0.7 and mine:
            ticket = mine.pop(rng.choice(sorted(mine)))
            at = length.get(ticket.id, 0)
            status = "finished" if at and rng.random() < 0.9 else "failed"
            ack = driver.outcome(m.Outcome(ticket.id, ticket.attempt, at, status, "stop", 0.5), worker=talking)
            assert bool(ack.refused) == (talking in dead)
        elif action < 0.76 and alive:
            gone = rng.choice(alive)
            alive.remove(gone)
            dead.append(gone)
            driver.send("feeder", m.Lost(gone))
        elif action < 0.84 and len(alive) < 3:
            sessions += 1
            alive.append(f"w{sessions}#{sessions}")
            driver.send(alive[-1], m.Hello("worker", rng.randint(1, 4)))
        elif action < 0.87:
            driver.send("feeder", m.Lost("rank0"))
            learner, batch = learner + 1, None
        elif batch is None:
            driver.send(f"rank0#{learner}", m.Take(version))
        else:
            for row in batch.rows:
                (out,) = driver.send(f"rank0#{learner}", m.Fetch(batch.lease, [row.ticket]))
                arrays = m.SampleArrays.from_frames(out.frames)
                assert arrays.tokens.tolist() == [token(row.ticket, i) for i in range(length[row.ticket])]
                assert arrays.versions.size == arrays.logprobs.size == row.length == length[row.ticket]
                trained.append(row.ticket)
            version += 1
            driver.send(f"rank0#{learner}", m.Commit(batch.lease, version))
            batch = None
        note()
        if driver.credit > driver.submitted:
            driver.feed()
            note()
    assert len(trained) == len(set(trained)) == driver.core.stats().trained
    assert len(trained) >= 12
    assert driver.core.stats().reissued > 10
