"""What needs an accelerator: `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.learner.packing import pack
from async_rl.learner.policy import load
from tests.async_rl.test_packing import segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_fused_kernels_have_the_same_gradients(tiny_model: Path) -> None:
    pytest.importorskip("liger_kernel")
    results = []
    for fused in (False, True):
        policy = load(str(tiny_model), 1.0, torch.device("cuda"), fused=fused)
        (packed,) = pack(segments(), tokens=4096)
        logprobs = policy(packed).logprobs
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(parameter.grad for parameter in policy.parameters())])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(plain, fused, atol=1e-4, rtol=1e-3)


def test_logprobs_and_gradients_on_a_gpu_are_those_of_the_cpu(tiny_model: Path) -> None:
    results = []
    for device in ("cpu", "cuda"):
        policy = load(str(tiny_model), 0.7, torch.device(device))
        (packed,) = pack(segments(), tokens=4096)
        logprobs = policy(packed).logprobs
        logprobs.sum().backward()
        gradients = [parameter.grad.cpu() for parameter in policy.parameters()]  # type: ignore[union-attr]
        results.append([logprobs.detach().cpu(), *gradients])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(cpu, gpu, atol=1e-4, rtol=1e-3)


def test_flex_attention_has_the_gradients_of_sdpa(tiny_model: Path) -> None:
    results = []
    for attention in ("sdpa", "flex_attention"):
        policy = load(str(tiny_model), 1.0, torch.device("cuda"), attention=attention)
        packed = next(each for each in pack(segments(), tokens=4096) if not each.causal)
        logprobs = policy(packed).logprobs
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(parameter.grad for parameter in policy.parameters())])
    for sdpa, flex in zip(*results, strict=True):
        torch.testing.assert_close(sdpa, flex, atol=1e-4, rtol=1e-3)
