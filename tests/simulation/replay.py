"""`python -m tests.simulation.replay SEED` runs one seed; `--count N` runs N from there on, on all cores."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from traceback import format_exc

from tests.simulation.world import World


def attempt(seed: int) -> tuple[int, str, int, Counter[str]]:
    """The seed, the traceback of what broke (empty if nothing did), events, faults."""
    try:
        result = World(seed).run()
    except Exception:
        return seed, format_exc(), 0, Counter()
    return seed, "", result.events, result.crashes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start, events, faults = time.monotonic(), 0, Counter[str]()
    failed: list[int] = []
    with ProcessPoolExecutor() as pool:
        for seed, error, count, crashes in pool.map(
            attempt, range(args.seed, args.seed + args.count), chunksize=20 if args.count > 100 else 1
        ):
            events += count
            faults += crashes
            if error:
                failed.append(seed)
                print(f"{error}\nseed {seed}; replay it with: python -m tests.simulation.replay {seed}", flush=True)
                if len(failed) >= 5:
                    break
    took = time.monotonic() - start
    print(f"{args.count} seeds, {events} events, {took:.0f} s, {len(failed)} failed {failed}; faults: {dict(faults)}")
    if args.json:
        figures = {"seeds": args.count, "events": events, "failed": failed, "faults": faults, "seconds": round(took)}
        args.json.write_text(json.dumps(figures))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
