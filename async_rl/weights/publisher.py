"""The learner's side of the weights' plane."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from async_rl.weights.manifest import MANIFEST, REHEARSAL, REHEARSED, Manifest, Probe
from async_rl.weights.shm import Writer


class Publisher:
    """Makes a version available to every worker on this host.

    `publish` returns when the snapshot is complete: the next optimizer step may start at once, and workers read the
    snapshot while it runs.
    """

    def __init__(self, folder: Path, run: str, dtype: torch.dtype, tied: list[str]) -> None:
        self._folder = folder
        self._writer = Writer(run)
        self._dtype = dtype
        self._tied = tied

    def rehearse(self, tensors: Iterable[tuple[str, Tensor]], probe: Probe) -> None:
        """Publishes other weights under no version, to be overwritten by the second publication."""
        self._write(REHEARSED, tensors, probe).write(self._folder / REHEARSAL)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None) -> Manifest:
        manifest = self._write(version, tensors, probe)
        manifest.write(self._folder / MANIFEST)
        return manifest

    def _write(self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None) -> Manifest:
        manifest = self._writer.write(version, tensors, self._dtype)
        return msgspec.structs.replace(manifest, tied=self._tied, probe=probe)

    def close(self) -> None:
        self._writer.close()
