"""How the ranks of the learner share the work.

rank = ((replica * shards + shard) * sequence + part) * tensor + slice

replica    a whole copy of the model; gradients are averaged over them (HSDP)
shard      a share of the batch, and of the parameters (FSDP2)
part       of every sequence of that share (all-to-all over heads); parameters are sharded over these ranks too
slice      of every matrix that the model's tensor-parallel plan splits
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from async_rl.config import ParallelConfig


@dataclass(frozen=True)
class Part:
    """This rank's place among those that share a sequence."""

    group: ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Mesh:
    """`data_rank` of `data_ranks` is the share of the batch that this rank trains on; ranks of the same share see the
    same samples, and `leads` is true of one of them. `data` connects ranks of different shares."""

    shards: DeviceMesh
    """For `fully_shard`: (replicas, shards) or (shards,)."""
    tensor: DeviceMesh | None
    sequence: Part | None
    data: ProcessGroup
    data_rank: int
    data_ranks: int
    leads: bool

    @property
    def averaged(self) -> int:
        """Ranks over which FSDP averages a gradient."""
        return self.shards.size()


def make(device: str, parallel: ParallelConfig) -> Mesh:
    """Of all ranks of the default group; `checks` has made sure that the sizes fit. Collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inner = parallel.sequence * parallel.tensor
    data_ranks = world // inner
    sharded = world // (parallel.replicas * parallel.tensor)
    whole = init_device_mesh(
        device, (parallel.replicas, sharded, parallel.tensor), mesh_dim_names=("replica", "shard", "tensor")
    )
    data_rank, within = divmod(rank, inner)
    part, piece = divmod(within, parallel.tensor)
    data = _groups([[share * inner + same for share in range(data_ranks)] for same in range(inner)], rank)
    sequence = None
    if parallel.sequence > 1:
        starts = [share * inner + same for share in range(data_ranks) for same in range(parallel.tensor)]
        parts = [[start + index * parallel.tensor for index in range(parallel.sequence)] for start in starts]
        sequence = Part(_groups(parts, rank), part, parallel.sequence)
    return Mesh(
        whole["replica", "shard"] if parallel.replicas > 1 else whole["shard"],
        whole["tensor"] if parallel.tensor > 1 else None,
        sequence,
        data,
        data_rank,
        data_ranks,
        part == piece == 0,
    )


def clip(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scales the gradients down to a global norm of `limit`; returns the norm that they had, the same on every rank.

    Parameters may lie on meshes of their own: one that a tensor-parallel plan leaves whole is sharded over fewer ranks.
    """
    total, local = torch.zeros((), dtype=torch.float64), []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        copies = dist.get_world_size()
        if isinstance(gradient, DTensor):
            places = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            copies //= math.prod(size for size, place in places if not place.is_replicate())
            gradient = gradient.to_local()
        local.append(gradient)
        total = total.to(gradient.device) + torch.linalg.vector_norm(gradient).double().square() / copies
    dist.all_reduce(total)
    norm = float(total.sqrt())
    if norm > limit:
        torch._foreach_mul_(local, limit / (norm + 1e-6))
    return norm


def _groups(members: Sequence[list[int]], rank: int) -> ProcessGroup:
    """The group of this rank, of groups that every rank must make."""
    groups = [(each, dist.new_group(each)) for each in members]
    return next(group for each, group in groups if rank in each)
