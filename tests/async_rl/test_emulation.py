"""Emulated devices: lengths, the clock that stands still, and an engine whose tokens come when they should."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from async_rl.benchmarks import overlap
from async_rl.config import Config, ConfigError, check, parse
from async_rl.emulation import DeviceClock, EmulationConfig, length
from async_rl.rollout.engines.emulated_engine import EmulatedEngine
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.tracking import usage
from async_rl.tracking.slots import Slots
from async_rl.weights.publisher import Publisher
from async_rl.weights.shm import Writer

END = 1


def config(**emulation: float) -> Config:
    return parse({"rollout": {"engine": "emulated"}, "emulation": emulation, "data": {"path": "x"}})


async def played(engine: EmulatedEngine, request: Request) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


def test_lengths_have_the_stated_mean_and_belong_to_their_key() -> None:
    lognormal = EmulationConfig(mean_tokens=400, sigma=0.8)
    lengths = [length(lognormal, f"{i}.0") for i in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(400, rel=0.03)
    assert length(lognormal, "7.0") == length(lognormal, "7.0")
    assert {length(EmulationConfig(mean_tokens=5), f"{i}") for i in range(9)} == {5}


def test_a_stopped_clock_stands_still() -> None:
    now = [10.0]
    clock = DeviceClock(lambda: now[0])
    assert clock.now() == 10
    now[0] = 12
    clock.stop()
    now[0] = 15
    assert clock.now() == 12
    clock.go()
    now[0] = 16
    assert clock.now() == 13


def test_a_response_has_its_length_and_takes_its_time() -> None:
    engine = EmulatedEngine(config(tokens_per_s=200, mean_tokens=40), end=END)
    begun = time.monotonic()
    deltas = asyncio.run(played(engine, Request("3.1.0", [5], max_tokens=100)))
    assert time.monotonic() - begun >= 40 / 200
    tokens = [token for delta in deltas for token in delta.tokens]
    assert len(tokens) == 40
    assert tokens[-1] == END
    assert END not in tokens[:-1]
    assert [delta.finish_reason for delta in deltas[-1:]] == ["stop"]
    assert deltas[-1].spans == [(0, deltas_start, deltas_end) for deltas_start, deltas_end in spans(deltas)]


def spans(deltas: list[Delta]) -> list[tuple[int, int]]:
    ends = [sum(len(delta.tokens) for delta in deltas[: i + 1]) for i in range(len(deltas))]
    return list(zip([0, *ends], ends, strict=False))


def test_a_budget_ends_a_response_and_who_asks_again_gets_the_rest() -> None:
    async def story() -> None:
        engine = EmulatedEngine(config(tokens_per_s=1000, mean_tokens=40), end=END)
        short = await played(engine, Request("3.1.0", [5], max_tokens=30))
        assert (sum(len(delta.tokens) for delta in short), short[-1].finish_reason) == (30, "length")
        rest = await played(engine, Request("3.2.0", [5], max_tokens=30))
        assert (sum(len(delta.tokens) for delta in rest), rest[-1].finish_reason) == (10, "stop")

    asyncio.run(story())


def test_tokens_carry_the_version_of_their_time(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, Writer(f"emulated-{tmp_path.name}"), torch.float32, [])
    manifest = publisher.publish(7, [("w", torch.ones(4))], None)

    async def story() -> list[Delta]:
        engine = EmulatedEngine(config(tokens_per_s=400, mean_tokens=200, update_s=0.2), end=END)
        running = asyncio.create_task(played(engine, Request("3.1.0", [5], max_tokens=1000)))
        await asyncio.sleep(0.2)
        assert await engine.update(manifest) >= 0.2
        return await running

    try:
        deltas = asyncio.run(story())
    finally:
        publisher.close()
    versions = [version for delta in deltas for version in delta.versions]
    assert len(versions) == 200
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    said = [version for version, start, end in deltas[-1].spans or [] for _ in range(end - start)]
    assert said == versions


def test_slot_seconds_by_state_add_up() -> None:
    clock = count(0.0, 1.0)  # every look at it is a second later
    slots = Slots(4, next(clock))
    with slots.taken("wait for weights", lambda: next(clock)) as doing:  # t = 1
        doing("generate")  # 2
        slots.paused("update", 0.5, next(clock))  # 3
        doing("reward")  # 4
    seconds = slots.seconds(next(clock))  # 5, 6
    assert seconds == {
        "generate": 1.5, "update": 0.5, "yield": 0.0, "environment": 0.0, "reward": 1.0, "wait for weights": 1.0,
        "no ticket": 4 * 6 - 4,
    }  # fmt: skip


def test_usage_between_two_times(tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir()
    (tmp_path / "usage" / "worker0.jsonl").write_text(
        '{"time": 1, "cpu_s": 1}\n{"time": 2, "cpu_s": 3}\n{"time": 5, "cpu_s": 4}\n{"time": 9, "cp'
    )
    assert usage.between(tmp_path, "worker0", 2.5, 4) == {"time": 3, "cpu_s": 1}
    assert usage.between(tmp_path, "worker0", 0, 9) == {"time": 4, "cpu_s": 3}


@pytest.mark.parametrize("setting", overlap.settings(["constant", "lognormal", "agentic"], [0.5], [2]))
def test_the_benchmark_makes_valid_configurations(setting: overlap.Setting, tmp_path: Path) -> None:
    check(parse(overlap.tree(setting, overlap.Options(), tmp_path)))


def test_a_colocated_baseline_has_the_devices_of_both_pools() -> None:
    options = overlap.Options(rollout_workers=3, learner_ranks=1, slots=100, rate=50, mean_tokens=400, batch=300)
    apart = parse(overlap.tree(overlap.Setting("lognormal", 0.5, 0, "disjoint"), options, Path()))
    shared = parse(overlap.tree(overlap.Setting("lognormal", 0.5, 0, "colocated"), options, Path()))
    assert overlap.seconds(options, "lognormal") == pytest.approx(8.0)  # 300 * 400 / (300 slots * 50)
    assert (apart.rollout.slots, apart.emulation.train_s) == (100, pytest.approx(0.8))
    assert (shared.rollout.slots, shared.emulation.train_s) == (133, pytest.approx(0.2))


def test_a_learner_is_not_emulated_on_real_samples() -> None:
    with pytest.raises(ConfigError, match="train nothing"):
        check(parse({"emulation": {"train_s": 1.0}, "data": {"path": "x"}, "reward": {"function": "a:b"}}))
