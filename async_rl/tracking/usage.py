"""What a process has used, moment by moment: processor time and whatever else it counts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EVERY_S = 0.5


class Usage:
    """Appends lines of growing totals to `usage/NAME.jsonl`."""

    def __init__(self, folder: Path, process: str) -> None:
        (folder / "usage").mkdir(exist_ok=True)
        self._file = (folder / "usage" / f"{process}.jsonl").open("a")
        self._next = 0.0

    def note(self, counted: Callable[[], dict[str, float]]) -> None:
        """Called now and then; writes what is `counted` every `EVERY_S`."""
        now = time.time()
        if now >= self._next:
            self._next = now + EVERY_S
            times = os.times()
            cpu = times.user + times.system + times.children_user + times.children_system
            self._file.write(json.dumps({"time": now, "cpu_s": round(cpu, 3), **counted()}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def between(folder: Path, process: str, start: float, end: float) -> dict[str, float]:
    """How much each total of a process grew from `start` to `end` (wall clock) and in the seconds around that for
    which there are lines: `time` says how long that was. Empty if there are not two lines."""
    lines = list(_lines(folder / "usage" / f"{process}.jsonl"))
    if len(lines) < 2:
        return {}
    first = next((line for line in reversed(lines[:-1]) if line["time"] <= start), lines[0])
    last = next((line for line in lines[1:] if line["time"] >= end), lines[-1])
    return {name: last[name] - first[name] for name in first}


def _lines(path: Path) -> Iterator[dict[str, float]]:
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # a process that was killed leaves half a line
            continue
