"""What was published: enough to find the bytes, and to prove that they arrived."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from async_rl.errors import WeightsError

MANIFEST = "weights.json"
"""File in the run's folder that describes the newest publication."""
REHEARSAL = "rehearsal.json"
"""The same for weights that are published once at the start, to prove that updates reach the engine."""
REHEARSED = -2
"""Version of the rehearsal; nothing is ever sampled under it."""


class TensorEntry(Struct, frozen=True):
    """One tensor: `offset` and `nbytes` in the segment, `dtype` by its torch name, `checksum` as in `checksum`."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    checksum: int


class Probe(Struct, frozen=True):
    """Token ids and the learner's own log-probs of `tokens[1:]` at temperature 1."""

    tokens: list[int]
    logprobs: list[float]


class Export(Struct, frozen=True):
    """A segment in the memory of a GPU, for other processes that use the GPU: what `reduce_tensor` of
    torch.multiprocessing says of it."""

    handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


class Manifest(Struct, frozen=True):
    """One publication. `segment` is the file of the shared memory; `tied` names share another tensor's bytes;
    `exports`, by a GPU's UUID, say where the bytes are if they are not in the file."""

    version: int
    segment: str
    tensors: list[TensorEntry]
    tied: list[str]
    probe: Probe | None = None
    exports: dict[str, Export] = {}

    def write(self, path: Path) -> None:
        """Replaces `path` in one step: a reader sees the old manifest or the new one."""
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(self))
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        return msgspec.json.decode(path.read_bytes(), type=cls)


def checksum(data: NDArray[np.uint8]) -> int:
    """Sum of the bytes as little-endian 64-bit words, modulo 2**64; runs at memory speed."""
    words = data.size // 8 * 8
    total = int(np.add.reduce(data[:words].view(np.uint64), dtype=np.uint64))
    return (total + int.from_bytes(data[words:].tobytes(), "little")) % (1 << 64)


def check_names(published: set[str], expected: set[str]) -> None:
    """Raises `WeightsError` if a tensor is missing or unknown."""
    missing, unknown = expected - published, published - expected
    if missing or unknown:
        raise WeightsError(
            f"the published tensors are not the model's: missing {sorted(missing)[:3]} ({len(missing)}), "
            f"unknown {sorted(unknown)[:3]} ({len(unknown)})"
        )
