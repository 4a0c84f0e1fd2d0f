"""Publication through shared memory and proof of receipt (failures.md 16)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.weights import shm
from async_rl.weights.manifest import MANIFEST, Manifest, Probe, check_names, checksum
from async_rl.weights.publisher import Publisher
from async_rl.weights.receiver import Here, Receiver

TENSORS = [("a", torch.arange(6.0).view(2, 3)), ("b.weight", torch.full((5,), -1.5))]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path, shm.Writer(f"test-{tmp_path.name}"), torch.bfloat16, tied=["head"])
    yield publisher
    publisher.close()


class FakeEngine:
    """Takes what it is given; `score` answers with `logprobs`."""

    def __init__(self, logprobs: list[float]) -> None:
        self.logprobs = logprobs
        self.loaded: list[int] = []

    async def update(self, manifest: Manifest) -> float:
        shm.read(manifest)
        self.loaded.append(manifest.version)
        return 0.0

    async def relabel(self, version: int) -> None: ...

    async def score(self, tokens: list[int]) -> list[float]:
        return self.logprobs


def pull(engine: FakeEngine, folder: Path) -> float | None:
    async def nothing(_: int) -> None: ...

    return asyncio.run(Receiver(engine, Here(folder), "float32").pull(nothing)).probe_error


def test_tensors_arrive_in_the_published_type(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(3, TENSORS, None)
    manifest = Manifest.read(tmp_path / MANIFEST)
    assert (manifest.version, manifest.tied) == (3, ["head"])
    with shm.hold(manifest):
        for (name, tensor), (want_name, want) in zip(shm.read(manifest), TENSORS, strict=True):
            assert name == want_name
            assert torch.equal(tensor, want.to(torch.bfloat16))


def test_a_changed_byte_is_found(publisher: Publisher) -> None:
    manifest = publisher.publish(3, TENSORS, None)
    with Path(manifest.segment).open("r+b") as file:
        file.seek(manifest.tensors[1].offset)
        file.write(b"\x01")
    with pytest.raises(WeightsError, match=r"b\.weight of version 3: the checksum differs"):
        shm.verify(manifest)


def test_an_old_manifest_is_overtaken_and_the_newest_is_read_instead(publisher: Publisher, tmp_path: Path) -> None:
    old = publisher.publish(1, TENSORS, None)
    publisher.publish(2, TENSORS, None)
    publisher.publish(3, TENSORS, None)
    with pytest.raises(shm.Overtaken), shm.hold(old):
        pass
    engine = FakeEngine([])
    pull(engine, tmp_path)
    assert engine.loaded == [3]


def test_the_writer_waits_for_a_reader_of_the_segment_it_needs(publisher: Publisher) -> None:
    first = publisher.publish(1, TENSORS, None)
    publisher.publish(2, TENSORS, None)
    done = threading.Event()
    with shm.hold(first):
        thread = threading.Thread(target=lambda: (publisher.publish(3, TENSORS, None), done.set()))
        thread.start()
        assert not done.wait(0.2)
        assert torch.equal(shm.read(first)[0][1], TENSORS[0][1].to(torch.bfloat16))
    assert done.wait(10)
    thread.join()


def test_a_probe_that_agrees_is_accepted_and_one_that_differs_is_not(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(1, TENSORS, Probe([5, 6, 7], [-1.0, -2.0]))
    assert pull(FakeEngine([-1.0, -2.0]), tmp_path) == pytest.approx(0.0)
    with pytest.raises(WeightsError, match="not the learner's"):
        pull(FakeEngine([-1.1, -2.2]), tmp_path)
    with pytest.raises(WeightsError, match="not the learner's"):
        pull(FakeEngine([-1.0, float("nan")]), tmp_path)


def test_missing_and_unknown_names_raise() -> None:
    check_names({"a", "b"}, {"a", "b"})
    with pytest.raises(WeightsError, match=r"missing \['b'\].*unknown \['c'\]"):
        check_names({"a", "c"}, {"a", "b"})


def test_the_checksum_covers_a_tail_that_is_no_whole_word() -> None:
    data = np.arange(13, dtype=np.uint8)
    other = data.copy()
    other[12] += 1
    assert checksum(data) != checksum(other)
    assert checksum(data) == (
        int.from_bytes(data[:8].tobytes(), "little") + int.from_bytes(data[8:].tobytes(), "little")
    )


def test_a_manifest_survives_the_file(publisher: Publisher, tmp_path: Path) -> None:
    manifest = publisher.publish(1 << 32 | 7, TENSORS, Probe([1, 2], [-0.25]))
    assert Manifest.read(tmp_path / MANIFEST) == manifest
    assert msgspec.json.decode((tmp_path / MANIFEST).read_bytes())["version"] == 1 << 32 | 7


def test_a_learner_that_has_ended_is_said_to_have_ended(publisher: Publisher) -> None:
    manifest = publisher.publish(1, TENSORS, None)
    publisher.close()
    with pytest.raises(WeightsError, match="the learner has ended"), shm.hold(manifest):
        pass
