"""Whole runs through the command line: real processes, sockets, shared memory, gloo FSDP2, torch engine, tiny model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.tracking import metrics, timeline
from buffers import export, keys
from launchers import folders
from staleness.versions import INJECTED
from tests.e2e import runs

pytestmark = pytest.mark.e2e


def test_a_run_leaves_everything_it_promises(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, **{"steps": 6, "tracking.mlflow": True})
    code, out, folder = runs.train(config)
    assert code == 0, out
    result = runs.adds_up(folder)
    assert (result.status, result.steps, result.span_mismatches) == ("finished", 6, 0)
    assert result.max_trained_age is not None
    assert result.max_trained_age <= 2
    assert result.tickets.trained == 6 * 8
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "reward.png",
        "timeline.json",
        "journal/00000001.journal",
        "checkpoints/latest",
    ):
        assert (folder / name).stat().st_size > 0, name
    names = {
        event["args"]["name"]
        for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]
        if event["ph"] == "M"
    }
    assert names == {"learner0", "worker0"}
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    after = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    runs.nothing_left(folder)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "async-rl"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "reward")) == 6
    assert run.data.params["buffer.batch_size"] == "8"


def test_eta_0_is_synchronous(tiny_model: Path, tmp_path: Path) -> None:
    """All ages are 0 and the pools never work at the same time."""
    config = runs.config(tiny_model, tmp_path, steps=6)
    code, out, folder = runs.train(config, "--max-staleness", "0")
    assert code == 0, out
    assert runs.adds_up(folder).max_trained_age == 0
    assert all(record["ages"][1:] == [] for record in metrics.read(folder))
    assert timeline.overlap(timeline.busy(folder, "learner"), timeline.busy(folder, "worker")) == 0.0


def test_gigpo_on_a_task_of_two_turns(tiny_model: Path, tmp_path: Path) -> None:
    """What the environment says is stored, never trained on; both turns have a reward, and each an advantage."""
    settings = {
        "algorithm.preset": "gigpo",
        "environment": {"name": "tests.e2e.rewards:Echo", "turn_tokens": 5, "params": {"answer": "xyz"}},
        "reward.function": "environment",
    }
    code, out, folder = runs.train(runs.config(tiny_model, tmp_path, **settings))
    assert code == 0, out
    assert runs.adds_up(folder).skipped_steps == 0
    export.export(folder / "journal", tmp_path / "out.parquet", {"trained"})
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == 3 * 8
    for row in rows:
        # Up to five tokens, three of the environment, up to five more.
        injected = [token for token, version in zip(row["tokens"], row["versions"], strict=True) if version == INJECTED]
        assert len(injected) == 3
        assert len({tuple(injected)} | {tuple(rows[0]["tokens"][-8:-5])}) <= 2
        assert len(row["tokens"]) <= 13
    assert all(0 < record["masked_share"] < 0.6 for record in metrics.read(folder))


def test_segments_train_what_is_still_being_generated(tiny_model: Path, tmp_path: Path) -> None:
    """Responses of up to 64 tokens, cut after eight at the soonest, through all processes and a resume."""
    settings = {
        "algorithm.preset": "vtrace",
        "rollout.max_tokens": 64,
        "rollout.chunk_tokens": 2,
        "rollout.flush_ms": 5.0,
        "staleness.segments": 8,
        "buffer.groups.policy": "split",
        "steps": 6,
    }
    config = runs.config(tiny_model, tmp_path, **settings)
    code, out, folder = runs.train(config, "--steps", "3")
    assert code == 0, out
    code, out, folder = runs.train(config, "--resume", "run", "--steps", "6")
    assert code == 0, out
    records = metrics.read(folder)
    assert len(records) == 6
    assert sum(record["segments"] for record in records) > 6
    assert max(record["age_max"] for record in records) <= 2
    runs.adds_up(folder)


def test_adapters_travel_alone_and_are_merged_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        "learner.lora": {"rank": 4},
        "learner.micro_batch_tokens": "auto",
        "algorithm.kl.coefficient": 0.05,
    }
    config = runs.config(tiny_model, tmp_path, **settings)
    code, out, folder = runs.train(config)
    assert code == 0, out
    code, out, folder = runs.train(config, "--resume", "run", "--steps", "8")
    assert code == 0, out
    result = runs.adds_up(folder)
    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    whole = sum(parameter.numel() for parameter in before.parameters())
    assert 0 < result.published_bytes < 4 * whole / 4
    after = AutoModelForCausalLM.from_pretrained(folder / "model")
    changed = {
        name
        for (name, one), two in zip(before.named_parameters(), after.parameters(), strict=True)
        if not one.bfloat16().equal(two.bfloat16())
    }
    assert any(name.endswith("q_proj.weight") for name in changed)
    assert not any(name.startswith("model.embed") for name in changed)


def test_remax_asks_for_a_greedy_response_to_every_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """Its reward is the baseline of the group; it is not streamed, and costs no ticket."""
    code, out, folder = runs.train(runs.config(tiny_model, tmp_path, **{"algorithm.preset": "remax"}))
    assert code == 0, out
    summary = runs.adds_up(folder)
    assert (summary.tickets.trained, summary.skipped_steps) == (3 * 8, 0)
    assert all(record["grad_norm"] > 0 for record in metrics.read(folder))


def test_two_learner_ranks_and_two_workers(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, steps=4)
    code, out, folder = runs.train(config, "--learner-ranks", "2", "--rollout-workers", "2")
    assert code == 0, out
    result = runs.adds_up(folder)
    assert (result.steps, result.tickets.trained) == (4, 32)
    assert (folder / "logs" / "learner1.log").exists()
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_weights_over_the_network_with_keys(tiny_model: Path, tmp_path: Path) -> None:
    keys.make(tmp_path / "keys")
    config = runs.config(
        tiny_model,
        tmp_path,
        **{
            "weights.transport": "zmq",
            "weights.probe_every": 1,
            "buffer.security.keys": str(tmp_path / "keys"),
            "rollout.workers": 2,
        },
    )
    code, out, folder = runs.train(config)
    assert code == 0, out
    runs.adds_up(folder)
    logs = "".join(path.read_text() for path in (folder / "logs").glob("worker*.log"))
    assert "probe differs by" in logs.split("version 0 applied")[0]  # the rehearsal came over the network too
    assert "version 2 applied" in logs
    runs.nothing_left(folder)


def test_a_run_resumes_twice_each_time_under_a_new_incarnation(tiny_model: Path, tmp_path: Path) -> None:
    """Steps, prompts and versions go on where the checkpoint is; no version is used twice.

    Each life has more steps than there are batches in flight, so that some of it is generated in it.
    """
    config = runs.config(tiny_model, tmp_path, **{"steps": 3, "learner.keep_best": False})
    assert runs.train(config)[0] == 0
    for life, (steps, ranks) in enumerate([(8, 2), (13, 1)], 1):
        run = ["run", "auto"][life - 1]
        code, out, folder = runs.train(config, "--resume", run, "--steps", str(steps), "--learner-ranks", str(ranks))
        assert code == 0, out
        assert f"going on from {folder}/checkpoints/step-0000000{[3, 8][life - 1]}" in out.replace("\n", "")
        assert [record["step"] for record in metrics.read(folder)] == list(range(1, steps + 1))
        assert f"version {life}:{[3, 8][life - 1]} applied" in (folder / "logs" / "worker0.log").read_text()
        result = runs.adds_up(folder)
        assert result.steps == steps
        assert result.tickets.trained == 8 * steps  # the journal counts all lives
        saved = json.loads(
            (folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text() / "state.json").read_text()
        )
        # Two prompts a step have ended, counted since the run was first started.
        assert (saved["step"], saved["cursor"]) == (steps, 2 * steps)
    assert json.loads((folder / "lineage.json").read_text()) == [3, 8]
    code, out, _ = runs.train(config, "--resume", "auto", "--steps", "13")
    assert code == 0
    assert "it has reached step 13; there is nothing to do" in out
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000008", "step-00000013"]


def test_a_run_that_is_going_on_cannot_be_resumed(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, **{"steps": 100_000, "learner.checkpoint_every": 1})
    started = runs.start(config)
    started.until(lambda: started.steps() >= 2)
    code, out, _ = runs.train(config, "--resume", "run")
    assert code == 2
    assert "this run is going on" in out
    before = started.steps()
    started.until(lambda: started.steps() > before)
    started.process.send_signal(signal.SIGINT)
    assert started.wait(60)[0] == 130


def test_a_process_that_hangs_fails_the_run(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, **{"steps": 100_000, "launch.stall_s": 3.0})
    started = runs.start(config)
    started.until(lambda: started.steps() >= 2)
    started.child("rollout.worker").send_signal(signal.SIGSTOP)
    code, out = started.wait(60)
    assert code == 1
    assert "a process hangs" in out
    runs.nothing_left(started.folder, started.family)


def test_a_batch_without_a_gradient_is_skipped_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    """failures.md 23: all rewards equal."""
    config = runs.config(tiny_model, tmp_path, **{"reward.function": "tests.e2e.rewards:constant"})
    code, out, folder = runs.train(config)
    assert code == 0, out
    assert runs.adds_up(folder).skipped_steps == 3
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    after = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_a_skipped_batch_is_not_retired_before_every_rank_has_it(tiny_model: Path, tmp_path: Path) -> None:
    """Without a gradient nothing else holds rank 0 back."""
    overrides = {"steps": 60, "reward.function": "tests.e2e.rewards:constant", "learner.ranks": 2}
    code, out, folder = runs.train(runs.config(tiny_model, tmp_path, **overrides))
    assert code == 0, out
    assert runs.adds_up(folder).skipped_steps == 60


def test_a_generator_that_refuses_every_request_ends_the_run(tmp_path: Path) -> None:
    """failures.md 1: the model has fewer positions than a request needs."""
    from async_rl.benchmarks import tiny

    model = tiny.make(tmp_path / "short", positions=8)
    config = runs.config(model, tmp_path, **{"weights.probe_every": 1000})
    code, out, folder = runs.train(config)
    assert code == 1
    assert "8 groups in a row failed entirely" in out.replace("\n", " ")
    assert runs.adds_up(folder).tickets.failed >= 32
    runs.nothing_left(folder)


def test_a_reward_that_cannot_be_loaded_is_known_before_engines_start(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, **{"reward.function": "no_such_module:f"})
    code, out, folder = runs.train(config)
    assert code == 1
    assert "reward.function = 'no_such_module:f'" in out
    assert "No module named 'no_such_module'" in out
    assert not (folder / "logs" / "worker0.log").exists()


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, **{"reward.function": "tests.e2e.rewards:raises"})
    code, _, folder = runs.train(config)
    assert code == 1
    assert "the reward is broken" in runs.adds_up(folder).error


@pytest.mark.parametrize("reward", ["raises_on_some", "hangs_on_some"])
def test_a_reward_that_fails_on_some_rows_drops_those_and_trains_the_others(
    reward: str, tiny_model: Path, tmp_path: Path
) -> None:
    """failures.md 2."""
    config = runs.config(
        tiny_model,
        tmp_path,
        **{"steps": 4, "reward.function": f"tests.e2e.rewards:{reward}", "reward.time_limit_s": 2.0},
    )
    code, out, folder = runs.train(config)
    assert code == 0, out
    assert runs.adds_up(folder).tickets.failed > 0


def test_on_error_fail_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(
        tiny_model, tmp_path, **{"reward.function": "tests.e2e.rewards:raises_on_some", "reward.on_error": "fail"}
    )
    code, _, folder = runs.train(config)
    assert code == 1
    assert "not to be scored" in runs.adds_up(folder).error


@pytest.mark.parametrize(
    ("module", "name"), [("rollout.worker", "worker0"), ("learner.rank", "learner0"), ("buffer", "buffer0")]
)
def test_a_killed_process_fails_the_run_by_name(module: str, name: str, tiny_model: Path, tmp_path: Path) -> None:
    overrides = {"steps": 100_000, "tracking.mlflow": name == "worker0", "launch.max_restarts": 0}
    started = runs.start(runs.config(tiny_model, tmp_path, **overrides))
    started.until(lambda: started.steps() >= 2)
    started.child(module).send_signal(signal.SIGKILL)
    code, out = started.wait(30)
    assert code == 1
    assert f"{name} was killed by SIGKILL" in out
    assert runs.adds_up(started.folder).status == "failed"
    runs.nothing_left(started.folder, started.family)
    if name == "worker0":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{started.folder.parent}/mlflow.db")
        (experiment,) = [e for e in client.search_experiments() if e.name == "async-rl"]
        assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["FAILED"]


def test_killed_workers_and_buffers_are_started_again_and_nothing_is_trained_twice(
    tiny_model: Path, tmp_path: Path
) -> None:
    """failures.md 6. The learner and the other worker go on without noticing."""
    config = runs.config(tiny_model, tmp_path, **{"steps": 40, "rollout.max_tokens": 64})
    started = runs.start(config, "--rollout-workers", "2")
    started.until(lambda: started.steps() >= 2)
    learner = started.child("learner.rank").pid
    for module in ("rollout.worker", "async_rl.buffer_process", "rollout.worker"):
        before = started.steps()
        started.child(module).send_signal(signal.SIGKILL)
        started.until(lambda before=before: started.steps() >= before + 3)
        assert started.child("learner.rank").pid == learner
    code, out = started.wait(120)
    assert code == 0, out
    result = runs.adds_up(started.folder)
    # A group that has lost a member to the bound makes its batch take one more group.
    assert result.steps == 40
    assert result.tickets.trained >= 40 * 8
    export.export(started.folder / "journal", tmp_path / "trained.parquet", {"trained"})
    rows = pq.read_table(tmp_path / "trained.parquet", columns=["epoch", "index", "group", "member"]).to_pylist()
    assert len({tuple(row.values()) for row in rows}) == len(rows) == result.tickets.trained
    assert result.lost_workers == 2
    assert result.reissued > 0
    assert result.max_trained_age is not None
    assert result.max_trained_age <= 2
    assert "is started again" in out
    runs.nothing_left(started.folder, started.family)


def test_ctrl_c_saves_and_exits_130(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, steps=100_000)
    started = runs.start(config)
    started.until(lambda: started.steps() >= 2)
    started.process.send_signal(signal.SIGINT)
    code, out = started.wait(60)
    assert code == 130, out
    assert runs.adds_up(started.folder).status == "interrupted"
    saved = json.loads((started.folder / "checkpoints" / "latest").read_text().split("-")[1].lstrip("0"))
    assert saved == len(metrics.read(started.folder))
    runs.nothing_left(started.folder, started.family)


def test_sigterm_with_a_dead_peer_ends_everything_in_five_seconds(tiny_model: Path, tmp_path: Path) -> None:
    """failures.md 5: the buffer is stopped, so messages wait for it for ever."""
    config = runs.config(tiny_model, tmp_path, **{"steps": 100_000, "learner.checkpoint_every": 1})
    started = runs.start(config)
    started.until(lambda: started.steps() >= 2)
    started.child("buffer").send_signal(signal.SIGSTOP)
    family = started.family
    started.process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=5)
    assert left == []
    code, _ = started.wait(30)
    assert code == 130
    runs.nothing_left(started.folder)
    assert (
        started.folder / "checkpoints" / (started.folder / "checkpoints" / "latest").read_text() / "state.json"
    ).exists()


def test_when_the_supervisor_is_killed_nothing_is_left(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path, steps=100_000)
    started = runs.start(config)
    started.until(lambda: started.steps() >= 1)
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait()
    runs.nothing_left(started.folder, started.family, shared_memory=False)
    folders.sweep()  # what the next run does first
    runs.nothing_left(started.folder)


def test_mlflow_that_is_not_there_costs_one_warning(tiny_model: Path, tmp_path: Path) -> None:
    """failures.md 29."""
    config = runs.config(tiny_model, tmp_path, **{"tracking.mlflow": True, "tracking.uri": "http://127.0.0.1:9"})
    code, out, folder = runs.train(config)
    assert code == 0, out
    assert out.count("warning: MLflow failed") == 1
    assert len(metrics.read(folder)) == 3


def test_a_changed_data_set_is_refused_on_resume_with_both_fingerprints(tiny_model: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_model, tmp_path)
    assert runs.train(config)[0] == 0
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"prompt": "new", "answer": 1}\n')
    code, out, _ = runs.train(config, "--resume", "run", "--steps", "5")
    assert code != 0
    assert "the data set has changed" in out.replace("\n", " ")
