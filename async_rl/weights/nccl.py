"""Weights over NCCL, on vLLM's own transfer engines: the learner's side.

Every worker has a communicator of its own with rank 0: it asks for a version when it has time, and one that comes, goes
or dies concerns nobody else. A worker brings its engine into the communicator (`Join`), then asks again and again
(`Send`): while it is being sent a version, a thread here takes part in the broadcast from the snapshot in the GPU's
memory, on streams of its own, and the next step is trained.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, WeightTransferUpdatePayload
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from async_rl.errors import WeightsError
from async_rl.weights import shm
from async_rl.weights.device import DeviceWriter
from async_rl.weights.manifest import Manifest

LIMIT_S = 120.0
"""Longest time for a worker to join, or for a version to arrive: then its communicator is aborted."""


class Snapshot(WeightSource):
    """What is sent: the tensors of one version."""

    def __init__(self) -> None:
        self.named: list[tuple[str, Tensor]] = []

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.named)


class Told:
    """vLLM's trainer tells its engine what to do through this. Here the worker knows it by itself, but for the place
    where they meet."""

    def __init__(self) -> None:
        self.meeting: queue.Queue[dict[str, Any]] = queue.Queue()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.meeting.put(init_info)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Peer:
    """One worker. Its thread does one thing after the other; an error in it ends the peer."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"nccl-{name}")
        self._snapshot, self._told = Snapshot(), Told()
        self._trainer: NCCLTrainerWeightTransferEngine | None = None
        self.error: Exception | None = None

    def meet(self, address: str, engine_ranks: int) -> dict[str, Any]:
        """Begins to make a communicator; what the worker's engine needs to know to take part."""
        info = NCCLTrainerInitInfo(address, _free_port(address), 1 + engine_ranks, rank=0)

        def join() -> None:
            self._trainer = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self._told, source=self._snapshot)

        self._do(join)
        return self._told.meeting.get(timeout=LIMIT_S)

    def send(self, named: list[tuple[str, Tensor]], held: ExitStack) -> None:
        """Begins to send; `held` is closed at the end."""

        def broadcast() -> None:
            with held:
                trainer, self._snapshot.named = self._trainer, named
                assert trainer is not None
                limit = threading.Timer(LIMIT_S, trainer.shutdown)
                limit.start()
                try:
                    trainer.send_weights()
                finally:
                    limit.cancel()

        self._do(broadcast)

    def _do(self, task: Any) -> None:
        def guarded() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                task()
            except Exception as error:
                self.error = error
                print(f"weights: {self._name} is left: {error!r}", file=sys.stderr, flush=True)

        self._thread.submit(guarded)

    def close(self) -> None:
        """Whoever still waits for the other side waits no more."""
        if self._trainer is not None:
            self._trainer.shutdown()
        self._thread.shutdown(wait=False, cancel_futures=True)


class Sender:
    """What a `WeightsServer` leaves to NCCL. Not thread-safe: called by the server's thread."""

    def __init__(self, writer: DeviceWriter, address: str, device: torch.device) -> None:
        self._writer, self._address, self._device = writer, address, device
        self._peers: dict[str, Peer] = {}

    def join(self, worker: str, engine_ranks: int) -> dict[str, Any]:
        """A worker, or its successor of the same name, makes a communicator; init info of its engine."""
        if worker in self._peers:
            self._peers.pop(worker).close()
        peer = self._peers[worker] = Peer(worker, self._device)
        return peer.meet(self._address, engine_ranks)

    def send(self, worker: str, manifest: Manifest) -> bool:
        """Begins to send a version; False if it has been written over. Raises `WeightsError` if there is nobody."""
        peer = self._peers.get(worker)
        if peer is None or peer.error is not None:
            raise WeightsError(f"{worker} shares no communicator with the learner")
        held = ExitStack()
        try:
            held.enter_context(shm.hold(manifest))
        except shm.Overtaken:
            return False
        peer.send(self._writer.tensors(manifest), held)
        return True

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
