"""Shared prompts in packed rows give the log-probs and gradients of one padded row per trajectory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from async_rl.config import parse
from async_rl.learner.batch import Plan, share
from async_rl.learner.kernels import fuse
from async_rl.learner.logprobs import token_logprobs
from async_rl.learner.packing import Member, Segment, pack, split
from async_rl.learner.policy import Policy, attended, attention_of, load
from buffers import messages as m
from staleness.versions import INJECTED


def segments(seed: int = 0, groups: int = 5) -> list[Segment]:
    rng = np.random.default_rng(seed)
    out, index = [], 0
    for _ in range(groups):
        members = []
        for _ in range(rng.integers(1, 4)):
            members.append(Member(index, rng.integers(2, 250, rng.integers(1, 9))))
            index += 1
        out.append(Segment(rng.integers(2, 250, rng.integers(1, 12)), members))
    return out


def reference(policy: Policy, found: list[Segment]) -> dict[tuple[int, int], torch.Tensor]:
    """(trajectory, offset) -> log-prob, one trajectory at a time, with the plain model and full logits."""
    out = {}
    for segment in found:
        for member in segment.members:
            ids = torch.from_numpy(np.concatenate([segment.prompt, member.response]))[None]
            logprobs = (policy.model(ids).logits[0] / policy.temperature).log_softmax(-1)
            for i, token in enumerate(member.response):
                out[member.index, i] = logprobs[segment.prompt.size + i - 1, int(token)]
    return out


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    return load(str(tiny_model), 0.7, torch.device("cpu"))


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_logprobs_and_gradients_equal_the_padded_ones(policy: Policy, tokens: int) -> None:
    found = segments()
    expected = reference(policy, found)
    weight = {key: float(np.sin(17 * key[0] + key[1])) for key in expected}
    sum(value * weight[key] for key, value in expected.items()).backward()  # type: ignore[union-attr]
    gradients = [p.grad.clone() for p in policy.parameters()]  # type: ignore[union-attr]
    policy.zero_grad()
    seen = 0
    for packed in pack(found, tokens=tokens):
        scores = policy(packed)
        keys = list(zip(packed.source.tolist(), packed.offset.tolist(), strict=True))
        want = torch.stack([expected[key] for key in keys])
        torch.testing.assert_close(scores.logprobs, want, atol=1e-5, rtol=1e-5)
        (scores.logprobs * torch.tensor([weight[key] for key in keys])).sum().backward()
        seen += len(keys)
    assert seen == len(expected)
    for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
        scale = gradient.abs().max()
        assert (parameter.grad - gradient).abs().max() <= 1e-5 * scale  # type: ignore[operator]


def test_every_token_is_packed_once_and_rows_fit() -> None:
    found = segments(seed=3, groups=20)
    longest = max(segment.size for segment in found)
    packed = pack(found, tokens=3 * longest)
    assert all(part.tokens.size <= 3 * longest for part in packed)
    assert [part.tokens.shape[1] for part in packed] == sorted((p.tokens.shape[1] for p in packed), reverse=True)
    places = {(int(s), int(o)) for part in packed for s, o in zip(part.source, part.offset, strict=True)}
    assert len(places) == sum(part.targets.size for part in packed)
    assert len(places) == sum(member.response.size for segment in found for member in segment.members)


def test_micro_batches_are_cut_where_it_costs_least() -> None:
    """Against every way to cut ten rows."""
    sizes = [90, 80, 79, 40, 39, 12, 11, 10, 9, 3]
    found = [Segment(np.zeros(size - 1, np.int64), [Member(i, np.zeros(1, np.int64))]) for i, size in enumerate(sizes)]
    for tokens, light in ((90, 5), (200, 0), (200, 30), (1000, 10), (1000, 10_000)):
        packed = pack(found, tokens=tokens, light=light)
        costs = []
        for cuts in range(1 << 9):
            ends = [i for i in range(1, 10) if cuts >> (i - 1) & 1]
            parts = [(start, end - start) for start, end in pairwise([0, *ends, 10])]
            if all(rows == 1 or rows * sizes[start] <= tokens for start, rows in parts):
                costs.append(sum(rows * sizes[start] + light for start, rows in parts))
        assert sum(part.tokens.size + light for part in packed) == min(costs)


def test_short_groups_stay_together_and_long_responses_have_rows_of_their_own() -> None:
    def group(prompt: int, *responses: int) -> Segment:
        return Segment(np.zeros(prompt, np.int64), [Member(i, np.zeros(n, np.int64)) for i, n in enumerate(responses)])

    assert len(split(group(35, *[16] * 8), 3456)) == 1
    assert len(split(group(35, *[1000] * 8), 3456)) == 8
    # A long prompt is worth sharing: eight times 4000 tokens again would cost more than attention does.
    assert len(split(group(4000, *[50] * 8), 3456)) == 1
    pieces = split(group(10, 900, 800, 20, 20, 20), 1000)
    assert sorted(member.index for piece in pieces for member in piece.members) == [0, 1, 2, 3, 4]
    assert [piece.size for piece in pieces if 0 in {m.index for m in piece.members}] == [910]


@pytest.mark.parametrize("pairs", [1, 10_000])
def test_however_groups_are_split_the_logprobs_are_the_same(policy: Policy, pairs: int) -> None:
    found = segments(seed=4)
    expected = reference(policy, found)
    micro = pack(found, tokens=60, pairs=pairs)
    assert all(part.causal for part in micro) == (pairs == 1)
    for part in micro:
        logprobs = policy(part).logprobs
        for source, offset, value in zip(part.source.tolist(), part.offset.tolist(), logprobs, strict=True):
            torch.testing.assert_close(value, expected[source, offset], atol=1e-5, rtol=1e-5)


def test_nothing_to_train_on_is_no_micro_batch() -> None:
    assert pack([], tokens=100) == []


def test_a_frozen_head_gets_no_gradient_and_the_states_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.learner.logprobs.CHUNK", 7)
    torch.manual_seed(0)
    hidden, head = torch.randn(20, 8), torch.randn(30, 8)
    targets = torch.randint(0, 30, (20,))
    gradients = []
    for trained in (True, False):
        states = hidden.clone().requires_grad_()
        weight = head.clone().requires_grad_(trained)
        token_logprobs(states, weight, targets, 1.0)[0].sum().backward()
        assert (weight.grad is not None) == trained
        gradients.append(states.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_padding_stays_within_the_positions_of_a_model(policy: Policy) -> None:
    shared = Segment(np.zeros(4, np.int64), [Member(i, np.zeros(6, np.int64)) for i in range(5)])
    alone = Segment(np.zeros(4, np.int64), [Member(9, np.zeros(6, np.int64))])
    (packed,) = pack([shared, alone], tokens=100, light=1000)
    assert not packed.causal
    assert packed.tokens.shape == (2, 34)
    assert packed.positions.max() == 9


def test_chunked_logprobs_and_their_gradients_equal_full_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.learner.logprobs.CHUNK", 7)
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, requires_grad=True)
    head = torch.randn(30, 8, requires_grad=True)
    targets = torch.randint(0, 30, (20,))
    weight = torch.randn(20)
    full = (hidden @ head.T / 0.6).log_softmax(-1)
    (full.gather(-1, targets[:, None])[:, 0] * weight).sum().backward()
    expected = hidden.grad.clone(), head.grad.clone()  # type: ignore[union-attr]
    hidden.grad = head.grad = None
    logprobs, entropy = token_logprobs(hidden, head, targets, 0.6)
    (logprobs * weight).sum().backward()
    torch.testing.assert_close(logprobs, full.gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close(hidden.grad, expected[0])
    torch.testing.assert_close(head.grad, expected[1])
    every = -(full.exp() * full).sum(-1)
    some = ~entropy.isnan()
    assert some.sum() == 3  # one in eight of each chunk of seven
    torch.testing.assert_close(entropy[some], every[some])


def test_trained_ids_are_the_sampled_ids_and_no_prompt_token_is_a_target() -> None:
    """failures.md 24, single turn: from the buffer's columns to the targets, without a tokenizer in between."""
    rows = [m.BatchRow(7, 0, 0, 3, 2, 2, 1.0), m.BatchRow(8, 0, 1, 3, 3, 2, 0.0)]
    arrays = m.SampleArrays(
        tokens=np.asarray([11, 12, 21, 22, 23], np.int32),
        logprobs=np.full(5, -1.0, np.float32),
        span_length=np.asarray([2, 1, 1, 1], np.int32),
        span_version=np.asarray([0, 0, INJECTED, 0]),
        mask=np.asarray([1, 1, 1, 0, 1], np.uint8),
        prompts=np.asarray([91, 92, 93], np.int32),
    )
    planned = Plan(0, 0, [rows], [[1.0, -1.0]], [[[], []]], tokens=4, sequences=2, gradient=True)
    mine = share(planned, 0, arrays, np.zeros(5, np.int64), parse({"data": {"path": "x"}}))
    (packed,) = pack(mine.segments(), tokens=100)
    assert packed.tokens.tolist() == [[91, 92, 93, 11, 12, 21, 22, 23]]
    assert packed.targets.tolist() == arrays.tokens.tolist()
    # The hidden states that predict: the prompt's last token for each first answer token, then the token before.
    assert packed.predict.tolist() == [2, 3, 2, 5, 6]
    flat = mine.starts[packed.source] + packed.offset
    assert mine.mask[flat].tolist() == [True, True, True, False, True]
    assert mine.sampled[flat].tolist() == [True, True, True, False, True]


