"""Weights from GPU to GPU, with vLLM's real engines: `make test-gpu`. They skip where something of it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from async_rl.weights import shm
from async_rl.weights.device import DeviceWriter, exported
from async_rl.weights.manifest import Manifest
from tests.e2e.runs import adds_up, config, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

READER = """
import sys, msgspec, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from async_rl.weights import shm
from async_rl.weights.device import imported
from async_rl.weights.manifest import Manifest
manifest = msgspec.json.decode(sys.stdin.buffer.read(), type=Manifest)
uuid = str(torch.cuda.get_device_properties(0).uuid)
tensors = []
for handles in imported(manifest):
    arguments = list(handles[uuid])
    arguments[6] = 0
    tensors.append(rebuild_cuda_tensor(*arguments))
assert shm.checksums(tensors) == [entry.checksum for entry in manifest.tensors]
print("read", [tuple(tensor.shape) for tensor in tensors])
"""


def test_another_process_reads_what_is_exported(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    writer = DeviceWriter(f"gpu-{tmp_path.name}", device, shared=False)
    tensors = [("a", torch.randn(33, 7, device=device)), ("b", torch.randn(5, device=device))]
    try:
        manifest = writer.write(1, tensors, torch.bfloat16)
        torch.cuda.synchronize()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        export = exported(writer._buffers[manifest.segment])
        manifest = msgspec.structs.replace(manifest, exports={uuid: export})
        told = msgspec.json.encode(manifest)
        assert msgspec.json.decode(told, type=Manifest) == manifest
        read = subprocess.run([sys.executable, "-c", READER], input=told, capture_output=True, check=False)
        assert read.returncode == 0, read.stderr.decode()
        assert b"read [(33, 7), (5,)]" in read.stdout
    finally:
        writer.close()


def test_checksums_on_a_gpu_are_those_of_the_cpu() -> None:
    data = torch.randint(0, 256, (1001,), dtype=torch.uint8)
    assert shm.checksums([data.cuda(), data[3:].cuda()]) == shm.checksums([data, data[3:]])


@pytest.mark.parametrize(
    ("transport", "placement", "gpus"), [("ipc", "concurrent", 1), ("ipc", "colocated", 1), ("nccl", "disjoint", 2)]
)
def test_a_run_with_weights_that_stay_on_gpus(
    tmp_path: Path, tiny_model: Path, transport: str, placement: str, gpus: int
) -> None:
    pytest.importorskip("vllm")
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed, and {torch.cuda.device_count()} are here")
    chosen = {"weights.transport": transport, "launch.placement": placement, "rollout.engine": "vllm"}
    code, out, folder = train(config(tiny_model, tmp_path, **chosen))
    assert code == 0, out
    assert adds_up(folder).steps == 3
    assert "probe differs" in (folder / "logs" / "worker0.log").read_text()
