"""`async-rl bench buffer`: what the buffer takes in, how fast it answers, what that costs; and what its peers do.

    python -m async_rl.benchmarks.buffer [--json FILE] [--seconds S] [--no-peers]

The server is the real process on loopback TCP with durability `batch` and its journal on a disk; one client process
plays worker, feeder and learner (`load`). Every measure has a server of its own. Rates are of acknowledged tokens,
which are on disk by then. At the end of every measure the server's own counters are compared with what was
acknowledged; a difference is an error.

Progress goes to stderr, the result as JSON to stdout. `async_rl/benchmarks/peers.py` says what the peers are and how to
install the one that is no dependency.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import psutil
from msgspec import Struct

from async_rl.benchmarks import machine, peers
from async_rl.benchmarks.crowd import realtime_factor
from async_rl.benchmarks.load import Load, Shape
from async_rl.benchmarks.machine import Machine
from async_rl.benchmarks.server import ServerProcess, serving

WINDOW = 256
"""Messages that the worker sends ahead of acknowledgements."""
PACED = 1e6
"""Tokens per second at which `cpu_share` is measured."""


class Report(Struct, frozen=True):
    """Token rates per second, times in ms. None: not measured here."""

    machine: Machine
    versions: dict[str, str | None]
    seconds: float
    ingest_tokens_per_s: float
    ack_p50_ms: float
    ack_p99_ms: float
    """From when a message was due at half of the ingest rate to its acknowledgement."""
    take_ms: float
    """From `Take` to all tokens of a batch in the client's hands; median."""
    wire_bytes_per_token: float
    """What the worker sends."""
    disk_bytes_per_token: float
    """What the server writes, snapshots included."""
    cpu_share: float
    """Of one core, by the whole server process at a million tokens per second."""
    sim_realtime_factor: float | None
    ratio_ray_actor: float | None
    ratio_ray_queue: float | None
    ratio_transfer_queue: float | None
    """Ingest rate over that of the peer, called once at a time; `peers` has what it does with several outstanding."""
    peers: dict[str, peers.Rates | None]
    tokens_acknowledged: int
    tokens_stored: int
    """By the client's and by the server's count, over all measures; equal, or there is no report."""
    other_cpu: float
    """Cores that were busy with other processes while ingest was measured: above 0.1, measure again."""


