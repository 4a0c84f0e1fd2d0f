"""Checkpoints: a copy at one moment, complete or absent, for any number of ranks; and the folders made of them."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from msgspec import to_builtins
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from async_rl.config import Config, parse
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.learner import checkpoint, export, state
from async_rl.learner.models import Models, build
from async_rl.lockstep import one_rank
from async_rl.tracking.metrics import MetricsWriter


def settings(model: Path) -> Config:
    return parse(
        {
            "model": {"path": str(model)},
            "data": {"path": "problems.jsonl"},
            "reward": {"function": "tests.e2e.rewards:length"},
            "learner": {"dtype": "float32", "learning_rate": 1e-2},
            "algorithm": {"preset": "ppo", "value": {"trunk": "own"}},
            "buffer": {"batch_size": 8, "group_size": 4},
            "staleness": {"max_staleness": 4},
        }
    )


def models(model: Path) -> Models:
    return build(settings(model), str(model), torch.device("cpu"))


def step(built: Models, amount: float) -> None:
    """An optimizer step that changes every weight and every moment."""
    for module, optimizer in built.parts().values():
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, amount)
        optimizer.step()
        optimizer.zero_grad()


def numbers(built: Models) -> dict[str, Tensor]:
    """Copies of all weights and moments, whole."""
    out: dict[str, Tensor] = {}
    for part, (module, optimizer) in built.parts().items():
        for name, parameter in module.named_parameters():
            for key, value in {"weight": parameter, **optimizer.state[parameter]}.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                out[f"{part} {name} {key}"] = whole.detach().clone()
    return out


def writer(folder: Path, built: Models, last: int = 10) -> checkpoint.Checkpoints:
    return checkpoint.Checkpoints(folder, built.parts(), keep_last=last, keep_best=False)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_step_right_after_a_snapshot_does_not_change_it(tiny_model: Path, tmp_path: Path) -> None:
    with one_rank():
        built = models(tiny_model)
        step(built, 1.0)
        checkpoints = writer(tmp_path, built)
        copies = []
        for number in (1, 2, 3):  # the second reuses the memory of the first
            copies.append(numbers(built))
            durable = checkpoints.save(state.State(number, 0, "x"))
            assert (durable.step if durable else 0) == number - 1
            checkpoints.copied()
            step(built, -1.0)
            assert not same(numbers(built), copies[-1])
        assert checkpoints.wait() == state.State(3, 0, "x")
        assert checkpoints.finished() is checkpoints.wait() is None
        checkpoints.close()
        fresh = models(tiny_model)
        for number, copy in enumerate(copies, 1):
            checkpoint.restore(tmp_path / state.folder_name(number), fresh.parts())
            assert same(numbers(fresh), copy)


def on_two(number: int, model: Path, folder: Path) -> None:
    """Loads what one rank has saved, trains a step and saves it for one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=number, world_size=2)
    built = models(model)
    checkpoint.restore(folder / "one" / state.folder_name(7), built.parts())
    loaded = numbers(built)
    step(built, -1.0)
    checkpoints = writer(folder / "two", built)
    checkpoints.save(state.State(8, 32, "x"))
    checkpoints.wait()
    after = numbers(built)
    if number == 0:
        torch.save((loaded, after), folder / "two.pt")
    dist.destroy_process_group()


