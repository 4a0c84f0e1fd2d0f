"""What every engine promises, proven for each of them on the same tiny model in float32 (failures.md 11 to 16, 19).

One engine lives through all tests of its kind, in an event loop of its own.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import LlamaForCausalLM

from async_rl.benchmarks import tiny
from async_rl.config import parse
from async_rl.errors import RequestRefused
from async_rl.rollout.engines import make
from async_rl.rollout.engines.protocol import Delta, Engine, Request
from async_rl.weights.manifest import Manifest, Probe
from async_rl.weights.publisher import Publisher
from async_rl.weights.receiver import Here, Receiver
from async_rl.weights.shm import Writer
from tests.async_rl.test_torch_engine import PROMPT, collect

pytestmark = pytest.mark.e2e
T = TypeVar("T")
TEMPERATURE = 0.7
LENGTH = 400
KINDS = [
    pytest.param((engine, kv), id=f"{engine}-{kv}")
    for engine in ("torch", "vllm")
    for kv in ("keep", "recompute")
    if engine == "torch" or importlib.util.find_spec("vllm")
]


@dataclass
class Bench:
    """An engine, its loop, and two models to publish: `one`, which it began with, and `two`."""

    engine: Engine
    kv: str
    runner: asyncio.Runner
    publisher: Publisher
    folder: Path
    models: dict[str, LlamaForCausalLM]
    version: int = 0
    names: int = field(default=0)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def publish(self, name: str) -> Manifest:
        self.version += 1
        model = self.models[name]
        return self.publisher.publish(self.version, model.named_parameters(), Probe(PROMPT, scores(model, PROMPT)))

    async def load(self, name: str) -> None:
        async def nothing(_: int) -> None: ...

        self.publish(name)
        await Receiver(self.engine, Here(self.folder), "float32").pull(nothing)

    def request(self, tokens: int, *, greedy: bool = False, prompt: list[int] = PROMPT) -> Request:
        self.names += 1
        return Request(f"r{self.names}", prompt, tokens, greedy=greedy)


def scores(model: LlamaForCausalLM, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of `tokens[1:]`."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logprobs = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[1:, None])[:, 0].tolist()


@pytest.fixture(scope="module", params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    name, kv = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{kv}")
    paths = {each: tiny.make(folder / each, seed=seed) for seed, each in enumerate(("one", "two"))}
    models = {each: LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for each, path in paths.items()}
    config = parse(
        {
            "data": {"path": "x"},
            "rollout": {"engine": name, "slots": 16, "dtype": "float32", "temperature": TEMPERATURE},
            "weights": {"kv_after_update": kv},
        }
    )
    engine = make(config, model=str(paths["one"]), max_model_tokens=512, cores=[0], seed=0)
    publisher = Publisher(folder, Writer(f"bench-{folder.name}"), torch.float32, tied=["lm_head.weight"])
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield Bench(engine, kv, runner, publisher, folder, models)
        finally:
            runner.run(engine.stop())
            publisher.close()


@pytest.fixture(autouse=True)
def with_the_first_weights(bench: Bench) -> None:
    bench.do(bench.load("one"))


def test_logprobs_are_the_learners(bench: Bench) -> None:
    """failures.md 19: also for continuations, whose prompts are longer."""

    async def all_of_them() -> list[Delta]:
        return await asyncio.gather(*(collect(bench.engine, each) for each in requests))

    requests = [bench.request(40, prompt=PROMPT[: 2 + i % 5]) for i in range(32)]
    for request, response in zip(requests, bench.do(all_of_them()), strict=True):
        want = scores(bench.models["one"], request.prompt + response.tokens, TEMPERATURE)[len(request.prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(response.logprobs), torch.tensor(want), atol=1e-4, rtol=0)


def test_greedy_is_the_plain_model_and_budgets_are_kept(bench: Bench) -> None:
    """failures.md 12."""
    response = bench.do(collect(bench.engine, bench.request(20, greedy=True)))
    ids = torch.tensor([PROMPT])
    want = bench.models["one"].generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    assert response.tokens == want[0, len(PROMPT) :].tolist()
    short = bench.do(collect(bench.engine, bench.request(3)))
    assert len(short.tokens) == len(short.logprobs) == len(short.versions) <= 3
    assert short.finish_reason == ("stop" if short.tokens[-1] == 1 else "length")


def test_what_can_never_fit_is_refused_and_the_next_one_runs(bench: Bench) -> None:
    """failures.md 4."""
    with pytest.raises(RequestRefused):
        bench.do(collect(bench.engine, bench.request(500, prompt=[5] * 100)))
    assert bench.do(collect(bench.engine, bench.request(4))).tokens


def test_an_update_in_mid_response_keeps_requests_and_tags_tokens(bench: Bench) -> None:
    """failures.md 11, 14, 16. With `recompute` the rest is what the new weights say to all that came before, from
    its first token; with `keep` the past has the old ones' KV, and that can be told apart."""

    async def story() -> list[Delta]:
        begun = asyncio.Event()
        running = [asyncio.create_task(collect(bench.engine, bench.request(LENGTH), begun)) for _ in range(8)]
        await begun.wait()
        await bench.load("two")
        return await asyncio.gather(*running)

    old = bench.version
    responses = bench.do(story())
    spanning = [response for response in responses if set(response.versions) == {old, bench.version}]
    assert spanning
    errors: list[float] = []
    for response in responses:
        assert response.finish_reason in ("stop", "length")
        assert [v for v, start, end in response.spans or [] for _ in range(end - start)] == response.versions
    for response in spanning:
        cut = response.versions.index(bench.version)
        fresh = scores(bench.models["two"], PROMPT + response.tokens, TEMPERATURE)[len(PROMPT) - 1 :]
        past = scores(bench.models["one"], PROMPT + response.tokens[:cut], TEMPERATURE)[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(response.logprobs[:cut]), torch.tensor(past), atol=1e-4, rtol=0)
        gap = torch.tensor(response.logprobs[cut:]) - torch.tensor(fresh[cut:])
        errors.append(float(gap.abs().max()))
    assert max(errors) < 1e-3 if bench.kv == "recompute" else max(errors) > 1e-3


