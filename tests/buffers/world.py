"""A whole run against one core, from one seed: workers that stream and die, a learner that is restored, a journal.

What is sampled is a function of (prompt, member, place), so that what is trained can be checked token by token; ages
are computed from the tree of versions, independently of `staleness/versions.py`. `World.step` does one random thing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from buffers import messages as m
from buffers.core import Core, Send
from buffers.journal import Journal
from buffers.records import Settings
from buffers.store import SELF
from staleness.versions import INJECTED, pack, unpack


def token(index: int, member: int, place: int) -> int:
    return (index * 131 + member * 17 + place * 3) % 30_000


def logprob(index: int, member: int, place: int) -> float:
    return float(np.float32(-0.5 - (index * 7 + member * 3 + place) % 64 / 64))


def reward(index: int, member: int) -> float:
    return ((index * 7 + member * 3) % 5) / 4


@dataclass
class Work:
    """A ticket at a worker and how far it has got."""

    ticket: m.Ticket
    length: int


@dataclass
class Whole:
    """A trajectory as it was fetched."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]


@dataclass
class Learner:
    version: int = 0
    forks: list[int] = field(default_factory=list)
    waiting: bool = False
    batches: dict[int, m.Batch] = field(default_factory=dict)
    lives: int = 0

    @property
    def name(self) -> str:
        return f"rank0#{self.lives}"


