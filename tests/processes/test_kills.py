"""The real server under real `kill -9`, in the middle of ingest; its peers live on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from async_rl.benchmarks.server import ServerProcess
from buffers import segments
from buffers.config import BufferConfig
from buffers.records import Settings
from tests.processes.peers import FeederPeer, Learner, Worker, wait_for

pytestmark = pytest.mark.e2e

SETTINGS = Settings(batch=16, group=4, max_staleness=2, max_tokens=256, min_group=4, on_failed="replace", retain=True)


def recovered_lengths(folder: Path) -> tuple[dict[tuple[int, int], int], set[int]]:
    """Length of each (ticket, attempt) in flight according to the journal, and the tickets."""
    core, _ = segments.recover(segments.of(folder / "journal"))
    core.check()
    pool = core.store.pool
    lengths = {
        (ticket, trajectory.attempt): int(pool.length[pool.row(ticket)])
        for ticket, trajectory in core.store.trajectories.items()
    }
    return lengths, {ticket for ticket, _ in lengths}


@pytest.mark.timeout(300)
def test_a_server_killed_twenty_times_loses_no_acknowledged_token(tmp_path: Path) -> None:
    rng = random.Random(0)
    server = ServerProcess(tmp_path, SETTINGS, BufferConfig(segment_mib=1))
    learner = Learner(server.endpoint, group=SETTINGS.group)
    worker, feeder = Worker(server.endpoint, slots=32, length=256, pause_s=0.002), FeederPeer(server.endpoint)
    peers = [worker, feeder, learner]
    for peer in peers:
        peer.start()
    for _ in range(20):
        enough = worker.tokens + rng.randint(500, 20_000)
        wait_for(lambda enough=enough: worker.tokens >= enough, peers, 60, "ingest")
        server.kill()
        known = dict(worker.acknowledged)
        lengths, tickets = recovered_lengths(tmp_path)
        lost = {
            key: (end, lengths.get(key))
            for key, end in known.items()
            if key[0] in tickets and lengths.get(key, 0) < end
        }
        assert lost == {}, "acknowledged tokens are not in the journal"
        server.start()
    step = learner.step
    wait_for(lambda: learner.step >= step + 3, peers, 60, "training after the last kill")
    assert worker.is_alive()
    assert learner.is_alive()
    for peer in (worker, learner, feeder):
        peer.stop()
    server.close()
    lengths, _ = recovered_lengths(tmp_path)
    core, _ = segments.recover(segments.of(tmp_path / "journal"))
    stats = core.stats()
    assert stats.trained == sum(learner.trained.values()) == learner.step * SETTINGS.batch
    assert (stats.failed, stats.cancelled, stats.lost_workers) == (0, 0, 0)
    assert stats.issued == stats.trained + stats.expired + stats.in_flight
