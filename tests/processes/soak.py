"""Ticketed producers at a steady rate against a learner that stops: `python -m tests.processes.soak [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from async_rl.benchmarks.load import Load, Shape
from async_rl.benchmarks.machine import describe, versions
from async_rl.benchmarks.server import ServerProcess
from buffers import journal
from buffers.config import BufferConfig

SEGMENT_MIB = 16
RATE = 1e6
FILL_S = 8.0


@dataclass
class Soak:
    """What was seen. Memory is resident bytes of the server, sampled ten times a second after the warm-up."""

    seconds: float
    rate: float
    rate_while_stopped: float
    """Tokens per second over the last third of the stop."""
    tokens_into_the_stop: int
    window_tokens: int
    rate_after: float
    rss_before: int
    rss_most: int
    journal_most: int
    journal_bound: int
    acknowledged: int
    stored: int
    dropped: int


class Watch:
    """Samples the server's memory and its journal's size."""

    def __init__(self, server: ServerProcess) -> None:
        self.rss = self.journal = 0
        self._server, self._going = server, True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while self._going:
            self.rss = max(self.rss, self._server.rss())
            self.journal = max(self.journal, journal_bytes(self._server.folder))
            time.sleep(0.1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        yield
        self._going = False
        self._thread.join()


def journal_bytes(folder: Path) -> int:
    total = 0
    for path in (folder / "journal").iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it has just been cut
            continue
    return total


def soak(folder: Path, *, warm_s: float, stop_s: float, after_s: float) -> Soak:
    """Streams for `warm_s`, then `stop_s` with a learner that stands still, then `after_s`."""
    shape = Shape()
    server = ServerProcess(folder, shape.settings, BufferConfig(segment_mib=SEGMENT_MIB))
    load = Load(server.endpoint, shape, window=64)
    watch = Watch(server)
    begun = time.monotonic()
    load.start()
    load.stream(warm_s / 2, rate=RATE)
    load.trains = False
    load.stream(FILL_S, rate=RATE)  # memory is what it will be when the window has been full once
    load.go_on()
    load.stream(warm_s / 2, rate=RATE)
    rss = server.rss()
    with watch.watching():
        before = load.acknowledged
        load.trains = False
        load.stream(stop_s * 2 / 3, rate=RATE)
        into = load.acknowledged - before
        load.stream(stop_s / 3, rate=RATE)
        stopped = (load.acknowledged - before - into) / (stop_s / 3)
        load.go_on()
        again = load.acknowledged
        load.stream(after_s, rate=RATE)
        after = (load.acknowledged - again) / after_s
    load.drain()
    stats = load.stats()
    load.close()
    server.close()
    return Soak(
        seconds=round(time.monotonic() - begun, 1),
        rate=RATE,
        rate_while_stopped=stopped,
        tokens_into_the_stop=into,
        window_tokens=shape.settings.limit * shape.length,
        rate_after=round(after),
        rss_before=rss,
        rss_most=watch.rss,
        journal_most=watch.journal,
        journal_bound=journal.bound(
            shape.settings,
            checkpoint_steps=shape.checkpoint_steps,
            segment_bytes=SEGMENT_MIB << 20,
            chunk_tokens=shape.chunk,
        ),
        acknowledged=load.acknowledged,
        stored=stats.tokens,
        dropped=stats.expired + stats.failed + stats.cancelled,
    )


def missed(seen: Soak) -> list[str]:
    """Which bounds did not hold."""
    bounds = {
        "ingest goes on while nobody trains": seen.rate_while_stopped == 0,
        "more than one admission window came in": seen.tokens_into_the_stop <= seen.window_tokens,
        "ingest does not come back": seen.rate_after > 0,
        "the server's memory grows": seen.rss_most <= 1.05 * seen.rss_before,
        "the journal grows": seen.journal_most <= seen.journal_bound,
        "acknowledged and stored tokens differ": seen.stored == seen.acknowledged,
        "something was dropped": seen.dropped == 0,
    }
    return [name for name, holds in bounds.items() if not holds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--warm", type=float, default=180.0)
    parser.add_argument("--stop", type=float, default=120.0)
    parser.add_argument("--after", type=float, default=300.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = soak(Path(folder), warm_s=args.warm, stop_s=args.stop, after_s=args.after)
    result = {
        "soak": asdict(seen),
        "missed": missed(seen),
        "bounded": not missed(seen),
        "machine": msgspec.to_builtins(describe()),
        "versions": versions(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    sys.exit(1 if missed(seen) else 0)


if __name__ == "__main__":
    main()
