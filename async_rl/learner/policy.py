"""The models as the learner uses them: packed rows in, a number per sampled token out; sharded by FSDP2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from async_rl.learner.logprobs import ENTROPY_EVERY, token_logprobs
from async_rl.learner.packing import Packed


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

    `value_head`, if there is one, maps the same hidden states to values.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, *, entropy_every: int = ENTROPY_EVERY) -> None:
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        self.temperature = temperature
        self.entropy_every = entropy_every

    def forward(self, packed: Packed) -> Scores:
        hidden = states(self.model.base_model, packed)
        head = self.model.get_output_embeddings().weight
        targets = torch.from_numpy(packed.targets).to(hidden.device)
        scores = token_logprobs(hidden, head, targets, self.temperature, entropy_every=self.entropy_every)
        values = None if self.value_head is None else self.value_head(hidden).float().sum(-1)
        return Scores(*scores, values)


def states(trunk: nn.Module, packed: Packed) -> Float[Tensor, "sampled width"]:
    """The hidden states in which the tokens of a micro-batch were sampled."""
    device = next(trunk.parameters()).device
    tokens, positions, predict = (
        torch.from_numpy(array).to(device) for array in (packed.tokens, packed.positions, packed.predict)
    )
    attention = None if packed.causal else torch.from_numpy(packed.attention()).to(device)[:, None]
    hidden = trunk(
        input_ids=tokens, position_ids=positions, attention_mask=attention, use_cache=False
    ).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])[predict]


def load(path: str, temperature: float, device: torch.device, *, entropy_every: int = ENTROPY_EVERY) -> Policy:
    """The model of a resolved path with float32 master weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()  # no dropout: a log-prob is a number; gradients do not need training mode
    return Policy(model.to(device), temperature, entropy_every=entropy_every)


def shard(module: Policy | ValueModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 over the mesh: each layer its own unit, compute in `dtype`, gradients reduced in float32."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    alone = mesh.size() == 1
    for layer in layers(module.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone)
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone)


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
        self.head = value_head(model)

    def forward(self, packed: Packed) -> Float[Tensor, " sampled"]:
        return self.head(states(self.model, packed)).float().sum(-1)  # not a view, which FSDP could not hook


def value_head(model: PreTrainedModel) -> nn.Linear:
    head = nn.Linear(model.config.hidden_size, 1, device=next(model.parameters()).device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def load_value_model(path: str, device: torch.device) -> ValueModel:
    """A value model whose trunk is that of the model of a resolved path, with float32 master weights."""
    trunk = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return ValueModel(trunk.to(device).eval())


def layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers: the one list of modules whose length is the configuration's number of layers."""
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers; its sharding is not known")


def accumulate(module: nn.Module, *, last: bool) -> None:
    """Set before each micro-batch: gradients stay local and parameters whole until the last one."""
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
