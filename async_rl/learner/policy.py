"""The model as the learner uses it: packed rows in, log-probs of the sampled tokens out; sharded by FSDP2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.learner.logprobs import token_logprobs
from async_rl.learner.packing import Packed


class Scores(NamedTuple):
    """Per sampled token of a micro-batch, in the order of `Packed.targets`, float32; the entropy has no gradient."""

    logprobs: Float[Tensor, " sampled"]
    entropy: Float[Tensor, " sampled"]


class Policy(nn.Module):
    """A causal language model whose head is applied to the answer tokens only."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, packed: Packed) -> Scores:
        device = next(self.parameters()).device
        tokens, positions, predict, targets = (
            torch.from_numpy(array).to(device)
            for array in (packed.tokens, packed.positions, packed.predict, packed.targets)
        )
        attention = torch.from_numpy(packed.attention()).to(device)[:, None]
        hidden = self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=attention, use_cache=False
        ).last_hidden_state
        head = self.model.get_output_embeddings().weight
        wanted = hidden.reshape(-1, hidden.shape[-1])[predict]
        return Scores(*token_logprobs(wanted, head, targets, self.temperature))


def load(path: str, temperature: float, device: torch.device) -> Policy:
    """The model of a resolved path with float32 master weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()  # no dropout: a log-prob is a number; gradients do not need training mode
    return Policy(model.to(device), temperature)


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 over the mesh: each layer its own unit, compute in `dtype`, gradients reduced in float32."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    alone = mesh.size() == 1
    for layer in layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone)


def layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers: the one list of modules whose length is the configuration's number of layers."""
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers; its sharding is not known")


def accumulate(policy: Policy, *, last: bool) -> None:
    """Set before each micro-batch: gradients stay local and parameters whole until the last one."""
    assert isinstance(policy, FSDPModule)
    policy.set_requires_gradient_sync(last)
    policy.set_reshard_after_backward(last)


def reshard(policy: Policy) -> None:
    """Drops whole parameters that a forward pass without a backward has left; they would outlive new weights."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tied_names(model: PreTrainedModel) -> list[str]:
    """Names in the checkpoint format that share another tensor's storage."""
    named = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(every - named)
