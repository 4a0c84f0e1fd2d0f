"""Entry point `vllm.general_plugins`: runs in every vLLM process, before anything is loaded."""

from __future__ import annotations

import os

BACKENDS = {
    "async_rl_shm": "ShmWeightTransfer",
    "async_rl_nccl": "NcclWeightTransfer",
    "async_rl_ipc": "IpcWeightTransfer",
}


def register() -> None:
    """Makes our weight transports known to vLLM; engine processes of a run also end with their parent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, name in BACKENDS.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "async_rl.weights.vllm_backend", name)
    worker = os.environ.get("ASYNC_RL_WORKER_PID")
    if worker is not None and os.getppid() == int(worker):
        from async_rl.process import die_with_parent

        die_with_parent(int(worker))
