"""The learner's side of the weights' plane."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from async_rl.weights.manifest import MANIFEST, Manifest, Probe
from async_rl.weights.shm import Writer


class Publisher:
    """Makes a version available to every worker on this host.

    `publish` returns when the snapshot is complete: the next optimizer step may start at once, and workers read the
    snapshot while it runs.
    """

    def __init__(self, folder: Path, run: str, dtype: torch.dtype, tied: list[str]) -> None:
        self._manifest = folder / MANIFEST
        self._writer = Writer(run)
        self._dtype = dtype
        self._tied = tied

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None) -> Manifest:
        manifest = self._writer.write(version, tensors, self._dtype)
        manifest = msgspec.structs.replace(manifest, tied=self._tied, probe=probe)
        manifest.write(self._manifest)
        return manifest

    def close(self) -> None:
        self._writer.close()
