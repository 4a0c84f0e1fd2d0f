"""The memory estimate against what a step really holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl import memory
from async_rl.config import Config, check, parse
from async_rl.errors import ConfigError
from async_rl.learner.models import build
from async_rl.learner.packing import Member, Segment, pack
from async_rl.learner.policy import load
from async_rl.lockstep import one_rank


def settings(**learner: object) -> Config:
    return parse(
        {
            "data": {"path": "x"},
            "reward": {"function": "tests.e2e.rewards:length"},
            "learner": {"dtype": "float32"} | learner,
        }
    )


def described(model: Path) -> memory.Model:
    found = memory.read(str(model))
    assert found is not None
    return found


def test_parameters_are_counted_from_the_files(tiny_model: Path) -> None:
    policy = load(str(tiny_model), 1.0, torch.device("cpu"))
    assert described(tiny_model).parameters == sum(each.numel() for each in policy.parameters())
    assert memory.read("owner/name") is None


def test_only_the_files_of_a_models_index_count(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, tmp_path)
    shutil.copy(tiny_model / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert described(tmp_path) == described(tiny_model)
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(tiny_model / "model.safetensors", tmp_path / "part-1.safetensors")
    assert described(tmp_path) == described(tiny_model)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    assert memory.read(str(tmp_path)) is None


def test_what_is_offloaded_is_not_on_the_device(tiny_model: Path) -> None:
    here, there = (memory.learner(described(tiny_model), settings(offload=flag)) for flag in (False, True))
    assert (there.weights, there.moments, there.gradients) == (0, 0, here.gradients)


def kept(model: Path, config: Config, tokens: int) -> int:
    """Bytes that a forward pass over one row of so many tokens keeps for its backward pass, of the layers alone."""
    row = np.arange(tokens) % 250
    (packed,) = pack([Segment(row[:-1], [Member(0, row[-1:])])], tokens=tokens)
    sizes: dict[int, int] = {}
    with one_rank():
        policy = build(config, str(model), torch.device("cpu")).policy
        parameters = {each.to_local().untyped_storage().data_ptr() for each in policy.parameters()}  # pyright: ignore

        def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters and tensor.is_floating_point():
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
            logprobs = policy(packed).logprobs
        logprobs.sum().backward()
    return sum(sizes.values())


def test_activations_grow_with_tokens_as_estimated(tiny_model: Path) -> None:
    config = settings()
    grown = kept(tiny_model, config, 400) - kept(tiny_model, config, 200)
    assert grown / 200 == pytest.approx(memory.learner(described(tiny_model), config).per_token, rel=0.35)


def test_recomputing_keeps_the_input_of_each_layer(tiny_model: Path) -> None:
    whole, less = (memory.learner(described(tiny_model), settings(recompute=flag)) for flag in (False, True))
    assert less.per_token < 0.7 * whole.per_token  # of two layers one is whole at a time
    held = kept(tiny_model, settings(recompute=True), 400)
    assert held < 0.5 * kept(tiny_model, settings(), 400)


def test_shards_replicas_and_adapters_divide_the_memory(tiny_model: Path) -> None:
    model = described(tiny_model)
    one = memory.learner(model, settings())
    assert (one.weights, one.moments, one.gradients) == tuple(n * model.parameters for n in (4, 8, 4))
    four = memory.learner(model, settings(ranks=4, reshard=True))
    assert (four.weights, four.moments, four.gradients) == tuple(n * model.parameters // 4 for n in (4, 8, 4))
    hsdp = memory.learner(model, settings(ranks=4, reshard=True, parallel={"replicas": 2}))
    assert hsdp.weights == 2 * four.weights
    lora = memory.learner(model, settings(lora={"rank": 4}))
    assert lora.moments < one.moments / 4
    assert lora.weights > one.weights


def test_an_adapter_is_as_large_as_counted(tiny_model: Path) -> None:
    config = settings(lora={"rank": 4})
    policy = load(str(tiny_model), 1.0, torch.device("cpu"), lora=config.learner.lora)
    trained = sum(each.numel() for each in policy.parameters() if each.requires_grad)
    assert memory.learner(described(tiny_model), config).moments == 8 * trained


def test_auto_takes_what_fits_and_says_what_does_not(tiny_model: Path) -> None:
    model, config = described(tiny_model), settings(micro_batch_tokens="auto")
    wanted = memory.learner(model, config)
    free = int((wanted.total(0) + 1000 * wanted.per_token) / memory.SPARE) + 2
    assert memory.micro_batch(model, config, free=free, longest=500) == 1000
    assert memory.micro_batch(model, config, free=1 << 50, longest=500) == memory.MOST_TOKENS
    with pytest.raises(ConfigError, match=r"a row of 1001 tokens wants .* learner.recompute"):
        memory.micro_batch(model, config, free=free, longest=1001)


def test_a_deterministic_run_has_a_number() -> None:
    config = parse(
        {
            "data": {"path": "x"},
            "reward": {"function": "tests.e2e.rewards:length"},
            "learner": {"micro_batch_tokens": "auto"},
            "staleness": {"max_staleness": 0},
            "deterministic": True,
        }
    )
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        check(config)
