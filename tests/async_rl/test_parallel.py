"""However ranks share the work, losses and gradients are those of one rank."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModel, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from async_rl.benchmarks import tiny
from async_rl.config import Config, check, parse
from async_rl.errors import ConfigError
from async_rl.learner import checkpoint, loading, sequence
from async_rl.learner.batch import plan, share
from async_rl.learner.models import build
from async_rl.learner.packing import pack
from async_rl.learner.policy import load
from async_rl.learner.step import Stepper
from async_rl.learner.tensor import SPLIT, SUMMED
from tests.async_rl.test_packing import segments
from tests.async_rl.test_ranks import a_batch, fetched, plain

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, {}),
    "one, activations again": (1, {"recompute": True}),
    "two shards": (2, {}),
    "two shards, all again": (2, {"reshard": True, "recompute": True}),
    "tensor 2": (2, {"parallel": {"tensor": 2}}),
    "sequence 2": (2, {"parallel": {"sequence": 2}}),
    "four shards": (4, {}),
    "two replicas of two shards": (4, {"parallel": {"replicas": 2}}),
    "two shards, tensor 2": (4, {"parallel": {"tensor": 2}}),
    "two shards, sequence 2, activations again": (4, {"parallel": {"sequence": 2}, "recompute": True}),
    "sequence 2, tensor 2": (4, {"parallel": {"sequence": 2, "tensor": 2}}),
}
"""Ranks, and the learner's settings."""
ALGORITHMS = {
    "grpo": {"preset": "grpo", "kl": {"coefficient": 0.1}},
    "gspo": {"preset": "gspo"},
    "ppo": {"preset": "ppo", "entropy": 0.01},
    "own trunk": {"preset": "ppo", "value": {"trunk": "own"}},
}
"""A term of the reference, ratios of whole sequences, values and an entropy with a gradient, a critic of its own."""


def settings(algorithm: dict[str, object], **learner: object) -> Config:
    return parse(
        {
            "data": {"path": "x"},
            "reward": {"function": "tests.e2e.rewards:length"},
            "learner": {"dtype": "float32", "clip_norm": 0.1, "micro_batch_tokens": 16} | learner,
            "algorithm": algorithm,
        }
    )


FAMILIES = ("llama", "qwen3")


def steps(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    for layout, (ranks, learner) in LAYOUTS.items():
        for family, algorithm in product(FAMILIES, ALGORITHMS) if ranks == world else ():
            if family == "qwen3" and (algorithm != "grpo" or world > 2):
                continue
            config = settings(ALGORITHMS[algorithm], **learner)
            models = plain(build(config, str(folder / family), torch.device("cpu")))
            data_rank, data_ranks = models.mesh.data_rank, models.mesh.data_ranks
            planned = plan(a_batch(), ranks=data_ranks, algorithm=config.algorithm)
            rows = planned.rows[data_rank]
            ages = np.zeros(sum(row.length for row in rows), np.int64)
            result = Stepper(models, config).step(share(planned, data_rank, fetched(rows), ages, config), rate=1.0)
            losses: list[float] = [0.0] * world
            dist.all_gather_object(losses, result.loss if models.mesh.leads else 0.0)
            weights = {name: tensor.clone() for name, tensor in checkpoint.full_tensors(models.policy)}
            if rank == 0:
                torch.save((sum(losses), result.grad_norm, weights), folder / f"{family} {algorithm} {layout}.pt")
    dist.destroy_process_group()


@pytest.mark.e2e
def test_every_layout_has_the_losses_and_gradients_of_one_rank(tmp_path: Path) -> None:
    before = {}
    for family in FAMILIES:
        model = tiny.make(tmp_path / family, heads=(4, 2), family=family)
        before[family] = dict(load(str(model), 1.0, torch.device("cpu")).model.named_parameters())
    for world in (1, 2, 4):
        mp.spawn(steps, (world, tmp_path), nprocs=world)
    for path in tmp_path.glob("*.pt"):
        family, case = path.stem.split(" ", 1)
        algorithm = next(name for name in ALGORITHMS if case.startswith(name))
        loss, norm, reference = torch.load(tmp_path / f"{family} {algorithm} one.pt")
        assert norm > 0.1  # it is clipped
        scale = max(float((reference[name] - before[family][name]).detach().abs().max()) for name in reference)
        other, its_norm, weights = torch.load(path)
        assert other == pytest.approx(loss, rel=1e-4, abs=1e-6), path.stem
        assert its_norm == pytest.approx(norm, rel=1e-4), path.stem
        for name in reference:
            torch.testing.assert_close(weights[name], reference[name], atol=1e-4 * scale, rtol=0)
    assert len(list(tmp_path.glob("*.pt"))) == len(LAYOUTS) * len(ALGORITHMS) + 6


@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_a_micro_batch_make_the_whole(size: int) -> None:
    (packed,) = pack(segments(), tokens=4096)
    whole = sequence.padded(packed, size)
    assert whole.tokens.shape[1] % size == 0
    assert np.array_equal(whole.tokens.ravel()[whole.predict], packed.tokens.ravel()[packed.predict])
    parts = [sequence.cut(whole, rank, size) for rank in range(size)]
    assert np.array_equal(np.concatenate([part.tokens for part in parts], axis=1), whole.tokens)
    for part, count in zip(parts, parts[0].counts, strict=True):
        assert part.targets.size == part.predict.size == count
    together = np.concatenate([part.targets for part in parts])
    assert np.array_equal(together[parts[0].order], packed.targets)
    predicting = np.concatenate([part.tokens.ravel()[part.predict] for part in parts])
    assert np.array_equal(predicting[parts[0].order], packed.tokens.ravel()[packed.predict])


def test_ranks_that_do_not_fit_the_layout_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner.ranks = 6: .* 1 x 2 x 2.*Use 8"):
        check(settings({}, parallel={"sequence": 2, "tensor": 2}, ranks=6))


def test_the_styles_of_common_plans_are_known() -> None:
    for config in (LlamaConfig(), MistralConfig(), Qwen2Config(), Qwen3Config()):
        assert set(config.base_model_tp_plan.values()) <= {*SPLIT, SUMMED}


def test_a_hollow_model_has_everything_but_weights(tiny_model: Path, tmp_path: Path) -> None:
    """The layouts of several shards above begin with one, each rank reading its part."""
    whole, hollow = loading.whole(str(tiny_model), "sdpa"), loading.hollow(str(tiny_model), "sdpa")
    assert hollow is not None
    assert all(parameter.is_meta for parameter in hollow.parameters())
    assert [name for name, _ in hollow.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert hollow.generation_config.to_dict() == whole.generation_config.to_dict()
    for one, two in zip(hollow.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    assert not hollow.training
    trunk = loading.hollow(str(tiny_model), "sdpa", AutoModel)
    assert trunk is not None
    shutil.copy(tiny_model / "config.json", tmp_path)  # no weights
    assert loading.hollow(str(tmp_path), "sdpa") is None
