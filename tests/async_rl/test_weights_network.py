"""Weights pulled over the network: exact deltas, lost answers, slow receivers, a learner that moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import WeightsError
from async_rl.weights import client as client_module
from async_rl.weights import delta, shm, wire
from async_rl.weights.client import WeightsClient
from async_rl.weights.manifest import Manifest, Probe
from async_rl.weights.publisher import Publisher
from async_rl.weights.server import Shelf, WeightsServer
from buffers import keys

SIZE = 300_000


@given(st.integers(1, 3 * delta.BLOCK), st.floats(0, 1), st.sampled_from([np.uint16, np.uint32]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_delta_applied_to_the_old_gives_the_new(size: int, share: float, dtype: type, seed: int) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, size).astype(dtype)
    new = np.where(random.random(size) < share**4, random.integers(0, 1 << 16, size), old).astype(dtype)
    step = delta.encode(old, new)
    assert len(step) <= new.nbytes + 4 * -(-size // delta.BLOCK)
    target = old.copy()
    delta.apply(step, target)
    assert np.array_equal(target, new)


def test_few_changes_make_a_small_delta() -> None:
    old = np.zeros(10 * delta.BLOCK, np.uint16)
    new = old.copy()
    new[::100] = 1
    assert len(delta.encode(old, new)) == 10 * 4 + 4 * np.count_nonzero(new)
    assert len(delta.encode(old, old)) == 10 * 4


@pytest.mark.parametrize("cut", [slice(0, 3), slice(0, -1), slice(0, None)])
def test_a_delta_for_something_else_is_refused(cut: slice) -> None:
    old = np.arange(100, dtype=np.uint16)
    step = delta.encode(old, old + 1)
    target = np.zeros(100 if cut.stop else delta.BLOCK + 1, np.uint16)
    with pytest.raises((WeightsError, ValueError)):
        delta.apply(step[cut], target)


def manifest(version: int) -> Manifest:
    entry = shm.TensorEntry("w", "bfloat16", [SIZE], shm.HEADER, 2 * SIZE, 0)
    return Manifest(version, "/dev/shm/nowhere", [entry], [])


def test_what_is_offered() -> None:
    shelf = Shelf(kept=2)
    assert shelf.offer(wire.Wanted(1)).manifest is None
    for version in (3, 4, 5, 6):
        shelf.add(manifest(version), b"d" * version)
    whole = wire.Piece(6, None, shm.size(manifest(6)))
    assert shelf.offer(wire.Wanted(1, have=4)).pieces == [wire.Piece(5, 4, 5), wire.Piece(6, 5, 6)]
    assert shelf.offer(wire.Wanted(1, have=6)).pieces == []
    for unknown in (None, 3, 99):
        assert shelf.offer(wire.Wanted(1, have=unknown)).pieces == [whole]
    # Someone is still downloading version 5, which is not written over meanwhile: it and a delta do as well.
    chained = shelf.offer(wire.Wanted(1), pinned=manifest(5))
    assert chained.pieces == [wire.Piece(5, None, whole.size), wire.Piece(6, 5, 6)]
    assert chained.newest
    # Without a delta from there it is older than the newest, and says so; whoever has it already gets the newest.
    older = shelf.offer(wire.Wanted(1), pinned=manifest(2))
    assert older.manifest is not None
    assert (older.manifest.version, older.newest) == (2, False)
    assert shelf.offer(wire.Wanted(1, have=2), pinned=manifest(2)).pieces == [whole]
    shelf.add(manifest(7), None)
    assert shelf.offer(wire.Wanted(1, have=6)).pieces == [wire.Piece(7, None, whole.size)]


class Pair:
    """A learner's publisher with a server, and weights that change a little."""

    def __init__(self, folder: Path, *, deltas: bool = True, keys: Path | None = None) -> None:
        self.server = WeightsServer("tcp://127.0.0.1:*", keys, deltas=deltas)
        self.publisher = Publisher(folder, shm.Writer(f"net-{folder.name}", 3), torch.bfloat16, [], self.server)
        self.weights = torch.randn(SIZE)
        self.version = 0

    def publish(self, changed: int = 100) -> Manifest:
        self.version += 1
        self.weights[torch.randperm(SIZE)[:changed]] += 1.0
        return self.publisher.publish(self.version, [("w", self.weights), ("b", self.weights[:7])], None)


@contextmanager
def pair(folder: Path, *, deltas: bool = True, keys: Path | None = None) -> Iterator[Pair]:
    both = Pair(folder, deltas=deltas, keys=keys)
    try:
        yield both
    finally:
        both.publisher.close()


