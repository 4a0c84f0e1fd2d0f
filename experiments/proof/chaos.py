"""A run whose processes are killed and stopped at random: `python -m experiments.proof.chaos [--seconds 900]`.

Three workers and two learner ranks on the torch engine. Every 45 seconds a random process of any role gets SIGKILL, or
SIGSTOP and 30 seconds later SIGCONT. Prints JSON; a promise that was not kept is exit 1.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from async_rl.tracking import metrics, summary
from experiments.proof.accounts import each_once
from experiments.proof.bars import Result, keep

MODULES = ("async_rl.buffer_process", "async_rl.learner.rank", "async_rl.rollout.worker")
BATCH, ETA = 8, 2
LATENCY_S = 2.0
"""Of the environment: with it a step takes about two and a half seconds, whatever the machine."""


@dataclass(frozen=True)
class Plan:
    """How long, how often, and for how long a process is stopped; seconds."""

    seconds: float = 900.0
    every_s: float = 45.0
    stop_s: float = 30.0
    seed: int = 0

    @property
    def steps(self) -> int:
        return max(4, round(self.seconds / 2.4))


@dataclass
class Done:
    """What was done to whom, and how the run ended."""

    code: int = 0
    output: str = ""
    faults: list[str] = field(default_factory=list)


def configuration(folder: Path, plan: Plan) -> Path:
    subprocess.run([sys.executable, "-m", "async_rl.benchmarks.tiny", str(folder / "model")], check=True)
    rows = ({"prompt": f"{i}", "answer": i} for i in range(64))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "name": "chaos",
        "folder": str(folder / "runs"),
        "steps": plan.steps,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data.jsonl")},
        "environment": {"name": "async_rl.environments.emulated:Tool", "params": {"latency_s": LATENCY_S, "turns": 2}},
        "reward": {"function": "async_rl.benchmarks.overlap:coin"},
        "rollout": {"engine": "torch", "workers": 3, "slots": 3, "max_tokens": 48, "dtype": "float32"},
        "buffer": {"batch_size": BATCH, "group_size": 4, "worker_timeout_s": 10},
        "staleness": {"max_staleness": ETA},
        "learner": {"ranks": 2, "learning_rate": 1e-4, "dtype": "float32", "checkpoint_every": 10},
        "tracking": {"mlflow": False},
    }
    (folder / "chaos.yaml").write_text(yaml.safe_dump(tree))
    return folder / "chaos.yaml"


def victims(run: int) -> list[psutil.Process]:
    """The processes of a run, by their command lines."""
    return [process for process in psutil.Process(run).children() if _module(process)]


def _module(process: psutil.Process) -> str | None:
    try:
        line = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    return next((module for module in MODULES if module in line), None)


def torment(folder: Path, plan: Plan) -> Done:
    """The run to its end, with faults from its first step on."""
    randomness, done = random.Random(plan.seed), Done()
    command = [sys.executable, "-m", "launchers.cli", "train", str(configuration(folder, plan))]
    with (folder / "out").open("w+") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
        while not metrics.read(folder / "runs" / "chaos") and run.poll() is None:
            time.sleep(0.2)
        begun = time.monotonic()
        stopped: list[tuple[float, psutil.Process]] = []
        due = begun + plan.every_s
        while run.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            for moment, process in [each for each in stopped if now >= each[0]]:
                stopped.remove((moment, process))
                _send(process, signal.SIGCONT)
            if now >= due:
                due += plan.every_s
                process = randomness.choice(victims(run.pid))
                sig = randomness.choice([signal.SIGKILL, signal.SIGSTOP])
                name = _module(process)
                if _send(process, sig):
                    done.faults.append(f"{now - begun:.0f} s: {sig.name} {name}")
                    if sig == signal.SIGSTOP:
                        stopped.append((now + plan.stop_s, process))
        done.code = run.returncode
        out.seek(0)
        done.output = out.read()
    return done


def _send(process: psutil.Process, sig: signal.Signals) -> bool:
    try:
        process.send_signal(sig)
    except psutil.NoSuchProcess:
        return False
    return True


def judged(folder: Path, plan: Plan, done: Done) -> Result:
    """Whether the run's promises were kept."""
    run = folder / "runs" / "chaos"
    found = summary.read(run)
    records = metrics.read(run)
    tickets = found.tickets
    bars = {
        "exit 0": done.code == 0,
        "all steps": [record["step"] for record in records] == list(range(1, plan.steps + 1)),
        "ages within the bound": max((record["age_max"] for record in records), default=0) <= ETA,
        "each sample once": each_once(run, tickets.trained),
        "as many as the steps say": tickets.trained == sum(record["samples"] for record in records),
        "counters add up": tickets.add_up,
        "no tag differs from the engine's": found.span_mismatches == 0,
    }
    lineage = run / "lineage.json"
    return {
        "bars": bars,
        "faults": done.faults,
        "steps": len(records),
        "wall_s": found.wall_s,
        "lost_workers": found.lost_workers,
        "reissued": found.reissued,
        "kept_tokens": found.kept_tokens,
        "discarded_tokens": found.discarded_tokens,
        "incarnations": 1 + (len(json.loads(lineage.read_text())) if lineage.exists() else 0),
        **({} if all(bars.values()) else {"output": done.output[-4000:]}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0, help="length of the run (default: 900)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    args = parser.parse_args()
    plan = Plan(args.seconds, seed=args.seed)
    with tempfile.TemporaryDirectory(prefix="async-rl-chaos-") as folder:
        done = torment(Path(folder), plan)
        result = judged(Path(folder), plan, done)
    keep("chaos", result)


if __name__ == "__main__":
    main()
