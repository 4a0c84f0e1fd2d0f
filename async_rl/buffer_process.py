"""The buffer process of a run: `python -m async_rl.buffer_process --run DIR`. Imports no torch."""

from __future__ import annotations

from async_rl import process
from async_rl.config import Config
from async_rl.learner import state
from buffers.core import Core
from buffers.records import Settings
from buffers.server import serve
from staleness.versions import Lineage


def settings(config: Config, lineage: Lineage) -> Settings:
    """The buffer's part of a run's configuration."""
    return Settings(
        batch=config.buffer.batch_size,
        group=config.buffer.group_size,
        max_staleness=config.staleness.max_staleness,
        max_tokens=config.rollout.max_tokens,
        slack=config.buffer.slack,
        on_stale=config.staleness.on_stale,
        max_consecutive_failed_groups=config.buffer.max_consecutive_failed_groups,
        lineage=lineage,
    )


def main() -> None:
    run = process.start("buffer")
    core = Core(settings(run.config, state.lineage(run.folder)))
    serve(core, run.folder / "buffer.endpoint", run.config.buffer.max_frame_bytes)


if __name__ == "__main__":
    process.guard(main)
