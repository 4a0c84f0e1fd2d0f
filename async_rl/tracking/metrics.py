"""One JSON line per learner step, written by rank 0, read by everything else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

FILE = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
"""The same for evaluations on held-out prompts, written by the supervisor."""
Record = dict[str, float | int | list[int]]


class MetricsWriter:
    """Appends; a line is complete or absent. Non-finite numbers are written as null."""

    def __init__(self, folder: Path, name: str = FILE) -> None:
        self._file: TextIO = (folder / name).open("a")

    def write(self, record: Record) -> None:
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsReader:
    """Follows the file of a run in progress."""

    def __init__(self, folder: Path, name: str = FILE) -> None:
        self._path = folder / name
        self._at = 0

    def new(self) -> Iterator[Record]:
        """Complete lines since the last call."""
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._at)
            while (line := file.readline()).endswith("\n"):
                self._at = file.tell()
                yield json.loads(line)


def read(folder: Path, name: str = FILE) -> list[Record]:
    """All steps, or evaluations, of a run."""
    return list(MetricsReader(folder, name).new())


def truncate(folder: Path, step: int) -> None:
    """Keeps the steps up to `step`: those after the checkpoint that a run resumes from are made again."""
    for path in (folder / FILE, folder / EVALUATIONS):
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            path.write_text("".join(kept))
