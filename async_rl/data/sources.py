"""Rows from files, data set folders and reasoning-gym tasks. Light to import: readers are loaded when used."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from async_rl.config import PRESETS, Config, DataConfig
from async_rl.errors import ConfigError, DataError

Row = dict[str, Any]


def resolve(path: str, beside: Path | None = None) -> Path:
    """A data path as given, else beside the configuration file, else among the shipped presets."""
    for folder in (Path(), *([beside] if beside else []), PRESETS):
        if (folder / path).exists():
            return (folder / path).resolve()
    raise ConfigError("data.path", path, "there is no such file or folder", "Give a path that exists")


def rows(config: DataConfig) -> list[Row]:
    """All rows of the configured source, in its own order."""
    if config.task is not None:
        return _reasoning_gym(config)
    assert config.path is not None
    path = Path(config.path)
    found = _read(path)
    if not found:
        raise DataError(f"data.path = {str(path)!r}: there is no row in it")
    missing = next((i for i, row in enumerate(found) if config.prompt_column not in row), None)
    if missing is not None:
        raise DataError(
            f"data.prompt_column = {config.prompt_column!r}: row {missing} of {path.name} has no such column, but "
            f"{sorted(found[missing])}"
        )
    return found


def split(found: list[Row], config: DataConfig) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): `config.holdout` rows chosen by the seed, both in source order."""
    if config.holdout >= len(found):
        raise ConfigError(
            "data.holdout", config.holdout, f"the data set has {len(found)} rows, so none would be left",
            f"Use at most {len(found) - 1}",
        )  # fmt: skip
    held = set(random.Random(config.seed).sample(range(len(found)), config.holdout))
    return [row for i, row in enumerate(found) if i not in held], [found[i] for i in sorted(held)]


def fingerprint(found: list[Row]) -> str:
    """SHA-256 over the rows: a resumed run must see the same data."""
    digest = hashlib.sha256()
    for row in found:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def check_size(config: Config, count: int) -> None:
    """Refuses a data set smaller than one batch, unless wrapping was asked for."""
    needed = config.buffer.batch_size // config.buffer.group_size
    if count < needed and not config.data.wrap:
        source = config.data.path or f"task {config.data.task.name}" if config.data.task else config.data.path
        raise ConfigError(
            "data", source, f"{count} prompts to train on, but one batch takes {needed} "
            f"(buffer.batch_size {config.buffer.batch_size} / buffer.group_size {config.buffer.group_size})",
            f"Use more prompts, buffer.batch_size <= {count * config.buffer.group_size}, or data.wrap: true",
        )  # fmt: skip


def _read(path: Path) -> list[Row]:
    try:
        if path.is_dir():
            import datasets

            loaded = datasets.load_from_disk(str(path))
            if isinstance(loaded, datasets.DatasetDict):
                raise DataError(f"data.path = {str(path)!r} holds the splits {sorted(loaded)}; give the folder of one")
            return list(loaded)
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold U+2028
            return [_parse(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
        if path.suffix == ".json":
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
                raise DataError(f"data.path = {str(path)!r}: a .json file holds a list of objects")
            return found
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.path = {str(path)!r} cannot be read: {error}") from error
    raise DataError(f"data.path = {str(path)!r}: not .jsonl, .json, .parquet or a data set folder")


def _parse(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path.name} line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path.name} line {number} is {type(row).__name__}, not an object")
    return row


def _reasoning_gym(config: DataConfig) -> list[Row]:
    import reasoning_gym

    task = config.task
    assert task is not None
    try:
        dataset = reasoning_gym.create_dataset(task.name, size=task.size, seed=config.seed, **task.params)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            "data.task", task.name, str(error), "See the reasoning-gym gallery for names and parameters"
        ) from error
    return [{config.prompt_column: entry["question"], **entry} for entry in dataset]
