"""Server, workers, feeder and learner of a simulated run: thin shells around the real parts, as the real shells are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from async_rl.config import DataConfig
from async_rl.data.prompts import Prompts
from async_rl.rollout.streamer import Streamer
from buffers import messages as m
from buffers.core import Core
from buffers.errors import ProtocolError
from buffers.journal import Outbox
from buffers.liveness import Deadline
from buffers.session import WorkerSession
from buffers.snapshot import digest
from buffers.store import SELF, Send
from launchers.feeder import Feeder
from staleness.versions import INJECTED, Lineage, pack
from tests.simulation.disk import Disk

if TYPE_CHECKING:
    from tests.simulation.world import World

WORKER_TIMEOUT_S = 8.0
RETRY_S = 3.0


def reward_of(index: int, member: int) -> float:
    """Of a member of a prompt's group; every seventh prompt gives all of its members the same."""
    return float(index % 7 and index % 7 + member)


Key = tuple[int, int, int]


class Broken(AssertionError):
    """An invariant does not hold."""


# --- what is generated -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What becomes of one place in one group, whoever generates it: fixed by the seed."""

    length: int
    failures: int
    """Tickets of this place that fail before one succeeds."""
    refused: bool
    kills: bool
    nan_at: int
    injected_at: int

    def token(self, index: int, member: int, at: int) -> int:
        return (index * 1_000_003 + member * 8191 + at * 31 + self.length) & 0x7FFFFFFF

    def logprob(self, at: int) -> float:
        return float("nan") if at == self.nan_at else -0.5 - at % 5


# --- server ------------------------------------------------------------------------------------------------------


class SimServer:
    """As `buffers/server.py`: take in, decide, make durable, answer."""

    def __init__(self, world: World, core: Core) -> None:
        self.world, self.core = world, core
        self.disk = Disk(world.file_entries)
        self.disk.begin(core)
        self.up = True
        self.boots = 0
        self._start()
        world.clock.after(0.5, self._watch)

    def _start(self) -> None:
        self.boots += 1
        self.handed = self.durable = 0
        self.outbox = Outbox()
        self.cuts: list[tuple[int, int]] = []
        self.workers = Deadline(WORKER_TIMEOUT_S)
        self.patience = Deadline(self.world.pace_timeout_s)

    def receive(self, peer: str, frames: list[bytes]) -> None:
        if not self.up:
            return
        self.world.touched = True
        self.workers.seen(peer, self.world.clock.now)
        message = m.decode_from_peer(frames[0])
        try:
            question = self.core.is_question(peer, message)
            known = self.core.store.pool.length.copy()
            sends = self.core.receive(peer, message, frames[1:])
        except ProtocolError as error:
            request = message.request if isinstance(message, m.Request) else 0
            self._deliver([Send(peer, m.Rejected(str(error), request))])
            return
        if isinstance(message, m.Append):
            self.world.check_fencing(peer, message, frames, known)
        if isinstance(message, m.Published):
            self.world.check_restored(peer)
        if isinstance(message, m.Hello):
            sends.append(Send(peer, m.Welcome(str(self.boots))))
        if isinstance(message, m.Checkpointed):
            self.cuts.append((self.handed + 1, self.core.offering.oldest_needed()))
        self._note(peer, frames, sends, question=question)

    def own(self, message: m.Inbound, frames: list[memoryview] | None = None) -> None:
        self.world.touched = True
        sends = self.core.receive(SELF, message, frames or [])
        self._note(SELF, [m.encode(message), *(frames or [])], sends, question=False)

    def _note(self, peer: str, frames: list, sends: list[Send], *, question: bool) -> None:
        if not question:
            self.disk.add(peer, frames)
        if question and self.handed == self.durable and not self.disk.group:
            self._deliver(sends)
            return
        self.outbox.hold(self.handed + bool(self.disk.group), sends)
        self._flush()

    def _flush(self) -> None:
        if self.handed > self.durable or not self.disk.group:
            return
        self.handed += 1
        self.disk.start_sync()
        boots = self.boots
        self.world.clock.after(self.world.random.choice([0.001, 0.01, 0.1]), lambda: self._synced(boots))

    def _synced(self, boots: int) -> None:
        if boots != self.boots or not self.up:
            return
        self.disk.end_sync()
        self.durable = self.handed
        self._deliver(self.outbox.release(self.durable))
        while self.cuts and self.cuts[0][0] <= self.durable:
            self.disk.cut(self.cuts.pop(0)[1])
        if self.disk.long and not self.disk.group and self.handed == self.durable:
            self.disk.begin(self.core)
            self.disk.cut(self.core.offering.oldest_needed())
        self._flush()
        self.world.at_stake |= bool(self.disk.syncing)

    def _deliver(self, sends: list[Send]) -> None:
        for to, message, frames in sends:
            if to == SELF:
                assert isinstance(message, m.Reload)
                self.own(*self.disk.find(message.tickets))
            else:
                self.world.note_answer(to, message)
                self.world.to_peer(to, [m.encode(message), *(bytes(frame) for frame in frames)])

    def _watch(self) -> None:
        self.world.clock.after(0.5, self._watch)
        if not self.up:
            return
        now = self.world.clock.now
        for worker in self.workers.over(list(self.core.issuing.workers), now):
            self.own(m.Lost(str(worker)))
        late = [int(serial) for serial in self.patience.over(self.core.offering.late(), now)]
        if late:
            self.own(m.GiveUp(late))

    def crash(self) -> None:
        """`kill -9`: what is not on disk is gone. What was being written may have arrived."""
        settled = not self.disk.group and not self.disk.syncing
        before = digest(self.core) if settled else b""
        self.up = False
        self.disk.crash(written=self.world.random.random() < 0.5)
        self.boots += 1
        recovered = self.disk.recover()
        if settled and digest(recovered) != before:
            raise Broken("the recovered core is not the one that crashed")
        self.core = recovered
        self.world.check_recovered()

    def restart(self, *, new_life: bool = False) -> None:
        if not self.up:
            self._start()
            self.up = True
            if self.core.offering.loading:
                self.own(*self.disk.find(self.core.offering.reload_request().tickets))
        if new_life:
            self.own(m.NewLife())
            self._wait()  # nobody may connect before

    def _wait(self) -> None:
        """Until everything is on disk, which takes no time here."""
        boots = self.boots
        while self.handed > self.durable or self.disk.group:
            self._flush()
            self._synced(boots)


