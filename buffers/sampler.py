"""Which ready groups a batch holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Offerable(Protocol):
    """What a sampler may look at: the order of issue, and how many members may be trained on."""

    @property
    def serial(self) -> int: ...


def oldest(groups: Iterable[tuple[Offerable, int]], batch: int) -> list[int]:
    """Serials of the groups issued first, until their trainable members reach `batch`; all of them if fewer.

    `groups` pairs each ready group with its count of trainable members, which is at least 1.
    """
    chosen: list[int] = []
    total = 0
    for group, members in sorted(groups, key=lambda pair: pair[0].serial):
        if total >= batch:
            break
        chosen.append(group.serial)
        total += members
    return chosen
