"""Sequence parallelism: each rank has a part of every row, and for attention all of it for some of the heads.

After Jacobs et al., 2023 (DeepSpeed-Ulysses): two all-to-alls a layer and direction, from (all heads, a part of the
row) to (a part of the heads, the whole row) and back. The mask is that of whole rows, so packing and shared prompts
stay as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single  # type: ignore[attr-defined]
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_rl.errors import ConfigError
from async_rl.learner.mesh import Part
from async_rl.learner.packing import Ints, Packed

ATTENTION = "async_rl_sequence"
"""`attn_implementation` of a model whose rows are shared; the forward pass is given `sequence`, this rank's part."""


def check(model: PreTrainedModel, size: int, tensor: int) -> None:
    heads = model.config.num_attention_heads
    if heads % (size * tensor):
        raise ConfigError(
            "learner.parallel.sequence", size,
            f"the {heads} attention heads of {type(model).__name__} are shared by {size} x {tensor} ranks (sequence x "
            "tensor), and each gets as many",
            "Use divisors",
        )  # fmt: skip


class Cut(NamedTuple):
    """This rank's part of a micro-batch.

    tokens, positions   (rows, length / size), the row padded to a multiple of the size
    predict             flat places in the part, of the sampled tokens that it predicts, in their order
    targets             those tokens
    counts              how many each rank has
    order               where each token of the micro-batch is found in the parts put together
    """

    tokens: Ints
    positions: Ints
    predict: Ints
    targets: Ints
    counts: list[int]
    order: Ints


def padded(packed: Packed, size: int) -> Packed:
    """With rows as long as a multiple of `size`."""
    length = packed.tokens.shape[1]
    more = -length % size
    if not more:
        return packed
    wide = ((0, 0), (0, more))
    row, column = np.divmod(packed.predict, length)
    return Packed(
        np.pad(packed.tokens, wide),
        np.concatenate([packed.positions, packed.positions[:, -1:] + 1 + np.arange(more)], axis=1),
        np.pad(packed.member, wide, constant_values=-1),
        row * (length + more) + column,
        packed.targets,
        packed.source,
        packed.offset,
        packed.causal,
    )


def cut(packed: Packed, rank: int, size: int) -> Cut:
    """Of a micro-batch whose rows `padded` has made long enough."""
    length = packed.tokens.shape[1]
    width = length // size
    row, column = np.divmod(packed.predict, length)
    owner, at = np.divmod(column, width)
    mine = owner == rank
    here = slice(rank * width, (rank + 1) * width)
    return Cut(
        packed.tokens[:, here],
        packed.positions[:, here],
        row[mine] * width + at[mine],
        packed.targets[mine],
        np.bincount(owner, minlength=size).tolist(),
        np.argsort(np.argsort(owner, kind="stable"), kind="stable"),
    )


def gathered(mine: Tensor, of: Cut, part: Part) -> Tensor:
    """A column of all sampled tokens of the micro-batch, in its order, from the ranks' own.

    Every rank goes on to compute the same loss of it, so each keeps the gradient of what is its own.
    """
    whole = cast("Tensor", _Gather.apply(mine, of.counts, part))
    return whole[torch.from_numpy(of.order).to(mine.device)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: list[int], part: Part) -> Tensor:
        ctx.start, ctx.size = sum(counts[: part.rank]), mine.numel()
        room = mine.new_zeros(max(counts))
        room[: mine.numel()] = mine
        everyone = [torch.empty_like(room) for _ in counts]
        dist.all_gather(everyone, room, group=part.group)
        return torch.cat([each[:count] for each, count in zip(everyone, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.start : ctx.start + ctx.size], None, None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence: Part,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """For transformers: (batch, heads, part, width) each; returns (batch, part, heads, width).

    `attention_mask` is (batch, 1, length, length) of whole rows, None for causal ones.
    """
    repeat = cast("int", getattr(module, "num_key_value_groups", 1))
    if key.shape[1] % sequence.size:
        key, value, repeat = repeat_kv(key, repeat), repeat_kv(value, repeat), 1
    query, key, value = (_to_heads(each, sequence) for each in (query, key, value))
    out = scaled_dot_product_attention(
        query,
        repeat_kv(key, repeat),
        repeat_kv(value, repeat),
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
    )
    return _to_parts(out, sequence).transpose(1, 2).contiguous(), None


def _to_heads(mine: Tensor, part: Part) -> Tensor:
    """(batch, heads, part, width) to (batch, heads / size, length, width)."""
    batch, heads, length, width = mine.shape
    by_heads = mine.reshape(batch, part.size, heads // part.size, length, width).transpose(0, 1)
    return _exchange(by_heads, part).permute(1, 2, 0, 3, 4).reshape(batch, heads // part.size, -1, width)


def _to_parts(mine: Tensor, part: Part) -> Tensor:
    """(batch, heads / size, length, width) to (batch, heads, part, width)."""
    batch, heads, length, width = mine.shape
    by_place = mine.reshape(batch, heads, part.size, length // part.size, width).permute(2, 0, 1, 3, 4)
    return _exchange(by_place, part).transpose(0, 1).reshape(batch, heads * part.size, length // part.size, width)


def _exchange(pieces: Tensor, part: Part) -> Tensor:
    """Piece i goes to rank i, and that of rank i comes back in its place."""
    pieces = pieces.contiguous()
    return all_to_all_single(torch.empty_like(pieces), pieces, group=part.group)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