def test_the_entropy_of_every_token_has_the_gradient_of_the_plain_formula() -> None:
    """Both heads of the function at once, over more than one chunk, against autograd on all logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1500, 8, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, generator=generator, requires_grad=True)
    targets = torch.randint(11, (1500,), generator=generator)
    weights = torch.randn(2, 1500, generator=generator)

    logprobs, entropies = token_logprobs(hidden, head, targets, 0.7, entropy_every=1)
    (weights[0] @ logprobs + weights[1] @ entropies).backward()
    ours = hidden.grad, head.grad
    hidden.grad = head.grad = None

    plain = (hidden @ head.T / 0.7).log_softmax(-1)
    expected = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(entropies, expected, atol=1e-4, rtol=1e-4)
    (weights[0] @ plain.gather(-1, targets[:, None])[:, 0] + weights[1] @ expected).backward()
    torch.testing.assert_close(ours, (hidden.grad, head.grad), atol=1e-4, rtol=1e-4)


def test_kernels_are_fused_on_gpus_only(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    liger = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(liger, "_apply_liger_kernel_to_instance", lambda **how: asked.append(how))
    model = load(str(tiny_model), 1.0, torch.device("cpu"), fused=True).model
    assert asked == []
    assert fuse(model, torch.device("cuda"))
    assert asked == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_flex_attention_masks_and_scores_like_the_dense_mask(tiny_model: Path) -> None:
    packed = next(each for each in pack(segments(), tokens=4096) if not each.causal)
    block = attended(packed, torch.device("cpu"), flex=True)
    assert isinstance(block, BlockMask)
    rows, length = packed.tokens.shape
    dense = create_mask(block.mask_mod, rows, 1, length, length, device="cpu")
    assert np.array_equal(dense[:, 0].numpy(), packed.attention())
    with torch.no_grad():  # on a CPU flex has no backward pass
        flex, sdpa = (
            load(str(tiny_model), 1.0, torch.device("cpu"), attention=how)(packed).logprobs
            for how in ("flex_attention", "sdpa")
        )
    torch.testing.assert_close(flex, sdpa, atol=1e-5, rtol=1e-5)


def test_flex_is_for_gpus() -> None:
    assert attention_of("auto", torch.device("cpu")) == "sdpa"
    assert attention_of("auto", torch.device("cuda")) == attention_of("flex", torch.device("cpu")) == "flex_attention"
