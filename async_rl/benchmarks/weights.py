"""`async-rl bench weights`: from the learner's parameters into a running engine, and to another host.

    python -m async_rl.benchmarks.weights [--json FILE] [--model PATH] [--rate LR] [--repeat N]

    publish   how long the learner is held up: a copy in the engine's type into shared memory, with checksums
    pause     how long a generating engine stands still for an update, beside the engine's own reload of the same
              weights from a file that is in memory, in turns
    network   bytes and seconds of a whole version and of deltas, over a socket of this host, after AdamW steps at the
              learning rate given; what arrives is compared bit for bit

Progress goes to stderr, the result as JSON to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import nn
from transformers import AutoModelForCausalLM

from async_rl import model
from async_rl.benchmarks import machine
from async_rl.benchmarks.machine import Machine
from async_rl.config import parse
from async_rl.learner.policy import tied_names
from async_rl.rollout.engines.protocol import Request
from async_rl.rollout.engines.vllm_engine import VllmEngine
from async_rl.weights import shm
from async_rl.weights.client import WeightsClient
from async_rl.weights.publisher import Publisher
from async_rl.weights.server import WeightsServer
from async_rl.weights.shm import Writer

RUNNING = 16
"""Requests that generate while weights are updated."""


class Pause(Struct, frozen=True):
    """Medians of seconds for which generation stood still. `ratio`: ours over the engine's own."""

    own_reload_s: float
    update_s: float
    ratio: float
    finished: int
    """Requests that went on and finished, of `RUNNING`."""


class Network(Struct, frozen=True):
    """`delta_share`: bytes of a delta over those of the whole version, the largest of the steps."""

    whole_bytes: int
    whole_s: float
    delta_bytes: int
    delta_s: float
    delta_share: float
    bit_equal: bool


class Result(Struct, frozen=True):
    """Everything that was measured."""

    machine: Machine
    versions: dict[str, str | None]
    model: str
    parameters: int
    learning_rate: float
    publish_s: float
    pause: Pause
    network: Network


class Learner:
    """Parameters, an optimizer whose gradients are noise, and a publisher."""

    def __init__(self, path: str, rate: float, folder: Path, server: WeightsServer | None = None) -> None:
        self.module: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=rate, fused=True)
        tied = tied_names(self.module)
        self.publisher = Publisher(
            folder, Writer(f"bench-{os.getpid()}", 3 if server else 2), torch.bfloat16, tied, server
        )
        self.version = 0
        self.times: list[float] = []

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def publish(self) -> shm.Manifest:
        self.version += 1
        begun = perf_counter()
        manifest = self.publisher.publish(self.version, self.module.named_parameters(), None)
        self.times.append(perf_counter() - begun)
        return manifest


async def pauses(path: str, learner: Learner, folder: Path, repeat: int) -> Pause:
    learner.module.to(torch.bfloat16).save_pretrained(folder / "bfloat16")
    learner.module.to(torch.float32)
    tree = {"data": {"path": "x"}, "rollout": {"slots": RUNNING}}
    cores = sorted(os.sched_getaffinity(0))
    engine = VllmEngine(parse(tree), model=path, max_model_tokens=1024, cores=cores[:1], seed=0)
    await engine.start()
    try:
        requests = [asyncio.create_task(_play(engine, f"r{i}")) for i in range(RUNNING)]
        await asyncio.sleep(2.0)
        own: list[float] = []
        ours: list[float] = []
        for turn in range(repeat + 1):
            manifest = learner.publish()
            with shm.hold(manifest):
                ours.append(await engine.update(manifest))
            begun = perf_counter()
            async with engine.paused():
                await engine.running.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "bfloat16")})
            own.append(perf_counter() - begun)
            print(f"update {turn}: {ours[-1]:.3f} s, own reload {own[-1]:.3f} s", file=sys.stderr, flush=True)
        finished = sum(await asyncio.gather(*requests))
    finally:
        await engine.stop()
    # The first of each pays for what is never paid again.
    own_s, ours_s = statistics.median(own[1:]), statistics.median(ours[1:])
    return Pause(round(own_s, 4), round(ours_s, 4), round(ours_s / own_s, 3), finished)


async def _play(engine: VllmEngine, name: str) -> bool:
    reason = None
    async for delta in engine.generate(Request(name, [1, 2, 3, 4, 5], 700)):
        reason = delta.finish_reason
    return reason is not None


@asynccontextmanager
async def _pulling(server: WeightsServer) -> AsyncIterator[WeightsClient]:
    client = WeightsClient(f"bench-client-{os.getpid()}")
    client.connect(server.endpoint)
    try:
        yield client
    finally:
        client.close()


async def network(learner: Learner, server: WeightsServer, repeat: int) -> Network:
    sizes: list[int] = []
    times: list[float] = []
    equal = True
    async with _pulling(server) as client:
        for turn in range(repeat + 1):
            manifest = learner.publish()
            begun, before = perf_counter(), client.pulled.deltas
            offer = await client.pull()
            times.append(perf_counter() - begun)
            assert offer.manifest is not None
            with shm.hold(manifest), shm.hold(offer.manifest):
                equal &= bool(np.array_equal(shm.data(manifest), shm.data(offer.manifest)))
            sizes.append(client.pulled.deltas - before)
            print(f"version {turn}: {sizes[-1]} bytes in deltas, {times[-1]:.2f} s", file=sys.stderr, flush=True)
            learner.step()
        whole = client.pulled.whole
    largest = max(sizes[1:])
    share = largest / whole if all(sizes[1:]) else 1.0
    return Network(whole, round(times[0], 3), largest, round(statistics.median(times[1:]), 3), round(share, 4), equal)


@contextlib.contextmanager
def _learner(path: str, rate: float, folder: Path, server: WeightsServer | None = None) -> Iterator[Learner]:
    learner = Learner(path, rate, folder, server)
    try:
        yield learner
    finally:
        learner.publisher.close()


def benchmark(name: str, rate: float, repeat: int) -> Result:
    path = model.resolve(name)
    with tempfile.TemporaryDirectory(prefix="async-rl-weights-") as temporary:
        folder = Path(temporary)
        server = WeightsServer("tcp://127.0.0.1:*", None, deltas=True)
        with _learner(path, rate, folder, server) as learner:
            print("network", file=sys.stderr, flush=True)
            sent = asyncio.run(network(learner, server, repeat))
        with _learner(path, rate, folder) as learner:
            print("pause", file=sys.stderr, flush=True)
            pause = asyncio.run(pauses(path, learner, folder, repeat))
            return Result(
                machine.describe(),
                machine.versions(),
                name,
                sum(parameter.numel() for parameter in learner.module.parameters()),
                rate,
                round(statistics.median(learner.times[1:]), 4),
                pause,
                sent,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--model", default="smollm2-135m", metavar="PATH", help="model (default: smollm2-135m)")
    parser.add_argument("--rate", type=float, default=1e-6, metavar="LR", help="learning rate (default: 1e-6)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="measured turns (default: 5)")
    args = parser.parse_args()
    text = msgspec.json.format(msgspec.json.encode(benchmark(args.model, args.rate, args.repeat)), indent=2)
    print(text.decode())
    if args.json:
        args.json.write_bytes(text + b"\n")


if __name__ == "__main__":
    main()
