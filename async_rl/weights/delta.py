"""What changed between two versions of the same tensors, exactly. Pure.

One optimizer step at a small learning rate moves most bfloat16 weights by less than they resolve, so few elements of a
segment change. A delta has, for each block of 65,536 elements, how many changed and then the cheapest of

    positions   2 bytes for each place in the block, then the new elements
    bitmap      8,192 bytes, then the new elements
    whole       the block as it is

which of them follows from the count. Applied to the old bytes it gives the new ones, bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from async_rl.errors import WeightsError

BLOCK = 1 << 16
Words = NDArray[np.uint16] | NDArray[np.uint32]


def words(raw: NDArray[np.uint8], itemsize: int) -> Words:
    """The bytes of a segment as unsigned elements of `itemsize` 2 or 4."""
    return raw.view(np.uint16 if itemsize == 2 else np.uint32)


def encode(old: Words, new: Words) -> bytes:
    """The delta from `old` to `new`, of equal size and type."""
    counts: list[int] = []
    parts: list[bytes] = []
    for start in range(0, new.size, BLOCK):
        block = new[start : start + BLOCK]
        changed = block != old[start : start + BLOCK]
        count = int(np.count_nonzero(changed))
        counts.append(count)
        form = _form(count, block.size, block.itemsize)
        if form == "positions":
            parts.append(np.flatnonzero(changed).astype(np.uint16).tobytes())
        elif form == "bitmap":
            parts.append(np.packbits(changed).tobytes())
        if count:
            parts.append((block if form == "whole" else block[changed]).tobytes())
    return b"".join([np.asarray(counts, np.uint32).tobytes(), *parts])


def apply(delta: bytes | memoryview, target: Words) -> None:
    """Makes the old elements in `target` the new ones. Raises `WeightsError` if the delta is not for such a target."""
    blocks = -(-target.size // BLOCK)
    counts = np.frombuffer(delta, np.uint32, blocks) if len(delta) >= 4 * blocks else None
    if counts is None:
        raise WeightsError(f"a delta of {len(delta)} bytes cannot be for {target.size} elements")
    at = 4 * blocks
    for number, count in enumerate(counts.tolist()):
        block = target[number * BLOCK : (number + 1) * BLOCK]
        if count > block.size:
            raise WeightsError(f"block {number} of a delta has {count} changes in {block.size} elements")
        form = _form(count, block.size, block.itemsize)
        if form == "positions":
            where = np.frombuffer(delta, np.uint16, count, at)
            at += where.nbytes
        elif form == "bitmap":
            bits = np.frombuffer(delta, np.uint8, -(-block.size // 8), at)
            where = np.unpackbits(bits, count=block.size).view(np.bool_)
            at += bits.nbytes
        else:
            where = slice(None)
        if count:
            fresh = np.frombuffer(delta, target.dtype, block.size if form == "whole" else count, at)
            block[where] = fresh
            at += fresh.nbytes
    if at != len(delta):
        raise WeightsError(f"a delta has {len(delta)} bytes, and its counts tell of {at}")


def _form(count: int, size: int, itemsize: int) -> str:
    costs = {
        "positions": count * (2 + itemsize),
        "bitmap": -(-size // 8) + count * itemsize,
        "whole": size * itemsize,
    }
    return min(costs, key=costs.__getitem__) if count else "positions"
