"""Devices that both pools use in turns: the baton between processes, and an engine that rests in mid-response."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.baton import SHM, Baton
from async_rl.config import parse
from async_rl.errors import RequestRefused
from async_rl.rollout.engines.emulated_engine import EmulatedEngine
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.rollout.engines.torch_engine import TorchEngine
from async_rl.rollout.engines.yielding import YieldingEngine

PROMPT = [0, 40, 41, 42, 1, 0]


@pytest.fixture
def name(tmp_path: Path) -> Iterator[str]:
    yield f"baton-{os.getpid()}-{tmp_path.name}"
    (SHM / f"async-rl-baton-{os.getpid()}-{tmp_path.name}").unlink(missing_ok=True)


def until(ready: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def learner(name: str, then: str) -> subprocess.Popen[str]:
    """Another process that takes the device and says so."""
    code = (
        "import sys, time\nfrom async_rl.baton import Baton\n"
        f"with Baton({name!r}).mine():\n    print('mine', flush=True)\n    {then}\nprint('done', flush=True)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_a_learner_waits_for_every_worker_and_workers_for_it(name: str) -> None:
    first, second = Baton(name), Baton(name)
    assert first.hold()
    assert second.hold()
    assert not first.asked()
    process = learner(name, "sys.stdin.readline()")
    assert process.stdout is not None
    assert process.stdin is not None
    until(first.asked)
    first.release()
    assert second.asked()
    second.release()
    assert process.stdout.readline() == "mine\n"
    assert not first.hold()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    assert first.hold()
    assert not first.asked()
    process.wait()
    for baton in (first, second):
        baton.close()


def test_the_wish_and_the_lock_of_a_killed_learner_go_with_it(name: str) -> None:
    worker = Baton(name)
    assert worker.hold()
    asking = learner(name, "pass")
    until(worker.asked)
    asking.kill()
    asking.wait()
    assert not worker.asked()  # it never got it
    worker.release()
    having = learner(name, "time.sleep(60)")
    assert having.stdout is not None
    assert having.stdout.readline() == "mine\n"
    assert not worker.hold()
    having.kill()
    having.wait()
    assert worker.hold()
    assert not worker.asked()
    worker.close()


async def collect(engine: YieldingEngine, request: Request) -> Delta:
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    async for delta in engine.generate(request):
        tokens += delta.tokens
        logprobs += delta.logprobs
        versions += delta.versions
        last = delta
    return Delta(tokens, logprobs, versions, last.finish_reason, last.spans)


def test_a_response_that_rests_is_the_one_that_does_not(tiny_model: Path) -> None:
    """On a deterministic engine, where that can be told: every token and log-prob, whenever it rests."""

    def engine() -> YieldingEngine:
        config = parse({"data": {"path": "x"}, "rollout": {"slots": 4, "dtype": "float32"}, "deterministic": True})
        return YieldingEngine(TorchEngine(config, model=str(tiny_model), max_model_tokens=128, seed=0))

    requests = [Request(str(i), PROMPT[i:], 60, seed=i) for i in range(4)]

    async def story(rests: int) -> list[Delta]:
        yielding = engine()
        await yielding.start()
        running = [asyncio.create_task(collect(yielding, request)) for request in requests]
        for _ in range(rests):
            await asyncio.sleep(0.03)
            await yielding.rest()
            assert yielding._streams == 0
            await asyncio.sleep(0.03)
            await yielding.resume()
        responses = await asyncio.gather(*running)
        await yielding.stop()
        return responses

    plain, rested = asyncio.run(story(0)), asyncio.run(story(3))
    for one, two in zip(plain, rested, strict=True):
        assert (one.tokens, one.logprobs, one.finish_reason) == (two.tokens, two.logprobs, two.finish_reason)
        assert [version for version, start, end in two.spans or [] for _ in range(end - start)] == two.versions


def test_nothing_runs_while_it_rests_and_budgets_are_kept() -> None:
    """failures.md 12: the continuation asks for what is left."""
    config = parse(
        {
            "data": {"path": "x"},
            "rollout": {"engine": "emulated"},
            "emulation": {"tokens_per_s": 400, "mean_tokens": 1000},
        }
    )

    async def story() -> tuple[Delta, float]:
        yielding = YieldingEngine(EmulatedEngine(config, end=1))
        running = asyncio.create_task(collect(yielding, Request("1.1.0", [5], 100)))
        await asyncio.sleep(0.12)
        await yielding.rest()
        begun = time.monotonic()
        waiting = asyncio.create_task(collect(yielding, Request("2.1.0", [5], 10)))
        await asyncio.sleep(0.3)
        assert not running.done()
        assert not waiting.done()
        await yielding.resume()
        await waiting
        return await running, time.monotonic() - begun

    response, _ = asyncio.run(story())
    assert (len(response.tokens), response.finish_reason) == (100, "length")
    assert [span for span in response.spans or [] if span[1] == 0]
    assert sum(end - start for _, start, end in response.spans or []) == 100


def test_whoever_stops_listening_and_what_is_refused(tiny_model: Path) -> None:
    async def story() -> None:
        config = parse({"data": {"path": "x"}, "rollout": {"slots": 2, "dtype": "float32"}})
        yielding = YieldingEngine(TorchEngine(config, model=str(tiny_model), max_model_tokens=128, seed=0))
        await yielding.start()
        with pytest.raises(RequestRefused):
            await collect(yielding, Request("long", [5] * 100, 60))
        for i in range(5):
            stream = yielding.generate(Request(str(i), PROMPT, 100))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        running = asyncio.create_task(collect(yielding, Request("x", PROMPT, 100)))
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.wait_for(yielding.rest(), 10)
        await yielding.resume()
        assert (await collect(yielding, Request("y", PROMPT, 4))).tokens
        await yielding.stop()

    asyncio.run(story())
