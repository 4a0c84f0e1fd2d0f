"""Runs through the real command line on the tiny model and the torch engine, and what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from async_rl.tracking import metrics, summary

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Started:
    """A run in progress."""

    process: subprocess.Popen[str]
    folder: Path
    family: list[psutil.Process] = field(default_factory=list)

    def wait(self, timeout_s: float) -> tuple[int, str]:
        """Exit code and everything printed."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out

    def until(self, ready: Callable[[], bool], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the run did not get there in time"
            time.sleep(0.05)

    def steps(self) -> int:
        """Steps done; on the way, notes every process of the run there is now."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return len(metrics.read(self.folder))

    def child(self, role: str) -> psutil.Process:
        """The process of a role, found by its command line."""
        for process in psutil.Process(self.process.pid).children():
            if any(role in part for part in process.cmdline()):
                return process
        raise AssertionError(f"no {role} among the children")


def config(model: Path, folder: Path, **overrides: object) -> Path:
    """A configuration of 2 prompts x 2 samples a batch on the tiny model; overrides are dotted paths."""
    rows = [{"prompt": f"{i}", "answer": i} for i in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict = {
        "name": "run",
        "folder": str(folder / "runs"),
        "steps": 3,
        "model": {"path": str(model)},
        "data": {"path": "data.jsonl", "holdout": 2},
        "reward": {"function": "tests.e2e.rewards:length"},
        "rollout": {"engine": "torch", "slots": 8, "max_tokens": 12, "dtype": "float32"},
        "buffer": {"batch_size": 8, "group_size": 4},
        "learner": {"learning_rate": 1e-4, "dtype": "float32"},
        "tracking": {"mlflow": False},
    }
    for path, value in overrides.items():
        section = tree
        *parents, leaf = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(config: Path, *arguments: str) -> Started:
    process = subprocess.Popen(
        [sys.executable, "-m", "launchers.cli", "train", str(config), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return Started(process, Path(yaml.safe_load(config.read_text())["folder"]) / "run")


def train(config: Path, *arguments: str, timeout_s: float = 300) -> tuple[int, str, Path]:
    """Runs to the end: exit code, output, run folder."""
    started = start(config, *arguments)
    code, out = started.wait(timeout_s)
    return code, out, started.folder


def nothing_left(folder: Path, family: list[psutil.Process] = [], *, shared_memory: bool = True) -> None:  # noqa: B006
    """No process of the run lives, of the `family` noted neither, and no shared memory of it remains."""
    deadline = time.monotonic() + 5
    _, left = psutil.wait_procs(family, timeout=5)
    assert left == []
    while time.monotonic() < deadline:
        alive = [
            p.cmdline() for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])
        ]
        if not alive:
            break
        time.sleep(0.1)
    assert alive == []
    if shared_memory:
        assert list(Path("/dev/shm").glob(f"async-rl-{folder.name}-{folder.stat().st_ino}-*")) == []


def adds_up(folder: Path) -> summary.Summary:
    """The summary of a run whose tickets add up."""
    result = summary.read(folder)
    assert result.tickets.add_up
    return result
