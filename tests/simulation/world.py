"""One simulated run: everything that happens follows from the seed; the invariants are checked after every event.

1  the accounts add up, and what is in memory keeps within the bound (`Core.check`)
2  what was acknowledged survives every crash, and a recovered core is the one that crashed
3  what a batch holds is what was generated, token by token, log-prob by log-prob, in its place
4  no token over the bound is trained on; every age is along the lineage
5  a group is offered as its policy says; nothing is trained on twice in the surviving lineage
6  versions only grow; a lease belongs to a learner that lives; tokens come from the ticket's worker; what a restore
   undoes is offered again
7  when the faults end, the run reaches its last step in time: nothing is leaked, nobody waits for ever
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from buffers import messages as m
from buffers.core import Core
from buffers.records import IN_FLIGHT, Settings
from staleness.versions import INJECTED, unpack
from tests.simulation.net import Clock, Net, Weather
from tests.simulation.parts import Broken, Fate, Key, Ledger, SimFeeder, SimLearner, SimServer, SimWorker, reward_of

FAULTS_S = 25.0
STALL_S = 60.0
"""Longest time without progress once the faults have ended."""


@dataclass
class Result:
    """How a run went."""

    seed: int
    events: int
    simulated_s: float
    crashes: Counter[str]
    stats: m.Stats


class World:
    """See the module. `run` raises `AssertionError` if an invariant breaks."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = rnd = random.Random(seed)
        self.clock = Clock()
        calm = rnd.random() < 0.2
        self.weather = Weather(
            delay_s=rnd.choice([0.001, 0.02, 0.2]),
            loss=0.0 if calm else rnd.choice([0.0, 0.02, 0.1]),
            duplication=0.0 if calm else rnd.choice([0.0, 0.05]),
            reordering=not calm and rnd.random() < 0.3,
        )
        self.net = Net(self.clock, rnd, self.weather)
        self.settings = self._settings()
        self.steps = rnd.randint(4, 8)
        self.checkpoint_every = rnd.randint(1, 4)
        self.slots = rnd.choice([1, 2, 4, 8])
        self.file_entries = rnd.choice([10, 60, 100_000])
        self.pace_timeout_s = 20.0
        self.bad_prompts = rnd.random() < 0.4
        self.failures: Counter[tuple[int, int]] = Counter()
        self.crashes: Counter[str] = Counter()
        self.acknowledged: dict[tuple[int, int], int] = {}
        self._chunk_ends: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
        self._serial = 0
        self._version = -1
        self._acknowledged_version: int | None = None
        self._armed = False
        self.at_stake = False
        """Whether answers have just gone out while later messages are on their way to the disk."""
        self.touched = False
        """Whether the core has seen something since it was last checked."""
        self._progress: object = None
        self._progress_at = FAULTS_S
        self.ledger = Ledger()
        self.server = SimServer(self, Core(self.settings))
        self.feeder = SimFeeder(self, 0)
        self.learner = SimLearner(self)
        self.workers = [SimWorker(self, f"worker{i}") for i in range(rnd.randint(1, 3))]
        if not calm:
            self.clock.after(rnd.uniform(1.0, 6.0), self._fault)

    def _settings(self) -> Settings:
        rnd = self.random
        group = rnd.choice([1, 2, 4])
        on_stale = rnd.choice(["mask", "mask", "drop", "pace"])
        pace = on_stale == "pace"
        group_policy = "whole" if pace else rnd.choice(["whole", "whole", "split", "split", "deadline_versions"])
        segments = rnd.choice([None, 1, 3, 6]) if group_policy == "split" else None
        return Settings(
            batch=group * rnd.randint(1, 3),
            group=group,
            max_staleness=rnd.choice([0, 1, 1, 2, 3]),
            max_tokens=rnd.choice([8, 16, 24]),
            slack=0 if pace else rnd.choice([0, 0, group]),
            on_stale=on_stale,
            group_policy=group_policy,
            dynamic_sampling=group > 1 and group_policy != "split" and rnd.random() < 0.3,
            deadline_versions=rnd.randint(1, 2),
            min_group=rnd.randint(1, group),
            on_failed=rnd.choice(["replace", "shrink", "fail_group"]) if segments is None else "shrink",
            max_consecutive_failed_groups=1_000_000,
            replayable=rnd.random() < 0.8,
            sampler="oldest" if pace else rnd.choice(["oldest", "oldest", "freshest", "uniform", "prioritized"]),
            seed=self.seed,
            segments=segments,
            retain=True,
        )

    def fate(self, index: int, member: int) -> Fate:
        rnd = random.Random(f"{self.seed}/{index}/{member}")
        bad = self.bad_prompts
        return Fate(
            length=rnd.randint(1, self.settings.max_tokens),
            failures=rnd.choice([0, 0, 0, 0, 0, 1, 1, 5]) if bad else 0,
            refused=bad and rnd.random() < 0.03,
            kills=bad and rnd.random() < 0.01,
            nan_at=rnd.randint(0, 200),
            injected_at=rnd.randint(1, 60),
        )

    def serial(self) -> int:
        self._serial += 1
        return self._serial

    # --- network -----------------------------------------------------------------------------------------------

    def to_server(self, peer: str, frames: list[bytes]) -> None:
        self._note_chunks(peer, frames)
        self.net.send(f"{peer}>", lambda: self.server.receive(peer, frames))

    def to_peer(self, peer: str, frames: list[bytes]) -> None:
        for part in (self.feeder, self.learner, *self.workers):
            if part.peer == peer:
                self.net.send(f">{peer}", lambda part=part: part.receive(frames))

    # --- faults ------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        rnd = self.random
        if self.clock.now > FAULTS_S:
            self.weather.loss = self.weather.duplication = 0.0
            return
        kind = rnd.choice(["server", "server", "worker", "worker", "leave", "freeze", "learner", "everything"])
        if not self.workers:
            kind = "server"  # the run is being started again
        self.crashes[kind] += 1
        if kind == "server" and self.server.up:
            self._armed = True
            self.clock.after(1.0, self._crash)
        elif kind == "worker":
            self.kill_worker(rnd.choice(self.workers))
        elif kind == "leave":
            rnd.choice(self.workers).leaving = True
        elif kind == "freeze":
            rnd.choice(self.workers).frozen_until = self.clock.now + rnd.uniform(1.0, 15.0)
        elif kind == "learner":
            self._kill_learner()
            self.clock.after(rnd.uniform(0.1, 3.0), self._new_learner)
        elif kind == "everything" and self.server.up:
            self._kill_everything()
        self.clock.after(rnd.uniform(1.0, 8.0), self._fault)

    def _crash(self) -> None:
        """Kills the server: when most is at stake, or a second after it was decided."""
        if self._armed and self.server.up:
            self._armed = False
            self.server.crash()
            self.clock.after(self.random.uniform(0.1, 4.0), self.server.restart)

    def kill_worker(self, worker: SimWorker) -> None:
        worker.alive = False
        self.clock.after(self.random.uniform(0.5, 4.0), lambda: self._replace(worker))
        if self.random.random() < 0.5:
            self.clock.after(0.1, lambda: self.feeder.feeder.lost(worker.name))

    def has_left(self, worker: SimWorker) -> None:
        worker.alive = False
        self.clock.after(self.random.uniform(0.5, 4.0), lambda: self._replace(worker))

    def _replace(self, worker: SimWorker) -> None:
        if worker in self.workers:
            self.workers[self.workers.index(worker)] = SimWorker(self, worker.name)

    def _kill_learner(self) -> None:
        self.learner.alive = False

    def _new_learner(self) -> None:
        if not self.learner.alive:
            self.ledger.forks.append(self.ledger.checkpoint)
            self.learner = SimLearner(self)

    def _kill_everything(self) -> None:
        """The machine, or the supervisor: the run is resumed."""
        self.server.crash()
        self._kill_learner()
        for worker in self.workers:
            worker.alive = False
        names = [worker.name for worker in self.workers]
        self.workers = []
        self.feeder.alive = False

        def resume() -> None:
            self.server.restart(new_life=True)
            self.feeder = SimFeeder(self, self.ledger.cursor)
            self._new_learner()
            self.workers = [SimWorker(self, name) for name in names]

        self.clock.after(self.random.uniform(0.1, 3.0), resume)

    # --- invariants --------------------------------------------------------------------------------------------

    def run(self) -> Result:
        events = 0
        while not (self.learner.done and self.learner.alive and self.learner.waiting is None):
            self.clock.step()
            events += 1
            if self._armed and (self.at_stake or (self.server.disk.group and self.random.random() < 0.3)):
                self._crash()
            self.at_stake = False
            self._check()
            self._check_progress()
        return Result(self.seed, events, self.clock.now, self.crashes, self.server.core.stats())

    def _check(self) -> None:
        if not self.touched:
            return
        self.touched = False
        core = self.server.core
        core.check()
        if "not in the journal" in core.store.tally.last_error:
            raise Broken(core.store.tally.last_error)
        version = core.store.version
        if version is not None:
            if version < self._version:
                raise Broken(f"version {version} after {self._version}")
            self._version = version

    def _check_progress(self) -> None:
        stats = self.server.core.store
        progress = (self.learner.step, stats.version, stats.tally.tokens, *stats.counts.values())
        if progress != self._progress or self.clock.now < FAULTS_S:
            self._progress, self._progress_at = progress, max(FAULTS_S, self.clock.now)
        elif self.clock.now - self._progress_at > STALL_S:
            raise Broken(
                f"nothing moves at step {self.learner.step} of {self.steps}; the learner waits for "
                f"{self.learner.waiting}; {self.server.core.stats()}"
            )

    def check_fencing(self, peer: str, head: m.Append, frames: list[bytes], known: np.ndarray) -> None:
        """Whatever has grown belongs to the sender, under the attempt it names."""
        store = self.server.core.store
        grown = {int(store.pool.ticket[row]) for row in np.flatnonzero(store.pool.length > known)}
        chunks = m.Chunks.from_frames(head, frames[1:])
        attempts = dict(zip(chunks.ticket.tolist(), chunks.attempt.tolist(), strict=True))
        for ticket in grown:
            trajectory = store.trajectories[ticket]
            if (trajectory.worker, trajectory.attempt) != (peer, attempts[ticket]):
                raise Broken(f"ticket {ticket} of {trajectory.worker} has grown by what {peer} sent")

    def _note_chunks(self, peer: str, frames: list[bytes]) -> None:
        head = m.decode_from_peer(frames[0])
        if isinstance(head, m.Append):
            chunks = m.Chunks.from_frames(head, frames[1:])
            ends = {
                (int(ticket), int(attempt)): int(end)
                for ticket, attempt, end in zip(
                    chunks.ticket, chunks.attempt, chunks.offset + chunks.length, strict=True
                )
            }
            self._chunk_ends[(peer, head.seq)] = ends

    def note_answer(self, peer: str, message: m.Message) -> None:
        """Once an acknowledgement is on its way, its tokens must never be lost."""
        if isinstance(message, m.Committed):
            self._acknowledged_version = self.server.core.store.version
        if isinstance(message, m.Ack):
            refused = {(refusal.ticket, refusal.attempt) for refusal in message.refused}
            ends = [self._chunk_ends.get((peer, seq), {}) for seq in (*message.before, message.seq)]
            for key, end in (item for some in ends for item in some.items()):
                if key not in refused:
                    self.acknowledged[key] = max(end, self.acknowledged.get(key, 0))

    def check_recovered(self) -> None:
        core = self.server.core
        core.check()
        version = core.store.version
        if self._acknowledged_version is not None and (version is None or version < self._acknowledged_version):
            raise Broken(f"version {self._acknowledged_version} was acknowledged, {version} was recovered")
        self._version = -1 if version is None else version
        for (ticket, attempt), end in self.acknowledged.items():
            trajectory = core.store.trajectories.get(ticket)
            if trajectory is None or (trajectory.attempt != attempt and not self.settings.replayable):
                continue
            length = int(core.store.pool.length[core.store.pool.row(ticket)])
            if length < end:
                raise Broken(f"ticket {ticket}: {end} tokens were acknowledged, {length} were recovered")

    def check_restored(self, peer: str) -> None:
        """The buffer has just heard of a learner's first version."""
        core = self.server.core
        if peer != self.learner.peer:
            return
        strangers = [lease.holder for lease in core.offering.leases.values() if lease.holder != peer]
        if strangers:
            raise Broken(f"leases of {strangers} outlive their learners")
        begins = {
            (group.prompt.key[1], member.member): member.start
            for group in core.store.groups.values()
            for member in group.having(*IN_FLIGHT)
        }
        # A trajectory of which a segment was trained on may have failed since; one that was complete may not.
        gone = {
            (index, member, place)
            for index, member, place in self.ledger.lost
            if (place < 0 and (index, member) not in begins) or 0 <= place < begins.get((index, member), 0)
        }
        if gone:
            raise Broken(f"{gone} were trained on in undone steps and are not offered again")
        self.ledger.lost = set()

    def check_batch(self, learner: SimLearner, batch: m.Batch, arrays: m.SampleArrays) -> list[Key]:
        """Everything that is promised of a batch; returns what of the ledger it is."""
        core = self.server.core
        lease = core.offering.leases.get(batch.lease)
        by_ticket = {t.ticket: t for t in lease.trajectories} if lease else {}
        by_ticket |= {part.trajectory.ticket: part.trajectory for part in lease.excerpts} if lease else {}
        at = 0
        keys: list[Key] = []
        versions = arrays.versions
        for row in batch.rows:
            span = slice(at, at + row.length)
            at = span.stop
            trajectory = by_ticket.get(row.ticket)
            if trajectory is None:
                raise Broken(f"ticket {row.ticket} is in a batch, but not in its lease")
            index = trajectory.group.prompt.key[1]
            keys += [(index, row.member, place) for place in range(row.start, row.length - row.goes_on)]
            keys += [] if row.goes_on else [(index, row.member, -1)]
            self._check_content(index, row, arrays.tokens[span], arrays.logprobs[span])
            self._check_ages(learner, row, versions[span], arrays.mask[span])
            if row.reward != (0.0 if row.goes_on else reward_of(index, row.member)):
                raise Broken(f"prompt {index}, member {row.member} has the reward {row.reward}")
            if self.settings.group_policy == "whole" and trajectory.group.having("running"):
                raise Broken(f"a part of group {trajectory.group.serial} was offered")
        if at != arrays.tokens.size:
            raise Broken(f"{arrays.tokens.size} tokens came for rows of {at}")
        return keys

    def _check_content(self, index: int, row: m.BatchRow, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        fate = self.fate(index, row.member)
        expected = [fate.token(index, row.member, i) for i in range(row.length)]
        complete = row.length == min(fate.length, self.settings.max_tokens)
        if not (complete or row.goes_on) or tokens.tolist() != expected:
            raise Broken(f"prompt {index}, member {row.member}: {tokens.tolist()} in place of {expected}")
        wanted = np.asarray([fate.logprob(i) for i in range(row.length)], np.float32)
        if not np.array_equal(logprobs, wanted, equal_nan=True):
            raise Broken(f"prompt {index}, member {row.member}: log-probs {logprobs} in place of {wanted}")

    def _check_ages(self, learner: SimLearner, row: m.BatchRow, versions: np.ndarray, mask: np.ndarray) -> None:
        trained = versions[mask == 1]
        if mask[: row.start].any() or (row.goes_on and mask[-1]):
            raise Broken(f"ticket {row.ticket}: a token of another batch is to be trained on")
        if not trained.size or trained.size != row.trainable:
            raise Broken(
                f"ticket {row.ticket}: {trained.size} tokens may be trained on, {row.trainable} were announced"
            )
        if (trained == INJECTED).any():
            raise Broken(f"ticket {row.ticket}: an injected token is to be trained on")
        ages = [self._age(learner, *unpack(int(version))) for version in trained]
        if max(ages) > self.settings.max_staleness:
            raise Broken(f"ticket {row.ticket}: age {max(ages)} over {self.settings.max_staleness}")

    def _age(self, learner: SimLearner, incarnation: int, step: int) -> int:
        """Steps back to where the lineages part, and from there on; written down independently of the code."""
        fork = min([step, *self.ledger.forks[incarnation:]])
        return (learner.step - fork) + (step - fork)
