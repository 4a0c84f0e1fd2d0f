"""The models of a learner rank and their optimizers: the policy, and what its algorithm asks for beside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from async_rl.config import Config, LearnerConfig
from async_rl.learner import mesh as meshes
from async_rl.learner.checkpoint import Part
from async_rl.learner.logprobs import ENTROPY_EVERY
from async_rl.learner.mesh import Mesh
from async_rl.learner.policy import (
    Policy,
    ValueModel,
    attention_of,
    load,
    load_value_model,
    shard,
    tied_names,
    value_head,
)


@dataclass(frozen=True)
class Critic:
    """A value model with weights of its own, and its optimizer."""

    model: ValueModel
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Models:
    """All sharded over the same ranks. `reference` is frozen, or the policy itself where that is a base model under
    adapters; `tied` are the policy's tied tensors (`tied_names`)."""

    mesh: Mesh
    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: Policy | None
    critic: Critic | None
    tied: list[str]

    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds."""
        critic = {"value": Part(self.critic.model, self.critic.optimizer)} if self.critic is not None else {}
        return {"policy": Part(self.policy, self.optimizer), **critic}


def build(config: Config, path: str, device: torch.device) -> Models:
    """Every model begins as the one of the resolved `path`. Collective."""
    mesh = meshes.make(device.type, config.learner.parallel)
    algorithm, temperature = config.algorithm, config.rollout.temperature
    every, lora = 1 if algorithm.entropy else ENTROPY_EVERY, config.learner.lora
    fused, attention = config.learner.fused_kernels, attention_of(config.learner.attention, device)
    hollow = mesh.shards.size() > 1 and not lora.rank and not config.learner.offload
    policy = load(
        path, temperature, device, entropy_every=every, lora=lora, fused=fused, attention=attention, hollow=hollow
    )
    tied = tied_names(policy.model)
    if algorithm.critic and algorithm.value.trunk == "shared":
        policy.value_head = value_head(policy.model)
    shard(policy, mesh, config.learner, path)
    reference = critic = None
    if algorithm.kl.coefficient and lora.rank:
        reference = policy
    elif algorithm.kl.coefficient:
        reference = load(path, temperature, device, fused=fused, attention=attention, hollow=hollow)
        shard(reference.requires_grad_(requires_grad=False), mesh, config.learner, path)
    if algorithm.critic and algorithm.value.trunk == "own":
        value = load_value_model(path, device, attention, hollow=hollow)
        shard(value, mesh, config.learner, path)
        critic = Critic(value, adamw(value.parameters(), config.learner, algorithm.value.learning_rate))
    optimizer = adamw(policy.parameters(), config.learner, config.learner.learning_rate)
    return Models(mesh, policy, optimizer, reference, critic, tied)


def adamw(parameters: Iterable[nn.Parameter], learner: LearnerConfig, rate: float) -> torch.optim.AdamW:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, betas=learner.betas, weight_decay=learner.weight_decay, fused=True)
