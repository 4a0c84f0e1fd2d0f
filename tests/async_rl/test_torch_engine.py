"""The torch engine against the plain model: samples, log-probs, updates in mid-response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from async_rl.benchmarks import tiny
from async_rl.config import parse
from async_rl.errors import RequestRefused
from async_rl.learner.packing import Member, Segment, pack
from async_rl.learner.policy import load
from async_rl.rollout.engines.protocol import Delta, Engine, Request
from async_rl.rollout.engines.torch_engine import TorchEngine
from async_rl.weights.publisher import Publisher
from async_rl.weights.shm import Writer

PROMPT = [0, 40, 41, 42, 1, 0]


def engine_for(
    model: Path, *, temperature: float = 1.0, slots: int = 4, seed: int = 0, deterministic: bool = False, **more: object
) -> TorchEngine:
    rollout = {"temperature": temperature, "slots": slots, "dtype": "float32"} | more
    config = parse({"data": {"path": "x"}, "rollout": rollout, "deterministic": deterministic})
    return TorchEngine(config, model=str(model), max_model_tokens=128, seed=seed)


async def collect(engine: Engine, request: Request, begun: asyncio.Event | None = None) -> Delta:
    """The whole response as one delta; `begun` is set when some of it has come."""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    last = None
    async for delta in engine.generate(request):
        tokens += delta.tokens
        logprobs += delta.logprobs
        versions += delta.versions
        last = delta
        if begun is not None:
            begun.set()
    assert last is not None
    return Delta(tokens, logprobs, versions, last.finish_reason, last.spans)


def run(engine: TorchEngine, *requests: Request) -> list[Delta]:
    async def all_of_them() -> list[Delta]:
        await engine.start()
        try:
            return await asyncio.gather(*(collect(engine, request) for request in requests))
        finally:
            await engine.stop()

    return asyncio.run(all_of_them())


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path, Writer(f"engine-{tmp_path.name}"), torch.float32, tied=["lm_head.weight"])
    yield publisher
    publisher.close()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_behaviour_logprobs_are_the_learners(tiny_model: Path, temperature: float) -> None:
    """failures.md 19: temperature on both sides; over 2,000 tokens, float32, every difference at most 1e-4."""
    requests = [Request(str(i), PROMPT[: 2 + i % 5], 60) for i in range(60)]
    responses = run(engine_for(tiny_model, temperature=temperature, slots=16), *requests)
    policy = load(str(tiny_model), temperature, torch.device("cpu"))
    segments = [
        Segment(torch.tensor(request.prompt).numpy(), [Member(i, torch.tensor(response.tokens).numpy())])
        for i, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]
    sampled = 0
    for packed in pack(segments, tokens=4096):
        with torch.no_grad():
            learner = policy(packed).logprobs
        behaviour = torch.tensor([responses[s].logprobs[o] for s, o in zip(packed.source, packed.offset, strict=True)])
        assert (learner - behaviour).abs().max() <= 1e-4
        assert ((learner - behaviour).exp() - 1).abs().max() < 1e-4
        sampled += behaviour.numel()
    assert sampled >= 2000


@pytest.mark.parametrize("truncation", [{"top_p": 0.5}, {"top_k": 7}, {"min_p": 0.9}], ids=str)
def test_truncated_sampling_is_off_by_the_mass_that_survives(tiny_model: Path, truncation: dict) -> None:
    """The engine's log-probs are those of the survivors alone; `exp(learner - engine)` is their mass, below 1."""
    (delta,) = run(engine_for(tiny_model, **truncation), Request("1", PROMPT, 40))
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + delta.tokens])).logits[0, len(PROMPT) - 1 : -1]
    for row, token, logprob in zip(logits, delta.tokens, delta.logprobs, strict=True):
        chances = row.softmax(-1)
        order = chances.argsort(descending=True)
        ranked = chances[order]
        if "top_k" in truncation:
            kept = set(order[: truncation["top_k"]].tolist())
        elif "min_p" in truncation:
            kept = set(order[ranked >= truncation["min_p"] * ranked[0]].tolist())
        else:
            kept = set(order[ranked.cumsum(0) - ranked < truncation["top_p"]].tolist())
        assert token in kept
        mass = float(chances[sorted(kept)].sum())
        assert mass < 1
        assert float(chances[token]) / mass == pytest.approx(torch.tensor(logprob).exp().item(), rel=1e-3)


