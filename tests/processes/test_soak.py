"""Bounded: memory, disk and admission, with a learner that stands still. `make proof-bounded` takes ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.soak import missed, soak

pytestmark = pytest.mark.e2e


def test_a_learner_that_stops_stops_ingest_and_nothing_grows(tmp_path: Path) -> None:
    assert missed(soak(tmp_path, warm_s=20.0, stop_s=15.0, after_s=12.0)) == []
