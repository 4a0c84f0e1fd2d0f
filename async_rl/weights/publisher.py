"""The learner's side of the weights' plane."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from async_rl import process
from async_rl.weights.device import DeviceWriter
from async_rl.weights.manifest import MANIFEST, REHEARSAL, REHEARSED, Manifest, Probe
from async_rl.weights.server import WeightsServer
from async_rl.weights.shm import Writer
from async_rl.weights.transport import segment_name, served


def publisher_of(run: process.Run, tied: list[str], device: torch.device) -> Publisher | None:
    """As `weights.transport` says; None on a rank that only helps to gather."""
    config, folder, weights = run.config, run.folder, run.config.weights
    dtype, name = getattr(torch, config.rollout.dtype), segment_name(folder)
    if weights.transport == "ipc":
        return Publisher(folder, DeviceWriter(name, device, shared=True), dtype, tied, leads=run.rank == 0)
    if run.rank != 0:
        return None
    if not served(config):
        return Publisher(folder, Writer(name), dtype, tied)
    bind, keys = process.bound(weights.bind, run), process.keys(config)
    if weights.transport == "nccl":
        from async_rl.weights.nccl import Sender

        writer = DeviceWriter(name, device, shared=False)
        server = WeightsServer(bind, keys, deltas=False, sender=Sender(writer, run.address, device))
    else:
        # Others may take their time over one segment, and two are compared.
        writer = Writer(name, segments=3)
        server = WeightsServer(bind, keys, deltas=weights.deltas)
    return Publisher(folder, writer, dtype, tied, server)


class Publisher:
    """Makes a version available to every worker.

    `publish` returns when the snapshot is complete: the next optimizer step may start at once, and workers read the
    snapshot while it runs.
    """

    def __init__(
        self,
        folder: Path,
        writer: Writer,
        dtype: torch.dtype,
        tied: list[str],
        server: WeightsServer | None = None,
        *,
        leads: bool = True,
    ) -> None:
        """`server`: for workers that ask for weights. `leads`: of several ranks that publish together one tells the
        workers."""
        self._folder, self._server, self._writer = folder, server, writer
        self._dtype, self._tied, self._leads = dtype, tied, leads

    def rehearse(self, tensors: Iterable[tuple[str, Tensor]], probe: Probe) -> None:
        """Publishes other weights under no version, to be overwritten by the second publication."""
        manifest = self._write(REHEARSED, tensors, probe)
        if self._leads:
            manifest.write(self._folder / REHEARSAL)
        if self._server is not None:
            self._server.rehearse(manifest)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None) -> Manifest:
        manifest = self._write(version, tensors, probe)
        if self._leads:
            manifest.write(self._folder / MANIFEST)
        if self._server is not None:
            self._server.publish(manifest)
        return manifest

    def _write(self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None) -> Manifest:
        manifest = self._writer.write(version, tensors, self._dtype)
        return msgspec.structs.replace(manifest, tied=self._tied, probe=probe)

    def check(self) -> None:
        """Raises `WeightsError` if workers on other hosts can get nothing any more."""
        if self._server is not None:
            self._server.check()

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