def test_greedy_responses_are_those_of_the_plain_model(tiny_model: Path) -> None:
    """Slots of different lengths do not disturb each other."""
    requests = [Request(str(i), PROMPT[: 2 + i], 20, greedy=True) for i in range(4)]
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for request, response in zip(requests, run(engine_for(tiny_model, slots=2), *requests), strict=True):
        ids = torch.tensor([request.prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
        assert response.tokens == want[0, ids.shape[1] :].tolist()
        assert response.finish_reason == ("stop" if response.tokens[-1] == 1 else "length")


def test_the_budget_is_kept(tiny_model: Path) -> None:
    (response,) = run(engine_for(tiny_model), Request("a", PROMPT, 3))
    assert len(response.tokens) == len(response.logprobs) == len(response.versions) <= 3


def test_eight_members_of_a_group_are_not_all_equal_and_a_seed_repeats_itself(tiny_model: Path) -> None:
    """failures.md 25."""
    requests = [Request(str(i), PROMPT, 12) for i in range(8)]
    one, two = (run(engine_for(tiny_model, slots=8, seed=seed), *requests) for seed in (0, 1))
    assert len({tuple(response.tokens) for response in one}) > 1
    assert [r.tokens for r in one] != [r.tokens for r in two]
    seeded = [Request("s", PROMPT, 12, seed=5)] * 2
    a, b = (run(engine_for(tiny_model, seed=seed), request)[0] for seed, request in enumerate(seeded))
    assert a.tokens == b.tokens


def test_a_deterministic_response_is_the_same_alone_in_company_and_continued(tiny_model: Path) -> None:
    company = [Request(str(i), PROMPT[i:], 20, seed=i) for i in range(4)]

    def together(*requests: Request) -> list[Delta]:
        return run(engine_for(tiny_model, deterministic=True), *requests)

    whole, *_ = together(*company)
    (alone,) = together(company[0])
    assert (alone.tokens, alone.logprobs) == (whole.tokens, whole.logprobs)
    assert len(whole.tokens) > 4
    for known in (1, 3):
        left = Request("rest", PROMPT + whole.tokens[:known], 20 - known, seed=0)
        rest = together(*company[1:], left)[-1]
        assert (rest.tokens, rest.logprobs) == (whole.tokens[known:], whole.logprobs[known:])


def test_a_request_that_can_never_fit_is_refused_and_the_next_one_runs(tiny_model: Path) -> None:
    async def both() -> Delta:
        engine = engine_for(tiny_model)
        await engine.start()
        with pytest.raises(RequestRefused, match="exceed"):
            await collect(engine, Request("long", [5] * 100, 60))
        response = await collect(engine, Request("a", PROMPT, 4))
        await engine.stop()
        return response

    assert asyncio.run(both()).finish_reason


def test_an_update_in_mid_response_keeps_requests_and_tags_tokens(
    tiny_model: Path, tmp_path: Path, publisher: Publisher
) -> None:
    """failures.md 11, 14 and 16, with tied embeddings: tags agree with the engine's spans, weights are the new ones."""
    other = load(str(tiny.make(tmp_path / "other", seed=1)), 1.0, torch.device("cpu"))
    manifest = publisher.publish(7, other.model.named_parameters(), None)

    async def scenario() -> tuple[list[Delta], Delta, list[float]]:
        engine = engine_for(tiny_model, slots=4)
        await engine.start()
        begun = asyncio.Event()
        running = [asyncio.create_task(collect(engine, Request(str(i), PROMPT, 100), begun)) for i in range(4)]
        await begun.wait()
        await engine.update(manifest)
        responses = await asyncio.gather(*running)
        after = await collect(engine, Request("after", PROMPT, 20, greedy=True))
        scores = await engine.score(PROMPT)
        await engine.stop()
        return responses, after, scores

    responses, after, scores = asyncio.run(scenario())
    assert any(set(response.versions) == {0, 7} for response in responses)
    for response in responses:
        spans = [version for version, start, end in response.spans or [] for _ in range(end - start)]
        assert spans == response.versions
    (fresh,) = run(engine_for(tmp_path / "other"), Request("fresh", PROMPT, 20, greedy=True))
    assert after.tokens == fresh.tokens
    assert set(after.versions) == {7}
    packed = pack([Segment(torch.tensor(PROMPT[:1]).numpy(), [Member(0, torch.tensor(PROMPT[1:]).numpy())])], tokens=9)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(scores), other(packed[0]).logprobs, atol=1e-5, rtol=0)


def test_requests_made_during_an_update_start_after_it(tiny_model: Path, publisher: Publisher) -> None:
    """failures.md 15."""
    model = load(str(tiny_model), 1.0, torch.device("cpu"))
    manifest = publisher.publish(3, model.model.named_parameters(), None)

    async def scenario() -> list[Delta]:
        engine = engine_for(tiny_model, slots=8)
        await engine.start()
        update = asyncio.create_task(engine.update(manifest))
        await asyncio.sleep(0)
        requests = [asyncio.create_task(collect(engine, Request(str(i), PROMPT, 3))) for i in range(50)]
        await update
        responses = await asyncio.gather(*requests)
        await engine.stop()
        return responses

    responses = asyncio.run(scenario())
    assert len(responses) == 50
    assert {version for response in responses for version in response.versions} == {3}