def same(here: Manifest, there: Pair) -> bool:
    with shm.hold(here):
        got = dict(shm.read(here))
    return torch.equal(got["w"], there.weights.bfloat16()) and torch.equal(got["b"], there.weights[:7].bfloat16())


def test_the_whole_first_then_deltas_bit_for_bit(tmp_path: Path) -> None:
    async def story(learner: Pair) -> None:
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(learner.server.endpoint)
        try:
            for turn in range(4):
                learner.publish()
                offer = await client.pull()
                assert offer.manifest is not None
                assert offer.manifest.version == learner.version
                assert same(offer.manifest, learner)
                assert client.pulled.whole == shm.size(offer.manifest), turn
            assert 0 < client.pulled.deltas < 3 * 1000
            again = await client.pull()  # nothing new
            assert again.manifest is not None
            assert again.manifest.version == 4
        finally:
            client.close()

    with pair(tmp_path) as learner:
        asyncio.run(story(learner))
    assert not list(shm.SHM.glob(f"async-rl-*{tmp_path.name}*"))


def test_a_receiver_that_was_away_gets_the_deltas_between(tmp_path: Path) -> None:
    async def story(learner: Pair) -> None:
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(learner.server.endpoint)
        try:
            learner.publish()
            await client.pull()
            for _ in range(3):
                learner.publish()
                # Each is compared with the one before it before the next comes; else only the last would be.
                await compared(learner)
            offer = await client.pull()
            assert offer.manifest is not None
            assert same(offer.manifest, learner)
            assert client.pulled.whole == shm.size(offer.manifest)
        finally:
            client.close()

    with pair(tmp_path) as learner:
        asyncio.run(story(learner))


async def compared(learner: Pair) -> None:
    while learner.server._waiting is not None:  # noqa: ASYNC110 - another thread's
        await asyncio.sleep(0.01)


