"""The learner's side of the weights' plane."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from async_rl.weights.manifest import MANIFEST, REHEARSAL, REHEARSED, Manifest, Probe
from async_rl.weights.server import WeightsServer
from async_rl.weights.shm import Writer


class Publisher:
    """Makes a version available to every worker.

    `publish` returns when the snapshot is complete: the next optimizer step may start at once, and workers read the
    snapshot while it runs.
    """

    def __init__(
        self, folder: Path, run: str, dtype: torch.dtype, tied: list[str], server: WeightsServer | None = None
    ) -> None:
        """`server`: for workers on other hosts."""
        self._folder, self._server = folder, server
        # Others may take their time over one segment, and two are compared.
        self._writer = Writer(run, segments=3 if server else 2)
        self._dtype = dtype
        self._tied = tied

    def rehearse(self, tensors: Iterable[tuple[str, Tensor]], probe: Probe) -> None:
        """Publishes other weights under no version, to be overwritten by the second publication."""
        manifest = self._write(REHEARSED, tensors, probe)
        manifest.write(self._folder / REHEARSAL)
        if self._server is not None:
            self._server.rehearse(manifest)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None) -> Manifest:
        manifest = self._write(version, tensors, probe)
        manifest.write(self._folder / MANIFEST)
        if self._server is not None:
            self._server.publish(manifest)
        return manifest

    def _write(self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None) -> Manifest:
        manifest = self._writer.write(version, tensors, self._dtype)
        return msgspec.structs.replace(manifest, tied=self._tied, probe=probe)

    @property
    def source(self) -> str:
        """Where workers on other hosts pull from; empty if they cannot."""
        return self._server.endpoint if self._server is not None else ""

    def stop(self) -> None:
        """Serves nobody any more; what was published stays."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        self.stop()
        self._writer.close()
