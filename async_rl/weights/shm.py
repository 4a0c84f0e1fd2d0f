"""Weights in POSIX shared memory: segments in turn, each with its version in front.

    [version: int64, 64-byte header][tensors, each aligned to 64 bytes]

A reader holds a shared lock on the segment while an engine loads from it; the writer takes an exclusive one. With two
segments they meet only when a reader is two versions behind. Locks end with the process that holds them, so nobody
waits for the dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Export, Manifest, TensorEntry, checksum
from async_rl.weights.transport import SHM

HEADER = 64
WRITING = -1
PIECE = 1 << 18
"""Elements that are copied and added up at a time."""


class Overtaken(WeightsError):
    """A newer version has been written, or is being written, to the segment: read the newest manifest."""


class Writer:
    """Segments named after the run. `close` removes them; readers that have them mapped keep their view."""

    def __init__(self, run: str, segments: int = 2) -> None:
        self._paths = [SHM / f"async-rl-{run}-{turn}" for turn in range(segments)]
        """The one written last comes last."""
        self._maps: dict[Path, mmap.mmap] = {}

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Manifest:
        """Copies the tensors, cast to `dtype`, into the oldest segment that nobody reads, never the newest; waits if
        they are all being read."""
        named = list(tensors)
        entries: list[TensorEntry] = []
        end = HEADER
        for name, tensor in named:
            nbytes = tensor.numel() * dtype.itemsize
            entries.append(TensorEntry(name, str(dtype).removeprefix("torch."), list(tensor.shape), end, nbytes, 0))
            end = (end + nbytes + 63) // 64 * 64
        with self._oldest() as file:
            header, memory = self._memory(file, end)
            header[0] = WRITING
            done: list[TensorEntry] = []
            for entry, (_, tensor) in zip(entries, named, strict=True):
                raw = memory[entry.offset : entry.offset + entry.nbytes]
                done.append(msgspec.structs.replace(entry, checksum=_copied(tensor, raw, dtype)))
            exports = self._exported()
            header[0] = version
        return Manifest(version, str(self._paths[-1]), done, tied=[], exports=exports)

    def _memory(self, file: BufferedRandom, size: int) -> tuple[NDArray[np.int64], Tensor]:
        """The version's place, and a segment's bytes, the first `HEADER` of which are never written to."""
        memory = self._map(file, size)
        return np.frombuffer(memory, np.int64, 1), torch.frombuffer(memory, dtype=torch.uint8, count=size)

    def _map(self, file: BufferedRandom, size: int) -> mmap.mmap:
        """Mapped once: the pages of a new mapping would have to be found one by one again."""
        path = self._paths[-1]
        if os.fstat(file.fileno()).st_size < size:
            file.truncate(size)
        if path not in self._maps or len(self._maps[path]) < size:
            self._maps[path] = mmap.mmap(file.fileno(), size)
        return self._maps[path]

    def _exported(self) -> dict[str, Export]:
        """What others need to read a segment that is not in its file."""
        return {}

    @contextmanager
    def _oldest(self) -> Iterator[BufferedRandom]:
        """The segment to write to, locked for the length of the block."""
        free = next((path for path in self._paths[:-1] if not _read(path)), self._paths[0])
        self._paths.remove(free)
        self._paths.append(free)
        with free.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


def _copied(tensor: Tensor, raw: Tensor, dtype: torch.dtype) -> int:
    """Copies a tensor, cast to `dtype`, to `raw`; its checksum, on a CPU taken piece by piece while they are in the
    cache."""
    target = raw.view(dtype)
    if raw.device.type != "cpu":
        target.view(tensor.shape).copy_(tensor)
        return checksums([raw])[0]
    data = raw.numpy()
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        target.view(tensor.shape).copy_(tensor)
        return checksum(data)
    source, total = tensor.reshape(-1), 0
    for start in range(0, source.numel(), PIECE):
        target[start : start + PIECE].copy_(source[start : start + PIECE])
        total += checksum(data[start * dtype.itemsize : (start + PIECE) * dtype.itemsize])
    return total % (1 << 64)


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """As `manifest.checksum` has them, taken where the tensors are; they are contiguous."""
    if not tensors:
        return []
    totals: list[Tensor] = []
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
        rest = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        rest[: raw.numel() - whole] = raw[whole:]
        totals.append(words.view(torch.int64).sum() + rest.view(torch.int64)[0])  # wraps around
    return [total % (1 << 64) for total in torch.stack(totals).tolist()]


@contextmanager
def hold(manifest: Manifest) -> Iterator[None]:
    """Keeps the writer off the manifest's segment for the length of the block; raises `Overtaken` if too late."""
    try:
        file = Path(manifest.segment).open("rb")  # noqa: SIM115 - closed below
    except FileNotFoundError as error:
        raise WeightsError(f"the segment {manifest.segment} is gone: the learner has ended") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Overtaken(f"the segment of version {manifest.version} is being written") from error
        if np.frombuffer(file.read(8), np.int64)[0] != manifest.version:
            raise Overtaken(f"the segment of version {manifest.version} holds another one")
        yield


