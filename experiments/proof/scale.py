"""A rollout pool that grows and shrinks while its run goes on: `python -m experiments.proof.scale [--phase-s 40]`.

One worker, then three, then one, by `async-rl scale`, with an environment that takes two seconds, so that slots and not
cores are what is scarce. Prints JSON; a promise that was not kept is exit 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from async_rl.tracking import metrics, summary
from experiments.proof import chaos
from experiments.proof.accounts import each_once
from experiments.proof.bars import Result, keep

SIZES = (1, 3, 1)


def story(folder: Path, phase_s: float) -> tuple[int, str, list[float]]:
    """Exit code, output, and the trained trajectories per second of each size of the pool."""
    path = chaos.configuration(folder, chaos.Plan())
    tree = yaml.safe_load(path.read_text())
    tree["steps"] = 10**6
    tree["learner"]["ranks"] = 1
    tree["rollout"]["workers"] = SIZES[0]
    path.write_text(yaml.safe_dump(tree))
    run = folder / "runs" / "chaos"
    out = (folder / "out").open("w+")
    process = subprocess.Popen([sys.executable, "-m", "launchers.cli", "train", str(path)], stdout=out, stderr=out)
    rates: list[float] = []
    try:
        for number, size in enumerate(SIZES):
            if number:
                ask = ["scale", str(run), "--rollout-workers", str(size)]
                subprocess.run([sys.executable, "-m", "launchers.cli", *ask], check=True, stdout=subprocess.DEVNULL)
            until(lambda number=number, size=size: settled(run, out.name, number, size), process)
            rates.append(rate(run, phase_s))
        process.send_signal(2)
        return process.wait(60), Path(out.name).read_text(), rates
    finally:
        process.kill()
        out.close()


def settled(run: Path, output: str, number: int, size: int) -> bool:
    """The pool has the size that was asked for, and every worker works."""
    said = Path(output).read_text()
    if size < max(SIZES[:number], default=0):
        return said.count("has left") >= max(SIZES) - size
    running = [path for path in (run / "usage").glob("worker*.jsonl") if '"generate": 0.0,' not in _last(path)]
    return len(running) >= size and len(metrics.read(run)) >= 2


def _last(path: Path) -> str:
    return (path.read_text().splitlines() or ['"generate": 0.0,'])[-1]


def rate(run: Path, seconds: float) -> float:
    time.sleep(seconds / 4)  # what the size before has begun
    before = metrics.read(run)
    time.sleep(seconds)
    steps = metrics.read(run)[len(before) :]
    return sum(step["samples"] for step in steps) / (steps[-1]["time"] - before[-1]["time"])


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError("the run did not get there")
        time.sleep(0.2)


def judged(folder: Path, code: int, output: str, rates: list[float]) -> Result:
    run = folder / "runs" / "chaos"
    found = summary.read(run)
    tickets = found.tickets
    bars = {
        "stopped by the user": code == 130,
        "three workers: at least 2.4 times one": rates[1] >= 2.4 * rates[0],
        "one again: at most 1.25 times one": rates[2] <= 1.25 * rates[0],
        "each sample once": each_once(run, tickets.trained),
        "counters add up": tickets.add_up,
        "nobody died": found.lost_workers == 0,
        "nothing was generated twice": found.discarded_tokens == 0 and found.reissued > 0,
    }
    return {
        "bars": bars,
        "trajectories_per_s": dict(
            zip(("one worker", "three", "one again"), (round(r, 3) for r in rates), strict=True)
        ),
        "reissued": found.reissued,
        "kept_tokens": found.kept_tokens,
        **({} if all(bars.values()) else {"output": output[-4000:]}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-s", type=float, default=40.0, help="measured seconds of each size (default: 40)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="async-rl-scale-") as folder:
        keep("scale", judged(Path(folder), *story(Path(folder), args.phase_s)))


if __name__ == "__main__":
    main()
