"""Busy intervals per process, merged into a Chrome trace, and the overlap of two pools.

Every process appends complete events to `trace/NAME.jsonl`. Times are seconds of the host's wall clock.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

Interval = tuple[float, float]


class Timeline:
    """Events of one process. `busy` is the category that counts as work of a pool."""

    def __init__(self, folder: Path, process: str) -> None:
        (folder / "trace").mkdir(exist_ok=True)
        self._file = (folder / "trace" / f"{process}.jsonl").open("a")

    @contextmanager
    def span(self, name: str, *, busy: bool = False) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), busy=busy)

    def add(self, name: str, start: float, end: float, *, busy: bool = False) -> None:
        self._file.write(json.dumps({"name": name, "start": start, "end": end, "busy": busy}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class BusyMeter:
    """Turns a count of things in progress into busy intervals: busy while it is above zero.

    An interval that is not over is written piece by piece, so that a process that is killed loses one piece at most.
    """

    PIECE_S = 1.0

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._count = 0
        self._since = 0.0
        self.seconds = 0.0

    def set(self, count: int) -> None:
        """So many are in progress now."""
        if count and not self._count:
            self._since = time.time()
        elif self._count and not count:
            self._write(time.time())
        self._count = count

    def tick(self) -> None:
        """Called now and then; writes what has been going on for longer than a piece."""
        now = time.time()
        if self._count and now - self._since >= self.PIECE_S:
            self._write(now)

    def _write(self, now: float) -> None:
        self._timeline.add(self._name, self._since, now, busy=True)
        self.seconds += now - self._since
        self._since = now


def merge(folder: Path) -> Path:
    """Writes `timeline.json`, which chrome://tracing and Perfetto open; returns it."""
    events: list[dict[str, object]] = []
    for number, path in enumerate(sorted((folder / "trace").glob("*.jsonl"))):
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": path.stem}})
        for event in _events(path):
            duration = (event["end"] - event["start"]) * 1e6
            events.append(
                {"ph": "X", "pid": number, "tid": 0, "name": event["name"], "ts": event["start"] * 1e6, "dur": duration}
            )
    out = folder / "timeline.json"
    out.write_text(json.dumps({"traceEvents": events}))
    return out


def busy(folder: Path, role: str) -> list[Interval]:
    """Intervals in which at least one process of a role was busy, disjoint and in order."""
    found = [
        (event["start"], event["end"])
        for path in (folder / "trace").glob(f"{role}*.jsonl")
        for event in _events(path)
        if event["busy"]
    ]
    return union(found)


def named(folder: Path, process: str, name: str) -> list[Interval]:
    """The events of one name of a process, in order."""
    path = folder / "trace" / f"{process}.jsonl"
    return [(event["start"], event["end"]) for event in _events(path) if event["name"] == name] if path.exists() else []


def union(intervals: Iterable[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def clip(intervals: list[Interval], start: float, end: float) -> list[Interval]:
    return [(max(a, start), min(b, end)) for a, b in intervals if b > start and a < end]


def total(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(left: list[Interval], right: list[Interval]) -> float:
    """Seconds in which both are busy; each list is disjoint."""
    return total(left) + total(right) - total(union([*left, *right]))


def overlap_fraction(left: list[Interval], right: list[Interval], start: float, end: float) -> float:
    """Time both are busy over the busy time of the less busy one, within [start, end]; 0 if one is never busy."""
    left, right = clip(left, start, end), clip(right, start, end)
    least = min(total(left), total(right))
    return overlap(left, right) / least if least > 0 else 0.0


def _events(path: Path) -> Iterator[dict]:
    """A process that is killed may leave a line unfinished, to which its successor's first line is glued."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