def test_a_checkpoint_before_the_first_step_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Moments are made for it by a step that Adam must not count."""
    with one_rank():
        saved, plain = models(tiny_model), models(tiny_model)
        checkpoints = writer(tmp_path, saved)
        checkpoints.save(state.State(0, 0, "x"))
        checkpoints.wait()
        restored = models(tiny_model)
        checkpoint.restore(tmp_path / state.folder_name(0), restored.parts())
        for each in (saved, plain, restored):
            step(each, 1.0)
            step(each, -0.5)
        assert same(numbers(saved), numbers(plain))
        assert same(numbers(restored), numbers(plain))


def test_a_complete_checkpoint_is_never_written_again_a_damaged_one_is(tiny_model: Path, tmp_path: Path) -> None:
    with one_rank():
        built = models(tiny_model)
        checkpoints = writer(tmp_path, built)
        checkpoints.save(state.State(1, 0, "x"))
        checkpoints.wait()
        first = numbers(built)
        step(built, 1.0)
        for again in (checkpoints, writer(tmp_path, built)):  # the same life, and the next
            again.save(state.State(1, 0, "y"))
            assert again.wait() is None
        fresh = models(tiny_model)
        step(fresh, -1.0)
        checkpoint.restore(tmp_path / state.folder_name(1), fresh.parts())
        weights = {name for name in first if name.endswith("weight")}
        assert same({name: first[name] for name in weights}, {name: numbers(fresh)[name] for name in weights})
        (tmp_path / state.folder_name(1) / "state.json").write_text("{")
        later = writer(tmp_path, built)
        later.save(state.State(1, 0, "z"))
        assert later.wait() == state.State(1, 0, "z")


@pytest.mark.e2e
def test_saved_on_one_rank_loaded_on_two_and_the_reverse(tiny_model: Path, tmp_path: Path) -> None:
    """failures.md 28."""
    with one_rank():
        built = models(tiny_model)
        step(built, 1.0)
        checkpoints = writer(tmp_path / "one", built)
        checkpoints.save(state.State(7, 28, "x"))
        checkpoints.wait()
        before = numbers(built)
    mp.spawn(on_two, (tiny_model, tmp_path), nprocs=2)
    loaded, after = torch.load(tmp_path / "two.pt")
    assert same(before, loaded)
    with one_rank():
        built = models(tiny_model)
        checkpoint.restore(tmp_path / "two" / state.folder_name(8), built.parts())
        assert same(numbers(built), after)


@pytest.mark.e2e
def test_a_save_killed_at_any_moment_leaves_the_newest_complete_one(tiny_model: Path, tmp_path: Path) -> None:
    """failures.md 27. The weights of step n are all n."""
    rng = random.Random(0)
    reached = 0
    for _ in range(5):
        code = f"from tests.async_rl.test_checkpoint import save_forever; save_forever({str(tmp_path)!r})"
        process = subprocess.Popen([sys.executable, "-c", code, str(tiny_model)])
        deadline = time.monotonic() + 120
        while (newest(tmp_path) or 0) <= reached:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)  # anywhere in one of the next saves
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = state.latest(tmp_path)
        assert found is not None
        assert found[1].step > reached
        reached = found[1].step
        with one_rank():
            built = models(tiny_model)
            checkpoint.restore(found[0], built.parts())
            weights = [tensor for _, tensor in checkpoint.full_tensors(built.policy)]
        assert all(bool((tensor == reached).all()) for tensor in weights)


def newest(folder: Path) -> int | None:
    found = state.latest(folder)
    return found[1].step if found else None


def save_forever(folder: str) -> None:
    with one_rank():
        built = models(Path(sys.argv[1]))
        step(built, 1.0)
        checkpoints = writer(Path(folder), built, last=2)
        for number in range((newest(Path(folder)) or 0) + 1, 100_000):
            with torch.no_grad():
                for parameter in built.policy.parameters():
                    parameter.fill_(number)
            checkpoints.save(state.State(number, 0, "x"))
            checkpoints.copied()


def test_the_last_and_the_best_are_kept() -> None:
    rewards = {10: 0.2, 20: 0.9, 30: None, 40: 0.9, 50: 0.1, 60: 0.3}
    states = [state.State(number, 0, "x", reward) for number, reward in rewards.items()]
    assert state.superfluous(states, last=2, best=True) == [10, 20, 30]
    assert state.superfluous(states, last=2, best=False) == [10, 20, 30, 40]
    assert state.superfluous(states[:1], last=2, best=True) == []
    assert state.superfluous(states[2:3] + states[:1], last=1, best=True) == []


def test_what_is_superfluous_or_unfinished_is_removed(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000003.partial").mkdir()
    with one_rank():
        checkpoints = checkpoint.Checkpoints(tmp_path, models(tiny_model).parts(), keep_last=1, keep_best=True)
        for number, reward in enumerate([0.5, 0.1, 0.2], 1):
            checkpoints.save(state.State(number, 0, "x", reward))
        checkpoints.wait()
        checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000003"
    (tmp_path / "step-00000003" / "state.json").write_text("{")
    assert newest(tmp_path) == 1
    (tmp_path / "step-00000001" / "state.json").unlink()
    with pytest.raises(AsyncRLError, match="names step-00000003, but no checkpoint"):
        newest(tmp_path)


@pytest.fixture
def finished(tiny_model: Path, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A run's folder with checkpoints of steps 1 and 2, and the weights of step 1."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(to_builtins(settings(tiny_model))))
    metrics = MetricsWriter(run)
    with one_rank():
        built = models(tiny_model)
        checkpoints = writer(run / "checkpoints", built)
        for number in (1, 2):
            step(built, 1.0)
            if number == 1:
                weights = {name: tensor.clone() for name, tensor in checkpoint.full_tensors(built.policy)}
            checkpoints.save(state.State(number, 0, "x"))
            checkpoints.copied()
            metrics.write({"step": number, "reward": number / 4, "age_max": 3 - number})
        checkpoints.wait()
    metrics.close()
    return run, weights


def test_an_exported_checkpoint_is_a_model_of_its_step(
    finished: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    run, weights = finished
    folder = export.export(run, 1, tmp_path / "out", "float32", "100KB")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert same(dict(loaded.named_parameters()), weights)  # pyright: ignore[reportArgumentType]
    assert loaded.dtype == torch.float32
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 1
    card = (folder / "README.md").read_text()
    assert "| Steps | 1 |" in card
    assert "0.250 in the first five steps" in card
    assert "at most 4 versions, 2 seen" in card
    assert str(tmp_path) not in card


def test_the_newest_is_exported_beside_the_run(finished: tuple[Path, dict[str, Tensor]]) -> None:
    run, _ = finished
    folder = export.export(run, None, None, "bfloat16", "5GB")
    assert folder == run / "model-2"
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export.export(run, None, None, "bfloat16", "5GB")
    with pytest.raises(ConfigError, match="those of the steps 1, 2"):
        export.export(run, 3, None, "bfloat16", "5GB")
