"""What a run came to: `summary.json` for scripts, a table for people."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from async_rl.tracking import timeline
from async_rl.tracking.metrics import EVALUATIONS, Record
from async_rl.tracking.metrics import read as read_metrics
from buffers.messages import Stats

Status = Literal["finished", "failed", "interrupted"]


class Tickets(Struct, frozen=True):
    """Trajectories by how they ended; they add up to `issued`."""

    issued: int
    trained: int
    expired: int
    failed: int
    cancelled: int
    in_flight: int

    @property
    def add_up(self) -> bool:
        return self.issued == self.trained + self.expired + self.failed + self.cancelled + self.in_flight


class Summary(Struct, frozen=True):
    """Figures of a run. Rates are per second of wall clock from the end of step 1 to the end of the last step."""

    status: Status
    error: str
    steps: int
    wall_s: float
    train_wall_s: float
    reward_first5: float | None
    reward_last5: float | None
    eval_first: float | None
    """Reward on held-out prompts in the first evaluation of `evaluation.every`, and in the last."""
    eval_last: float | None
    max_trained_age: int | None
    mean_trained_age: float | None
    overlap_fraction: float | None
    samples_per_s: float | None
    backward_share: float | None
    gen_tokens_per_s: float | None
    train_tokens_per_s: float | None
    multi_version_trajectories: int
    span_mismatches: int
    skipped_steps: int
    accounting_share: float | None
    published_bytes: int
    """Of one version."""
    checkpoint_stall: float | None
    """Mean time for which a checkpoint held up the learner, over the mean time of a step."""
    lost_workers: int
    reissued: int
    kept_tokens: int
    discarded_tokens: int
    failed_groups: int
    filtered_groups: int
    late_groups: int
    expired_lengths: list[int]
    """Expired trajectories by length: entry i counts those of 2 ** (i - 1) to 2 ** i - 1 tokens."""
    last_failure: str
    tickets: Tickets


def summarise(
    folder: Path, records: list[Record], stats: Stats, *, status: Status, error: str, wall_s: float, earlier: int = 0
) -> Summary:
    """The summary of what `metrics.jsonl`, the timeline and the buffer's counters say.

    Steps and rewards are those of the whole run. Rates, ages and tickets leave out the first `earlier` steps, which
    belong to lives before a resume.
    """
    steps, rewards = len(records), [record["reward"] for record in records]
    evaluations = [round(record["eval_reward"], 4) for record in read_metrics(folder, EVALUATIONS)]
    records = records[earlier:]
    rated = len(records) >= 2
    span = records[-1]["time"] - records[0]["time"] if rated else 0.0
    later = records[1:]
    tokens = sum(record["tokens_trainable"] for record in records)
    return Summary(
        status=status,
        error=error,
        steps=steps,
        wall_s=round(wall_s, 1),
        train_wall_s=round(records[-1]["time"] - _started(records[0]), 1) if records else 0.0,
        reward_first5=_mean(rewards[:5]),
        reward_last5=_mean(rewards[-5:]),
        eval_first=evaluations[0] if evaluations else None,
        eval_last=evaluations[-1] if evaluations else None,
        max_trained_age=max((record["age_max"] for record in records), default=None),
        mean_trained_age=(
            round(sum((r["age_mean"] or 0.0) * r["tokens_trainable"] for r in records) / tokens, 3) if tokens else None
        ),
        overlap_fraction=_overlap(folder, records),
        samples_per_s=round(sum(record["samples"] for record in later) / span, 3) if rated else None,
        backward_share=(
            round(sum(r["samples_backward"] for r in records) / sum(r["samples"] for r in records), 3)
            if records
            else None
        ),
        gen_tokens_per_s=(
            round((records[-1]["buffer_tokens"] - records[0]["buffer_tokens"]) / span, 1) if rated else None
        ),
        train_tokens_per_s=round(sum(record["tokens"] for record in later) / span, 1) if rated else None,
        multi_version_trajectories=stats.multi_version,
        span_mismatches=stats.span_mismatches,
        skipped_steps=sum(record["skipped"] for record in records),
        published_bytes=max((record["published_bytes"] for record in records), default=0),
        checkpoint_stall=_stall(folder, records),
        accounting_share=round(stats.worker_overhead_s / stats.worker_busy_s, 5) if stats.worker_busy_s else None,
        lost_workers=stats.lost_workers,
        reissued=stats.reissued,
        kept_tokens=stats.kept_tokens,
        discarded_tokens=stats.discarded_tokens,
        failed_groups=stats.failed_groups,
        filtered_groups=stats.filtered_groups,
        late_groups=stats.late_groups,
        expired_lengths=stats.expired_lengths,
        last_failure=stats.last_error,
        tickets=Tickets(stats.issued, stats.trained, stats.expired, stats.failed, stats.cancelled, stats.in_flight),
    )


def _started(record: Record) -> float:
    return record["time"] - record["publish_s"] - record["train_s"]


def _overlap(folder: Path, records: list[Record]) -> float | None:
    """From the end of step 2 to the start of the last step."""
    if len(records) < 4:
        return None
    start, end = records[1]["time"], _started(records[-1])
    fraction = timeline.overlap_fraction(timeline.busy(folder, "learner"), timeline.busy(folder, "worker"), start, end)
    return round(fraction, 4)


def _stall(folder: Path, records: list[Record]) -> float | None:
    spans = [end - start for start, end in timeline.named(folder, "learner0", "checkpoint")]
    waits = [end - start for start, end in timeline.named(folder, "learner0", "checkpoint copy")]
    steps = [record["wait_s"] + record["train_s"] + record["publish_s"] for record in records]
    return round(sum(spans + waits) / len(spans) / (sum(steps) / len(steps)), 4) if spans and sum(steps) else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None


def write(summary: Summary, folder: Path) -> None:
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read(folder: Path) -> Summary:
    return msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)


def rows(summary: Summary) -> list[tuple[str, str]]:
    """The lines of the table."""
    tickets = summary.tickets
    unusual: list[tuple[str, str]] = []
    if summary.skipped_steps:
        unusual.append(("steps without a gradient", f"{summary.skipped_steps}: all rewards of every group were equal"))
    if summary.lost_workers:
        unusual.append(
            (
                "workers lost",
                f"{summary.lost_workers}; {summary.reissued} of their trajectories went on elsewhere, from "
                f"{summary.kept_tokens} tokens",
            )
        )
    if tickets.expired:
        lengths = ", ".join(f"{count} below {2**i} tokens" for i, count in enumerate(summary.expired_lengths) if count)
        unusual.append(("expired by length", lengths))
    if summary.failed_groups or summary.late_groups:
        unusual.append(("groups dropped", f"{summary.failed_groups} failed, {summary.late_groups} late"))
    if summary.filtered_groups:
        unusual.append(("groups replaced", f"{summary.filtered_groups} of equal rewards, by dynamic sampling"))
    if tickets.failed:
        unusual.append(("last failed trajectory", (summary.last_failure.strip().splitlines() or ["-"])[-1][:200]))
    return [
        ("status", summary.status),
        ("steps", f"{summary.steps} in {summary.train_wall_s:.0f} s ({summary.wall_s:.0f} s with start and end)"),
        ("reward", f"{_show(summary.reward_first5)} (first 5 steps) → {_show(summary.reward_last5)} (last 5)"),
        ("age of trained tokens", f"mean {_show(summary.mean_trained_age)}, largest {_show(summary.max_trained_age)}"),
        ("overlap of the pools", _show(summary.overlap_fraction)),
        ("samples/s", f"{_show(summary.samples_per_s)} ({_show(summary.backward_share)} needed a backward pass)"),
        ("tokens/s", f"generated {_show(summary.gen_tokens_per_s)}, trained {_show(summary.train_tokens_per_s)}"),
        ("stalled by a checkpoint", f"{_percent(summary.checkpoint_stall)} of a step"),
        ("buffer and accounts", f"{_percent(summary.accounting_share)} of the workers' time"),
        (
            "over two versions or more",
            f"{summary.multi_version_trajectories} of {tickets.trained} trained trajectories",
        ),
        ("tags not the engine's", str(summary.span_mismatches)),
        (
            "tickets",
            f"{tickets.issued} issued = {tickets.trained} trained + {tickets.expired} expired "
            f"+ {tickets.failed} failed + {tickets.cancelled} cancelled + {tickets.in_flight} in flight",
        ),
        *unusual,
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
