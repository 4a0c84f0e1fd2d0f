"""Seeds by hash, for draws that are the same whoever makes them, and when (`deterministic`)."""

from __future__ import annotations

import struct
from hashlib import blake2b

import torch


def mix(*numbers: int) -> int:
    """A number of 63 bits that depends on all of these, and on their order."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


def generator(seed: int, position: int) -> torch.Generator:
    """For the one draw of the token at `position` of a sequence."""
    return torch.Generator().manual_seed(mix(seed, position))
