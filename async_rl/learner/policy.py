"""The models as the learner uses them: packed rows in, a number per sampled token out; sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, PreTrainedModel

from async_rl import adapters
from async_rl.config import LearnerConfig, LoraConfig
from async_rl.learner import loading, sequence
from async_rl.learner.kernels import fuse
from async_rl.learner.logprobs import ENTROPY_EVERY, token_logprobs
from async_rl.learner.mesh import Mesh, Part
from async_rl.learner.packing import PAD, Packed
from async_rl.learner.tensor import parallelize

FLEX = "flex_attention"


class Scores(NamedTuple):
    """Per sampled token of a micro-batch, in the order of `Packed.targets`, float32.

    The entropy has a gradient if it is wanted for every token. `values` are those of the states that the tokens were
    sampled in, if the policy has a value head.
    """

    logprobs: Float[Tensor, " sampled"]
    entropy: Float[Tensor, " sampled"]
    values: Float[Tensor, " sampled"] | None = None


class Policy(nn.Module):
    """A causal language model whose head is applied to the answer tokens only.

    `value_head`, if there is one, maps the same hidden states to values. `part` and `summed` are what `shard` has made
    of the model: this rank's part of each row, and the modules whose gradients are summed (`tensor.add_up`). `device`
    is where it computes; parameters may be elsewhere.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, *, entropy_every: int = ENTROPY_EVERY) -> None:
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        self.part: Part | None = None
        self.summed: list[nn.Module] = []
        self.device = next(model.parameters()).device
        self.temperature = temperature
        self.entropy_every = entropy_every

    def forward(self, packed: Packed) -> Scores:
        hidden, targets, whole = states(self.model.base_model, packed, self.part, self.device)
        head = self.model.get_output_embeddings().weight
        logprobs, entropy = token_logprobs(hidden, head, targets, self.temperature, entropy_every=self.entropy_every)
        values = None if self.value_head is None else whole(self.value_head(hidden).float().sum(-1))
        return Scores(whole(logprobs), whole(entropy), values)


class States(NamedTuple):
    """The hidden states in which the sampled tokens of a micro-batch were sampled, and those tokens.

    Where ranks share a sequence these are a rank's own; `whole` makes of a column of them that of all.
    """

    hidden: Float[Tensor, "sampled width"]
    targets: Int[Tensor, " sampled"]
    whole: Callable[[Tensor], Tensor]


def states(trunk: PreTrainedModel, packed: Packed, part: Part | None, device: torch.device) -> States:
    """Of a trunk's forward pass; `part` is this rank's of every row, None for all of it."""
    shared: dict[str, Part] = {}
    if part is None:
        mine = packed
        whole: Callable[[Tensor], Tensor] = _itself
    else:
        packed = sequence.padded(packed, part.size)
        mine = sequence.cut(packed, part.rank, part.size)
        whole = partial(sequence.gathered, of=mine, part=part)
        shared = {"sequence": part}
    tokens, positions, predict, targets = (
        torch.from_numpy(array).to(device) for array in (mine.tokens, mine.positions, mine.predict, mine.targets)
    )
    attention = attended(packed, device, flex=trunk.config._attn_implementation == FLEX)
    hidden = trunk(
        input_ids=tokens, position_ids=positions, attention_mask=attention, use_cache=False, **shared
    ).last_hidden_state
    return States(hidden.reshape(-1, hidden.shape[-1])[predict], targets, whole)


