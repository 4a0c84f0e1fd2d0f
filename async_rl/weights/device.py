"""Segments in the memory of GPUs: the files of `shm` have their versions and locks, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from async_rl.weights.manifest import Export, Manifest
from async_rl.weights.shm import HEADER, Writer


class DeviceWriter(Writer):
    """A `Writer` whose bytes stay on the device. `shared`: all ranks have a copy, each on its GPU, which other
    processes may map; then every rank calls `write` with the same tensors, and rank 0 has the locks."""

    def __init__(self, run: str, device: torch.device, *, shared: bool, segments: int = 2) -> None:
        super().__init__(run, segments)
        self._device, self._shared = device, shared
        self._leads = not shared or dist.get_rank() == 0
        self._buffers: dict[str, Tensor] = {}

    @contextmanager
    def _oldest(self) -> Iterator[BufferedRandom]:
        if self._leads:
            with super()._oldest() as file:
                if self._shared:
                    dist.broadcast_object_list([str(self._paths[-1])], src=0)
                yield file
            return
        turn: list[Any] = [None]
        dist.broadcast_object_list(turn, src=0)
        path = next(path for path in self._paths if str(path) == turn[0])
        self._paths.remove(path)
        self._paths.append(path)
        with path.open("rb") as file:
            yield file  # type: ignore[misc] - its header is rank 0's to write

    def _memory(self, file: BufferedRandom, size: int) -> tuple[NDArray[np.int64], Tensor]:
        header = np.zeros(1, np.int64)
        if self._leads:
            header = np.frombuffer(self._map(file, HEADER), np.int64, 1)
        path = str(self._paths[-1])
        if path not in self._buffers or self._buffers[path].numel() < size:
            self._buffers[path] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return header, self._buffers[path]

    def _exported(self) -> dict[str, Export]:
        """Of every rank, once it has its copy."""
        if not self._shared:
            return {}
        torch.cuda.synchronize(self._device)
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (uuid, exported(self._buffers[str(self._paths[-1])])))
        return dict(every)

    def tensors(self, manifest: Manifest) -> list[tuple[str, Tensor]]:
        """What was written, where it is; whoever reads it `hold`s the segment."""
        memory = self._buffers[manifest.segment]
        return [
            (entry.name, memory[entry.offset :][: entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape))
            for entry in manifest.tensors
        ]


def exported(memory: Tensor) -> Export:
    """For other processes on the same GPU."""
    arguments: tuple[Any, ...] = reduce_tensor(memory)[1]
    handle, size, offset, _, ref_counter, ref_counter_offset, event, sync = arguments[7:]
    return Export(handle, size, offset, ref_counter, ref_counter_offset, event, sync)


def imported(manifest: Manifest) -> list[dict[str, tuple[Any, ...]]]:
    """For each tensor, by a GPU's UUID, the arguments of torch's `rebuild_cuda_tensor`, but for the device."""
    out: list[dict[str, tuple[Any, ...]]] = []
    for entry in manifest.tensors:
        dtype = getattr(torch, entry.dtype)
        strides = torch.empty(entry.shape, dtype=dtype, device="meta").stride()
        shape = torch.Size(entry.shape)
        start = torch.Tensor, shape, strides, entry.offset // dtype.itemsize, torch.UntypedStorage, dtype, None
        handles: dict[str, tuple[Any, ...]] = {}
        for uuid, each in manifest.exports.items():
            memory = each.handle, each.storage_bytes, each.storage_offset
            counted = each.ref_counter, each.ref_counter_offset, each.event, each.event_sync_required
            handles[uuid] = (*start, *memory, False, *counted)
        out.append(handles)
    return out
