"""What a person sees while a run goes on: a live panel on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from async_rl.tracking import summary as summaries
from async_rl.tracking.metrics import Record
from buffers.messages import Stats


class Display:
    """`phase` while things start, `step` for every record, `stats` about once a second."""

    def __init__(self, name: str, steps: int, folder: Path) -> None:
        self._console = Console(highlight=False)
        self._name, self._steps, self._folder = name, steps, folder
        self._last: Record | None = None
        self._stats: Stats | None = None
        self._rate = (time.monotonic(), 0)
        self._tokens_per_s = 0.0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("ETA"), TimeRemainingColumn(), console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task(name, total=steps)
        self._live = (
            Live(console=self._console, refresh_per_second=2, transient=True) if self._console.is_terminal else None
        )

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, record: Record) -> None:
        self._last = record
        self._progress.update(self._task, completed=record["step"])
        if self._live:
            self._draw()
            return
        self.line(
            f"step {record['step']}/{self._steps}  reward {_reward(record)}  "
            f"age {record['age_mean'] or 0:.2f} (max {record['age_max']})  "
            f"wait {record['wait_s']:.1f} s  train {record['train_s']:.1f} s  "
            f"in flight {record['buffer_running'] + record['buffer_ready'] + record['buffer_leased']}"
            f"/{record['buffer_limit']}  generated {self._tokens_per_s:.0f} tokens/s"
        )

    def stats(self, stats: Stats) -> None:
        now = time.monotonic()
        since, tokens = self._rate
        if now - since >= 5:
            self._tokens_per_s = (stats.tokens - tokens) / (now - since)
            self._rate = (now, stats.tokens)
        self._stats = stats
        self._draw()

    def _draw(self) -> None:
        if not self._live:
            return
        table = Table.grid(padding=(0, 3))
        record, stats = self._last, self._stats
        if record:
            table.add_row("reward", _reward(record), "age", f"{record['age_mean'] or 0:.2f} (max {record['age_max']})")
            trained = record["tokens"] / max(1e-9, record["wait_s"] + record["train_s"] + record["publish_s"])
            table.add_row("generated", f"{self._tokens_per_s:.0f} tokens/s", "trained", f"{trained:.0f} tokens/s")
            table.add_row("last step", f"wait {record['wait_s']:.1f} s, train {record['train_s']:.1f} s")
        if stats:
            fill = f"{stats.running} running, {stats.ready} ready, {stats.leased} leased of {stats.limit}"
            table.add_row("buffer", fill, "failed", f"{stats.failed}")
        self._live.update(Group(self._progress, table))

    def summary(self, summary: summaries.Summary) -> None:
        if summary.error:
            self.line(f"{summary.status}: {summary.error}")
        table = Table(title=f"{self._name}: {self._folder}", show_header=False, title_justify="left")
        for label, value in summaries.rows(summary):
            table.add_row(label, value)
        self._console.print(table)


def _reward(record: Record) -> str:
    """`-` for a batch of segments only, of which no reward is known yet."""
    return "-" if record["reward"] is None else f"{record['reward']:.3f}"
