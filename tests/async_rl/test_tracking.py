"""Metrics, timeline, overlap and summary, from numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.tracking import metrics, summary, timeline
from async_rl.tracking.plot import plot
from buffers.messages import Stats


def record(step: int, **more: object) -> metrics.Record:
    base = {
        "step": step, "time": 100.0 + 10 * step, "reward": step / 10, "samples": 8, "samples_backward": 4, "tokens": 80,
        "tokens_trainable": 40, "age_mean": 1.0, "age_max": 2, "wait_s": 1.0, "train_s": 4.0, "publish_s": 1.0,
        "published_bytes": 400, "buffer_tokens": 100 * step, "skipped": 0,
    }  # fmt: skip
    return base | more  # type: ignore[return-value]


def test_a_reader_follows_complete_lines_only(tmp_path: Path) -> None:
    writer, reader = metrics.MetricsWriter(tmp_path), metrics.MetricsReader(tmp_path)
    assert list(reader.new()) == []
    writer.write({"step": 1, "x": float("nan")})
    assert list(reader.new()) == [{"step": 1, "x": None}]
    with (tmp_path / metrics.FILE).open("a") as file:
        file.write('{"step": 2')
        file.flush()
        assert list(reader.new()) == []
        file.write("}\n")
    assert list(reader.new()) == [{"step": 2}]
    writer.close()


def test_steps_after_the_checkpoint_are_forgotten_on_resume(tmp_path: Path) -> None:
    writer = metrics.MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write({"step": step})
    writer.close()
    with (tmp_path / metrics.FILE).open("a") as file:
        file.write('{"step": 4, "half a li')
    metrics.truncate(tmp_path, 2)
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2]


def test_overlap_of_intervals() -> None:
    left = timeline.union([(0, 2), (1, 3), (5, 6)])
    assert left == [(0, 3), (5, 6)]
    assert timeline.overlap(left, [(2, 5.5)]) == pytest.approx(1.5)
    assert timeline.overlap_fraction(left, [(2, 5.5)], 0, 10) == pytest.approx(1.5 / 3.5)
    assert timeline.overlap_fraction(left, [(2, 5.5)], 5, 10) == pytest.approx(1.0)
    assert timeline.overlap_fraction(left, [], 0, 10) == 0.0


def test_busy_time_survives_a_kill_and_counts_once(tmp_path: Path) -> None:
    line = timeline.Timeline(tmp_path, "worker0")
    meter = timeline.BusyMeter(line, "generate")
    meter.PIECE_S = 0.0
    for count in (1, 2):
        meter.set(count)
        meter.tick()
    meter.set(0)
    meter.set(0)
    assert len((tmp_path / "trace" / "worker0.jsonl").read_text().splitlines()) == 3
    assert len(timeline.busy(tmp_path, "worker")) == 1
    line.close()


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    line = timeline.Timeline(tmp_path, "learner0")
    line.add("train", 2.0, 3.5, busy=True)
    line.add("wait", 3.5, 4.0)
    line.close()
    events = json.loads(timeline.merge(tmp_path).read_text())["traceEvents"]
    assert events[0]["args"] == {"name": "learner0"}
    assert (events[1]["name"], events[1]["ts"], events[1]["dur"]) == ("train", 2e6, 1.5e6)
    assert timeline.busy(tmp_path, "learner") == [(2.0, 3.5)]


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    for name, spans in {"learner0": [(121, 125), (131, 135)], "worker0": [(120, 123), (130, 150)]}.items():
        line = timeline.Timeline(tmp_path, name)
        for start, end in spans:
            line.add("x", start, end, busy=True)
        line.close()
    records = [record(step) for step in range(1, 6)]
    stats = Stats(
        issued=60, trained=40, expired=4, failed=2, running=14, multi_version=7, last_error="Traceback\nKeyError: x"
    )
    result = summary.summarise(tmp_path, records, stats, status="finished", error="", wall_s=99.0)
    assert (result.steps, result.reward_first5, result.reward_last5) == (5, 0.3, 0.3)
    assert result.train_wall_s == 45.0  # the first step began 5 s before its end
    assert result.samples_per_s == pytest.approx(4 * 8 / 40)
    assert (result.gen_tokens_per_s, result.train_tokens_per_s) == (10.0, 8.0)
    assert (result.max_trained_age, result.mean_trained_age, result.backward_share) == (2, 1.0, 0.5)
    # From 120 to 145: the learner is busy 8 s, of which 2 + 4 with the worker.
    assert result.overlap_fraction == pytest.approx(6 / 8)
    assert result.tickets.in_flight == 14
    summary.write(result, tmp_path)
    assert summary.read(tmp_path) == result
    assert ("last failed trajectory", "KeyError: x") in summary.rows(result)
    assert any("7 of 40" in value for _, value in summary.rows(result))


def test_a_run_without_a_step_has_a_summary_too(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    result = summary.summarise(tmp_path, [], Stats(), status="failed", error="why", wall_s=1.0)
    assert (result.steps, result.reward_last5, result.samples_per_s) == (0, None, None)
    assert summary.rows(result)


def test_the_plot_is_written(tmp_path: Path) -> None:
    plot([record(step) for step in range(1, 4)], tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
