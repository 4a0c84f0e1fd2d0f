"""Real vLLM: one engine lives through an update in mid-response, and a whole run through the command line."""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from async_rl import adapters, fetch
from async_rl.benchmarks import tiny
from async_rl.config import parse
from async_rl.errors import RequestRefused
from async_rl.learner.checkpoint import full_tensors
from async_rl.learner.policy import load
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.weights.manifest import Probe
from async_rl.weights.publisher import Publisher
from async_rl.weights.receiver import Here, Receipt, Receiver
from async_rl.weights.shm import Writer
from buffers import export, segments
from buffers import messages as m
from tests.async_rl.test_torch_engine import collect
from tests.e2e import runs

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

PROMPT = [0, 40, 41, 42, 1, 0]
PROBE = [0, 40, 50, 60, 70, 80, 90, 1, 0, 41, 42, 43]


def logprobs_of(policy: PreTrainedModel, tokens: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of tokens[1:]."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        full = (policy(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return full.gather(-1, ids[1:, None])[:, 0]


@dataclass
class Lived:
    """What one engine went through: requests before an update, across it, after it."""

    before: list[Delta]
    across: list[Delta]
    after: list[Delta]
    greedy: Delta
    receipt: Receipt
    relabelled: Delta


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny tied models with different weights."""
    folder = tmp_path_factory.mktemp("models")
    return tiny.make(folder / "one", seed=0), tiny.make(folder / "two", seed=1)


@pytest.fixture(scope="module")
def lived(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Lived:
    from async_rl.rollout.engines.vllm_engine import VllmEngine

    folder = tmp_path_factory.mktemp("weights")
    rollout = {"temperature": 0.6, "slots": 16, "dtype": "float32"}
    config = parse({"data": {"path": "x"}, "rollout": rollout})
    engine = VllmEngine(config, model=str(models[0]), max_model_tokens=512, cores=[0], seed=0)
    new = LlamaForCausalLM.from_pretrained(models[1], dtype=torch.float32)
    publisher = Publisher(folder, Writer(f"vllm-{folder.name}"), torch.float32, tied=["lm_head.weight"])

    async def live() -> Lived:
        await engine.start()
        before = await asyncio.gather(*(collect(engine, Request(f"b{i}", PROMPT, 50)) for i in range(16)))
        publisher.publish(7, new.named_parameters(), Probe(PROBE, logprobs_of(new, PROBE, 1.0).tolist()))
        seen: list[int] = []

        async def noted(version: int) -> None:
            seen.append(version)

        begun = asyncio.Event()
        running = [asyncio.create_task(collect(engine, Request(f"m{i}", PROMPT, 400), begun)) for i in range(16)]
        await begun.wait()
        receipt = await Receiver(engine, Here(folder), "float32").pull(noted)
        assert seen == [7]
        across = await asyncio.gather(*running)
        after = await asyncio.gather(*(collect(engine, Request(f"a{i}", PROMPT, 50)) for i in range(45)))
        greedy = await collect(engine, Request("g", PROMPT, 40, greedy=True))
        await engine.relabel(8)
        relabelled = await collect(engine, Request("r", PROMPT, 5, greedy=True))
        with pytest.raises(RequestRefused):
            await collect(engine, Request("long", PROMPT * 200, 5))
        await engine.stop()
        return Lived(before, across, after, greedy, receipt, relabelled)

    try:
        return asyncio.run(live())
    finally:
        publisher.close()


def test_the_probe_proves_receipt_on_a_tied_model(lived: Lived) -> None:
    """failures.md 16: a head left stale differs by far more than the limit of 1e-3."""
    assert lived.receipt.version == 7
    assert lived.receipt.probe_error is not None
    assert lived.receipt.probe_error < 1e-4


def test_greedy_after_the_update_is_a_fresh_models(lived: Lived, models: tuple[Path, Path]) -> None:
    """failures.md 14."""
    fresh = LlamaForCausalLM.from_pretrained(models[1], dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    want = fresh.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    assert lived.greedy.tokens == want[0, ids.shape[1] :].tolist()


def test_no_request_was_aborted_and_some_span_both_versions(lived: Lived) -> None:
    responses = lived.before + lived.across + lived.after
    assert {response.finish_reason for response in responses} <= {"stop", "length"}
    assert any(set(response.versions) == {0, 7} for response in lived.across)
    assert {version for response in lived.after for version in response.versions} == {7}
    assert set(lived.relabelled.versions) == {8}


def test_streamed_tags_are_the_engines_spans(lived: Lived) -> None:
    """failures.md 11."""
    for response in lived.before + lived.across + lived.after:
        spans = [version for version, start, end in response.spans or [] for _ in range(end - start)]
        assert spans == response.versions
        assert len(response.tokens) == len(response.logprobs) == len(response.versions)


@pytest.mark.parametrize("when", ["before", "after"])
def test_behaviour_logprobs_are_the_learners_at_temperature_06(
    when: str, lived: Lived, models: tuple[Path, Path]
) -> None:
    """failures.md 19."""
    policy = LlamaForCausalLM.from_pretrained(models[when == "after"], dtype=torch.float32)
    worst, count = 0.0, 0
    for response in getattr(lived, when):
        learner = logprobs_of(policy, PROMPT + response.tokens, 0.6)[len(PROMPT) - 1 :]
        worst = max(worst, float(np.abs(learner.numpy() - np.asarray(response.logprobs)).max()))
        count += len(response.tokens)
    assert count > 400
    assert worst < 1e-4


def test_a_run_with_vllm_and_a_real_model(tmp_path: Path) -> None:
    """SmolLM2-135M, three steps, in flight across updates."""
    smol = fetch.fetch("smollm2-135m")
    config = runs.config(
        smol,
        tmp_path,
        **{
            "rollout": {"engine": "vllm", "slots": 16, "max_tokens": 24},
            "learner": {"learning_rate": 1e-5},
            "reward.function": "tests.e2e.rewards:length",
        },
    )
    before = set(Path("/dev/shm").iterdir())
    code, out, folder = runs.train(config, timeout_s=500)
    assert set(Path("/dev/shm").iterdir()) <= before
    assert code == 0, out
    result = runs.adds_up(folder)
    assert (result.status, result.steps, result.span_mismatches) == ("finished", 3, 0)
    log = (folder / "logs" / "worker0.log").read_text()
    assert "version 0 applied" in log
    assert "probe differs by" in log
    runs.nothing_left(folder)


def streamed(folder: Path) -> dict[int, dict[int, list[tuple[int, float, int]]]]:
    """By ticket and attempt: what its workers sent, as (token, log-prob, version) in order of offset."""
    out: dict[int, dict[int, dict[int, tuple[int, float, int]]]] = defaultdict(lambda: defaultdict(dict))
    for file in segments.of(folder / "journal"):
        entries = file.entries()
        next(entries)  # the snapshot
        for entry in entries:
            head = m.decode_inbound(entry.head)
            if not isinstance(head, m.Append):
                continue
            chunks = m.Chunks.from_frames(head, entry.frames)
            at = 0
            columns = (chunks.ticket, chunks.attempt, chunks.offset, chunks.length, chunks.version)
            for ticket, attempt, offset, length, version in zip(*(c.tolist() for c in columns), strict=True):
                for i in range(length):
                    sample = (int(chunks.tokens[at + i]), float(chunks.logprobs[at + i]), version)
                    out[ticket][attempt][offset + i] = sample
                at += length
    return {
        ticket: {attempt: [of[i] for i in sorted(of)] for attempt, of in attempts.items()}
        for ticket, attempts in out.items()
    }


def test_a_worker_killed_in_mid_response_loses_no_token(models: tuple[Path, Path], tmp_path: Path) -> None:
    """failures.md 6 and 12: another engine goes on after the stored prefix, within what is left of the budget."""
    config = runs.config(
        models[0],
        tmp_path,
        **{
            "steps": 12,
            "rollout": {"engine": "vllm", "slots": 8, "max_tokens": 400, "dtype": "float32", "workers": 2},
            "buffer": {"batch_size": 8, "group_size": 4},
            "launch.max_restarts": 1,
        },
    )
    started = runs.start(config)
    started.until(lambda: started.steps() >= 2, timeout_s=300)
    worker = started.child("rollout.worker")
    family = [worker, *worker.children(recursive=True)]
    worker.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=10)
    assert left == [], "the engine outlives its worker"
    code, out = started.wait(400)
    assert code == 0, out
    result = runs.adds_up(started.folder)
    assert (result.tickets.trained, result.span_mismatches, result.lost_workers) == (12 * 8, 0, 1)
    assert result.kept_tokens > 0
    export.export(started.folder / "journal", tmp_path / "all.parquet", {"trained"})
    trained = pq.read_table(tmp_path / "all.parquet").to_pylist()
    keys = [(row["epoch"], row["index"], row["group"], row["member"]) for row in trained]
    assert len(set(keys)) == len(keys) == 12 * 8
    sent = streamed(started.folder)
    continued = [row for row in trained if len(sent[row["ticket"]]) > 1]
    assert continued, "no trained trajectory has changed its worker"
    for row in continued:
        whole = list(zip(row["tokens"], row["logprobs"], row["versions"], strict=True))
        first, second = sent[row["ticket"]][1], sent[row["ticket"]][2]
        assert whole == first + second
        assert len(whole) <= 400
    runs.nothing_left(started.folder, started.family)


def test_an_adapter_is_replaced_under_running_requests(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Only adapters travel; log-probs of engine and learner agree before and after, tags say which is which."""
    from async_rl.rollout.engines.vllm_engine import VllmEngine

    lora = {"rank": 4, "alpha": 8}
    rollout = {"slots": 8, "dtype": "float32"}
    config = parse({"data": {"path": "x"}, "rollout": rollout, "learner": {"lora": lora}})
    engine = VllmEngine(config, model=str(models[0]), max_model_tokens=512, cores=[0], seed=0)
    policies = [load(str(models[0]), 1.0, torch.device("cpu"), lora=config.learner.lora) for _ in range(2)]
    torch.manual_seed(0)
    with torch.no_grad():
        for policy in policies:
            for name, parameter in policy.named_parameters():
                if name.endswith(adapters.B):
                    parameter.normal_(0, 0.2)
    publisher = Publisher(tmp_path, Writer(f"lora-{tmp_path.name}"), torch.float32, tied=["lm_head.weight"])

    async def noted(version: int) -> None:
        del version

    async def live() -> tuple[list[float], list[Delta], Delta]:
        await engine.start()
        errors: list[float] = []
        running: list[asyncio.Task[Delta]] = []
        for version, policy in enumerate(policies, 1):
            tensors = full_tensors(policy, trained=True)
            publisher.publish(version, tensors, Probe(PROBE, logprobs_of(policy.model, PROBE, 1.0).tolist()))
            receipt = await Receiver(engine, Here(tmp_path), "float32").pull(noted)
            assert receipt.probe_error is not None
            errors.append(receipt.probe_error)
            if version == 1:
                begun = asyncio.Event()
                running = [asyncio.create_task(collect(engine, Request(f"r{i}", PROMPT, 300), begun)) for i in range(8)]
                await begun.wait()
        across = await asyncio.gather(*running)
        greedy = await collect(engine, Request("g", PROMPT, 20, greedy=True))
        await engine.stop()
        return errors, across, greedy

    try:
        errors, across, greedy = asyncio.run(live())
    finally:
        publisher.close()
    assert max(errors) < 1e-3
    assert any(set(response.versions) == {1, 2} for response in across)
    for response in across:
        assert [
            version for version, start, end in response.spans or [] for _ in range(end - start)
        ] == response.versions
    after = logprobs_of(policies[1].model, PROMPT + greedy.tokens, 1.0)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(greedy.logprobs, np.zeros(len(greedy.tokens)) + after.numpy(), atol=1e-3)
