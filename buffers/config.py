"""Configuration of the replay buffer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

GroupPolicy = Literal["whole", "deadline_versions", "split"]
OnFailed = Literal["replace", "shrink", "fail_group"]
SamplerName = Literal["oldest", "freshest", "uniform", "prioritized"]
Durability = Literal["none", "batch", "strict"]


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When the trajectories of one prompt are offered, and what a failed one does to the others."""

    policy: GroupPolicy = "whole"
    """`whole`: when all have finished. `deadline_versions`: those that have finished some versions after the group's
    issue. `split`: each as it finishes, once `min_group` rewards are known."""
    deadline_versions: Annotated[int, Meta(ge=1)] = 2
    """Learner steps after a group's issue at which `deadline_versions` cancels its unfinished members."""
    min_group: Annotated[int, Meta(ge=1)] = 2
    """A group with fewer finished members than this is not trained on."""
    on_failed: OnFailed = "replace"
    """A failed member is generated anew (`replace`, `buffer.max_attempts` tickets in all), left out (`shrink`), or ends
    its group (`fail_group`)."""
    dynamic_sampling: bool = False
    """A group whose rewards are all equal, from which a comparison learns nothing, is cancelled as it ends, and another
    prompt takes its place (DAPO)."""
    max_consecutive_filtered: Annotated[int, Meta(ge=1)] = 256
    """The run ends after this many such groups in a row."""


class SamplerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Which of the groups on offer a batch holds."""

    name: SamplerName = "oldest"
    """`oldest` or `freshest` by issue, `uniform` at random, `prioritized` by the variance of a group's rewards."""
    exponent: Annotated[float, Meta(ge=0)] = 1.0
    """`prioritized` draws in proportion to variance ** exponent and corrects for it with importance weights."""


class SecurityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who may connect to the buffer."""

    bind: str = "tcp://127.0.0.1:*"
    """Address of the buffer's socket. One that other hosts can reach needs `keys`."""
    keys: str | None = None
    """Folder made by `async-rl keys`: encrypts every connection (CURVE) and admits only holders of its client key."""


class BufferConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What a batch holds, how much may be in flight, what survives a crash."""

    batch_size: Annotated[int, Meta(ge=1)] = 128
    """B: trajectories per learner step. A multiple of `group_size`."""
    group_size: Annotated[int, Meta(ge=1)] = 8
    """n: trajectories sampled per prompt."""
    slack: Annotated[int, Meta(ge=0)] = 0
    """Trajectories that may be in flight beyond (max_staleness + 1) * batch_size."""
    durability: Durability = "batch"
    """`batch`: everything acknowledged is on disk, synced in groups. `strict`: synced message by message. `none`: no
    journal; what the buffer holds is lost with its process."""
    segment_mib: Annotated[int, Meta(ge=1)] = 1024
    """Size of a journal file, beyond twice what is live, at which the next one begins. MiB."""
    groups: GroupConfig = GroupConfig()
    """Groups and their failed members."""
    sampler: SamplerConfig = SamplerConfig()
    """Choice of a batch."""
    security: SecurityConfig = SecurityConfig()
    """Connections."""
    max_attempts: Annotated[int, Meta(ge=1)] = 3
    """Workers that may die over a ticket, and tickets issued for one place in a group, before it counts as failed."""
    max_consecutive_failed_groups: Annotated[int, Meta(ge=1)] = 8
    """The run ends after this many groups in a row of which none could be trained on."""
    worker_timeout_s: Annotated[float, Meta(ge=10)] = 60.0
    """A worker that says nothing for so long (its heartbeat is five seconds) counts as dead; its trajectories go to
    others."""
    pace_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Under `staleness.on_stale: pace`, longest wait for a late group before it is dropped and counted."""
    max_frame_bytes: Annotated[int, Meta(ge=1 << 16)] = 1 << 26
    """Largest message frame accepted, in bytes."""
