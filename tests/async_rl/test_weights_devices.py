"""Weights that stay in the memory of GPUs, as far as a CPU goes: vLLM's own engines receive them, with host memory in
the place of a GPU's and a queue in the place of NCCL. `make test-gpu` has the rest."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from async_rl.config import parse
from async_rl.errors import ConfigError, WeightsError
from async_rl.weights import shm
from async_rl.weights.device import DeviceWriter, exported, imported
from async_rl.weights.manifest import Export, Manifest, checksum
from async_rl.weights.receiver import Broadcast, Receiver
from launchers import devices

GPU = "GPU-of-the-test"
TENSORS = [("a", torch.arange(35.0).view(5, 7)), ("b.weight", torch.full((3,), -1.5)), ("c", torch.ones(4, 2, 2))]


class Model(torch.nn.Module):
    """Loads as vLLM's models do: says what it has loaded."""

    def __init__(self, tensors: list[tuple[str, Tensor]] = TENSORS) -> None:
        super().__init__()
        self.now = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in tensors}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.now.items())

    def load_weights(self, weights: Any) -> set[str]:
        loaded = dict(weights)
        self.now |= {name: tensor.clone() for name, tensor in loaded.items()}
        return set(loaded)

    def has(self, tensors: list[tuple[str, Tensor]] = TENSORS) -> bool:
        return all(torch.equal(self.now[name], tensor.bfloat16()) for name, tensor in tensors)


def engine_of(kind: str, model: Model) -> Any:
    from async_rl.weights import vllm_backend

    config = SimpleNamespace(parallel_config=None, model_config=None)
    return getattr(vllm_backend, kind)(None, config, torch.device("cpu"), model)


def update_info(manifest: Manifest) -> dict[str, Any]:
    """As it comes out of the worker's request."""
    return msgspec.json.decode(msgspec.json.encode({"manifest": msgspec.to_builtins(manifest)}))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[DeviceWriter]:
    writer = DeviceWriter(f"device-{tmp_path.name}", torch.device("cpu"), shared=False)
    yield writer
    writer.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_a_checksum_is_the_same_wherever_it_is_taken(size: int, start: int) -> None:
    data = torch.randint(0, 256, (start + size,), dtype=torch.uint8)[start:]
    assert shm.checksums([data]) == [checksum(data.numpy())]


def test_a_device_has_the_bytes_and_the_file_has_the_version(writer: DeviceWriter) -> None:
    manifest = writer.write(7, TENSORS, torch.bfloat16)
    assert Path(manifest.segment).stat().st_size == shm.HEADER
    with shm.hold(manifest):
        for (name, tensor), (wanted, want) in zip(writer.tensors(manifest), TENSORS, strict=True):
            assert name == wanted
            assert torch.equal(tensor, want.bfloat16())
        assert shm.checksums([tensor for _, tensor in writer.tensors(manifest)]) == [
            entry.checksum for entry in manifest.tensors
        ]
        writer.write(8, TENSORS, torch.bfloat16)  # into the other segment
        assert writer.tensors(manifest)[0][1][4, 6] == 34
    writer.write(9, [(name, tensor + 1) for name, tensor in TENSORS], torch.bfloat16)
    with pytest.raises(shm.Overtaken), shm.hold(manifest):
        pass


def test_what_is_exported_is_what_torch_rebuilds_from(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    told = dict.fromkeys(names) | {
        "storage_handle": b"h\x00", "storage_size_bytes": 640, "storage_offset_bytes": 512, "ref_counter_handle": b"r",
        "ref_counter_offset": 3, "event_handle": b"e", "event_sync_required": True,
    }  # fmt: skip
    monkeypatch.setattr("async_rl.weights.device.reduce_tensor", lambda _: (None, tuple(told.values())))
    export = exported(torch.empty(1))
    assert export == Export(b"h\x00", 640, 512, b"r", 3, b"e", True)
    entry = shm.TensorEntry("w", "bfloat16", [2, 3], 128, 12, 0)
    manifest = Manifest(1, "/nowhere", [entry], [], exports={GPU: export})
    (handles,) = imported(msgspec.convert(update_info(manifest)["manifest"], Manifest))
    rebuilt = dict(zip(names, handles[GPU], strict=True))
    assert {name: rebuilt[name] for name in names[7:10] + names[11:]} == {
        name: told[name] for name in names[7:10] + names[11:]
    }
    assert (rebuilt["tensor_size"], rebuilt["tensor_stride"], rebuilt["tensor_offset"]) == ((2, 3), (3, 1), 64)
    assert (rebuilt["dtype"], rebuilt["requires_grad"], names[6]) == (torch.bfloat16, False, "storage_device")


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch, writer: DeviceWriter) -> None:
    """Host memory in the place of a GPU's that two processes have mapped."""
    here = SimpleNamespace(uuid=GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)

    def mapped(_device: Any, handle: bytes, *_: Any) -> Any:
        return writer._buffers[handle.decode()].untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", mapped)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", lambda *_, **__: None)


def shared(writer: DeviceWriter, manifest: Manifest) -> Manifest:
    size = writer._buffers[manifest.segment].numel()
    return msgspec.structs.replace(
        manifest, exports={GPU: Export(manifest.segment.encode(), size, 0, b"", 0, b"", False)}
    )


@pytest.mark.usefixtures("shared_memory")
def test_vllm_loads_from_memory_that_it_shares_with_the_learner(writer: DeviceWriter) -> None:
    model = Model()
    engine = engine_of("IpcWeightTransfer", model)
    engine.init_transfer_engine(engine.parse_init_info({}))
    for version in (1, 2, 3):
        tensors = [(name, tensor * version) for name, tensor in TENSORS]
        manifest = shared(writer, writer.write(version, tensors, torch.bfloat16))
        engine.receive_weights(engine.parse_update_info(update_info(manifest)))
        assert model.has(tensors)


