"""Wrong configurations: one readable error, exit 2, nothing started (failures.md 7, 30)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from buffers import keys
from buffers import messages as m
from buffers.journal import Journal
from buffers.records import Settings
from tests.buffers.driver import chunks, prompt
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
        (["--placement", "colocated", "--launcher", "ray"], ["launch.placement = 'colocated'", "places of its own"]),
        (["--ray-address", "auto"], ["launch.ray_address = 'auto'", "--launcher ray"]),
        (["--set", "data.path=nowhere.jsonl"], ["data.path = 'nowhere.jsonl'", "no such file"]),
        (["--set", "data.prompt_column=question"], ["question", "no such column"]),
        (["--resume", "never"], ["RUN = 'never'", "no run of that name"]),
        (["--set", "learner.lora={rank: 4, targets: [query]}"], ["no query", "Choose from down_proj, gate_proj"]),
        (["--set", "learner.lora={rank: 4, targets: [lm_head]}"], ["no adapter reaches"]),
        (["--set", "learner.attention=flex"], ["learner.attention = 'flex'", "no backward pass on a CPU"]),
        (["--set", "learner.offload=true"], ["learner.offload = True", "host's memory"]),
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
    "arguments",
    [[], ["train"], ["eval"], ["keys"], ["buffer"], ["buffer", "inspect"], ["buffer", "verify"], ["buffer", "export"]],
)
def test_every_command_has_help(arguments: list[str]) -> None:
    code, out, _ = command(*arguments, "--help")
    assert code == 0
    assert f"usage: {' '.join(['async-rl', *arguments])}" in out


# --- the buffer's journal ----------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run in `runs/r` whose buffer has granted 4 tickets and stored 3 tokens, in groups of one message each."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    journal, core, _ = Journal.open(
        folder / "journal", Settings(batch=2, group=2, max_staleness=1, max_tokens=8), 1 << 20
    )
    columns = chunks([(0, 0, 0, [5, 6]), (1 << 20 | 1, 0, 0, [7])], logprob=-0.25)
    for peer, message, frames in (
        ("feeder", m.Hello("feeder"), []),
        ("w", m.Hello("worker", 8), []),
        ("rank0", m.Published(0), []),
        ("feeder", m.Submit(0, [prompt(0), prompt(1)]), []),
        ("w", columns.header(1), [columns.to_frame()]),
    ):
        core.receive(peer, message, frames)
        journal.add(peer, [m.encode(message), *frames])
        journal.flush()
        journal.wait()
    journal.close()
    return folder


@pytest.mark.parametrize("action", ["inspect", "verify", "export"])
def test_a_run_without_a_journal_says_so(action: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    code, out, err = command("buffer", action, str(tmp_path))
    assert (code, out) == (2, "")
    assert f"error: there is no journal in {tmp_path / 'journal'}" in err
    assert "durability: none" in err


def test_a_runs_buffer_can_be_looked_into_by_name(run_folder: Path) -> None:
    runs_folder = str(run_folder.parent)
    code, out, _ = command("buffer", "inspect", "r", "--runs", runs_folder)
    assert code == 0
    assert "issued 4 = trained 0 + expired 0 + failed 0 + cancelled 0 + in flight 4" in out
    code, out, _ = command("buffer", "inspect", "r", "--runs", runs_folder, "--ticket", str(1 << 20 | 1))
    assert code == 0
    assert out.splitlines()[2:] == ["  chunk at 0, 1 tokens, version 0", "    7:-0.250"]
    code, _, err = command("buffer", "inspect", "r", "--runs", runs_folder, "--ticket", "5")
    assert code == 2
    assert "error: ticket 5 is not in the journal" in err


def test_verify_answers_with_its_exit_code_and_the_place(run_folder: Path) -> None:
    code, out, _ = command("buffer", "verify", str(run_folder))
    assert code == 0
    assert "no damage found" in out
    path = run_folder / "journal" / "00000001.journal"
    data = bytearray(path.read_bytes())
    place = data.rindex(b"GRUP", 0, data.rindex(b"GRUP"))  # the last group but one
    data[place + 30] ^= 1
    path.write_bytes(data)
    code, out, _ = command("buffer", "verify", str(run_folder))
    assert code == 1
    assert f"{path} is damaged at byte {place}" in out


def test_trajectories_are_exported_to_the_run_or_elsewhere(run_folder: Path, tmp_path: Path) -> None:
    code, out, _ = command("buffer", "export", str(run_folder))
    assert code == 0
    assert f"4 trajectories in {run_folder / 'trajectories.parquet'}" in out
    rows = pyarrow.parquet.read_table(run_folder / "trajectories.parquet").to_pylist()
    assert [row["tokens"] for row in rows] == [[5, 6], [7], [], []]
    code, _, _ = command(
        "buffer", "export", str(run_folder), "--output", str(tmp_path / "x"), "--states", "trained,ready"
    )
    assert code == 0
    assert pyarrow.parquet.read_table(tmp_path / "x").num_rows == 0
    code, _, err = command("buffer", "export", str(run_folder), "--states", "trained,done")
    assert code == 2
    assert "error: --states = 'trained,done': 'done' is no state. Choose from running,ready," in err


# --- keys --------------------------------------------------------------------------------------------------------


def test_keys_are_made_once_and_say_how_they_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    code, out, _ = command("keys", str(folder))
    assert code == 0
    assert f"--set buffer.security.keys={folder}" in out
    keys.check("tcp://*:5555", str(folder))
    before = (folder / "server.key_secret").read_bytes()
    code, _, err = command("keys", str(folder))
    assert code == 2
    assert "keys are never overwritten" in err
    assert (folder / "server.key_secret").read_bytes() == before


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    program = "import sys, launchers.cli; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=runs.ROOT, capture_output=True, text=True, timeout=60)
    loaded = set(result.stdout.split())
    assert "buffers.journal" not in loaded
    assert not loaded & {"buffers.inspect", "buffers.verify", "buffers.export", "pyarrow", "torch", "vllm"}