def attended(packed: Packed, device: torch.device, *, flex: bool) -> Tensor | BlockMask | None:
    """What each token may attend to, as the model takes it; None if that is all before it."""
    if packed.causal:
        return None
    if not flex:
        return torch.from_numpy(packed.attention()).to(device)[:, None]
    member = torch.from_numpy(packed.member).to(device)

    def allowed(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((member[row, key] == PAD) | (member[row, query] == member[row, key]))

    rows, length = packed.tokens.shape
    return create_block_mask(allowed, rows, None, length, length, device=str(device))


def attention_of(wanted: str, device: torch.device) -> str:
    """transformers' name for `learner.attention`."""
    return FLEX if wanted == "flex" or (wanted == "auto" and device.type == "cuda") else "sdpa"


def _itself(column: Tensor) -> Tensor:
    return column


def load(
    path: str,
    temperature: float,
    device: torch.device,
    *,
    entropy_every: int = ENTROPY_EVERY,
    lora: LoraConfig | None = None,
    fused: bool = False,
    attention: str = "sdpa",
    hollow: bool = False,
) -> Policy:
    """The model of a resolved path with float32 master weights; under fresh adapters if `lora` has a rank, with `fused`
    kernels where there are some. A `hollow` one, if that can be, has weights only after `shard`."""
    model = (loading.hollow(path, attention) if hollow else None) or loading.whole(path, attention)
    if fused:
        fuse(model, device)
    if lora is not None and lora.rank:
        adapters.inject(model, lora)
    policy = Policy(_on(model, device), temperature, entropy_every=entropy_every)
    policy.device = device
    return policy


def _on(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    return model if next(model.parameters()).is_meta else model.to(device)


def shard(module: Policy | ValueModel, mesh: Mesh, learner: LearnerConfig, path: str) -> None:
    """FSDP2 over the mesh: each layer its own unit, compute in `learner.dtype`, gradients reduced in float32. Before
    that the matrices are split and the rows shared, if ranks do so; after it a hollow model is filled from `path`."""
    if mesh.tensor is not None:
        module.summed = parallelize(module.model, mesh.tensor)
    if mesh.sequence is not None:
        sequence.check(module.model, mesh.sequence.size, 1 if mesh.tensor is None else mesh.tensor.size())
        module.model.set_attn_implementation(sequence.ATTENTION)
        module.part = mesh.sequence
    units = [*layers(module.model), module]
    if learner.recompute:
        for layer in units[:-1]:
            layer.forward = recomputed(layer.forward)
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh.shards,
            mp_policy=MixedPrecisionPolicy(getattr(torch, learner.dtype), torch.float32),
            reshard_after_forward=mesh.shards.size() > 1,
            offload_policy=CPUOffloadPolicy() if learner.offload else OffloadPolicy(),
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        loading.fill(module, module.model, path, module.device)


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keeps its arguments in place of its activations where there is a backward pass to come."""

    def call(*args: object, **kwargs: object) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return cast("Tensor", checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs))

    return call


def pairs_per_token(width: int) -> int:
    """How many pairs of tokens attention compares for what all else costs per token; see `packing.split`.

    A layer of width w has about 12 w^2 parameters, 24 w^2 operations a token; a pair costs 4 w.
    """
    return 6 * width


class ValueModel(nn.Module):
    """A language model's trunk with a head of one number, at first 0: the value of the state before each token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.part: Part | None = None
        self.summed: list[nn.Module] = []
        self.device = next(model.parameters()).device
        self.head = value_head(model)

    def forward(self, packed: Packed) -> Float[Tensor, " sampled"]:
        hidden, _, whole = states(self.model, packed, self.part, self.device)
        return whole(self.head(hidden).float().sum(-1))  # not a view, which FSDP could not hook


def value_head(model: PreTrainedModel) -> nn.Linear:
    head = nn.Linear(model.config.hidden_size, 1, device=next(model.parameters()).device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def load_value_model(path: str, device: torch.device, attention: str = "sdpa", *, hollow: bool = False) -> ValueModel:
    """A value model whose trunk is that of the model of a resolved path, with float32 master weights; see `load`."""
    trunk = loading.hollow(path, attention, AutoModel) if hollow else None
    value = ValueModel(_on(trunk or loading.whole(path, attention, AutoModel), device))
    value.device = device
    return value


def layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers: the one list of modules whose length is the configuration's number of layers."""
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers; its sharding is not known")


def accumulate(module: nn.Module, *, last: bool) -> None:
    """Set before each micro-batch: gradients stay local and parameters whole until it is the `last` one."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(last)
    module.set_reshard_after_backward(last)


def reshard(module: nn.Module) -> None:
    """Drops whole parameters that a forward pass without a backward has left; they would outlive new weights."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def tied_names(model: PreTrainedModel) -> list[str]:
    """Names in the checkpoint format that share another tensor's storage."""
    named = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(every - named)
