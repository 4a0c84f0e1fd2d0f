"""Pools get cores and GPUs of their own."""

from __future__ import annotations

import pytest

from async_rl.config import Config, parse
from async_rl.errors import ConfigError
from launchers import devices
from launchers.devices import Place


def config(workers: int = 1, ranks: int = 1, device: str = "auto", pin: bool = True) -> Config:
    launch = {"device": device, "pin_cores": pin}
    return parse(
        {"data": {"path": "x"}, "rollout": {"workers": workers}, "learner": {"ranks": ranks}, "launch": launch}
    )


@pytest.mark.parametrize(
    ("workers", "ranks", "cores", "expected"),
    [
        (1, 1, [0, 1], ([(0,)], [(1,)])),
        (1, 1, [4, 5, 6, 7], ([(4, 5)], [(6, 7)])),
        (2, 1, [0, 1, 2, 3], ([(0,), (1,)], [(2, 3)])),
        (2, 2, [0, 1], ([(0,), (0,)], [(1,), (1,)])),
        (1, 1, [0], ([()], [()])),
    ],
)
def test_cores_are_disjoint_and_shared_out_evenly(workers: int, ranks: int, cores: list[int], expected: tuple) -> None:
    found = devices.places(config(workers, ranks), cores, gpus=[])
    assert ([place.cores for place in found[0]], [place.cores for place in found[1]]) == expected


def test_unpinned_processes_may_run_anywhere() -> None:
    assert devices.places(config(pin=False), [0, 1], gpus=[]) == ([Place()], [Place()])


def test_every_member_gets_a_gpu_of_its_own_where_there_are_enough() -> None:
    workers, ranks = devices.places(config(2, 2), [0, 1], gpus=["4", "5", "6", "7"])
    assert [place.gpus for place in workers + ranks] == [("6",), ("7",), ("4",), ("5",)]


def test_a_request_for_gpus_that_are_not_there_names_both_numbers() -> None:
    """failures.md 30."""
    with pytest.raises(ConfigError, match=r"need 9 GPUs, and 0 are available"):
        devices.check(config(8, 1, device="cuda"), gpus=0)
    devices.check(config(8, 1, device="cuda"), gpus=9)
    with pytest.raises(ConfigError, match=r"need 2 GPUs, and 1 are available"):
        devices.check(config(1, 1), gpus=1)
    devices.check(config(1, 1, device="cpu"), gpus=1)


def test_only_visible_gpus_count_and_cpu_pools_see_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert devices.gpus_here() == ["4", "6"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.gpus_here() == []
    workers, _ = devices.places(config(device="cpu"), [0, 1], gpus=["0", "1"])
    assert workers[0].gpus == ()
