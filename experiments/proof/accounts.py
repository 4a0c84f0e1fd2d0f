"""What a run's journal says of the samples that were trained."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from buffers import export


def each_once(run: Path, trained: int) -> bool:
    """Whether so many samples were trained, no two of them the same member of the same prompt's group."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.parquet"
        export.export(run / "journal", file, {"trained"})
        rows = pq.read_table(file, columns=["epoch", "index", "member"]).to_pylist()
    return len({tuple(row.values()) for row in rows}) == len(rows) == trained