def test_no_prefix_of_old_weights_is_served(bench: Bench) -> None:
    """failures.md 14: the same prompt before and after an update."""
    long = (PROMPT * 20)[:100]
    before = bench.do(collect(bench.engine, bench.request(12, greedy=True, prompt=long)))
    bench.do(bench.load("two"))
    after = bench.do(collect(bench.engine, bench.request(12, greedy=True, prompt=long)))
    for response, name in ((before, "one"), (after, "two")):
        want = scores(bench.models[name], long + response.tokens)[len(long) - 1 :]
        assert response.tokens == greedy(bench.models[name], long, len(response.tokens))
        assert len(want) == len(response.tokens)


def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def test_fifty_requests_during_an_update_start_after_it(bench: Bench) -> None:
    """failures.md 15."""

    async def story() -> list[Delta]:
        update = asyncio.create_task(bench.engine.update(manifest))
        await asyncio.sleep(0)
        running = [asyncio.create_task(collect(bench.engine, bench.request(3))) for _ in range(50)]
        await update
        return await asyncio.gather(*running)

    manifest = bench.publish("two")
    responses = bench.do(story())
    assert len(responses) == 50
    assert {version for response in responses for version in response.versions} == {bench.version}


def test_whoever_stops_listening_ends_the_request(bench: Bench) -> None:
    """failures.md 13: it is nobody's finished response, and its slot is free."""

    async def story() -> list[Delta]:
        for _ in range(20):  # more than there are slots
            stream = bench.engine.generate(bench.request(LENGTH))
            first = await anext(stream)
            assert first.finish_reason is None or first.tokens
            await stream.aclose()  # type: ignore[attr-defined]
        return await asyncio.gather(*(collect(bench.engine, bench.request(5)) for _ in range(16)))

    assert len(bench.do(story())) == 16


def test_a_version_of_the_same_weights_is_a_new_label(bench: Bench) -> None:
    bench.version += 1
    bench.do(bench.engine.relabel(bench.version))
    assert set(bench.do(collect(bench.engine, bench.request(4))).versions) == {bench.version}


def test_scores_are_those_of_the_weights_loaded(bench: Bench) -> None:
    for name in ("two", "one"):
        bench.do(bench.load(name))
        got = bench.do(bench.engine.score(PROMPT))
        torch.testing.assert_close(
            torch.tensor(got), torch.tensor(scores(bench.models[name], PROMPT)), atol=1e-4, rtol=0
        )
