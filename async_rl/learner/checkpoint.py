"""Distributed checkpoints, complete or absent, written while training goes on.

    checkpoints/step-00000020/   torch distributed checkpoint (weights and optimizer of each part) and `state.json`
    checkpoints/latest           the name of the newest complete one

A checkpoint is a copy that is written under another name by a thread, and renamed when every rank has written; `latest`
is replaced after that. Nothing else is to be saved: a learner draws no random numbers, and what is random elsewhere is
named by the seed and a place in the order of prompts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from async_rl.learner import state
from async_rl.learner.policy import Policy
from async_rl.learner.state import State
from buffers import disk

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""A base model under adapters is not stored: it is that of `model.path`."""


class Part(NamedTuple):
    """A sharded module that is trained, and its optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer


class Checkpoints:
    """Writes checkpoints of `parts` into `folder`, one at a time, and keeps the last and the best of them.

    Every rank has one and calls `save` and `wait` in the same order; rank 0 is told what has become durable.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Part], *, keep_last: int, keep_best: bool) -> None:
        self._folder, self._parts = folder, parts
        self._keep_last, self._keep_best = keep_last, keep_best
        # The thread's collectives must not meet those of the training.
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copying: Future[None] | None = None
        self._writing: tuple[Future[None], State] | None = None
        self._first = dist.get_rank() == 0
        self._saved = {found.step for found in state.complete(folder)}
        if self._first:
            for broken in folder.glob("*.partial"):
                shutil.rmtree(broken) if broken.is_dir() else broken.unlink()

    def save(self, reached: State) -> State | None:
        """Begins to copy the parts as they are now and returns; threads finish the copy and write it. Nothing may
        change them before `copied` has returned.

        Waits for the checkpoint before this one, and returns what has become durable by that, as `wait` does. A step
        that has a checkpoint gets no other: nothing was trained in between, and what is complete is never touched.
        """
        durable = self.wait()
        if reached.step in self._saved:
            return durable
        self._saved.add(reached.step)
        partial = self._partial(reached)
        saving = dcp.async_save(
            _tree(self._parts), checkpoint_id=partial, process_group=self._group, async_stager=self._stager
        )
        assert isinstance(saving, AsyncSaveResponse)
        self._copying = saving.staging_completion
        self._writing = self._finisher.submit(self._complete, saving.upload_completion, reached), reached
        return durable

    @property
    def copying(self) -> bool:
        return self._copying is not None

    def copied(self) -> None:
        """Waits for the copy that `save` has begun. An optimizer step changes the parts, a forward or backward pass
        does not: so the copy is taken while those run."""
        if self._copying is not None:
            self._copying.result()
            self._copying = None

    def finished(self) -> State | None:
        """What has become durable since the last call, on rank 0; never waits."""
        if self._writing is None or not self._writing[0].done():
            return None
        return self.wait()

    def wait(self) -> State | None:
        """Waits for the checkpoint that is being written, if there is one; raises what went wrong with it."""
        if self._writing is None:
            return None
        (done, reached), self._writing = self._writing, None
        done.result()
        return reached if self._first else None

    def close(self) -> None:
        self._finisher.shutdown()
        self._stager.close()

    def _partial(self, reached: State) -> Path:
        return self._folder / f"{state.folder_name(reached.step)}.partial"

    def _complete(self, written: Future[Any], reached: State) -> None:
        """Once every rank has written, which rank 0 is told of, the checkpoint gets its name; the learner need not be
        between two steps for that."""
        written.result()
        if not self._first:
            return
        partial = self._partial(reached)
        final = partial.with_suffix("")
        disk.write(partial / state.STATE, msgspec.json.encode(reached))
        disk.sync(partial)
        if final.exists():
            shutil.rmtree(final)  # without a readable state: `save` has looked
        partial.rename(final)
        pointer = self._folder / f"{state.LATEST}.partial"
        disk.write(pointer, final.name.encode())
        pointer.rename(self._folder / state.LATEST)
        disk.sync(self._folder)
        for step in state.superfluous(state.complete(self._folder), last=self._keep_last, best=self._keep_best):
            going = self._folder / f"{state.folder_name(step)}.partial"
            going.with_suffix("").rename(going)  # half removed it must not look complete
            shutil.rmtree(going)


def _tree(parts: Mapping[str, Part]) -> dict[str, Any]:
    """What is stored of each part; the dictionaries are those that loading fills."""
    tree: dict[str, Any] = {}
    for name, part in parts.items():
        fresh = not part.optimizer.state
        weights, moments = get_state_dict(part.module, part.optimizer, options=TRAINED)
        if fresh:  # torch has made the moments by a step without a gradient, which Adam must not count
            for moment in part.optimizer.state.values():
                moment["step"].zero_()
        tree[name] = {"weights": trained_only(part.module, weights), "optimizer": moments}
    return tree


def trained_only(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is frozen; torch leaves a frozen tied tensor in under its second name."""
    frozen = {name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad}
    return {name: tensor for name, tensor in weights.items() if name not in frozen}


def restore(path: Path, parts: Mapping[str, Part]) -> None:
    """Loads weights and optimizers into modules sharded over any number of ranks."""
    tree = _tree(parts)
    dcp.load(tree, checkpoint_id=path)
    for name, part in parts.items():
        weights, moments = tree[name]["weights"], tree[name]["optimizer"]
        set_state_dict(part.module, part.optimizer, model_state_dict=weights, optim_state_dict=moments, options=TRAINED)


def full_tensors(policy: Policy, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint format, whole tensor), one at a time; a collective, so every rank must exhaust it.

    `trained`: only of what is trained, adapters where there are some.
    """
    for name, parameter in policy.model.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
