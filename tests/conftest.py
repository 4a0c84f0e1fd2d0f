"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model of `tests/tiny.py`."""
    from async_rl.benchmarks import tiny

    return tiny.make(tmp_path_factory.mktemp("model") / "tiny")
