"""The buffer process of a run: `python -m async_rl.buffer_process --run DIR`. Imports no torch."""

from __future__ import annotations

import msgspec

from async_rl import process
from async_rl.config import Config
from buffers.records import Settings
from buffers.server import serve


def settings(config: Config) -> Settings:
    """The buffer's part of a run's configuration."""
    buffer = config.buffer
    return Settings(
        batch=buffer.batch_size,
        group=buffer.group_size,
        max_staleness=config.staleness.max_staleness,
        max_tokens=config.rollout.max_tokens,
        slack=buffer.slack,
        on_stale=config.staleness.on_stale,
        group_policy=buffer.groups.policy,
        deadline_versions=buffer.groups.deadline_versions,
        min_group=buffer.groups.min_group,
        on_failed=buffer.groups.on_failed,
        dynamic_sampling=buffer.groups.dynamic_sampling,
        max_consecutive_filtered=buffer.groups.max_consecutive_filtered,
        segments=config.staleness.segments,
        max_attempts=buffer.max_attempts,
        replayable=config.environment.name is None or config.environment.replayable,
        max_consecutive_failed_groups=buffer.max_consecutive_failed_groups,
        sampler=buffer.sampler.name,
        priority_exponent=buffer.sampler.exponent,
        seed=config.seed,
        retain=buffer.durability != "none",
        regenerate=config.deterministic,
    )


def main() -> None:
    run = process.start("buffer")
    buffer = run.config.buffer
    security = msgspec.structs.replace(buffer.security, bind=process.bound(buffer.security.bind, run))
    serve(settings(run.config), msgspec.structs.replace(buffer, security=security), run.folder)


if __name__ == "__main__":
    process.guard(main)