# --- worker ------------------------------------------------------------------------------------------------------


@dataclass
class Generating:
    ticket: m.Ticket
    length: int
    scored_at: float | None = None


class SimWorker:
    """As `async_rl/rollout/worker.py`, with the real session and streamer."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.peer = f"{name}#{world.serial()}"
        self.alive = True
        self.leaving = False
        self.frozen_until = 0.0
        # It gets ready first, as one that joins does.
        self.session = WorkerSession(0, window=4, heartbeat_s=2.0, retry_s=RETRY_S)
        self.streamer = Streamer(chunk_tokens=4, flush_s=0.2)
        self.version: int | None = None
        self.running: dict[int, Generating] = {}
        self.speed = world.random.choice([1, 2, 4])
        self._send(self.session.hello(world.clock.now))
        world.clock.after(0.1, self._tick)

    def _send(self, frames: list[bytes]) -> None:
        self.world.to_server(self.peer, frames)

    def receive(self, frames: list[bytes]) -> None:
        if not self.alive:
            return
        news, again = self.session.received(m.decode_outbound(frames[0]), self.world.clock.now)
        for frames in again:
            self._send(frames)
        for message in news:
            match message:
                case m.Tickets(tickets):
                    for ticket in tickets:
                        self.running[ticket.id] = Generating(ticket, len(ticket.prefix))
                        self.streamer.open(ticket.id, ticket.attempt, len(ticket.prefix))
                case m.Cancel(cancelled):
                    for held in cancelled:
                        self.running.pop(held.ticket, None)
                        self.streamer.drop(held.ticket)
                case m.News(version):
                    self.world.clock.after(self.world.random.uniform(0.0, 1.0), lambda v=version: self._apply(v))

    def _apply(self, version: int) -> None:
        if self.version is None and self.alive:
            self.session.slots = self.world.slots
            self._send(self.session.hello(self.world.clock.now))
        if self.version is None or version > self.version:
            self.version = version

    def _tick(self) -> None:
        """Some tokens for every running trajectory, then what is due."""
        if not self.alive:
            return
        self.world.clock.after(self.world.random.uniform(0.1, 0.4), self._tick)
        now = self.world.clock.now
        if now < self.frozen_until:
            return
        for frames in self.session.due(now):
            self._send(frames)
        for generating in list(self.running.values()):
            if self.alive and self.session.open and not self.leaving:
                self._advance(generating, now)
        if self.alive:
            self._flush()
        if self.alive and self.leaving and not self.session.unacknowledged:
            self._send([m.encode(m.Leave())])
            self.world.has_left(self)

    def _advance(self, generating: Generating, now: float) -> None:
        ticket = generating.ticket
        if self.version is None or self.version < ticket.min_version:
            return
        fate = self.world.fate(ticket.key[1], ticket.member)
        if fate.kills:
            self.world.kill_worker(self)
            return
        if fate.refused:
            self._outcome(ticket, m.Outcome(ticket.id, ticket.attempt, 0, "refused", error="too long"), ends=True)
            return
        if generating.scored_at is None and not ticket.finish_reason:
            self._generate(generating, fate)
            return
        if generating.scored_at is None:
            generating.scored_at = now  # complete already: only the reward is wanted
        if now >= generating.scored_at:
            failing = self.world.failures[(ticket.key[1], ticket.member)] < fate.failures
            self.world.failures[(ticket.key[1], ticket.member)] += failing
            reward = None if failing else reward_of(ticket.key[1], ticket.member)
            status = "failed" if failing else "finished"
            outcome = m.Outcome(ticket.id, ticket.attempt, generating.length, status, "stop", reward)
            self._outcome(ticket, outcome, ends=True)

    def _generate(self, generating: Generating, fate: Fate) -> None:
        ticket, start = generating.ticket, generating.length
        most = len(ticket.prefix) + ticket.max_tokens
        stop = min(fate.length, most, start + self.speed)
        at = range(start, stop)
        assert self.version is not None
        self.streamer.add(
            ticket.id,
            [fate.token(ticket.key[1], ticket.member, i) for i in at],
            [fate.logprob(i) for i in at],
            [INJECTED if i == fate.injected_at else self.version for i in at],
            now=self.world.clock.now,
        )
        generating.length = stop
        if stop == min(fate.length, most):
            generating.scored_at = self.world.clock.now + self.world.random.uniform(0.0, 1.0)
            done = m.Outcome(ticket.id, ticket.attempt, stop, "generated", "stop")
            self._outcome(ticket, done, ends=False)

    def _outcome(self, ticket: m.Ticket, outcome: m.Outcome, *, ends: bool) -> None:
        self._flush()
        self._send(self.session.outcomes([outcome]))
        if ends:
            self.streamer.drop(ticket.id)
            self.running.pop(ticket.id, None)

    def _flush(self) -> None:
        chunks = self.streamer.flush()
        if chunks is not None:
            self._send(self.session.append(chunks))


# --- feeder ------------------------------------------------------------------------------------------------------


class FeederLink:
    """Stands for `buffers.client.Client`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.peer = f"feeder#{world.serial()}"

    def send(self, message: m.Message) -> None:
        self.world.to_server(self.peer, [m.encode(message)])


