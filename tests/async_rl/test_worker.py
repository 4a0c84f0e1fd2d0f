"""The worker against a real buffer server, with an engine that answers at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from async_rl import process
from async_rl.config import parse
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.rollout.worker import Worker
from async_rl.weights.manifest import Manifest
from async_rl.weights.publisher import Publisher
from buffers import messages as m
from buffers.client import Client
from buffers.core import Core
from buffers.records import Settings
from buffers.server import Server
from tests.buffers.driver import prompt


@dataclass
class QuickEngine:
    """One token a response, under the version it was given last. `lie`: its own spans disagree."""

    lie: bool = False
    version: int = -1
    loaded: list[int] = field(default_factory=list)

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        spans = [(self.version + self.lie, 0, 1)]
        yield Delta([5], [-0.5], [self.version], "length", spans)

    async def update(self, manifest: Manifest) -> float:
        self.version = manifest.version
        self.loaded.append(manifest.version)
        return 0.0

    async def relabel(self, version: int) -> None:
        self.version = version

    async def score(self, tokens: list[int]) -> list[float]:
        return []

    async def stop(self) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(Core(Settings(batch=2, group=2, max_staleness=0, max_tokens=4)))
    (tmp_path / "buffer.endpoint").write_text(server.endpoint)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join(5)


def one_batch(server: Server, tiny_model: Path, folder: Path, engine: QuickEngine, versions: list[int]) -> m.Batch:
    """Publishes the versions to the buffer, weights only for version 0, then lets the worker make one batch."""
    tree = {
        "data": {"path": "x"},
        "model": {"path": str(tiny_model)},
        "reward": {"function": "tests.e2e.rewards:length"},
    }
    run = process.Run(folder, parse({**tree, "rollout": {"dtype": "float32"}}), "worker", 0)
    publisher = Publisher(folder, f"worker-{folder.name}", torch.float32, tied=[])
    publisher.publish(0, [("a", torch.zeros(3))], None)
    learner = Client(server.endpoint, "rank0", "learner")
    feeder = Client(server.endpoint, "feeder", "feeder")
    for version in versions:
        learner.ask(m.Published(version), m.Done)
    feeder.send(m.Hello("feeder"))
    feeder.send(m.Submit(0, [prompt(0)]))

    async def work() -> m.Batch:
        worker = Worker(run, engine)
        task = asyncio.create_task(worker.main())
        asked = asyncio.create_task(asyncio.to_thread(learner.ask, m.Take(versions[-1]), m.Batch, until=task.done))
        batch = await asyncio.wait_for(asked, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.close()
        assert batch is not None
        return batch

    try:
        return asyncio.run(work())
    finally:
        feeder.close()
        learner.close()
        publisher.close()


def test_a_worker_that_joins_after_a_skipped_step_starts_its_tickets(
    server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    """The newest publication is version 0, the tickets ask for version 2: the steps between changed nothing."""
    engine = QuickEngine()
    batch = one_batch(server, tiny_model, tmp_path, engine, [0, 1, 2])
    assert engine.loaded == [0]
    assert batch.version == 2
    assert [row.length for row in batch.rows] == [1, 1]
    assert server.core.stats().span_mismatches == 0


def test_tags_that_the_engine_contradicts_are_counted(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    """failures.md 11."""
    one_batch(server, tiny_model, tmp_path, QuickEngine(lie=True), [0])
    assert server.core.stats().span_mismatches == 2
