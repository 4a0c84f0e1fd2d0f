"""A learner that goes back to a checkpoint trains each sample exactly once in the lineage that survives.

1  what was committed after the checkpoint is parked, read from the journal and offered again; what came before is not
2  ages follow the lineage: (v - c) + (u - c) for tokens of lost steps (failures.md 26)
3  what is reloaded keeps its tokens, log-probs, versions, rewards and its group's statistics, and is offered by groups
4  reloading needs free rows; whatever the order of events, everything has its turn, and the accounts add up
5  a learner that does not continue the run is refused, and nothing changes
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from buffers import messages as m
from buffers import snapshot
from buffers.errors import ProtocolError
from buffers.records import Settings, Trajectory
from buffers.store import SELF
from staleness.versions import INJECTED, pack
from tests.buffers.driver import Driver, chunks, prompt
from tests.buffers.world import Whole, World, reloaded


class Run(Driver):
    """A driver whose learner notes what it trains, and which answers `Reload` from those notes."""

    def __init__(self, **settings: object) -> None:
        self.archive: dict[int, Whole] = {}
        self.answering = True
        super().__init__(**({"batch": 4, "group": 2, "max_staleness": 10, "retain": True, "slots": 64} | settings))

    def _note(self, out: list) -> list:
        super()._note(out)
        for send in out:
            if isinstance(send.message, m.Reload) and self.answering:
                self.bring_back(send.message)
        return out

    def bring_back(self, reload: m.Reload) -> None:
        message, frames = reloaded(reload.tickets, self.archive)
        self._note(self.core.receive(SELF, message, frames))

    def samples(self, batch: m.Batch) -> list[m.SampleArrays]:
        found: list[m.SampleArrays] = []
        for row in batch.rows:
            (out,) = self.send("rank0", m.Fetch(batch.lease, [row.ticket]))
            arrays = m.SampleArrays.from_frames(out.frames)
            starts = (np.cumsum(arrays.span_length) - arrays.span_length).tolist()
            spans = list(zip(starts, arrays.span_version.tolist(), strict=True))
            self.archive[row.ticket] = Whole(arrays.tokens.tolist(), arrays.logprobs.tolist(), spans)
            found.append(arrays)
        return found

    def keys(self, batch: m.Batch) -> list[tuple[int, int]]:
        """(prompt, member) of each row."""
        groups = [self.core.store.trajectories[row.ticket].group.index for row in batch.rows]
        return [(index, row.member) for index, row in zip(groups, batch.rows, strict=True)]

    def generate(self, count: int) -> None:
        """The oldest `count` tickets finish with tokens of the newest version that say whose they are."""
        for ticket in sorted(self.tickets, key=lambda t: t.id)[:count]:
            tokens = [ticket.key[1] * 10 + ticket.member, 1, 2]
            self.append(chunks([(ticket.id, 0, self.version, tokens)], attempt=ticket.attempt))
            reward = ticket.key[1] + ticket.member / 2
            self.outcome(m.Outcome(ticket.id, ticket.attempt, 3, "finished", "stop", reward))
            self.tickets.remove(ticket)

    def train(self) -> list[tuple[int, int]]:
        batch = self.take()
        assert batch is not None
        self.samples(batch)
        keys = self.keys(batch)
        self.commit(batch)
        return keys

    def need(self, trajectories: int) -> None:
        """Submits just enough prompts to have so many tickets, so that rows stay free."""
        while len(self.tickets) < trajectories:
            self.send("feeder", m.Submit(self.submitted, [prompt(self.submitted)]))
            self.submitted += 1

    def step(self) -> list[tuple[int, int]]:
        """A step as usual."""
        self.need(self.core.settings.batch)
        self.generate(self.core.settings.batch)
        return self.train()

    def save(self, step: int) -> None:
        self.send("rank0", m.Checkpointed(step))

    def restore(self, *forks: int) -> None:
        self.version = pack(len(forks), forks[-1])
        self.send("rank0", m.Published(self.version, list(forks)))


# --- 1 once ------------------------------------------------------------------------------------------------------


def test_what_was_committed_after_the_checkpoint_is_trained_again_in_the_same_order() -> None:
    run = Run()
    steps = [run.step() for _ in range(7)]
    run.save(4)
    assert run.core.stats().trained == 28
    run.restore(4)
    stats = run.core.stats()
    assert (stats.trained, stats.ready, stats.parked) == (16, 12, 0)
    again = [run.train() for _ in range(3)]
    assert again == steps[4:]
    assert run.core.stats().trained == 28
    nxt = run.step()
    assert set(nxt).isdisjoint(key for step in steps for key in step)


def test_a_checkpoint_made_by_the_learner_is_proof_enough() -> None:
    """The message that step 4 was saved was lost, but the learner has restored it."""
    run = Run()
    steps = [run.step() for _ in range(6)]
    run.restore(4)
    assert [run.train() for _ in range(2)] == steps[4:]
    assert run.core.stats().ready == 0


def test_before_any_checkpoint_everything_is_trained_again() -> None:
    run = Run()
    steps = [run.step() for _ in range(3)]
    run.restore(0)
    assert run.core.stats().trained == 0
    assert [run.train() for _ in range(3)] == steps
    assert run.version == pack(1, 3)


def test_where_all_is_generated_again_the_prompts_since_the_checkpoint_come_first() -> None:
    run = Run(max_staleness=0, regenerate=True)
    steps = [run.step() for _ in range(5)]
    run.save(2)
    run.need(4)
    run.generate(1)
    run.restore(3)
    stats = run.core.stats()
    assert (stats.trained, stats.cancelled, stats.running, stats.ready, stats.parked) == (12, 12, 0, 0, 0)
    assert run.of(m.Credit)[-1] == m.Credit(8, 6)
    assert [len(message.tickets) for message in run.of(m.Cancel)] == [1, 1, 1]
    run.tickets.clear()
    run.submitted = 6
    again = [run.step() for _ in range(3)]
    assert again[:2] == steps[3:]
    assert set(again[2]).isdisjoint(key for step in steps for key in step)
    assert run.core.stats().trained == 24


def test_without_retention_nothing_comes_back() -> None:
    run = Run(retain=False)
    for _ in range(3):
        run.step()
    run.restore(0)
    assert (run.core.stats().trained, run.core.stats().parked, run.core.stats().ready) == (12, 0, 0)


def test_a_second_restore_of_the_same_checkpoint_offers_the_same_again() -> None:
    run = Run()
    steps = [run.step() for _ in range(6)]
    run.save(4)
    run.restore(4)
    assert run.train() == steps[4]
    run.restore(4, 4)
    assert [run.train() for _ in range(2)] == steps[4:]
    run.save(6)
    run.restore(4, 4, 6)
    assert run.core.stats().trained == 24
    assert run.core.stats().ready == 0


def test_a_learner_that_died_before_it_published_leaves_a_gap_in_the_incarnations() -> None:
    run = Run()
    steps = [run.step() for _ in range(6)]
    run.save(5)
    run.restore(5, 5)
    assert run.version == pack(2, 5)
    assert run.train() == steps[5]


def test_leases_and_the_waiting_take_of_the_old_life_are_void() -> None:
    run = Run()
    run.step()
    run.need(16)
    run.generate(4)
    batch = run.take()
    assert batch is not None
    run.send("rank0", m.Take(run.version + 1))
    run.restore(0)
    assert (run.core.stats().leased, run.core.stats().ready) == (0, 8)
    run.generate(12)
    assert len(run.of(m.Batch)) == 2  # nobody waits any more
    with pytest.raises(ProtocolError, match="not outstanding"):
        run.core.handle("rank0", m.Commit(batch.lease, pack(1, 1)))


def test_repeats_in_the_new_life_are_answered_and_change_nothing() -> None:
    run = Run()
    for _ in range(3):
        run.step()
    old = run.of(m.Committed)[-1]
    run.save(2)
    run.restore(2)
    with pytest.raises(ProtocolError, match="not outstanding"):
        run.core.handle("rank0", m.Commit(old.lease, pack(1, 3)))
    run.send("rank0", m.Published(run.version, [2], request=4))
    assert run.core.stats().ready == 4
    batch = run.take()
    assert batch is not None
    out = run.send("rank0", m.Take(run.version, request=8))
    (same,) = [s.message for s in out if isinstance(s.message, m.Batch)]
    assert same == msgspec.structs.replace(batch, request=8)
    run.commit(batch)
    for request in (5, 6):
        out = run.send("rank0", m.Commit(batch.lease, run.version, request=request))
        assert [s.message.request for s in out if isinstance(s.message, m.Committed)] == [request]
    assert run.core.stats().trained == 12
    assert run.core.stats().version == pack(1, 3)


def test_the_cursor_goes_back_to_what_is_to_be_trained_again() -> None:
    run = Run(max_staleness=0)
    for _ in range(4):
        run.step()
    assert run.of(m.Committed)[-1].cursor == 8
    run.save(1)
    run.answering = False
    run.restore(1)
    assert run.core.cursor() == 2


def test_trajectories_of_several_versions_are_counted_once() -> None:
    run = Run(batch=2, group=2, max_staleness=5)
    run.feed()
    one, two = sorted(run.tickets, key=lambda t: t.id)[:2]
    run.append(chunks([(one.id, 0, 0, [1]), (one.id, 1, 1, [2])]))
    run.outcome(m.Outcome(one.id, 1, 2, "finished", "stop", 1.0))
    run.finish(two)
    run.tickets.remove(one)
    run.version = 1
    run.send("rank0", m.Published(1))
    run.train()
    assert run.core.stats().multi_version == 1
    run.restore(1)
    run.train()
    assert (run.core.stats().trained, run.core.stats().multi_version) == (2, 1)


# --- 2 ages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 3, 4, 9])
def test_tokens_of_lost_steps_have_the_age_of_both_branches(bound: int) -> None:
    """failures.md 26: restored at 4 after 5 and 6 were published."""
    run = Run(max_staleness=bound, on_stale="mask")
    for _ in range(4):
        run.step()
    lost = [run.step() for _ in range(3)]  # sampled and trained at 4, 5, 6
    run.save(4)
    run.restore(4)
    for v, keys in zip((4, 5, 6), lost, strict=True):
        age = (v - 4) + (v - 4)
        if age > bound:
            assert run.take() is None
            assert run.core.stats().expired >= 4
            break
        batch = run.take()
        assert batch is not None
        for arrays in run.samples(batch):
            assert set(arrays.versions.tolist()) == {v}
            assert arrays.mask.tolist() == [1, 1, 1]
        assert run.keys(batch) == keys
        run.commit(batch)
    assert run.core.store.version == pack(1, 4 + sum(2 * i <= bound for i in range(3)))


def test_a_lost_branch_counts_for_running_trajectories_too() -> None:
    """Sampled at 6 on the lost branch, then at 1:4 by the same trajectory: ages 3 and 1 at 1:5."""
    for bound, mask in ((0, None), (1, [0, 0, 1]), (2, [0, 0, 1]), (3, [1, 1, 1])):
        run = Run(batch=1, group=1, max_staleness=bound, on_stale="mask", slack=2)
        for _ in range(6):
            run.step()
        run.feed()
        ticket = min(run.tickets, key=lambda t: t.id)
        run.append(chunks([(ticket.id, 0, 6, [7, 8])]))
        run.save(4)
        run.answering = False
        run.restore(4)
        run.append(chunks([(ticket.id, 2, pack(1, 4), [9])]))
        run.outcome(m.Outcome(ticket.id, 1, 3, "finished", "stop", 1.0))
        run.send("rank0", m.Take(run.version + 1))  # prefetched for 1:5
        batches = [b for b in run.of(m.Batch) if b.version == pack(1, 5)]
        if mask is None:
            assert batches == []
            assert run.core.stats().expired == 1
        else:
            assert run.samples(batches[0])[0].mask.tolist() == mask


def test_no_version_is_used_twice() -> None:
    run = Run()
    for _ in range(6):
        run.step()
    run.save(4)
    run.restore(4)
    with pytest.raises(ProtocolError, match="not newer"):
        run.core.handle("rank0", m.Published(pack(1, 3), [4]))
    with pytest.raises(ProtocolError):
        run.core.handle("rank0", m.Take(6))


# --- 3 what comes back -------------------------------------------------------------------------------------------


def test_what_comes_back_is_what_was_trained() -> None:
    run = Run(batch=2, group=2, max_staleness=9)
    run.feed()
    one, two = sorted(run.tickets, key=lambda t: t.id)[:2]
    columns = chunks([(one.id, 0, 0, [5, 6]), (one.id, 2, INJECTED, [70, 71]), (one.id, 4, 0, [8])])
    columns.logprobs[:] = [-0.25, -0.5, 0, 0, -2]
    run.append(columns)
    run.append(chunks([(two.id, 0, 0, [9])]))
    run.outcome(m.Outcome(one.id, 1, 5, "finished", "stop", 0.25), m.Outcome(two.id, 1, 1, "finished", "length", 0.75))
    batch = run.take()
    assert batch is not None
    before = run.samples(batch)
    run.commit(batch)
    run.restore(0)
    again = run.take()
    assert again is not None
    after = run.samples(again)
    for x, y in zip(before, after, strict=True):
        for name in ("prompts", "tokens", "logprobs", "mask", "span_length", "span_version"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
    assert after[0].mask.tolist() == [1, 1, 0, 0, 1]
    rows = [(row.member, row.length, row.trainable, row.reward) for row in again.rows]
    assert rows == [(0, 5, 3, 0.25), (1, 1, 1, 0.75)]
    assert again.group_rewards == batch.group_rewards == [[0.25, 0.75]]
    assert {row.ticket for row in again.rows}.isdisjoint(row.ticket for row in batch.rows)
    assert run.core.stats().issued == len(run.of(m.Tickets)[0].tickets)  # not issued again


def test_the_statistics_of_a_group_outlive_members_trained_before_the_checkpoint() -> None:
    run = Run(batch=2, group=2, max_staleness=3, group_policy="split", min_group=1)
    run.feed()
    tickets = sorted(run.tickets, key=lambda t: t.id)
    run.finish(tickets[0], reward=0.0)
    run.finish(tickets[2], reward=0.5)
    assert run.train() == [(0, 0), (1, 0)]
    run.save(1)
    run.finish(tickets[1], reward=1.0)
    run.finish(tickets[3], reward=1.0)
    assert run.train() == [(0, 1), (1, 1)]
    run.restore(1)
    batch = run.take()
    assert batch is not None
    assert run.keys(batch) == [(0, 1), (1, 1)]
    assert batch.group_rewards == [[0.0, 1.0], [0.5, 1.0]]


def test_a_group_whose_rows_come_back_one_by_one_is_offered_whole() -> None:
    """`whole` also means: not three now and the fourth in another batch."""
    run = Run(batch=4, group=4, max_staleness=1, on_failed="shrink")
    run.step()
    run.step()
    run.feed()
    running = sorted(run.tickets, key=lambda t: t.id)
    assert len(running) == 8  # no row is free
    run.restore(0)
    assert (run.core.stats().parked, run.core.stats().ready) == (8, 0)
    run.take()
    for ticket in running[:3]:
        run.fail(ticket)  # three rows are free, but group 0 needs four
    run.finish(running[3], version=run.version)
    for batch in run.of(m.Batch)[2:]:
        assert sum(index == 0 for index, _ in run.keys(batch)) in (0, 4)
    for ticket in running[4:]:
        run.finish(ticket, version=run.version)
    run.commit(run.of(m.Batch)[2])
    assert run.train() == [(0, member) for member in range(4)]
    assert run.core.stats().expired == 4  # group 1 was sampled at the lost step 1: two steps from here


def test_what_the_journal_does_not_have_any_more_has_failed_and_is_said() -> None:
    run = Run(batch=2, group=2, max_staleness=3)
    run.step()
    gone = next(iter(run.archive))
    del run.archive[gone]
    run.restore(0)
    stats = run.core.stats()
    assert (stats.ready, stats.failed, stats.parked, stats.trained) == (1, 1, 0, 0)
    assert "not in the journal" in stats.last_error
    run.archive.clear()
    run.feed()
    run.generate(4)
    keys = run.train()
    assert len(keys) == 3  # two whole groups and what is left of the first
    assert run.core.stats().trained == 3


def test_only_the_server_brings_back_what_was_parked() -> None:
    run = Run()
    run.step()
    run.answering = False
    run.restore(0)
    (reload,) = run.of(m.Reload)
    message, frames = reloaded(reload.tickets, run.archive)
    for peer, given in (("w", frames), (SELF, frames[:1])):
        with pytest.raises(ProtocolError, match="in 2 frames"):
            run.core.receive(peer, message, given)
    assert (run.core.stats().parked, run.core.stats().ready) == (4, 0)


# --- 4 rows ------------------------------------------------------------------------------------------------------


def test_without_free_rows_what_is_parked_waits_and_then_has_its_turn() -> None:
    run = Run(batch=2, group=2, max_staleness=1, slack=0)
    steps = [run.step() for _ in range(3)]
    run.feed()
    assert len(run.tickets) == 4
    run.save(2)
    run.restore(2)
    assert run.core.stats().parked == 2
    assert run.credit == run.submitted  # nothing new until these are through
    run.generate(4)
    trained = run.train()
    assert run.core.stats().parked == 0  # the rows of what was trained
    assert run.core.stats().ready == 4
    trained += run.train()
    assert set(steps[2]) <= set(trained)


def test_a_restore_while_the_last_one_is_still_loading() -> None:
    run = Run(batch=2, group=2, max_staleness=9)
    steps = [run.step() for _ in range(4)]
    run.save(2)
    run.answering = False
    run.restore(2)
    run.restore(2, 2)
    assert (run.core.stats().parked, run.core.stats().trained) == (4, 4)
    (reload,) = run.of(m.Reload)
    run.answering = True
    run.bring_back(reload)
    assert (run.core.stats().parked, run.core.stats().ready) == (0, 4)
    assert [run.train() for _ in range(2)] == steps[2:]
    run.bring_back(reload)  # said twice
    assert run.core.stats().trained == 8
    assert run.core.stats().ready == 0


def test_after_two_restores_the_first_trained_still_come_back_first() -> None:
    """Whoever waits longest for a row is the one that goes stale."""
    run = Run(batch=2, group=2, max_staleness=9, slack=0)
    steps = [run.step() for _ in range(4)]
    run.need(18)
    run.restore(0)  # two rows are free: step 0 comes back, the others wait
    assert (run.core.stats().ready, run.core.stats().parked) == (2, 6)
    assert run.train() == steps[0]  # and step 1 takes its place
    run.restore(0, 0)
    assert (run.core.stats().ready, run.core.stats().parked) == (2, 6)
    trained = [run.train() for _ in range(4)]
    assert trained == [steps[1], steps[0], steps[2], steps[3]]


@pytest.mark.parametrize("policy", ["whole", "deadline_versions", "split"])
@pytest.mark.parametrize("seed", range(8))
def test_any_run_trains_everything_once_however_often_it_is_restored(policy: str, seed: int) -> None:
    """`World` checks each token and age on the way; here: nothing is lost, nothing is trained twice."""
    settings = Settings(
        4,
        2,
        60,
        10,
        retain=True,
        group_policy=policy,
        deadline_versions=2,
        min_group=1,
        on_failed=("replace", "shrink", "fail_group")[seed % 3],
        max_consecutive_failed_groups=1000,
        sampler=("oldest", "uniform", "prioritized", "freshest")[seed % 4],
    )
    world = World(settings, seed)
    endings: dict[tuple[int, int], str] = {}

    def ended(trajectory: Trajectory) -> None:
        endings[trajectory.group.index, trajectory.member] = trajectory.state

    for i in range(350):
        world.core.store.ended = ended
        world.step()
        if i % 120 == 100:
            world.restore()
    groups = world.core.store.groups.values()
    waiting = {(group.index, one.member) for group in groups for one in group.having("ready", "leased", "parked")}
    # What was undone may go down with its group afterwards, where a failed member takes all of it along.
    gone = {key for key in world.ever - waiting if endings[key] == "cancelled" and settings.on_failed == "fail_group"}
    assert world.ever <= world.trained | waiting | gone
    assert len(gone) < 3
    assert world.core.stats().trained == len(world.trained) == sum(len(keys) for _, keys in world.history)
    assert world.core.stats().expired == 0
    assert world.reloads > 0


@pytest.mark.parametrize("seed", range(8))
def test_any_run_drains_when_no_more_prompts_come(seed: int) -> None:
    """With a small window: what is parked, ready or running ends trained, or in another counted way."""
    settings = Settings(4, 2, 1 + seed % 3, 10, retain=True, on_failed="replace", max_consecutive_failed_groups=1000)
    world = World(settings, seed)
    for _ in range(300):
        world.step()
    world.restore()
    world.quiet()
    stats = world.core.stats()
    assert (stats.running, stats.parked) == (0, 0)
    assert stats.in_flight < 4
    assert stats.trained == len(world.trained)
    assert stats.issued == stats.trained + stats.expired + stats.failed + stats.cancelled + stats.in_flight


# --- 5 what does not continue the run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "forks"),
    [
        (pack(1, 4), []),
        (pack(0, 9), [4]),
        (pack(2, 4), [3, 4]),
        (pack(1, 5), [5]),
        (pack(0, 9), []),
        (pack(3, 4), [4, 4]),
    ],
)
def test_a_learner_of_another_run_is_refused_and_nothing_changes(version: int, forks: list[int]) -> None:
    run = Run()
    for _ in range(5):
        run.step()
    run.save(4)
    run.restore(4)
    before = snapshot.digest(run.core)
    with pytest.raises(ProtocolError, match="does not continue"):
        run.core.handle("rank0", m.Published(version, forks))
    assert snapshot.digest(run.core) == before


def test_a_group_larger_than_the_limit_of_a_resumed_run_still_comes_back() -> None:
    run = Run(batch=8, group=8, max_staleness=0)
    assert len(run.step()) == 8
    smaller = msgspec.structs.replace(run.core.settings, batch=2, group=2)
    run.core = snapshot.restore(*snapshot.take(run.core), smaller)
    run.restore(0)
    batch = run.take()
    assert batch is not None
    assert [member for _, member in run.keys(batch)] == list(range(8))
