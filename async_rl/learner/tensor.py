"""Tensor parallelism by the plan that a transformers model comes with."""

from __future__ import annotations

from fnmatch import fnmatch

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from async_rl.errors import ConfigError

SPLIT: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
SUMMED = "replicated_with_grad_allreduce"
"""Whole on every rank, where it sees the heads of that rank only."""
WHOLE = ("embedding_rowwise", "embedding_colwise")
"""Styles of what may as well stay whole."""


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Splits the matrices of the plan over the mesh; what is in none (embeddings, norms, the head) stays whole.

    Returns the modules whose gradients are to be summed over the mesh, see `add_up`.
    """
    config = model.config
    plan: dict[str, str] = config.base_model_tp_plan or {}
    size = mesh.size()
    unknown = sorted(set(plan.values()) - {*SPLIT, SUMMED, *WHOLE})
    if not plan or unknown:
        raise ConfigError(
            "learner.parallel.tensor", size,
            f"{type(model).__name__} " + (f"splits matrices as {', '.join(unknown)}" if plan else "has no plan for it"),
            "Shard it without: learner.parallel.tensor=1",
        )  # fmt: skip
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % size or groups % size:
        raise ConfigError(
            "learner.parallel.tensor", size,
            f"{type(model).__name__} has {heads} heads and {groups} of keys and values, and each rank gets whole ones",
            "Use a divisor of both",
        )  # fmt: skip
    base = model.base_model
    parallelize_module(base, mesh, {name: SPLIT[style]() for name, style in plan.items() if style in SPLIT})
    patterns = [name for name, style in plan.items() if style == SUMMED]
    return [module for name, module in base.named_modules() if any(fnmatch(name, pattern) for pattern in patterns)]


def add_up(modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Sums their gradients, to each of which every rank of the mesh has contributed its part."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, group=mesh.get_group())