def _read(path: Path) -> bool:
    """Whether somebody reads the segment."""
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True


def read(manifest: Manifest) -> list[tuple[str, Tensor]]:
    """The published tensors, mapped; the caller's process, or its parent, `hold`s the segment and `verify`-ed it."""
    memory = _mapped(manifest)
    tensors: list[tuple[str, Tensor]] = []
    for entry in manifest.tensors:
        raw = np.frombuffer(memory, np.uint8, entry.nbytes, entry.offset)
        tensors.append((entry.name, torch.from_numpy(raw).view(getattr(torch, entry.dtype)).view(entry.shape)))
    return tensors


def verify(manifest: Manifest) -> None:
    """Raises `WeightsError` if the bytes of a segment are not those that were published. Apart from `read`, since an
    engine need not stand still for it. What is in a device's memory is proven where it is loaded."""
    if manifest.exports:
        return
    memory = _mapped(manifest)
    for entry in manifest.tensors:
        if checksum(np.frombuffer(memory, np.uint8, entry.nbytes, entry.offset)) != entry.checksum:
            raise WeightsError(f"{entry.name} of version {manifest.version}: the checksum differs")


# --- segments as bytes, for their way to other hosts -------------------------------------------------------------


def size(manifest: Manifest) -> int:
    """Bytes of a segment after its header."""
    last = manifest.tensors[-1]
    return (last.offset + last.nbytes + 63) // 64 * 64 - HEADER


def itemsize(manifest: Manifest) -> int:
    """Bytes of an element; a publication has one type."""
    return getattr(torch, manifest.tensors[0].dtype).itemsize


def alike(left: Manifest, right: Manifest) -> bool:
    """Whether the same tensors lie in the same places."""

    def layout(manifest: Manifest) -> list[tuple[str, str, int, int]]:
        return [(entry.name, entry.dtype, entry.offset, entry.nbytes) for entry in manifest.tensors]

    return layout(left) == layout(right)


def data(manifest: Manifest) -> NDArray[np.uint8]:
    """What comes after the header, mapped; the caller `hold`s the segment."""
    return np.frombuffer(_mapped(manifest), np.uint8, size(manifest), HEADER)


@contextmanager
def writing(manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
    """The bytes after the header of a segment that is made, or changed, by someone else than `Writer`. It holds no
    version until the block has ended well."""
    with Path(manifest.segment).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        whole = HEADER + size(manifest)
        if os.fstat(file.fileno()).st_size < whole:
            file.truncate(whole)
        memory = mmap.mmap(file.fileno(), whole)
        header = np.frombuffer(memory, np.int64, 1)
        header[0] = WRITING
        try:
            yield np.frombuffer(memory, np.uint8, whole - HEADER, HEADER)
            header[0] = manifest.version
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a mapping that somebody still has would keep it


def _mapped(manifest: Manifest) -> mmap.mmap:
    with Path(manifest.segment).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
