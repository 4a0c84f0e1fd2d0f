"""Prints what a dump holds: a line a trajectory, or one trajectory chunk by chunk."""

from __future__ import annotations

from pathlib import Path

from buffers.dump import Record, read
from buffers.errors import DumpError
from staleness.versions import show as show_version


def show(path: Path, ticket: int | None = None) -> None:
    """The dump's trajectories; with `ticket` that one, else an overview and the one with most versions in full."""
    if not path.is_file():
        raise DumpError(f"{path} does not exist: the run has not ended, or ended before the buffer was written")
    records = list(read(path))
    if ticket is not None:
        chosen = [record for record in records if record.ticket == ticket]
        if not chosen:
            raise DumpError(f"ticket {ticket} is not in {path}; it holds {len(records)} others")
        _detail(chosen[0])
        return
    print(f"{len(records)} trajectories in flight at the end of the run")
    print(
        f"{'ticket':>8} {'prompt':>10} {'member':>6} {'state':>8} {'tokens':>6} {'chunks':>6} {'reward':>7}  versions"
    )
    for record in records:
        versions = ",".join(show_version(version) for version in sorted({chunk.version for chunk in record.chunks}))
        reward = "-" if record.reward is None else f"{record.reward:.3f}"
        key = f"{record.key[0]}/{record.key[1]}"
        print(
            f"{record.ticket:>8} {key:>10} {record.member:>6} {record.state:>8} {record.tokens.size:>6} "
            f"{len(record.chunks):>6} {reward:>7}  {versions}"
        )
    if records:
        print()
        _detail(max(records, key=lambda record: (len({chunk.version for chunk in record.chunks}), record.tokens.size)))


def _detail(record: Record) -> None:
    print(f"ticket {record.ticket}, prompt {record.key[0]}/{record.key[1]}, member {record.member}, {record.state}")
    print(f"  prompt of {record.prompt.size} tokens")
    for chunk in record.chunks:
        span = slice(chunk.offset, chunk.offset + chunk.length)
        pairs = zip(record.tokens[span].tolist(), record.logprobs[span].tolist(), strict=True)
        print(f"  chunk at {chunk.offset}, {chunk.length} tokens, version {show_version(chunk.version)}")
        print("    " + " ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs))
