"""Distributed checkpoints, complete or absent, and the Hugging Face export.

    checkpoints/step-00000020/   torch distributed checkpoint (weights and optimizer of each part) and `state.json`
    checkpoints/latest           the name of the newest complete one

A checkpoint is written under another name and renamed when every rank has written; `latest` is replaced after that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from async_rl.learner.policy import Policy
from async_rl.learner.state import LATEST, STATE, State
from async_rl.tokenizer import tokenizer_of


class Part(NamedTuple):
    """A sharded module that is trained, and its optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer


def _tree(parts: Mapping[str, Part]) -> dict[str, Any]:
    """What is stored of each part; the dictionaries are those that loading fills."""
    tree: dict[str, Any] = {}
    for name, part in parts.items():
        weights, moments = get_state_dict(part.module, part.optimizer)
        tree[name] = {"weights": weights, "optimizer": moments}
    return tree


def save(folder: Path, parts: Mapping[str, Part], state: State) -> Path:
    """Every rank calls this; returns the checkpoint's folder."""
    name = f"step-{state.step:08d}"
    final, partial = folder / name, folder / f"{name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_tree(parts), checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / STATE).write_bytes(msgspec.json.encode(state))
        old = folder / f"{name}.old"
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        pointer = folder / f"{LATEST}.partial"
        pointer.write_text(name)
        pointer.rename(folder / LATEST)
    dist.barrier()
    return final


def restore(path: Path, parts: Mapping[str, Part]) -> None:
    """Loads weights and optimizers into modules sharded over any number of ranks."""
    tree = _tree(parts)
    dcp.load(tree, checkpoint_id=path)
    for name, part in parts.items():
        weights, moments = tree[name]["weights"], tree[name]["optimizer"]
        set_state_dict(part.module, part.optimizer, model_state_dict=weights, optim_state_dict=moments)


def full_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint format, whole tensor), one at a time; a collective, so every rank must exhaust it."""
    for name, parameter in policy.model.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def export(folder: Path, policy: Policy, source: str) -> None:
    """A Hugging Face folder in bfloat16 with the tokenizer of `source`; every rank calls this."""
    tensors = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in full_tensors(policy)}
    if dist.get_rank() == 0:
        policy.model.config.dtype = "bfloat16"
        policy.model.save_pretrained(folder, state_dict=tensors)
        tokenizer_of(source).save_pretrained(folder)
    dist.barrier()
