"""Rewards as users write them, some of them badly."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

Row = dict[str, Any]


def good(response: str, row: Row) -> float:
    print("a reward may print")
    return float(response == row["answer"])


async def slow_but_async(response: str, row: Row) -> float:
    import asyncio

    await asyncio.sleep(0.01)
    return 0.5


def raises(response: str, row: Row) -> float:
    raise KeyError("no such key")


def raises_on_bad(response: str, row: Row) -> float:
    if row["answer"] == "bad":
        raise ValueError("bad row")
    return 1.0


def hangs(response: str, row: Row) -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while row["answer"] == "hang":
        time.sleep(3600)
    return 1.0


def dies(response: str, row: Row) -> float:
    os._exit(3)


def not_a_number(response: str, row: Row) -> float:
    return float("nan")


def a_numpy_scalar(response: str, row: Row) -> Any:
    import numpy as np

    return np.float32(0.5)


def text(response: str, row: Row) -> Any:
    return "1.0"


def has_nan(response: str, row: Row) -> float:
    return float(row["x"] != row["x"])


def a_list(response: str, row: Row) -> Any:
    return [1.0]
