"""Pools, weights and launchers against their bars: `python -m experiments.proof.pools NAME`.

overlap   emulated devices, the setting of the planning figures, eta = 4 and both synchronous baselines
weights   what an update costs the engine, the learner and the network, on SmolLM2-135M and vLLM
ray       the quickstart on a Ray cluster of its own
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from async_rl.tracking import metrics, summary
from experiments.proof.bars import Result, keep
from experiments.proof.main_job import async_rl, quickstart

PLANNED = {0.5: 0.98, 0.8: 0.97}
"""Efficiency at eta = 4 by sigma, from an independent sketch of the system."""
RATE = "1e-6"


def overlap(folder: Path) -> Result:
    sigmas = ",".join(map(str, PLANNED))
    async_rl("bench", "overlap", "--sigma", sigmas, "--eta", "4", "--json", str(folder / "overlap.json"))
    result = json.loads((folder / "overlap.json").read_text())
    bars: dict[str, bool] = {}
    for record in result["records"]:
        bars[f"sigma {record['sigma']}, eta {record['eta']}, {record['placement']}: own work is small"] = record[
            "valid"
        ]
        if record["eta"] == 4:
            planned = PLANNED[record["sigma"]]
            bars[f"sigma {record['sigma']}: .95 of the ideal"] = record["efficiency"] >= 0.95
            near = abs(record["efficiency"] - planned) <= 0.03
            bars[f"sigma {record['sigma']}: within .03 of the planned {planned}"] = near
    return {"bars": bars, **result}


def weights(folder: Path) -> Result:
    """The benchmark, and how long real steps were held up by publishing."""
    async_rl("bench", "weights", "--rate", RATE, "--json", str(folder / "weights.json"))
    result = json.loads((folder / "weights.json").read_text())
    more = ["--steps", "16", "--set", "weights.transport=zmq", "--set", f"learner.learning_rate={RATE}"]
    code, _, _ = async_rl("train", "quickstart", "--set", f"folder={folder}", *more)
    steps = metrics.read(folder / "quickstart")[1:]
    spent = [(step["publish_s"], step["train_s"] + step["publish_s"]) for step in steps if not step["skipped"]]
    stall = sum(publish for publish, _ in spent) / sum(whole for _, whole in spent)
    bars = {
        "the engine stands still for at most 1.2 times its own reload": result["pause"]["ratio"] <= 1.2,
        "every request went on": result["pause"]["finished"] == bench_requests(),
        "deltas are under 30% of the bytes": result["network"]["delta_share"] < 0.3,
        "and bit-equal": result["network"]["bit_equal"],
        "the learner is held up for under 5% of a step": stall < 0.05,
        "a run over zmq finishes": code == 0 and summary.read(folder / "quickstart").steps == 16,
    }
    return {"bars": bars, "learner_stall": round(stall, 4), **result}


def bench_requests() -> int:
    from async_rl.benchmarks.weights import RUNNING

    return RUNNING


def ray(folder: Path) -> Result:
    return quickstart(folder, "--launcher", "ray")


PROOFS: dict[str, Callable[[Path], Result]] = {proof.__name__: proof for proof in (overlap, weights, ray)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROOFS)
    name = parser.parse_args().name
    with tempfile.TemporaryDirectory(prefix="async-rl-proof-") as folder:
        keep(name, PROOFS[name](Path(folder)))


if __name__ == "__main__":
    main()
