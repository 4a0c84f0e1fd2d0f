"""Pools that change, processes that are killed and stopped, in whole runs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.tracking import metrics, timeline
from experiments.proof import chaos
from launchers import cli
from tests.e2e import runs

pytestmark = pytest.mark.e2e


@pytest.mark.soak
def test_two_minutes_of_faults(tmp_path: Path) -> None:
    plan = chaos.Plan(seconds=120, every_s=15, stop_s=12, seed=3)
    result = chaos.judged(tmp_path, plan, chaos.torment(tmp_path, plan))
    bars = result["bars"]
    assert isinstance(bars, dict)
    assert all(bars.values()), result


def test_workers_join_and_leave(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {
        "steps": 100_000,
        "rollout.slots": 3,
        "rollout.max_tokens": 32,
        "environment.name": "async_rl.environments.emulated:Tool",
        "environment.params": {"latency_s": 0.5, "turns": 3},
    }
    started = runs.start(runs.config(tiny_model, tmp_path, **overrides))
    started.until(lambda: started.steps() >= 2)

    def scale(workers: int) -> int:
        return cli.run(["scale", str(started.folder), "--rollout-workers", str(workers)])

    def generated(worker: int) -> bool:
        trace = started.folder / "trace" / f"worker{worker}.jsonl"
        return trace.exists() and '"name": "generate"' in trace.read_text()

    assert scale(0) == 2
    assert scale(3) == 0
    started.until(lambda: generated(1) and generated(2))
    assert scale(1) == 0
    reached = started.steps()
    started.until(lambda: started.steps() >= reached + 3 and workers(started) == 1)
    assert scale(2) == 0  # a number that has become free is given again
    started.until(lambda: started.steps() >= 0 and workers(started) == 2)
    started.process.send_signal(2)
    code, out = started.wait(60)
    assert code == 130, out
    assert out.count("has left") == 2
    assert "rollout workers: 1 -> 3" in out
    result = runs.adds_up(started.folder)
    assert (result.lost_workers, result.discarded_tokens, result.tickets.failed) == (0, 0, 0)
    assert result.reissued > 0
    assert len(metrics.read(started.folder)) == result.steps
    runs.nothing_left(started.folder, started.family)
    assert scale(2) == 2  # it is not going on any more


def workers(started: runs.Started) -> int:
    return len([process for process in started.family if _is_worker(process)])


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "async_rl.rollout.worker" in process.cmdline()
    except psutil.Error:
        return False


def test_pools_that_take_turns_never_work_at_once_and_lose_nothing(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {"steps": 8, "rollout.max_tokens": 120, "rollout.workers": 2, "learner.ranks": 2}
    code, out, folder = runs.train(runs.config(tiny_model, tmp_path, **overrides), "--placement", "colocated")
    assert code == 0, out
    result = runs.adds_up(folder)
    assert (result.steps, result.span_mismatches, result.lost_workers, result.tickets.failed) == (8, 0, 0, 0)
    assert timeline.overlap(timeline.busy(folder, "learner"), timeline.busy(folder, "worker")) < 0.05
    assert len(timeline.named(folder, "worker0", "yield")) >= 4
    assert result.multi_version_trajectories > 0  # they rested in mid-response and went on with newer weights
    runs.nothing_left(folder)


def test_a_killed_learner_gives_the_devices_back(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {"steps": 16, "rollout.max_tokens": 60, "learner.checkpoint_every": 5}
    started = runs.start(runs.config(tiny_model, tmp_path, **overrides), "--placement", "colocated")
    started.until(lambda: started.steps() >= 7)
    started.child("learner.rank").kill()
    code, out = started.wait(120)
    assert code == 0, out
    assert "the learner goes on from step" in out
    assert runs.adds_up(started.folder).steps == 16


def test_colocated_and_disjoint_pools_learn_the_same(tiny_model: Path, tmp_path: Path) -> None:
    """To the last bit in deterministic mode: where pools are is no part of what is computed."""
    weights: list[dict[str, torch.Tensor]] = []
    for placement in ("disjoint", "colocated", "concurrent"):
        (tmp_path / placement).mkdir()
        config = runs.config(tiny_model, tmp_path / placement, **{"deterministic": True, "staleness.max_staleness": 0})
        code, out, folder = runs.train(config, "--placement", placement)
        assert code == 0, out
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        weights.append(dict(model.named_parameters()))
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])
