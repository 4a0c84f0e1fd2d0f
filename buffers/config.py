"""Configuration of the replay buffer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class BufferConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What a batch holds and how much may be in flight."""

    batch_size: Annotated[int, Meta(ge=1)] = 128
    """B: trajectories per learner step. A multiple of `group_size`."""
    group_size: Annotated[int, Meta(ge=1)] = 8
    """n: trajectories sampled per prompt."""
    slack: Annotated[int, Meta(ge=0)] = 0
    """Trajectories that may be in flight beyond (max_staleness + 1) * batch_size."""
    max_consecutive_failed_groups: Annotated[int, Meta(ge=1)] = 8
    """The run ends after this many groups in a row of which every member failed."""
    max_frame_bytes: Annotated[int, Meta(ge=1 << 16)] = 1 << 28
    """Largest message frame accepted, in bytes."""
