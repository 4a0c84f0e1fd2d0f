"""1,000 workers and 10,000 trajectories on the real core and the real sessions, against the clock.

`python -m async_rl.benchmarks.crowd` prints simulated seconds per second of one processor core.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from time import perf_counter

import numpy as np

from buffers import messages as m
from buffers.core import Core
from buffers.records import Settings
from buffers.session import WorkerSession
from buffers.store import Send

WORKERS, SLOTS = 1_000, 10
RATE = 30.0
"""Tokens per second of one trajectory: a batch of ten on an accelerator."""
CHUNK = 16
LENGTH = 512
GROUP, BATCH, STALENESS = 10, 2_500, 3
PERIOD_S = CHUNK / RATE


class Crowd:
    """Every worker streams a chunk of each of its trajectories once a period; the learner trains what is ready."""

    def __init__(self) -> None:
        settings = Settings(
            batch=BATCH, group=GROUP, max_staleness=STALENESS, max_tokens=LENGTH, min_group=GROUP, retain=True
        )
        self.core = Core(settings)
        self.now = 0.0
        self.random = random.Random(0)
        self.sessions = [WorkerSession(SLOTS, heartbeat_s=5.0) for _ in range(WORKERS)]
        self.names = {f"worker{i}#1": i for i in range(WORKERS)}
        self.at: list[dict[int, int]] = [{} for _ in range(WORKERS)]
        """Of each worker: how far each of its tickets has come."""
        self.version = 0
        self.submitted = 0
        self.events: list[tuple[float, int]] = []
        self.deliver(self.core.handle("feeder", m.Hello("feeder")))
        for name, worker in self.names.items():
            self.deliver(self.core.handle(name, m.decode_from_peer(self.sessions[worker].hello(0.0)[0])))
            heappush(self.events, (self.random.uniform(0, PERIOD_S), worker))
        self.deliver(self.core.handle("learner", m.Published(0)))
        self.deliver(self.core.handle("learner", m.Take(0)))

    def deliver(self, sends: list[Send]) -> None:
        for to, message, _ in sends:
            match message:
                case m.Credit(upto) if upto > self.submitted:
                    first, self.submitted = self.submitted, upto
                    prompts = [m.Prompt((0, place), [1, 2, 3], b"{}") for place in range(first, upto)]
                    self.deliver(self.core.handle("feeder", m.Submit(first, prompts)))
                case m.Batch():
                    self._train(message)
                case _ if to in self.names:
                    self._hear(self.names[to], message)  # type: ignore[arg-type]
                case _:
                    pass

    def _train(self, batch: m.Batch) -> None:
        self.version += 1
        self.deliver(self.core.handle("learner", m.Commit(batch.lease, self.version)))
        self.deliver(self.core.handle("learner", m.Checkpointed(self.version)))
        self.deliver(self.core.handle("learner", m.Take(self.version)))

    def _hear(self, worker: int, message: m.Outbound) -> None:
        news, _ = self.sessions[worker].received(message, self.now)
        for item in news:
            if isinstance(item, m.Tickets):
                # Lengths are spread, so that groups do not end in step.
                self.at[worker].update({ticket.id: -self.random.randrange(8) for ticket in item.tickets})

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.events[0][0] < end:
            self.now, worker = heappop(self.events)
            heappush(self.events, (self.now + PERIOD_S, worker))
            self._stream(worker, f"worker{worker}#1")

    def _stream(self, worker: int, name: str) -> None:
        at, session = self.at[worker], self.sessions[worker]
        for ticket in at:
            at[ticket] += 1
        growing = [ticket for ticket, chunk in at.items() if chunk > 0]
        if not growing:
            return
        offsets = np.asarray([(at[ticket] - 1) * CHUNK for ticket in growing], np.int32)
        chunks = m.Chunks(
            ticket=np.asarray(growing, np.int64),
            attempt=np.ones(len(growing), np.int32),
            offset=offsets,
            length=np.full(len(growing), CHUNK, np.int32),
            version=np.full(len(growing), self.version, np.int64),
            tokens=np.zeros(len(growing) * CHUNK, np.int32),
            logprobs=np.full(len(growing) * CHUNK, -1.0, np.float32),
        )
        head, frame = session.append(chunks)
        self.deliver(self.core.receive(name, m.decode_from_peer(head), [frame]))
        ended = [ticket for ticket in growing if at[ticket] * CHUNK >= LENGTH]
        if ended:
            outcomes = [m.Outcome(ticket, 1, LENGTH, "finished", "length", ticket % 2 / 1) for ticket in ended]
            for ticket in ended:
                del at[ticket]
            (head,) = session.outcomes(outcomes)
            self.deliver(self.core.receive(name, m.decode_from_peer(head), []))


def realtime_factor(seconds: float = 20.0) -> float:
    """Simulated seconds per second, once all trajectories are under way."""
    crowd = Crowd()
    crowd.run(10.0)
    running = crowd.core.stats().running
    assert running > 0.9 * WORKERS * SLOTS, f"{running} trajectories are running"
    begun = perf_counter()
    crowd.run(seconds)
    factor = seconds / (perf_counter() - begun)
    crowd.core.check()
    assert crowd.version > 0
    return factor


if __name__ == "__main__":
    print(f"{realtime_factor():.2f}")
