"""The benchmark on a tiny load: what it reports, not how fast. Whole processes, so seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from async_rl.benchmarks import buffer, learner, peers
from async_rl.benchmarks.load import Load, Shape
from async_rl.benchmarks.server import serving
from launchers import cli

TINY = Shape(tickets=16, chunk=4, length=32, prompt=4, group=4, batch=16)

KEYS = {
    *("machine", "versions", "seconds", "ingest_tokens_per_s", "ack_p50_ms", "ack_p99_ms", "take_ms"),
    *("wire_bytes_per_token", "disk_bytes_per_token", "cpu_share", "sim_realtime_factor"),
    *("ratio_ray_actor", "ratio_ray_queue", "ratio_transfer_queue", "peers"),
    *("tokens_acknowledged", "tokens_stored", "other_cpu"),
}


def test_a_tiny_run_reports_everything() -> None:
    report = buffer.run(seconds=0.3, warm_up_s=0.1, shape=TINY, with_peers=False, simulate=False)
    found = msgspec.to_builtins(report)
    assert set(found) == KEYS
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["numpy"]
    assert report.tokens_acknowledged == report.tokens_stored > 0
    assert 0 < report.ack_p50_ms <= report.ack_p99_ms
    # 8 bytes are the token and its log-prob, 28 those of each chunk's row.
    assert report.wire_bytes_per_token > 8 + 28 / TINY.chunk
    assert report.disk_bytes_per_token > 8 + 28 / TINY.chunk
    assert report.take_ms > 0
    assert report.cpu_share >= 0
    assert report.peers == dict.fromkeys(peers.NAMES)
    assert report.ratio_ray_actor is report.ratio_ray_queue is report.ratio_transfer_queue is None


def test_the_load_keeps_every_rule_and_takes_whole_batches() -> None:
    with serving(TINY.settings) as server:
        load = Load(server.endpoint, TINY, window=8, trains=False)
        load.start()
        for number in range(3):
            load.stream_until((number + 1) * TINY.batch)
            load.drain()
            batch, arrays = load.take()
            assert len(batch.rows) == TINY.batch
            assert arrays.prompts.size == TINY.batch // TINY.group * TINY.prompt
            assert arrays.tokens.size == sum(row.length for row in batch.rows)
            assert arrays.mask.all()
            if number:
                # Only the first life of a column is cut short.
                assert {row.length for row in batch.rows} == {TINY.length}
            load.commit(batch)
        stats = load.stats()
        load.close()
    assert stats.trained == 3 * TINY.batch
    assert stats.tokens == load.acknowledged
    assert (stats.refused_chunks, stats.refused_messages, stats.expired, stats.failed, stats.cancelled) == (0,) * 5


def test_a_missing_peer_is_null_and_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "MODULES", ("no_such_module",))
    assert peers.measure("transfer_queue", 0.1) is None
    assert "TransferQueue==0.1.11" in capsys.readouterr().err


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(cli, "_module", lambda *arguments: asked.append(arguments) or 0)
    assert cli.run(["bench", "buffer", "--json", "out.json", "--seconds", "3", "--no-peers"]) == 0
    assert asked == [("async_rl.benchmarks.buffer", "--seconds", "3.0", "--json", "out.json", "--no-peers")]


def test_a_learner_step_computes_the_gradient_of_the_padded_loop(tiny_model: Path) -> None:
    """What the benchmark of the learner compares is the same; how fast is not for a test."""
    shape = learner.Shape("tiny", "float32", 3, 4, 6, lambda rng, count: rng.integers(2, 30, count))
    result = learner.measure(shape, str(tiny_model), 1)
    assert result.gradient_difference < 1e-4
    assert (result.shape, result.samples) == ("tiny", 12)
    assert min(result.samples_per_s, result.tokens_per_s, result.ratio_padded, result.mfu) > 0
