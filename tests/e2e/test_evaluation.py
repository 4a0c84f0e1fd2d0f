"""Held-out prompts answered by the workers of a run that trains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from async_rl.data.prompts import Prompts
from async_rl.evaluation import answers
from async_rl.tracking.metrics import EVALUATIONS, read
from tests.e2e import runs
from tests.e2e.rewards import length

pytestmark = pytest.mark.e2e


def test_evaluations_are_of_one_version_each_and_right(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {
        "steps": 9, "evaluation.every": 4, "evaluation.slots": 2, "rollout.workers": 2, "learner.learning_rate": 0.02,
        "tracking.mlflow": True, "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}", "data.holdout": 4,
        "environment.name": "async_rl.environments.emulated:Tool",
        "environment.params": {"latency_s": 0.3, "turns": 2},
    }  # fmt: skip
    code, out, folder = runs.train(runs.config(tiny_model, tmp_path, **overrides))
    assert code == 0, out
    found = read(folder, EVALUATIONS)
    assert [record["step"] for record in found][:2] == sorted({record["step"] for record in found})[:2]
    assert found[-1]["step"] - found[0]["step"] >= 2
    assert all(record["eval_prompts"] + record["eval_missing"] <= 4 for record in found)
    assert f"evaluation at step {found[0]['step']}: reward" in out
    result = runs.adds_up(folder)
    assert result.eval_first == pytest.approx(found[0]["eval_reward"], abs=1e-4)
    assert each_metric(tmp_path, "eval_reward") == [(record["step"], record["eval_reward"]) for record in found]


def test_an_evaluation_is_worth_what_greedy_answers_are(tiny_model: Path, tmp_path: Path) -> None:
    # Weights that stay what they are, so that it does not matter which version is asked.
    overrides = {
        "steps": 6, "evaluation.every": 2, "data.holdout": 5, "rollout.workers": 2, "learner.learning_rate": 1e-20,
    }  # fmt: skip
    code, out, folder = runs.train(runs.config(tiny_model, tmp_path, **overrides))
    assert code == 0, out
    held_out = Prompts.read(folder / "heldout.npz")
    responses = answers(str(tiny_model), held_out, 12)
    rows = [json.loads(row) for row in held_out.rows]
    wanted = np.mean([length(response, row) for response, row in zip(responses, rows, strict=True)])
    found = [record for record in read(folder, EVALUATIONS) if record["eval_prompts"] == 5]
    assert found
    assert {record["eval_missing"] for record in found} == {0}
    assert [record["eval_reward"] for record in found] == [pytest.approx(float(wanted))] * len(found)


def each_metric(folder: Path, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "async-rl"]
    (run,) = client.search_runs([experiment.experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
