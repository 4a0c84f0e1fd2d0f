"""Entry point `vllm.general_plugins`: runs in every vLLM process, before anything is loaded."""

from __future__ import annotations

import os

BACKEND = "async_rl_shm"


def register() -> None:
    """Makes the shared-memory backend known to vLLM; engine processes of a run also end with their parent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "async_rl.weights.vllm_backend", "ShmWeightTransfer")
    worker = os.environ.get("ASYNC_RL_WORKER_PID")
    if worker is not None and os.getppid() == int(worker):
        from async_rl.process import die_with_parent

        die_with_parent(int(worker))
