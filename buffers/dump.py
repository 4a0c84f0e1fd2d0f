"""A file with everything the buffer holds: one `.npz` of columns, readable without this package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffers.core import Core
from buffers.errors import DumpError
from buffers.records import Chunk

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One trajectory of a dump. The arrays have one entry per sampled token."""

    ticket: int
    key: tuple[int, int]
    member: int
    state: str
    reward: float | None
    chunks: list[Chunk]
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]


def write(core: Core, path: Path) -> int:
    """Writes the live trajectories of `core` to `path` in one step; returns how many."""
    heads: list[dict[str, object]] = []
    tokens: list[NDArray[np.int32]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int64]] = []
    for trajectory in core.trajectories.values():
        row = core.pool.row(trajectory.ticket)
        length = int(core.pool.length[row])
        tokens.append(core.pool.tokens[row, :length])
        logprobs.append(core.pool.logprobs[row, :length])
        versions.append(core.pool.versions[row, :length])
        prompt = trajectory.group.prompt
        heads.append(
            {
                "ticket": trajectory.ticket,
                "key": prompt.key,
                "member": trajectory.member,
                "state": trajectory.state,
                "reward": trajectory.reward,
                "chunks": trajectory.chunks,
                "prompt": prompt.tokens,
                "length": length,
            }
        )
    partial = path.with_suffix(".partial.npz")
    np.savez(
        partial,
        format=FORMAT,
        heads=json.dumps(heads),
        tokens=np.concatenate([np.empty(0, np.int32), *tokens]),
        logprobs=np.concatenate([np.empty(0, np.float32), *logprobs]),
        versions=np.concatenate([np.empty(0, np.int64), *versions]),
    )
    partial.rename(path)
    return len(heads)


def read(path: Path) -> Iterator[Record]:
    """The trajectories of a dump, in order of their tickets' issue."""
    with np.load(path) as file:
        if int(file["format"]) != FORMAT:
            raise DumpError(f"{path} has dump format {int(file['format'])}; this version reads {FORMAT}")
        tokens, logprobs, versions = file["tokens"], file["logprobs"], file["versions"]
        start = 0
        for head in json.loads(str(file["heads"])):
            span = slice(start, start + head["length"])
            start = span.stop
            yield Record(
                ticket=head["ticket"],
                key=tuple(head["key"]),
                member=head["member"],
                state=head["state"],
                reward=head["reward"],
                chunks=[Chunk(*chunk) for chunk in head["chunks"]],
                prompt=np.asarray(head["prompt"], np.int32),
                tokens=tokens[span],
                logprobs=logprobs[span],
                versions=versions[span],
            )
