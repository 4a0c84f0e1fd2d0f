"""What other people use to move tokens, doing the same work: `python -m async_rl.benchmarks.peers NAME SECONDS`.

Each takes 16-token chunks of 256 trajectories, with their log-probs, from one producer. None keeps anything on disk,
checks offsets, attempts or budgets, or knows tickets. Each is measured with one call at a time and with several
outstanding.

    ray_actor        an actor that appends to per-trajectory arrays, called with the columns of 256 chunks
    ray_queue        `ray.util.queue.Queue`, one chunk each; nobody takes them out
    transfer_queue   TransferQueue's `kv_batch_put` of 256 chunks

TransferQueue is no dependency of this project and its own dependencies do not resolve with ours (hydra-core and
omegaconf of an old ANTLR), but what is needed here does; it also brings a top-level package called `tests`:

    pip install --no-deps TransferQueue==0.1.11 tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.4.0
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

TICKETS, CHUNK, LENGTH = 256, 16, 2000
NAMES = ("ray_actor", "ray_queue", "transfer_queue")
WARM_UP_S = 2.0
INSTALL = "pip install --no-deps TransferQueue==0.1.11 tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.4.0"
MODULES = ("transfer_queue", "tensordict", "omegaconf", "prometheus_client")


class Rates(Struct, frozen=True):
    """Tokens per second, with one call at a time and with several outstanding."""

    blocking: float
    pipelined: float


def measure(name: str, seconds: float) -> Rates | None:
    """Runs one peer in a process of its own; None, with a line that says why, if it is not installed or fails."""
    if name == "transfer_queue" and not all(find_spec(module) for module in MODULES):
        print(f"transfer_queue: not installed; {INSTALL}", file=sys.stderr, flush=True)
        return None
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "async_rl.benchmarks.peers", name, str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}: failed\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Rates)


def main() -> None:
    name, seconds = sys.argv[1], float(sys.argv[2])
    rates = {"ray_actor": ray_actor, "ray_queue": ray_queue, "transfer_queue": transfer_queue}[name](seconds)
    print(msgspec.json.encode(rates).decode())


class Columns:
    """The chunks of one flush after another, as the worker of `load` makes them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.ticket = np.arange(TICKETS)
        self.length = np.full(TICKETS, CHUNK, np.int32)
        self.tokens = rng.integers(0, 150_000, TICKETS * CHUNK, dtype=np.int32)
        self.logprobs = -rng.exponential(1.0, TICKETS * CHUNK).astype(np.float32)

    def flushes(self) -> Iterator[tuple[np.ndarray, ...]]:
        for number in count():
            offset = np.full(TICKETS, number * CHUNK % LENGTH, np.int32)
            yield self.ticket, offset, self.length, self.tokens, self.logprobs


# --- how it is timed ---------------------------------------------------------------------------------------------


def calls_per_s(start: Callable[[], Any], finish: Callable[[Any], None], seconds: float, outstanding: int) -> float:
    """Rate of calls that are started, at most `outstanding` ahead of the oldest that is not finished."""
    pending: deque[Any] = deque()
    done = 0
    measured_from = perf_counter() + WARM_UP_S
    while (now := perf_counter()) < measured_from + seconds:
        pending.append(start())
        if len(pending) >= outstanding:
            finish(pending.popleft())
            done += now >= measured_from
    rate = done / (perf_counter() - measured_from)
    while pending:
        finish(pending.popleft())
    return rate


async def awaits_per_s(call: Callable[[], Awaitable[Any]], seconds: float, outstanding: int) -> float:
    """The same for coroutines."""
    done = 0
    measured_from = perf_counter() + WARM_UP_S

    async def repeat() -> None:
        nonlocal done
        while (now := perf_counter()) < measured_from + seconds:
            await call()
            done += now >= measured_from

    await asyncio.gather(*(repeat() for _ in range(outstanding)))
    return done / (perf_counter() - measured_from)


# --- the peers ---------------------------------------------------------------------------------------------------


@contextmanager
def _ray(cores: int) -> Iterator[Any]:
    import ray

    ray.init(num_cpus=cores, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


class Arrays:
    """Per-trajectory arrays; an offset of 0 begins a new trajectory."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def append(self, columns: tuple[np.ndarray, ...]) -> None:
        ticket, offset, length, tokens, logprobs = columns
        at = 0
        for row, start, size in zip(ticket.tolist(), offset.tolist(), length.tolist(), strict=True):
            if start == 0:
                self.rows[row] = np.empty(LENGTH, np.int32), np.empty(LENGTH, np.float32)
            into_tokens, into_logprobs = self.rows[row]
            into_tokens[start : start + size] = tokens[at : at + size]
            into_logprobs[start : start + size] = logprobs[at : at + size]
            at += size


def ray_actor(seconds: float) -> Rates:
    with _ray(cores=2) as ray:
        actor = ray.remote(Arrays).remote()
        flushes = Columns().flushes()

        def rate(outstanding: int) -> float:
            calls = calls_per_s(lambda: actor.append.remote(next(flushes)), ray.get, seconds, outstanding)
            return calls * TICKETS * CHUNK

        return Rates(blocking=rate(1), pipelined=rate(8))


def ray_queue(seconds: float) -> Rates:
    with _ray(cores=2):
        from ray.util.queue import Queue

        columns = Columns()
        chunk = (0, 1, 0, 0, columns.tokens[:CHUNK], columns.logprobs[:CHUNK])
        queue = Queue()
        blocking = calls_per_s(lambda: queue.put(chunk), lambda _: None, seconds, 1)
        queue.shutdown()
        queue = Queue()
        pipelined = asyncio.run(awaits_per_s(lambda: queue.put_async(chunk), seconds, 64))
        return Rates(blocking * CHUNK, pipelined * CHUNK)


def transfer_queue(seconds: float) -> Rates:
    # It waits for more cores than there are here.
    with _ray(cores=16):
        import torch
        import transfer_queue as queue
        from tensordict import TensorDict

        queue.init()
        columns = Columns()
        tokens = torch.from_numpy(columns.tokens.reshape(TICKETS, CHUNK))
        logprobs = torch.from_numpy(columns.logprobs.reshape(TICKETS, CHUNK))
        numbers = count()

        def put() -> tuple[list[str], str, TensorDict]:
            """A partition per life of the trajectories, a key per chunk."""
            number = next(numbers)
            keys = [f"{ticket}:{number}" for ticket in range(TICKETS)]
            fields = TensorDict({"tokens": tokens, "logprobs": logprobs}, batch_size=TICKETS)
            return keys, f"life{number * CHUNK // LENGTH}", fields

        async def put_async() -> None:
            keys, partition, fields = put()
            await queue.async_kv_batch_put(keys, partition, fields=fields)

        def put_blocking() -> None:
            keys, partition, fields = put()
            queue.kv_batch_put(keys, partition, fields=fields)

        blocking = calls_per_s(put_blocking, lambda _: None, seconds, 1)
        # Its client's sockets belong to its client's event loop.
        pipelined = queue.get_client()._run_coroutine(awaits_per_s(put_async, seconds, 8))
        queue.close()
        return Rates(blocking * TICKETS * CHUNK, pipelined * TICKETS * CHUNK)


if __name__ == "__main__":
    main()