@dataclass
class Bench:
    """The measures on one shape of load. `seconds` each, after `warm_up_s`."""

    shape: Shape
    seconds: float
    warm_up_s: float
    acknowledged: int = 0
    stored: int = 0

    @contextmanager
    def _loaded(self, *, trains: bool = True) -> Iterator[tuple[ServerProcess, Load]]:
        """A server and its load; at the end both must have counted the same."""
        with serving(self.shape.settings) as server:
            load = Load(server.endpoint, self.shape, window=WINDOW, trains=trains)
            try:
                load.start()
                yield server, load
                load.drain()
                stats = load.stats()
            finally:
                load.close()
        if stats.tokens != load.acknowledged or stats.refused_chunks or stats.refused_messages:
            raise RuntimeError(f"{load.acknowledged} tokens were acknowledged, but the buffer counts {stats}")
        self.acknowledged += load.acknowledged
        self.stored += stats.tokens

    def ingest(self) -> Ingest:
        """As fast as acknowledgements come."""
        with self._loaded() as (server, load):
            load.stream(self.warm_up_s)
            begun, cores, own = perf_counter(), _busy_s(), server.cpu_s() + _own_s()
            tokens, wire, disk = load.acknowledged, load.wire_bytes, server.bytes_written()
            load.stream(self.seconds)
            elapsed = perf_counter() - begun
            tokens = load.acknowledged - tokens
            others = _busy_s() - cores - (server.cpu_s() + _own_s() - own)
            return Ingest(
                tokens_per_s=tokens / elapsed,
                wire_bytes_per_token=(load.wire_bytes - wire) / max(tokens, 1),
                disk_bytes_per_token=(server.bytes_written() - disk) / max(tokens, 1),
                other_cpu=max(0.0, others / elapsed),
            )

    def latencies_ms(self, rate: float) -> tuple[float, float]:
        """Median and 99th percentile of the time to an acknowledgement at `rate` tokens per second."""
        with self._loaded() as (_, load):
            load.stream(self.warm_up_s, rate=rate)
            load.latencies.clear()
            load.stream(self.seconds, rate=rate)
            load.drain()
            p50, p99 = np.percentile(load.latencies, [50, 99])
            return float(p50) * 1e3, float(p99) * 1e3

    def cpu_share(self, rate: float) -> float:
        """Cores' worth of processor time that the server uses at `rate` tokens per second."""
        with self._loaded() as (server, load):
            load.stream(self.warm_up_s, rate=rate)
            begun, used = perf_counter(), server.cpu_s()
            load.stream(self.seconds, rate=rate)
            return (server.cpu_s() - used) / (perf_counter() - begun)

    def take_ms(self, rounds: int = 7) -> float:
        """Median time of `Take` and `Fetch` of one batch of whole trajectories, while nobody else asks for anything."""
        times: list[float] = []
        with self._loaded(trains=False) as (_, load):
            # The first trajectory of every column is short, so the first batches are not timed.
            untimed = -(-self.shape.tickets // self.shape.batch)
            for number in range(untimed + rounds):
                load.stream_until((number + 1) * self.shape.batch)
                load.drain()
                begun = perf_counter()
                batch, arrays = load.take()
                times.append((perf_counter() - begun) * 1e3)
                assert arrays.tokens.size == sum(row.length for row in batch.rows)
                assert number < untimed or arrays.tokens.size == self.shape.batch * self.shape.length
                load.commit(batch)
        return statistics.median(times[untimed:])


@dataclass(frozen=True)
class Ingest:
    """See `Report`."""

    tokens_per_s: float
    wire_bytes_per_token: float
    disk_bytes_per_token: float
    other_cpu: float


def _busy_s() -> float:
    """Processor seconds used by everything on this machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def _own_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


def run(
    *,
    seconds: float,
    warm_up_s: float = 2.0,
    shape: Shape | None = None,
    with_peers: bool = True,
    simulate: bool = True,
) -> Report:
    """All measures, one after the other."""
    bench = Bench(shape or Shape(), seconds, warm_up_s)
    ingest = bench.ingest()
    _say(f"ingest: {ingest.tokens_per_s / 1e6:.2f} million tokens/s")
    if ingest.other_cpu > 0.1:
        _say(f"note: other processes used {ingest.other_cpu:.2f} cores meanwhile; the figures are too low")
    p50, p99 = bench.latencies_ms(ingest.tokens_per_s / 2)
    _say(f"acknowledged at half of that: median {p50:.1f} ms, 99% within {p99:.1f} ms")
    cpu_share = bench.cpu_share(min(PACED, ingest.tokens_per_s / 2))
    _say(f"server at a million tokens/s: {cpu_share:.2f} of a core")
    take_ms = bench.take_ms()
    _say(f"take and fetch of {bench.shape.batch} trajectories: {take_ms:.1f} ms")
    rates: dict[str, peers.Rates | None] = dict.fromkeys(peers.NAMES)
    for name in peers.NAMES if with_peers else ():
        rates[name] = found = peers.measure(name, seconds)
        if found is not None:
            _say(
                f"{name}: {found.blocking / 1e6:.3f} million tokens/s, "
                f"{found.pipelined / 1e6:.3f} with several calls outstanding"
            )
    factor = realtime_factor() if simulate else None

    def ratio(name: str) -> float | None:
        found = rates[name]
        return None if found is None else ingest.tokens_per_s / found.blocking

    return Report(
        machine=machine.describe(),
        versions=machine.versions(),
        seconds=seconds,
        ingest_tokens_per_s=ingest.tokens_per_s,
        ack_p50_ms=p50,
        ack_p99_ms=p99,
        take_ms=take_ms,
        wire_bytes_per_token=ingest.wire_bytes_per_token,
        disk_bytes_per_token=ingest.disk_bytes_per_token,
        cpu_share=cpu_share,
        sim_realtime_factor=factor,
        ratio_ray_actor=ratio("ray_actor"),
        ratio_ray_queue=ratio("ray_queue"),
        ratio_transfer_queue=ratio("transfer_queue"),
        peers=rates,
        tokens_acknowledged=bench.acknowledged,
        tokens_stored=bench.stored,
        other_cpu=ingest.other_cpu,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the replay buffer on this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="length of each measure (default: 10)")
    parser.add_argument("--no-peers", action="store_true", help="without Ray and TransferQueue")
    args = parser.parse_args()
    report = run(seconds=args.seconds, with_peers=not args.no_peers)
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