class SimFeeder:
    """The real feeder, and its client's heartbeat."""

    def __init__(self, world: World, start: int) -> None:
        self.world = world
        self.alive = True
        self.link = FeederLink(world)
        self.peer = self.link.peer
        count = 10_000
        prompts = Prompts([np.asarray([1, 2])] * count, [b"{}"] * count, "simulated")
        self.feeder = Feeder(self.link, prompts, DataConfig(shuffle=False), start=start)  # type: ignore[arg-type]
        self._beat()

    def _beat(self) -> None:
        if self.alive:
            self.link.send(m.Hello("feeder"))
            self.world.clock.after(2.0, self._beat)

    def receive(self, frames: list[bytes]) -> None:
        if self.alive:
            self.feeder._act(m.decode_outbound(frames[0]))


# --- learner -----------------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What the surviving lineage has trained, by step; outlives the learner's processes.

    A key is (prompt, member, place) of a token handed out for training; that of a trajectory's end has the place -1.
    """

    checkpoint: int = 0
    cursor: int = 0
    forks: list[int] = field(default_factory=list)
    trained: dict[int, list[Key]] = field(default_factory=dict)
    lost: set[Key] = field(default_factory=set)
    """Trained in steps that a restore has undone, of which the buffer has not heard yet."""

    def keys(self) -> Counter[Key]:
        return Counter(key for step in self.trained.values() for key in step)


class SimLearner:
    """As `async_rl/learner/rank.py`: publish, then take, train, commit, and save now and then. One rank."""

    def __init__(self, world: World) -> None:
        self.world, self.ledger = world, world.ledger
        self.peer = f"learner0#{world.serial()}"
        self.alive = True
        self.step = self.ledger.checkpoint
        self.lineage = Lineage(tuple(self.ledger.forks))
        self.ledger.lost |= {key for s, keys in self.ledger.trained.items() if s >= self.step for key in keys}
        self.ledger.trained = {s: keys for s, keys in self.ledger.trained.items() if s < self.step}
        self.batch: m.Batch | None = None
        self.requests = 0
        self.waiting: m.Request | None = None
        self._ask(m.Published(self.version, list(self.ledger.forks)))

    @property
    def version(self) -> int:
        return pack(len(self.ledger.forks), self.step)

    @property
    def done(self) -> bool:
        return self.step >= self.world.steps

    def _ask(self, message: m.Request) -> None:
        import msgspec

        self.requests += 1
        self.waiting = msgspec.structs.replace(message, request=self.requests)
        self._repeat(self.requests)

    def _repeat(self, request: int) -> None:
        if self.alive and self.waiting is not None and request == self.requests:
            self.world.to_server(self.peer, [m.encode(self.waiting)])
            self.world.clock.after(RETRY_S, lambda: self._repeat(request))

    def receive(self, frames: list[bytes]) -> None:
        message = m.decode_outbound(frames[0])
        if not self.alive:
            return
        if isinstance(message, m.Rejected) and message.request in (0, self.requests):
            raise Broken(f"the learner was refused: {message.reason}")
        if getattr(message, "request", None) != self.requests or self.waiting is None:
            return
        asked, self.waiting = self.waiting, None
        match message:
            case m.Done():
                self._next()
            case m.Batch():
                self.batch = message
                self._ask(m.Fetch(message.lease, [row.ticket for row in message.rows]))
            case m.Samples():
                self._train(m.SampleArrays.from_frames(frames[1:]))
            case m.Committed(_, cursor):
                self.ledger.cursor = cursor
                self._committed()
            case other:
                raise Broken(f"{type(other).__name__} answers {type(asked).__name__}")

    def _next(self) -> None:
        if not self.done:
            self._ask(m.Take(self.version))

    def _train(self, arrays: m.SampleArrays) -> None:
        assert self.batch is not None
        keys = self.world.check_batch(self, self.batch, arrays)
        self.ledger.trained[self.step] = keys
        known = self.ledger.keys()
        twice = [key for key, count in known.items() if count > 1]
        if twice:
            raise Broken(f"{twice[:3]} were trained on twice")
        for index, member, place in keys:
            if place > 0 and (index, member, place - 1) not in known:
                raise Broken(f"prompt {index}, member {member}: token {place - 1} was left out")
        self.world.clock.after(self.world.random.uniform(0.1, 2.0), self._commit)

    def _commit(self) -> None:
        if self.alive and self.batch is not None:
            self.step += 1
            self._ask(m.Commit(self.batch.lease, self.version, self.world.random.random() < 0.8))

    def _committed(self) -> None:
        self.batch = None
        if self.step % self.world.checkpoint_every and not self.done:
            self._next()
            return
        self.world.clock.after(self.world.random.uniform(0.0, 1.0), self._saved)

    def _saved(self) -> None:
        if self.alive:
            self.ledger.checkpoint = self.step
            self._ask(m.Checkpointed(self.step))
