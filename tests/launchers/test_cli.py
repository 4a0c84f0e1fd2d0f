"""Wrong configurations: one readable error, exit 2, nothing started (failures.md 7, 30)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs


def command(*arguments: str) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-m", "launchers.cli", *arguments], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "rollout.slotz=3"], ["rollout.slotz = 3", "no such setting", "Did you mean rollout.slots?"]),
        (["--set", "steps=many"], ["steps = 'many'", "expected `int`"]),
        (["--rollout-workers", "0"], ["rollout.workers = 0", ">= 1"]),
        (["--set", "buffer.batch_size=64"], ["10 prompts", "takes 16", "data.wrap"]),
        (["--set", "model.path=README.md"], ["model.path = 'README.md'", "no config.json"]),
        (["--set", "model.path=tests"], ["model.path = 'tests'", "no config.json"]),
        (["--set", "model.path=/no/such/folder"], ["there is no such folder"]),
        (["--placement", "colocated"], ["launch.placement = 'colocated'", "not built yet"]),
        (["--set", "data.path=nowhere.jsonl"], ["data.path = 'nowhere.jsonl'", "no such file"]),
        (["--set", "data.prompt_column=question"], ["question", "no such column"]),
        (["--resume", "never"], ["RUN = 'never'", "no run of that name"]),
        (["--set", "launch.device=cuda", "--rollout-workers", "8"], ["9 GPUs", "available"]),
        (["--set", "nonsense"], ["a.b=value"]),
        (["--set", "data.path=["], ["not valid YAML"]),
    ],
)
def test_a_wrong_configuration_is_one_error_and_exit_2(
    arguments: list[str], words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    config = runs.config(tiny_model, tmp_path)
    code, out, err = command("train", str(config), *arguments)
    assert (code, out) == (2, "")
    assert err.count("error:") == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "runs").exists()


def test_three_prompts_for_a_batch_of_sixteen(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, **{"buffer": {"batch_size": 32, "group_size": 2}, "data.holdout": 0})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(3)))
    code, _, err = command("train", str(config))
    assert code == 2
    assert "3 prompts" in err
    assert "takes 16" in err


def test_a_missing_preset_names_those_there_are() -> None:
    code, _, err = command("train", "no-such-preset")
    assert code == 2
    assert "inflight, quickstart" in err


def test_a_dry_run_shows_everything_and_starts_nothing(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path)
    code, out, _ = command(
        "train", str(config), "--dry-run", "--max-staleness", "7", "--set", "learner.learning_rate=1e-5"
    )
    assert code == 0
    assert "max_staleness: 7" in out
    assert "learning_rate: 1.0e-05" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["buffer", "inspect", "--help"], ["eval", "--help"]]
)
def test_every_command_has_help(arguments: list[str]) -> None:
    code, out, _ = command(*arguments)
    assert code == 0
    assert "usage: async-rl" in out


def test_inspecting_a_run_that_has_not_ended_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    code, _, err = command("buffer", "inspect", str(tmp_path))
    assert code == 2
    assert "has not ended" in err
