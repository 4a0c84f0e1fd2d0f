"""What a model path stands for: a folder, a hub name, or a model that was fetched into the cache. Light to import."""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.errors import ConfigError

FETCHABLE = ("smollm2-135m",)


def cache() -> Path:
    """Where fetched models live: $ASYNC_RL_CACHE or ~/.cache/async-rl."""
    return Path(os.environ.get("ASYNC_RL_CACHE") or Path.home() / ".cache" / "async-rl")


def resolve(path: str) -> str:
    """A folder or hub name that transformers and vLLM can load. Touches no network and imports nothing heavy."""
    if path in FETCHABLE:
        folder = cache() / path
        if not (folder / "config.json").is_file():
            raise ConfigError("model.path", path, "not in the cache yet", f"Run `async-rl model fetch {path}` once")
        return str(folder)
    local = Path(path)
    if local.exists():
        if not (local / "config.json").is_file():
            raise ConfigError("model.path", path, "not a model folder: it has no config.json", "Give the folder itself")
        return str(local.resolve())
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            "model.path",
            path,
            "there is no such folder, and it is not OWNER/NAME of a hub",
            f"Fetchable by name: {', '.join(FETCHABLE)}",
        )
    return path
