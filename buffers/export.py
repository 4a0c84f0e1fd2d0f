"""The trajectories of a journal as a Parquet file, one row each, for whoever reads them without this package.

    export(run / "journal", run / "trajectories.parquet", {"trained"})

epoch, index      int64           the prompt's place in the data
group             int64           serial number of its group
member, attempt   int32
ticket            int64
state             string
reward            double          null if there is none
finish_reason     string
prompt            list<int32>     tokens
tokens            list<int32>     the response; the next two have one entry for each
logprobs          list<float>     nothing meaningful where the version is -1
versions          list<int64>     `incarnation << 32 | step`; -1 for text nobody sampled
trained_step      int64           step of the batch that it was trained in; null if it was not
"""

from __future__ import annotations

# pyarrow has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffers.inspect import Record, files, opened, undone
from buffers.pool import Pool
from buffers.records import State, Trajectory
from buffers.segments import recover, replay

GROUP_TOKENS = 1 << 20
GROUP_ROWS = 1 << 14
"""Most tokens (but for one trajectory) and rows of a Parquet row group: what is held in memory at once."""


def export(folder: Path, target: Path, states: set[State] | None = None) -> Counter[str]:
    """Writes the trajectories that the journal in `folder` has whole to `target`; returns how many of each state.

    Those that have ended in any of its files come in the order of their end, then those that are running, ready or
    leased at the end of the newest file, as far as they have come. With `states` only those in one of them.

    Each comes once: a ticket ends once, and what a learner that has gone back to a checkpoint trains on again under
    another ticket comes under that one only. `JournalError` if there is no journal or a file of it is damaged.
    """
    found = files(folder)
    newest, _ = recover(found)
    parked, renamed = undone(found, newest)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    table = _Table(partial)

    def add(trajectory: Trajectory, pool: Pool) -> None:
        state: State = "parked" if trajectory.ticket in parked else trajectory.state
        if trajectory.ticket in renamed or (states is not None and state not in states):
            return
        record = Record.of(trajectory, pool)
        table.add(record if state == record.state else replace(record, state=state, step=None))

    try:
        for core, entries in opened(found):

            def ended(trajectory: Trajectory, pool: Pool = core.store.pool) -> None:
                add(trajectory, pool)

            core.store.ended = ended
            for entry in entries:
                replay(core, entry)
        for trajectory in newest.store.trajectories.values():
            add(trajectory, newest.store.pool)
        table.close()
        partial.rename(target)
    except BaseException:
        table.abandon()
        partial.unlink(missing_ok=True)
        raise
    return table.states


def _schema(arrow: Any) -> Any:
    return arrow.schema(
        {
            "epoch": arrow.int64(),
            "index": arrow.int64(),
            "group": arrow.int64(),
            "member": arrow.int32(),
            "ticket": arrow.int64(),
            "attempt": arrow.int32(),
            "state": arrow.string(),
            "reward": arrow.float64(),
            "finish_reason": arrow.string(),
            "prompt": arrow.list_(arrow.int32()),
            "tokens": arrow.list_(arrow.int32()),
            "logprobs": arrow.list_(arrow.float32()),
            "versions": arrow.list_(arrow.int64()),
            "trained_step": arrow.int64(),
        }
    )


class _Table:
    """A Parquet file in the making; holds one row group at most."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.states: Counter[str] = Counter()
        self._arrow: Any = pyarrow
        self._schema = _schema(self._arrow)
        self._writer: Any = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[Record] = []
        self._tokens = 0

    def add(self, record: Record) -> None:
        size = record.tokens.size + len(record.prompt.tokens)
        if self._rows and (self._tokens + size > GROUP_TOKENS or len(self._rows) >= GROUP_ROWS):
            self._write()
        self._rows.append(record)
        self._tokens += size
        self.states[record.state] += 1

    def _write(self) -> None:
        rows = self._rows
        columns: dict[str, Any] = {
            "epoch": [row.prompt.key[0] for row in rows],
            "index": [row.prompt.key[1] for row in rows],
            "group": [row.group for row in rows],
            "member": [row.member for row in rows],
            "ticket": [row.ticket for row in rows],
            "attempt": [row.attempt for row in rows],
            "state": [row.state for row in rows],
            "reward": [row.reward for row in rows],
            "finish_reason": [row.finish_reason for row in rows],
            "prompt": self._lists([np.asarray(row.prompt.tokens, np.int32) for row in rows]),
            "tokens": self._lists([row.tokens for row in rows]),
            "logprobs": self._lists([row.logprobs for row in rows]),
            "versions": self._lists([row.versions for row in rows]),
            "trained_step": [row.step for row in rows],
        }
        self._writer.write_table(self._arrow.table(columns, schema=self._schema), row_group_size=len(rows))
        self._rows, self._tokens = [], 0

    def _lists(self, arrays: list[NDArray[Any]]) -> Any:
        """One list a row, without a Python object for each number."""
        ends = np.cumsum([0, *(array.size for array in arrays)], dtype=np.int32)
        return self._arrow.ListArray.from_arrays(ends, np.concatenate(arrays))

    def close(self) -> None:
        if self._rows:
            self._write()
        self._writer.close()

    def abandon(self) -> None:
        """Closes the file whatever state it is in."""
        with suppress(OSError):
            self._writer.close()
