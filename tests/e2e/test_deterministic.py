"""Deterministic mode: a run that is killed again and again ends with the weights of one that never was."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from async_rl.learner import state
from async_rl.tracking import metrics
from tests.e2e import runs

pytestmark = pytest.mark.e2e

STEPS = 12
SAME = ("reward", "tokens", "length_mean", "loss", "grad_norm", "ess", "ratio_max", "packed_tokens")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint: float32 weights and moments."""
    found = state.latest(folder / "checkpoints")
    assert found is not None
    assert (found[1].step, found[1].cursor) == (STEPS, 2 * STEPS)
    metadata = dcp.FileSystemReader(found[0]).read_metadata().state_dict_metadata
    tree = {name: torch.empty(each.size) for name, each in metadata.items() if hasattr(each, "size")}
    dcp.load(tree, checkpoint_id=found[0], no_dist=True)
    return tree


def killed_three_times(config: Path, folder: Path, steps: tuple[int, ...]) -> None:
    """A little after each of these steps; runs to the end all the same."""
    rng = random.Random(0)
    for reached in steps:
        resume = ["--resume", folder.name] if folder.exists() else []
        started = runs.start(config, "--name", folder.name, *resume)
        started.until(lambda reached=reached: len(metrics.read(folder)) >= reached)
        time.sleep(rng.random() / 4)
        started.process.send_signal(signal.SIGKILL)
        started.process.wait()
        runs.nothing_left(folder, shared_memory=False)
    code, out, _ = runs.train(config, "--resume", folder.name)
    assert code == 0, out


@pytest.mark.timeout(400)
def test_killed_three_times_the_run_ends_with_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        "deterministic": True,
        "steps": STEPS,
        "staleness": {"max_staleness": 0},
        "learner": {"learning_rate": 1e-3, "dtype": "float32", "checkpoint_every": 2},
    }
    config = runs.config(tiny_model, tmp_path, **settings)
    once, killed = (tmp_path / "runs" / name for name in ("once", "killed"))
    code, out, _ = runs.train(config, "--name", "once")
    assert code == 0, out
    killed_three_times(config, killed, (3, 6, 9))
    first, second = weights(once), weights(killed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any("exp_avg" in name for name in first)
    for one, two in zip(metrics.read(once), metrics.read(killed), strict=True):
        assert {name: one[name] for name in SAME} == {name: two[name] for name in SAME}
    assert runs.adds_up(killed).tickets.trained == 8 * STEPS


@pytest.mark.timeout(400)
def test_killed_three_times_at_a_staleness_of_two_the_accounts_are_exact(tiny_model: Path, tmp_path: Path) -> None:
    """Which token meets which weights is up to the clock; that every sample is trained on once is not."""
    learner = {"learning_rate": 1e-3, "dtype": "float32", "checkpoint_every": 2}
    config = runs.config(tiny_model, tmp_path, **{"steps": 40, "learner": learner})
    killed = tmp_path / "runs" / "killed"
    killed_three_times(config, killed, (4, 12, 20))
    records = metrics.read(killed)
    assert [record["step"] for record in records] == list(range(1, 41))
    assert max(record["age_max"] for record in records) <= 2
    result = runs.adds_up(killed)
    # A restore may leave a group with fewer fresh members: then a batch of whole groups is not eight.
    trained = sum(record["samples"] for record in records)
    assert (result.tickets.trained, result.tickets.failed) == (trained, 0)
    assert len(json.loads((killed / "lineage.json").read_text())) == 3