class World:
    def __init__(
        self, settings: Settings, seed: int, *, core: Core | None = None, journal: Journal | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.core = core or Core(settings)
        self.journal = journal
        self.workers: dict[str, dict[int, Work]] = {}
        self.workers_made = 0
        self.learner = Learner()
        self.seq = self.credit = self.submitted = 0
        self.saved = 0
        self.history: list[tuple[int, set[tuple[int, int]]]] = []
        """Steps of the surviving lineage, and the (prompt, member) trained in each."""
        self.ever: set[tuple[int, int]] = set()
        """What was trained in any lineage."""
        self.archive: dict[int, Whole] = {}
        """Leased trajectories by ticket."""
        self.reloads = 0
        self.reloading = True
        """Whether `Reload` is answered at once."""
        self.asked: list[m.Reload] = []
        self.say("feeder", m.Hello("feeder"))
        self.hire()
        self.say(self.learner.name, m.Published(0))

    # --- messages ----------------------------------------------------------------------------------------------

    def say(self, peer: str, message: m.Message, *frames: bytes | memoryview) -> list[Send]:
        """As the server does: decided, put into the journal unless it is a question, answered."""
        head = m.encode(message)
        inbound = m.decode_inbound(head)
        question = self.core.is_question(peer, inbound)
        sends = self.core.receive(peer, inbound, frames)
        if self.journal is not None and not question:
            self.journal.add(peer, [head, *frames])
        if self.core.store.pool.rows == self.core.settings.limit:  # else the run was reopened under smaller settings
            self.core.check()
        for send in sends:
            self._heard(send)
        return sends

    def _heard(self, send: Send) -> None:
        message, work = send.message, self.workers.get(send.to, {})
        match message:
            case m.Tickets(tickets):
                for ticket in tickets:
                    index = ticket.key[1]
                    assert ticket.prefix == [token(index, ticket.member, i) for i in range(len(ticket.prefix))]
                    work[ticket.id] = Work(ticket, len(ticket.prefix))
            case m.Cancel(held):
                for one in held:
                    if one.ticket in work and work[one.ticket].ticket.attempt == one.attempt:
                        del work[one.ticket]
            case m.Credit(upto):
                self.credit = upto
            case m.Batch():
                if send.to == self.learner.name:
                    self.learner.waiting = False
                    self.learner.batches[message.version] = message
                    self._fetch(message)
            case m.Reload():
                assert send.to == SELF
                self.asked.append(message)
                if self.reloading:
                    self.reload()
            case _:
                pass

    def reload(self) -> None:
        """Answers what was asked of the journal, from the journal if there is one."""
        self.reloads += 1
        wanted = self.asked.pop().tickets
        if self.journal is not None:
            self.sync()
            message, frames = self.journal.find(wanted)
            assert message.tickets == wanted
            for i, ticket in enumerate(wanted):
                assert message.lengths[i] == len(self.archive[ticket].tokens)
                assert message.spans[i] == self.archive[ticket].spans
            assert np.frombuffer(frames[0], np.int32).tolist() == [x for t in wanted for x in self.archive[t].tokens]
            assert np.frombuffer(frames[1], np.float32).tolist() == [
                x for t in wanted for x in self.archive[t].logprobs
            ]
        else:
            message, frames = reloaded(wanted, self.archive)
        self.say(SELF, message, *frames)

    def sync(self) -> None:
        assert self.journal is not None
        self.journal.wait()
        if self.journal.pending:
            self.journal.flush()
            self.journal.wait()

    # --- the rollout side --------------------------------------------------------------------------------------

    def hire(self) -> None:
        self.workers_made += 1
        name = f"w{self.workers_made}#x"
        self.workers[name] = {}
        self.say(name, m.Hello("worker", self.rng.randint(2, 6)))

    def kill(self) -> None:
        name = self.rng.choice(sorted(self.workers))
        del self.workers[name]
        self.say("feeder", m.Lost(name))

    def greet(self) -> None:
        """A heartbeat of a worker that has forgotten some of its tickets."""
        name = self.rng.choice(sorted(self.workers))
        work = self.workers[name]
        for ticket in [ticket for ticket in work if self.rng.random() < 0.2]:
            del work[ticket]
        held = [m.Held(one.ticket.id, one.ticket.attempt) for one in work.values()]
        self.say(name, m.Hello("worker", 4, held))

    def versions(self) -> list[int]:
        """What a worker may be sampling from: the newest version, or one a little older of the same incarnation."""
        assert self.core.store.version is not None
        incarnation, step = unpack(self.core.store.version)
        first = self.learner.forks[-1] if self.learner.forks else 0
        return [pack(incarnation, s) for s in range(max(first, step - 1), step + 1)]

    def stream(self) -> None:
        name = self.rng.choice(sorted(self.workers))
        rows: list[tuple[Work, int, int]] = []
        for one in self.workers[name].values():
            size = min(self.rng.randint(0, 3), self.core.settings.max_tokens - one.length)
            if size > 0 and not one.ticket.finish_reason:
                version = INJECTED if one.length and self.rng.random() < 0.15 else self.rng.choice(self.versions())
                rows.append((one, size, version))
        if not rows:
            return
        places = [(w.ticket.key[1], w.ticket.member, w.length + i) for w, size, _ in rows for i in range(size)]
        columns = m.Chunks(
            ticket=np.asarray([w.ticket.id for w, _, _ in rows], np.int64),
            attempt=np.asarray([w.ticket.attempt for w, _, _ in rows], np.int32),
            offset=np.asarray([w.length for w, _, _ in rows], np.int32),
            length=np.asarray([size for _, size, _ in rows], np.int32),
            version=np.asarray([version for _, _, version in rows], np.int64),
            tokens=np.asarray([token(*place) for place in places], np.int32),
            logprobs=np.asarray([logprob(*place) for place in places], np.float32),
        )
        for one, size, _ in rows:
            one.length += size
        self.seq += 1
        sends = self.say(name, columns.header(self.seq), columns.to_frame())
        assert [send.message for send in sends if isinstance(send.message, m.Ack)] == [m.Ack(self.seq)]

    def end(self, *, faults: bool = True) -> None:
        """Some trajectory's outcome."""
        name = self.rng.choice(sorted(self.workers))
        work = self.workers[name]
        ready = [ticket for ticket, one in work.items() if one.length]
        if not ready:
            return
        one = work[self.rng.choice(ready)]
        ticket, chance = one.ticket, self.rng.random()
        status = "failed" if faults and chance < 0.1 else "generated" if chance < 0.2 else "finished"
        score = reward(ticket.key[1], ticket.member) if status == "finished" else None
        self.seq += 1
        if status != "generated":
            del work[ticket.id]
        outcome = m.Outcome(ticket.id, ticket.attempt, one.length, status, "stop", score, error="x")
        self.say(name, m.Outcomes(self.seq, [outcome]))

    def feed(self) -> None:
        count = self.credit - self.submitted
        if count > 0:
            prompts = [m.Prompt((0, i), [i, i + 1], b"{}") for i in range(self.submitted, self.submitted + count)]
            self.say("feeder", m.Submit(self.submitted, prompts))
            self.submitted += count

    # --- the learner -------------------------------------------------------------------------------------------

    def _fetch(self, batch: m.Batch) -> None:
        """Checks a batch token by token and keeps it for the day it is to be reloaded."""
        for row in batch.rows:
            (samples,) = self.say(self.learner.name, m.Fetch(batch.lease, [row.ticket]))
            arrays = m.SampleArrays.from_frames(samples.frames)
            index, length = int(arrays.prompts[0]), row.length
            assert arrays.tokens.tolist() == [token(index, row.member, i) for i in range(length)]
            assert arrays.logprobs.tolist() == [logprob(index, row.member, i) for i in range(length)]
            assert row.reward == reward(index, row.member)
            assert row.trainable == arrays.mask.sum() > 0
            ages = [self.age(batch.version, v) if v != INJECTED else None for v in arrays.versions.tolist()]
            limit = self.core.settings.max_staleness
            assert arrays.mask.tolist() == [age is not None and age <= limit for age in ages]
            starts = np.cumsum(arrays.span_length) - arrays.span_length
            spans = list(zip(starts.tolist(), arrays.span_version.tolist(), strict=True))
            self.archive[row.ticket] = Whole(arrays.tokens.tolist(), arrays.logprobs.tolist(), spans)

    def age(self, trained_at: int, sampled_at: int) -> int:
        """Steps between two nodes of the tree of versions."""

        def up(node: tuple[int, int]) -> tuple[int, int]:
            incarnation, step = node
            while incarnation and step <= self.learner.forks[incarnation - 1]:
                incarnation -= 1  # the same weights, under the name of the incarnation that made them
            return incarnation, step

        one, two, distance = up(unpack(trained_at)), up(unpack(sampled_at)), 0
        while one != two:
            if one[1] >= two[1]:
                one = up((one[0], one[1] - 1))
            else:
                two = up((two[0], two[1] - 1))
            distance += 1
        return distance

    def learn(self) -> None:
        """A take, a prefetch or a commit."""
        learner = self.learner
        batch = learner.batches.get(learner.version)
        if batch is None and not learner.waiting:
            learner.waiting = True
            self.say(learner.name, m.Take(learner.version))
        elif batch is not None and learner.version + 1 not in learner.batches and not learner.waiting:
            if self.rng.random() < 0.3:
                learner.waiting = True
                self.say(learner.name, m.Take(learner.version + 1))
            else:
                self.commit(batch)
        elif batch is not None:
            self.commit(batch)

    def commit(self, batch: m.Batch) -> None:
        learner = self.learner
        keys: set[tuple[int, int]] = set()
        for row in batch.rows:
            key = (self.core.store.trajectories[row.ticket].group.index, row.member)
            assert not any(key in trained for _, trained in self.history), f"{key} is trained twice"
            keys.add(key)
        assert len(keys) == len(batch.rows)
        self.history.append((unpack(learner.version)[1], keys))
        self.ever |= keys
        del learner.batches[learner.version]
        learner.version += 1
        self.say(learner.name, m.Commit(batch.lease, learner.version))

    def save(self) -> None:
        """A checkpoint is durable."""
        self.saved = unpack(self.learner.version)[1]
        self.say(self.learner.name, m.Checkpointed(self.saved))
        if self.journal is not None:
            self.sync()
            self.journal.cut(self.core.offering.oldest_needed())

    def restore(self) -> None:
        """The learner dies and another goes on from the last checkpoint."""
        old = self.learner
        self.history = [(step, trained) for step, trained in self.history if step < self.saved]
        forks = [*old.forks, self.saved]
        self.learner = Learner(pack(len(forks), self.saved), forks, lives=old.lives + 1)
        self.say(self.learner.name, m.Published(self.learner.version, forks))

    def new_life(self) -> None:
        """The whole run is started again on the core that the journal brought back."""
        self.workers.clear()
        self.say(SELF, m.NewLife())
        self.say("feeder", m.Hello("feeder"))
        self.hire()
        assert not any(self.workers.values())
        self.restore()

    # --- all together ------------------------------------------------------------------------------------------

    @property
    def trained(self) -> set[tuple[int, int]]:
        return {key for _, keys in self.history for key in keys}

    def step(self) -> None:
        chance = self.rng.random()
        if not self.workers or (chance < 0.02 and len(self.workers) < 3):
            self.hire()
        elif chance < 0.05:
            self.kill()
        elif chance < 0.07:
            self.greet()
        elif chance < 0.40:
            self.stream()
        elif chance < 0.70:
            self.end()
        elif chance < 0.71:
            self.save()
        elif chance < 0.72:
            self.restore()
        else:
            self.learn()
        self.feed()

    def quiet(self) -> None:
        """No more prompts and no more faults: whatever is in flight is trained, or has ended in another way."""
        for _ in range(400):
            if not self.core.store.in_flight:
                return
            if not self.workers:
                self.hire()
            self.stream()
            self.end(faults=False)
            self.learn()


def reloaded(wanted: list[int], archive: dict[int, Whole]) -> tuple[m.Reloaded, list[memoryview]]:
    """What the server would answer to `Reload`, from what the test has noted; what it has not is missing."""
    found = [ticket for ticket in wanted if ticket in archive]
    tokens = [x for ticket in found for x in archive[ticket].tokens]
    logprobs = [x for ticket in found for x in archive[ticket].logprobs]
    message = m.Reloaded(
        found,
        [len(archive[ticket].tokens) for ticket in found],
        [archive[ticket].spans for ticket in found],
        wanted,
    )
    return message, [
        np.asarray(tokens, np.int32).view(np.uint8).data,
        np.asarray(logprobs, np.float32).view(np.uint8).data,
    ]
