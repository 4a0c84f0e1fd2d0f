"""The receiving ends inside a vLLM engine process: into the model, the tied head included, and proven.

`ShmWeightTransfer` reads this host's shared memory. The other two are vLLM's own, given what they need to know: a
broadcast from the learner's GPU, or the memory of the GPU that the learner shares with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_rl.errors import WeightsError
from async_rl.weights import shm
from async_rl.weights.device import imported
from async_rl.weights.manifest import Manifest, check_names


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the manifest says it all."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The publication to load, as JSON-able data of `Manifest`."""

    manifest: dict[str, Any]


def manifest_of(update_info: UpdateInfo) -> Manifest:
    return msgspec.convert(update_info.manifest, Manifest)


def described(manifest: Manifest) -> dict[str, list[Any]]:
    """What vLLM's own engines are told of the tensors to come."""
    return {
        "names": [entry.name for entry in manifest.tensors],
        "dtype_names": [entry.dtype for entry in manifest.tensors],
        "shapes": [entry.shape for entry in manifest.tensors],
    }


class Proof:
    """Names and, if asked for, checksums of everything that a model's loader is given during `receive`."""

    def __init__(self, model: torch.nn.Module, *, sums: bool) -> None:
        self._model, self._with_sums = model, sums
        self._loaded: set[str] = set()
        self._told = True
        """Whether the loader says what it has loaded."""
        self._sums: dict[str, int] = {}

    def receive(self, receive: Callable[[], None]) -> None:
        loader: Any = self._model.load_weights

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            named = list(weights)
            if self._with_sums:
                sums = shm.checksums([tensor for _, tensor in named])
                self._sums.update(zip((name for name, _ in named), sums, strict=True))
            loaded = loader(named)
            self._told &= loaded is not None
            self._loaded.update(loaded or ())
            return loaded

        self._model.load_weights = load_weights  # type: ignore[assignment]
        try:
            receive()
        finally:
            del self._model.load_weights

    def check(self, manifest: Manifest, parameters: set[str]) -> None:
        """Raises `WeightsError` if a tensor is missing, unknown or not what was published."""
        for entry in manifest.tensors if self._with_sums else ():
            if self._sums.get(entry.name) != entry.checksum:
                raise WeightsError(f"{entry.name} of version {manifest.version}: the checksum differs")
        if self._told:
            tied = {name for name in parameters if name.endswith(tuple(manifest.tied))} if manifest.tied else set()
            check_names(self._loaded - tied, parameters - tied)


class ShmWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer lifecycle over `async_rl.weights.shm`, whose reader has compared the checksums."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._parameters = {name for name, _ in model.named_parameters()}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        manifest = manifest_of(update_info)
        proof = Proof(self.model, sums=False)
        proof.receive(lambda: self.model.load_weights(shm.read(manifest)))  # type: ignore[operator]
        proof.check(manifest, self._parameters)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # On a CPU a head holds a packed copy made at load time; if it is tied, no loader refreshes it.
            if isinstance(module, ParallelLMHead) and self.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


class NcclWeightTransfer(NCCLWeightTransferEngine):
    """vLLM's, from a publication's manifest."""

    update_info_cls = UpdateInfo  # type: ignore[assignment]
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._parameters = {name for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: UpdateInfo) -> None:  # type: ignore[override]
        manifest = manifest_of(update_info)
        inner = NCCLWeightTransferUpdateInfo(**described(manifest))
        proof = Proof(self.model, sums=True)
        proof.receive(lambda: NCCLWeightTransferEngine.receive_weights(self, inner))
        proof.check(manifest, self._parameters)


class IpcWeightTransfer(IPCWeightTransferEngine):
    """vLLM's, from a publication's manifest and what it exports."""

    update_info_cls = UpdateInfo  # type: ignore[assignment]
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._parameters = {name for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: UpdateInfo) -> None:  # type: ignore[override]
        manifest = manifest_of(update_info)
        inner = IPCWeightTransferUpdateInfo(**described(manifest), ipc_handles=imported(manifest))
        proof = Proof(self.model, sums=True)
        proof.receive(lambda: IPCWeightTransferEngine.receive_weights(self, inner))
        proof.check(manifest, self._parameters)
