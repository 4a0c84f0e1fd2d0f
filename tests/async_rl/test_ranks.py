"""The same samples give the same gradient in any micro-batching on one rank and on two (failures.md 22).

Plain SGD with learning rate 1 turns the gradient into a difference of weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from async_rl.algorithms.config import AlgorithmConfig
from async_rl.algorithms.presets import PRESETS
from async_rl.config import parse
from async_rl.learner import checkpoint
from async_rl.learner.batch import Plan, plan, share
from async_rl.learner.models import Critic, Models, build
from async_rl.learner.policy import Policy, load
from async_rl.learner.step import Stepper, learning_rate
from buffers import messages as m

LENGTHS = [3, 7, 1, 5, 9, 2, 4, 6]
REWARDS = [1.0, 0.0, 0.0, 0.5, 0.2, 0.9, 0.3, 0.3]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]  # the last group has no gradient
PROMPTS = [4, 6, 5]
UNTRAINED = 1
"""Place of a token in every response that may not be trained on."""


def turns(length: int, reward: float) -> list[m.Turn]:
    """Two turns that begin in states shared by a group, for `gigpo`."""
    return [m.Turn(0, reward / 2, 5), m.Turn(length // 2, reward / 2, 6)] if length > 1 else [m.Turn(0, reward, 5)]


def a_batch() -> m.Batch:
    rows = [
        m.BatchRow(
            i, group, i, PROMPTS[group], length, length - (length > UNTRAINED), reward, turns=turns(length, reward)
        )
        for i, (group, length, reward) in enumerate(zip(GROUPS, LENGTHS, REWARDS, strict=True))
    ]
    known = [[reward for reward, g in zip(REWARDS, GROUPS, strict=True) if g == group] for group in range(3)]
    return m.Batch(0, 0, rows, known, m.Stats(), baselines=[0.4, 0.0, None])


def fetched(rows: list[m.BatchRow]) -> m.SampleArrays:
    """Tokens that depend on the ticket only, as every rank would fetch them."""
    each = [np.random.default_rng(row.ticket) for row in rows]
    tokens = [rng.integers(2, 250, row.length) for rng, row in zip(each, rows, strict=True)]
    logprobs = [-4 + rng.normal(0, 1, row.length) for rng, row in zip(each, rows, strict=True)]
    groups = dict.fromkeys(row.group for row in rows)
    prompts = [np.random.default_rng(100 + group).integers(2, 250, PROMPTS[group]) for group in groups]
    masks = [np.arange(row.length) != UNTRAINED for row in rows]
    empty = np.empty(0)
    return m.SampleArrays(
        tokens=np.concatenate([empty, *tokens]).astype(np.int32),
        logprobs=np.concatenate([empty, *logprobs]).astype(np.float32),
        span_length=np.asarray([row.length for row in rows], np.int32),
        span_version=np.zeros(len(rows), np.int64),
        mask=np.concatenate([empty, *masks]).astype(np.uint8),
        prompts=np.concatenate([empty, *prompts]).astype(np.int32),
    )


def plain(models: Models) -> Models:
    """With optimizers whose step is the gradient."""
    critic = models.critic
    if critic is not None:
        critic = Critic(critic.model, torch.optim.SGD(critic.model.parameters(), lr=1.0))
    return replace(models, optimizer=torch.optim.SGD(models.policy.parameters(), lr=1.0), critic=critic)


class Watch:
    """Whether a policy has the weights it began with, each time that it is called."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._begun = [parameter.detach().clone() for parameter in policy.parameters()]
        self.unchanged: list[bool] = []

    def __call__(self) -> None:
        self.unchanged.append(all(map(torch.equal, self._begun, self._policy.parameters())))


def steps(rank: int, world: int, model: Path, folder: Path) -> None:
    """One step for each preset and micro-batch size, each from the model as it is on disk."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    for preset, tokens in product(PRESETS, (4096, 1)):
        learner = {"micro_batch_tokens": tokens, "clip_norm": 1e9, "dtype": "float32"}
        config = parse({"data": {"path": "x"}, "learner": learner, "algorithm": {"preset": preset}})
        models = plain(build(config, str(model), torch.device("cpu")))
        policy, critic = models.policy, models.critic
        watch = Watch(policy)
        stepper = Stepper(models, config, before_update=watch)
        planned: Plan = plan(a_batch(), ranks=world, algorithm=config.algorithm)
        rows = planned.rows[rank]
        ages = np.zeros(sum(row.length for row in rows), np.int64)
        stepper.step(share(planned, rank, fetched(rows), ages, config), rate=1.0)
        assert watch.unchanged[0]  # a checkpoint may copy until then
        weights = {name: tensor.clone() for name, tensor in checkpoint.full_tensors(policy)}
        if critic is not None:
            # The head begins at 0, so that the first gradient does not reach the trunk.
            weights |= {f"critic {name}": whole(each) for name, each in critic.model.head.named_parameters()}
        if rank == 0:
            torch.save(weights, folder / f"{preset}-{world}-{tokens}.pt")
    dist.destroy_process_group()


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().full_tensor()  # type: ignore[attr-defined]


@pytest.mark.e2e
def test_gradients_do_not_depend_on_ranks_or_micro_batches(tiny_model: Path, tmp_path: Path) -> None:
    for world in (1, 2):
        mp.spawn(steps, (world, tiny_model, tmp_path), nprocs=world)
    before = dict(load(str(tiny_model), 1.0, torch.device("cpu")).model.named_parameters())
    for preset in PRESETS:
        reference = torch.load(tmp_path / f"{preset}-1-4096.pt")
        scale = max(float((reference[name] - before[name]).detach().abs().max()) for name in before)
        if "critic weight" in reference:
            assert float(reference["critic weight"].abs().max()) > 1e-4
        assert scale > 1e-4, preset
        for other in ("1-1", "2-4096", "2-1"):
            weights = torch.load(tmp_path / f"{preset}-{other}.pt")
            for name in reference:
                torch.testing.assert_close(weights[name], reference[name], atol=1e-5 * scale, rtol=1e-6)


def test_a_plan_keeps_groups_whole_and_counts_what_may_be_trained_on() -> None:
    planned = plan(a_batch(), ranks=2, algorithm=AlgorithmConfig(advantage="dr-grpo"))
    homes = [{row.group for row in rows} for rows in planned.rows]
    assert homes[0].isdisjoint(homes[1])
    assert homes[0] | homes[1] == {0, 1, 2}
    assert planned.tokens == sum(length - (length > UNTRAINED) for length in LENGTHS)
    assert planned.gradient
    pairs = zip(planned.rows, planned.advantages, strict=True)
    flat = {row.ticket: value for rows, values in pairs for row, value in zip(rows, values, strict=True)}
    assert flat[0] == pytest.approx(2 / 3)
    assert flat[6] == flat[7] == 0.0


@pytest.mark.parametrize(("step", "expected"), [(0, 0.25), (2, 0.75), (3, 1.0), (100, 1.0)])
def test_warm_up_is_linear(step: int, expected: float) -> None:
    assert learning_rate(1.0, 3, step) == pytest.approx(expected)
