"""Segment files or an embedded store? `python -m experiments.journal.compare [--json FILE]`; needs lmdb.

Both write the same messages (one chunk of 16 tokens for each of 256 trajectories) in groups that are synced at once,
then drop the oldest half, then read all that is left; the files are checked against their checksums as they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from async_rl.benchmarks.machine import describe, versions
from async_rl.benchmarks.server import disk
from buffers import messages as m
from buffers import segments

TOKENS = 4096
GROUPS = (1, 4, 16, 64)
MESSAGES = 2048


def message() -> list[bytes]:
    """About 40 kB."""
    rng = np.random.default_rng(0)
    rows = TOKENS // 16
    chunks = m.Chunks(
        ticket=np.arange(rows, dtype=np.int64),
        attempt=np.ones(rows, np.int32),
        offset=np.zeros(rows, np.int32),
        length=np.full(rows, 16, np.int32),
        version=np.zeros(rows, np.int64),
        tokens=rng.integers(0, 50_000, TOKENS, dtype=np.int32),
        logprobs=rng.standard_normal(TOKENS, dtype=np.float32),
    )
    return [m.encode(chunks.header(1)), chunks.to_frame()]


def files(folder: Path, group: int) -> dict[str, float]:
    """Two segment files; dropping the older half is unlinking one."""
    frames = message()
    written = 0.0
    for number in (1, 2):
        path = folder / f"{number:08d}.journal"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, segments.MAGIC)
        begun = perf_counter()
        for _ in range(MESSAGES // 2 // group):
            parts = [part for _ in range(group) for part in segments.pack("worker0", frames)]
            os.write(file, segments.seal(parts, group))
            os.fdatasync(file)
        written += perf_counter() - begun
        os.close(file)
    size = sum(path.stat().st_size for path in folder.iterdir())
    begun = perf_counter()
    (folder / "00000001.journal").unlink()
    dropped = perf_counter() - begun
    begun = perf_counter()
    count = sum(len(entry.frames[0]) > 0 for entry in segments.Segment(folder / "00000002.journal").entries())
    return _figures(written, dropped, perf_counter() - begun, size, count)


def embedded(folder: Path, group: int) -> dict[str, float]:
    """LMDB, one entry a message under its number, one transaction a group; dropping is deleting keys."""
    import lmdb

    frames = message()
    environment = lmdb.open(str(folder), map_size=1 << 32)
    begun = perf_counter()
    for first in range(0, MESSAGES, group):
        with environment.begin(write=True) as transaction:
            for number in range(first, first + group):
                transaction.put(number.to_bytes(8, "big"), b"".join(segments.pack("worker0", frames)), append=True)
    written = perf_counter() - begun
    size = sum(path.stat().st_size for path in folder.iterdir())
    begun = perf_counter()
    with environment.begin(write=True) as transaction:
        for number in range(MESSAGES // 2):
            transaction.delete(number.to_bytes(8, "big"))
    dropped = perf_counter() - begun
    begun = perf_counter()
    with environment.begin() as transaction:
        count = sum(len(value) > 0 for _, value in transaction.cursor())
    read = perf_counter() - begun
    environment.close()
    return _figures(written, dropped, read, size, count)


def _figures(written: float, dropped: float, read: float, size: int, count: int) -> dict[str, float]:
    assert count == MESSAGES // 2
    return {
        "million_tokens_per_s": round(MESSAGES * TOKENS / written / 1e6, 2),
        "bytes_per_token": round(size / MESSAGES / TOKENS, 2),
        "drop_ms": round(dropped * 1e3, 2),
        "read_million_tokens_per_s": round(count * TOKENS / read / 1e6, 1),
    }


def measure(way: Callable[[Path, int], dict[str, float]], group: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(dir=disk()))
    try:
        return way(folder, group)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measure(files, 16)  # warm
    table = {
        f"groups of {group}": {"files": measure(files, group), "lmdb": measure(embedded, group)} for group in GROUPS
    }
    result = {"journal": table, "machine": msgspec.to_builtins(describe()), "versions": versions()}
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
