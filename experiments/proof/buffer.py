"""The replay buffer against its bars: `python -m experiments.proof.buffer NAME`. JSON beside it; a miss is exit 1.

ingest      `async-rl bench buffer`: tokens/s with every promise kept, against its peers; latency; take
simulate    20,000 seeds of the fault simulation (`--seeds`)
bounded     ten minutes at a million tokens/s, two of them with a learner that stands still
faults      real `kill -9` of the server and of a vLLM worker, hostile frames, keys, and the ten deliberate bugs
journal     segment files against an embedded store
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from async_rl.benchmarks.machine import describe, versions
from experiments.proof.bars import Result, keep


def run(*command: str) -> int:
    return subprocess.run([sys.executable, *command], check=False).returncode


def measured(*command: str) -> dict[str, float]:
    """What a command writes to its `--json`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        if run(*command, "--json", str(file)) != 0 and not file.exists():
            raise SystemExit(f"{' '.join(command)} failed")
        return json.loads(file.read_text())


def ingest(_: argparse.Namespace) -> Result:
    found = measured("-m", "launchers.cli", "bench", "buffer")
    bars = {
        "8 million tokens/s": found["ingest_tokens_per_s"] >= 8e6,
        "5 times a Ray actor": (found["ratio_ray_actor"] or 0) >= 5,
        "500 times ray.util.queue": (found["ratio_ray_queue"] or 0) >= 500,
        "15 times TransferQueue": (found["ratio_transfer_queue"] or 0) >= 15,
        "acknowledged within 50 ms at half load (p99)": found["ack_p99_ms"] < 50,
        "512 trajectories of 2,000 tokens within 60 ms": found["take_ms"] < 60,
        "10,000 trajectories simulated faster than real time": (found["sim_realtime_factor"] or 0) > 1,
    }
    return {"bars": bars, "bench": found}


def simulate(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        code = run("-m", "tests.simulation.replay", "0", "--count", str(args.seeds), "--json", str(file))
        return {"bars": {f"{args.seeds} seeds": code == 0}, "simulation": json.loads(file.read_text())}


def bounded(_: argparse.Namespace) -> Result:
    found = measured("-m", "tests.processes.soak")
    return {"bars": {"bounded": bool(found["bounded"])}, **found}


def faults(_: argparse.Namespace) -> Result:
    tests = {
        "the server killed 20 times": ["tests/processes/test_kills.py"],
        "a vLLM worker killed in mid-response": ["tests/e2e/test_vllm.py", "-k", "killed"],
        "workers and buffer of a run killed": ["tests/e2e/test_tiny_runs.py", "-k", "started_again"],
        "100,000 hostile frames, and keys": ["tests/processes/test_fuzz.py"],
        "ten deliberate bugs within 300 seeds": ["tests/simulation", "-k", "deliberate"],
    }
    return {"bars": {name: run("-m", "pytest", *arguments) == 0 for name, arguments in tests.items()}}


def journal(_: argparse.Namespace) -> Result:
    return {"bars": {}, **measured("-m", "experiments.journal.compare")}


PROOFS: dict[str, Callable[[argparse.Namespace], Result]] = {
    proof.__name__: proof for proof in (ingest, simulate, bounded, faults, journal)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROOFS)
    parser.add_argument("--seeds", type=int, default=20_000)
    args = parser.parse_args()
    result = PROOFS[args.name](args)
    result |= {"machine": msgspec.to_builtins(describe()), "versions": versions()}
    keep(args.name, result)


if __name__ == "__main__":
    main()
