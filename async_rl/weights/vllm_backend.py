"""The receiving end inside a vLLM engine process: shared memory into the model, the tied head included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_rl.weights import shm
from async_rl.weights.manifest import Manifest, check_names


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the manifest says it all."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The publication to load, as JSON-able data of `Manifest`."""

    manifest: dict[str, Any]


class ShmWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer lifecycle over `async_rl.weights.shm`."""

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
        import msgspec

        manifest = msgspec.convert(update_info.manifest, Manifest)
        loaded = self.model.load_weights(shm.read(manifest))
        if loaded is not None:
            tied = (
                {name for name in self._parameters if name.endswith(tuple(manifest.tied))} if manifest.tied else set()
            )
            check_names(set(loaded) - tied, self._parameters - tied)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # On a CPU a head holds a packed copy made at load time; if it is tied, no loader refreshes it.
            if isinstance(module, ParallelLMHead) and self.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass
