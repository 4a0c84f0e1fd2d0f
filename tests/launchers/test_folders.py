"""Run folders, their locks, and the shared memory of killed runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.config import parse
from async_rl.errors import ConfigError
from launchers import folders


def test_a_name_that_exists_gets_a_number(tmp_path: Path) -> None:
    config = parse({"data": {"path": "x"}, "folder": str(tmp_path), "name": "a"})
    assert [folders.new(config).name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_the_runs_of_a_name_in_their_order(tmp_path: Path) -> None:
    config = parse({"data": {"path": "x"}, "folder": str(tmp_path), "name": "a"})
    assert folders.of_name(config) == []
    for name in ("a", "a-2", "a-10", "a-b", "ab", "a-3"):
        (tmp_path / name).mkdir()
        if name != "a-3":
            (tmp_path / name / "config.yaml").write_text("")
    assert [path.name for path in folders.of_name(config)] == ["a", "a-2", "a-10"]


def test_a_run_has_one_supervisor_and_its_memory_goes_with_it(tmp_path: Path) -> None:
    memory = folders.SHM / f"async-rl-{folders.segment_name(tmp_path)}-0"
    with folders.alone(tmp_path):
        memory.write_bytes(b"x")
        folders.sweep()  # another run starts: this one lives
        assert memory.exists()
        with pytest.raises(ConfigError, match="going on"), folders.alone(tmp_path):
            pass
    assert not memory.exists()


def test_the_memory_of_a_killed_run_is_swept(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal; from launchers import folders\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "with folders.alone(folder):\n"
        "    (folders.SHM / f'async-rl-{folders.segment_name(folder)}-1').write_bytes(b'x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    memory = folders.SHM / f"async-rl-{folders.segment_name(tmp_path)}-1"
    assert memory.exists()
    folders.sweep()
    assert not memory.exists()
