"""The batches of a run, replayed on another number of ranks, have the gradients that they had."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from async_rl.config import Config, parse
from async_rl.learner import checkpoint
from async_rl.learner.batch import Plan, ages_of, plan, share
from async_rl.learner.models import build
from async_rl.learner.step import Stepper
from async_rl.lockstep import Lockstep, Problem, one_rank
from buffers import messages as m
from staleness.versions import Lineage
from staleness.versions import pack as pack_version
from tests.async_rl.test_ranks import plain

STEPS = 12
WORLDS = (1, 2)


def settings(model: Path) -> Config:
    return parse(
        {
            "steps": STEPS,
            "model": {"path": str(model)},
            "data": {"path": "x"},
            "reward": {"function": "tests.e2e.rewards:length"},
            "rollout": {"slots": 16, "max_tokens": 12, "dtype": "float32"},
            "buffer": {"batch_size": 16, "group_size": 4},
            "staleness": {"max_staleness": 2},
            "learner": {"dtype": "float32", "learning_rate": 1e-3, "clip_norm": 1e9},
        }
    )


@dataclass
class Recorded:
    """A step: the weights it began with, and for each number of ranks the plan and what each rank fetched."""

    step: int
    weights: dict[str, torch.Tensor]
    plans: dict[int, Plan]
    fetched: dict[int, list[m.SampleArrays]]


class Recording(Lockstep):
    recorded: list[Recorded]

    def _learn(self, batch: m.Batch, waited: float) -> Any:
        weights = {name: tensor.clone() for name, tensor in checkpoint.full_tensors(self.models.policy)}
        plans = {world: plan(batch, ranks=world, algorithm=self.config.algorithm) for world in WORLDS}
        fetched = {world: [self._arrays(batch, rows) for rows in plans[world].rows] for world in WORLDS}
        self.recorded.append(Recorded(self.step, weights, plans, fetched))
        return super()._learn(batch, waited)

    def _arrays(self, batch: m.Batch, rows: list[m.BatchRow]) -> m.SampleArrays:
        (sent,) = self.core.handle("rank0", m.Fetch(batch.lease, [row.ticket for row in rows]))
        return m.SampleArrays.from_frames([bytes(frame) for frame in sent.frames])


def replay(rank: int, world: int, model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    config = settings(model)
    models = plain(build(config, str(model), torch.device("cpu")))
    stepper = Stepper(models, config)
    gradients: list[torch.Tensor] = []
    recorded: list[Recorded] = pickle.loads((folder / "recorded").read_bytes())
    for each in recorded:
        load_whole(models.policy, each.weights)
        arrays = each.fetched[world][rank]
        ages = ages_of(arrays, pack_version(0, each.step), Lineage())
        stepper.step(share(each.plans[world], rank, arrays, ages, config), rate=1.0)
        after = dict(checkpoint.full_tensors(models.policy))
        gradients.append(torch.cat([(each.weights[name] - after[name]).flatten() for name in after]))
    if rank == 0:
        torch.save(gradients, folder / f"{world}.pt")
    dist.destroy_process_group()


def load_whole(policy: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    named = {f"model.{name}": tensor.clone() for name, tensor in weights.items()}
    set_model_state_dict(policy, named, options=StateDictOptions(full_state_dict=True, strict=False))


@pytest.mark.e2e
def test_another_number_of_ranks_has_the_gradient_of_every_recorded_batch(tiny_model: Path, tmp_path: Path) -> None:
    problems = [Problem(list(range(2 + i, 8 + i)), {}) for i in range(8)]
    with one_rank():
        run = Recording(settings(tiny_model), str(tiny_model), problems, lambda text, _: float(len(text) % 5))
        run.recorded = []
        assert len(list(run.run())) == STEPS
    (tmp_path / "recorded").write_bytes(pickle.dumps(run.recorded))
    for world in WORLDS:
        mp.spawn(replay, (world, tiny_model, tmp_path), nprocs=world)
    one, two = (torch.load(tmp_path / f"{world}.pt") for world in WORLDS)
    assert len(one) == STEPS
    for alone, shared in zip(one, two, strict=True):
        assert float(alone.norm()) > 1e-3
        assert float((alone - shared).norm() / alone.norm()) < 1e-5