def test_a_slow_receiver_gets_on_while_versions_fly_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version takes longer to arrive than the next to be published: it is kept until it has arrived."""
    monkeypatch.setattr(client_module, "PART", 50_000)

    async def story(learner: Pair) -> None:
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(learner.server.endpoint)
        stop = threading.Event()
        learner.publish()

        def fly() -> None:
            while not stop.wait(0.005):
                learner.publish(changed=SIZE)

        thread = threading.Thread(target=fly)
        thread.start()
        try:
            seen = [(await client.pull()).manifest for _ in range(5)]
        finally:
            stop.set()
            thread.join()
            versions = [manifest.version for manifest in seen if manifest is not None]
            assert len(versions) == 5
            assert versions == sorted(versions)
            last = await client.pull()
            last = last if last.newest else await client.pull()
            assert last.manifest is not None
            assert last.manifest.version == learner.version
            assert same(last.manifest, learner)
            client.close()

    for deltas in (True, False):
        with pair(tmp_path, deltas=deltas) as learner:
            asyncio.run(story(learner))


def test_lost_answers_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.3)
    monkeypatch.setattr(client_module, "PART", 50_000)

    async def story(learner: Pair) -> None:
        answers = learner.server._answer
        seen = [0, 0]

        def lossy(asked: wire.Question) -> list[bytes]:
            """Every third answer has a wrong byte, every fourth is none."""
            seen[0] += 1
            head, *frames = answers(asked)
            if frames and seen[0] % 3 == 0:
                seen[1] += 1
                return [head, b"x" + frames[0][1:]]
            return [wire.encode(wire.Soon(0))] if seen[0] % 4 == 0 else [head, *frames]

        monkeypatch.setattr(learner.server, "_answer", lossy)
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(learner.server.endpoint)
        try:
            learner.publish()
            offer = await client.pull()
            assert offer.manifest is not None
            assert same(offer.manifest, learner)
            assert seen[1] >= 3
        finally:
            client.close()

    with pair(tmp_path) as learner:
        asyncio.run(story(learner))


def test_a_learner_that_starts_again_is_followed(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()

    async def story(first: Pair) -> None:
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(first.server.endpoint)
        try:
            first.publish()
            await client.pull()
            with pair(tmp_path / "second") as second:
                second.version = 1 << 32
                second.publish()
                client.connect(second.server.endpoint)
                offer = await client.pull()
                assert offer.manifest is not None
                assert same(offer.manifest, second)
        finally:
            client.close()

    with pair(tmp_path) as first:
        asyncio.run(story(first))


def test_the_rehearsal_and_the_probe_travel_too(tmp_path: Path) -> None:
    async def story(learner: Pair) -> None:
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(learner.server.endpoint)
        try:
            assert (await client.pull(rehearsal=True)).manifest is None
            learner.publisher.rehearse([("w", learner.weights), ("b", learner.weights[:7])], Probe([1, 2], [-0.5]))
            rehearsal = (await client.pull(rehearsal=True)).manifest
            assert rehearsal is not None
            assert rehearsal.probe == Probe([1, 2], [-0.5])
            assert same(rehearsal, learner)
            learner.publish(SIZE)
            newest = (await client.pull()).manifest
            assert newest is not None
            assert same(newest, learner)
        finally:
            client.close()

    with pair(tmp_path) as learner:
        asyncio.run(story(learner))


def test_only_holders_of_a_key_get_weights(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys")

    async def story(learner: Pair) -> None:
        learner.publish()
        stranger, friend = WeightsClient(f"a-{tmp_path.name}"), WeightsClient(f"b-{tmp_path.name}", tmp_path / "keys")
        for client in (stranger, friend):
            client.connect(learner.server.endpoint)
        try:
            offer = await friend.pull()
            assert offer.manifest is not None
            assert same(offer.manifest, learner)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stranger.pull(), 1.0)
        finally:
            stranger.close()
            friend.close()

    with pair(tmp_path, keys=tmp_path / "keys") as learner:
        asyncio.run(story(learner))


def test_a_learner_that_dies_in_mid_pull_is_left_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull ends as soon as news come of another one, not when its limit is reached."""
    monkeypatch.setattr(client_module, "PART", 50_000)
    (tmp_path / "second").mkdir()

    async def story(first: Pair) -> None:
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(first.server.endpoint)
        first.publish()
        answers, stuck = first.server._answer, asyncio.Event()
        loop = asyncio.get_running_loop()

        def dies(asked: wire.Wanted | wire.Get) -> list[bytes]:
            if isinstance(asked, wire.Get) and asked.offset > 100_000:
                loop.call_soon_threadsafe(stuck.set)
                return [wire.encode(wire.Soon(0))]
            return answers(asked)

        monkeypatch.setattr(first.server, "_answer", dies)
        try:
            pulling = asyncio.create_task(client.pull())
            await asyncio.wait_for(stuck.wait(), 20)
            with pair(tmp_path / "second") as second:
                second.version = 1 << 32
                second.publish()
                client.connect(second.server.endpoint)
                offer = await asyncio.wait_for(pulling, 20)
                assert offer.manifest is not None
                assert same(offer.manifest, second)
        finally:
            client.close()

    with pair(tmp_path) as first:
        asyncio.run(story(first))


def test_parts_that_come_later_than_they_are_asked_for_again_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link every answer may be late: then each part still travels about once."""
    monkeypatch.setattr(client_module, "PART", 50_000)
    monkeypatch.setattr(client_module, "RETRY_S", 0.05)

    async def story(learner: Pair) -> None:
        client = WeightsClient(f"client-{tmp_path.name}")
        client.connect(learner.server.endpoint)
        learner.publish()
        answers = learner.server._answer
        held: list[list[bytes]] = []

        def late(asked: wire.Wanted | wire.Get) -> list[bytes]:
            """Always the answer to an earlier question."""
            if isinstance(asked, wire.Wanted):
                return answers(asked)
            held.append(answers(asked))
            return held.pop(0) if len(held) > 8 else [wire.encode(wire.Soon(0))]

        monkeypatch.setattr(learner.server, "_answer", late)
        try:
            offer = await asyncio.wait_for(client.pull(), 60)
            assert offer.manifest is not None
            assert same(offer.manifest, learner)
        finally:
            client.close()

    with pair(tmp_path) as learner:
        asyncio.run(story(learner))


def test_a_server_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(tmp_path) as learner:

        def broken(*_: object) -> bytes:
            raise ValueError("bad difference")

        monkeypatch.setattr("async_rl.weights.server.difference", broken)
        learner.publish()
        learner.publish()
        learner.server._threads[1].join(20)
        with pytest.raises(WeightsError, match="bad difference"):
            learner.publish()


def test_deltas_that_nobody_would_take_are_not_kept() -> None:
    shelf = Shelf()
    size = shm.size(manifest(1))
    for version in range(1, 6):
        shelf.add(manifest(version), b"d" * (size // 3))
    assert shelf._bytes() <= size
    assert len(shelf.offer(wire.Wanted(1, have=3)).pieces) == 2
