"""The worker against a real buffer server, with an engine that answers at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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
from async_rl.weights.shm import Writer
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


@contextmanager
def serving(folder: Path, **settings: int) -> Iterator[Server]:
    """A buffer of one group of two per batch, in a thread of this process."""
    server = Server(Core(Settings(batch=2, group=2, max_staleness=0, **settings)))
    (folder / "buffer.endpoint").write_text(server.endpoint)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join(5)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, max_tokens=4) as server:
        yield server


@pytest.fixture
def long_server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, max_tokens=60, min_group=2) as server:
        yield server


@contextmanager
def peers(server: Server, folder: Path, versions: list[int]) -> Iterator[tuple[Client, Client]]:
    """A learner that has published the versions, with weights for version 0 only, and a feeder with one prompt."""
    publisher = Publisher(folder, Writer(f"worker-{folder.name}"), torch.float32, tied=[])
    publisher.publish(0, [("a", torch.zeros(3))], None)
    learner = Client(server.endpoint, "rank0", "learner")
    feeder = Client(server.endpoint, "feeder", "feeder")
    for version in versions:
        learner.ask(m.Published(version), m.Done)
    feeder.send(m.Submit(0, [prompt(0)]))
    try:
        yield learner, feeder
    finally:
        feeder.close()
        learner.close()
        publisher.close()


def make_worker(tiny_model: Path, folder: Path, engine: QuickEngine, **rollout: object) -> Worker:
    tree = {
        "data": {"path": "x"},
        "model": {"path": str(tiny_model)},
        "reward": {"function": "tests.e2e.rewards:length"},
        "rollout": {"dtype": "float32", **rollout},
    }
    return Worker(process.Run(folder, parse(tree), "worker", 0, process.LOOPBACK), engine)


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """Runs the worker for the length of the block."""
    task = asyncio.create_task(worker.main())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.close()


async def make_batch(worker: Worker, learner: Client, version: int) -> m.Batch:
    """Lets the worker work until the learner has a batch."""
    async with working(worker) as task:
        asked = asyncio.create_task(asyncio.to_thread(learner.ask, m.Take(version), m.Batch, until=task.done))
        batch = await asyncio.wait_for(asked, 60)
        assert batch is not None
        return batch


def one_batch(server: Server, tiny_model: Path, folder: Path, engine: QuickEngine, versions: list[int]) -> m.Batch:
    async def work(learner: Client) -> m.Batch:
        return await make_batch(make_worker(tiny_model, folder, engine), learner, versions[-1])

    with peers(server, folder, versions) as (learner, _):
        return asyncio.run(work(learner))


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


@dataclass
class EndlessEngine(QuickEngine):
    """Counts up from the prompt's last token, one token a delta, until the budget is used or nobody listens."""

    requests: list[Request] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request)
        try:
            for i in range(request.max_tokens):
                await asyncio.sleep(0.005)
                last = i == request.max_tokens - 1
                spans = [(self.version, 0, request.max_tokens)] if last else None
                yield Delta([request.prompt[-1] + 1 + i], [-0.5], [self.version], "length" if last else None, spans)
        except BaseException:
            self.abandoned.append(request.id)
            raise


LONG = {"max_tokens": 60, "chunk_tokens": 4, "flush_ms": 20.0}


def test_a_worker_goes_on_after_the_prefix_of_one_that_is_gone(
    long_server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    """failures.md 12: the second asks for what is left of the budget, and the reward sees the whole response."""
    first, second = EndlessEngine(), EndlessEngine()

    async def live(learner: Client) -> m.Batch:
        async with asyncio.timeout(60), working(make_worker(tiny_model, tmp_path, first, **LONG)):
            while long_server.core.stats().tokens < 16:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.01)
        # The other is of the same name: the first is gone.
        return await make_batch(make_worker(tiny_model, tmp_path, second, **LONG), learner, 0)

    with peers(long_server, tmp_path, [0]) as (learner, _):
        batch = asyncio.run(live(learner))
        arrays = learner.fetch(m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
    prefixes = [len(request.prompt) - len(prompt(0).tokens) for request in second.requests]
    assert sum(prefixes) >= 16
    assert [request.max_tokens for request in second.requests] == [60 - prefix for prefix in prefixes]
    # Token by token what one engine would have counted: the last prompt token is 2.
    assert arrays.tokens.tolist() == [*range(3, 63)] * 2
    stats = long_server.core.stats()
    assert (stats.lost_workers, stats.reissued, stats.kept_tokens) == (1, 2, sum(prefixes))
    assert stats.span_mismatches == 0


def test_a_cancelled_trajectory_ends_its_request(long_server: Server, tiny_model: Path, tmp_path: Path) -> None:
    engine = EndlessEngine()

    async def live(feeder: Client) -> None:
        async with asyncio.timeout(60), working(make_worker(tiny_model, tmp_path, engine, **LONG)) as task:
            while long_server.core.stats().tokens < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            feeder.send(m.Lost("worker0"))  # wrongly: it lives, and its next hello takes the tickets up again
            while long_server.core.stats().ready < 2:
                assert not task.done()
                await asyncio.sleep(0.01)

    with peers(long_server, tmp_path, [0]) as (_, feeder):
        asyncio.run(live(feeder))
    assert len(engine.requests) == 4
    assert engine.abandoned == [request.id for request in engine.requests[:2]]
    assert [request.id.split(".")[1] for request in engine.requests] == ["1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([m.News(5, False)], m.News(5, False)),
        ([m.News(6, False)], m.News(6, True)),  # of 5 nothing was heard: its weights may be others
        ([m.News(5, False), m.News(6, False)], m.News(6, False)),
        ([m.News(5, True), m.News(6, False)], m.News(6, True)),
        ([m.News(3, True), m.News(5, False)], m.News(5, False)),  # 3 is old news
        ([m.News(1 << 32, False)], m.News(1 << 32, True)),
    ],
)
def test_news_that_was_missed_may_have_changed_the_weights(
    said: list[m.News], expected: m.News, server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    async def newest() -> m.News:
        worker = make_worker(tiny_model, tmp_path, QuickEngine())
        worker.version = 4
        for news in said:
            worker.news.put_nowait(news)
        found = await worker._newest()
        await worker.close()
        return found

    assert asyncio.run(newest()) == expected