@pytest.mark.usefixtures("shared_memory")
def test_what_differs_from_what_was_published_is_found(writer: DeviceWriter) -> None:
    """failures.md 16."""
    manifest = shared(writer, writer.write(1, TENSORS, torch.bfloat16))
    engine = engine_of("IpcWeightTransfer", Model([*TENSORS, ("forgotten", torch.ones(1))]))
    with pytest.raises(WeightsError, match=r"missing \['forgotten'\]"):
        engine.receive_weights(engine.parse_update_info(update_info(manifest)))
    writer.tensors(manifest)[1][1][0] = 3.0
    with pytest.raises(WeightsError, match=r"b\.weight of version 1: the checksum differs"):
        engine.receive_weights(engine.parse_update_info(update_info(manifest)))


class Wire:
    """One direction of a communicator of two."""

    def __init__(self) -> None:
        self.sent: queue.Queue[Tensor] = queue.Queue()
        self.cut = False

    def end(self, *, sends: bool) -> Any:
        def broadcast(tensor: Tensor, src: int = 0, **_: Any) -> None:
            assert src == 0
            if self.cut:
                raise RuntimeError("NCCL: the other side is gone")
            if sends:
                self.sent.put(tensor.clone())
            else:
                tensor.copy_(self.sent.get(timeout=10))

        return SimpleNamespace(broadcast=broadcast, destroy=lambda: None)


class Engine:
    """What a worker has: vLLM's receiver, in this process."""

    ranks = 2

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.joined = 0

    async def join(self, init: dict[str, Any]) -> None:
        self.joined += 1
        self.inner.init_transfer_engine(self.inner.parse_init_info(init))

    async def update(self, manifest: Manifest) -> float:
        await asyncio.to_thread(lambda: self.inner.receive_weights(self.inner.parse_update_info(update_info(manifest))))
        return 0.0

    async def relabel(self, version: int) -> None: ...

    async def score(self, tokens: list[int]) -> list[float]:
        return []


def test_vllm_sends_and_receives_a_broadcast(
    tmp_path: Path, writer: DeviceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a server, a client and both of vLLM's engines, which make a new communicator when one has failed."""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    from async_rl.weights.client import WeightsClient
    from async_rl.weights.nccl import Sender
    from async_rl.weights.publisher import Publisher
    from async_rl.weights.server import WeightsServer

    wires: list[Wire] = []

    def opened(info: Any) -> Any:
        assert (info.world_size, info.rank) == (3, 0)
        wires.append(Wire())
        return wires[-1].end(sends=True)

    def taken(info: Any, _: Any) -> Any:
        assert (info.world_size, info.rank_offset, info.master_address, info.packed) == (3, 1, "127.0.0.1", True)
        return wires[-1].end(sends=False)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", opened)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", taken)
    streams = [SimpleNamespace(synchronize=lambda: None)] * 2
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)

    model = Model()
    engine = Engine(engine_of("NcclWeightTransfer", model))

    async def story(publisher: Publisher) -> None:
        client = WeightsClient(f"nccl-{tmp_path.name}")
        client.connect(publisher.source)
        receiver = Receiver(engine, Broadcast(client, "worker0", engine), "bfloat16")
        applied: list[int] = []

        async def on_version(version: int) -> None:
            applied.append(version)

        try:
            for version in (1, 2, 3):
                tensors = [(name, tensor * version) for name, tensor in TENSORS]
                publisher.publish(version, tensors, None)
                if version == 3:
                    wires[-1].cut = True
                    with pytest.raises(RuntimeError, match="gone"):
                        await receiver.pull(on_version)
                receipt = await receiver.pull(on_version)
                assert (receipt.version, model.has(tensors)) == (version, True)
            assert applied == [1, 2, 3]
            assert engine.joined == 2
        finally:
            client.close()

    server = WeightsServer(
        "tcp://127.0.0.1:*", None, deltas=True, sender=Sender(writer, "127.0.0.1", torch.device("cpu"))
    )
    publisher = Publisher(tmp_path, writer, torch.bfloat16, [], server)
    try:
        asyncio.run(story(publisher))
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"weights": {"transport": "nccl"}, "launch": {"device": "cpu"}}, "weights.transport = 'nccl'"),
        ({"weights": {"transport": "nccl"}, "launch": {"placement": "concurrent"}}, "weights.transport = 'nccl'"),
        ({"weights": {"transport": "ipc"}}, "weights.transport = 'ipc'"),
        ({"weights": {"transport": "nccl"}, "rollout": {"engine": "torch"}}, "weights.transport = 'nccl'"),
        ({"weights": {"transport": "nccl"}, "learner": {"lora": {"rank": 4}}}, "weights.transport = 'nccl'"),
        ({"rollout": {"tensor_parallel": 2, "engine": "torch"}}, "rollout.tensor_parallel = 2"),
        ({"rollout": {"tensor_parallel": 2}, "launch": {"placement": "colocated"}}, "rollout.tensor_parallel = 2"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], field: str) -> None:
    from async_rl.config import check

    with pytest.raises(ConfigError, match=field):
        check(parse({"data": {"task": {"name": "basic_arithmetic"}}, **given}))


def test_without_gpus_it_is_refused_in_time() -> None:
    for section, field, value in (("weights", "transport", "nccl"), ("rollout", "tensor_parallel", 2)):
        config = parse({"data": {"path": "x"}, section: {field: value}})
        with pytest.raises(ConfigError, match=f"{section}.{field} = {value!r}: it needs GPUs"):
            devices.check(config, gpus=0)
        devices.check(config, gpus=3)
