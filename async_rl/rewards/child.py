"""The process in which reward functions run: `python -m async_rl.rewards.child FD module:function PARENT`.

Requests and replies travel over an inherited socket, so that a reward may print what it likes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from async_rl.named import named
from async_rl.process import die_with_parent

ERROR_CHARACTERS = 4000


class Request(msgspec.Struct):
    response: str
    row: bytes


class Reply(msgspec.Struct):
    """`value` is finite, or `error` says what happened."""

    value: float = 0.0
    error: str = ""


def load(name: str) -> Callable[[str, dict[str, Any]], Any]:
    """The function that `module:function` or `reasoning_gym` names; the working directory is importable."""
    if name == "reasoning_gym":
        name = "async_rl.rewards.functions:reasoning_gym"
    return named(name)


def score(function: Callable[[str, dict[str, Any]], Any], request: Request) -> Reply:
    try:
        # Not msgspec: rows may hold NaN, which Python's json writes and reads.
        value = function(request.response, json.loads(request.row))
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        # numpy's and torch's scalars are numbers too; text is not, though float() would read it.
        if hasattr(value, "__float__") and math.isfinite(number := float(value)):
            return Reply(number)
        return Reply(error=f"the reward returned {repr(value)[:200]}, not a finite number")
    except Exception:
        return Reply(error=_told())


def _told() -> str:
    """The current exception with the last lines of its traceback, at a length that can be shown."""
    return traceback.format_exc(limit=-4)[-ERROR_CHARACTERS:]


async def _await(value: Any) -> Any:
    return await value


def serve(connection: Connection, load: Callable[[], Callable[[list[Request]], list[Reply]]]) -> None:
    """Says that it has loaded, or why not; then answers lists of requests until the other end closes."""
    try:
        score_all = load()
    except Exception:
        connection.send_bytes(msgspec.msgpack.encode([Reply(error=_told())]))
        return
    connection.send_bytes(msgspec.msgpack.encode([Reply()]))
    decoder = msgspec.msgpack.Decoder(list[Request])
    while True:
        try:
            requests = decoder.decode(connection.recv_bytes())
        except EOFError:
            return
        try:
            replies = score_all(requests)
        except Exception:
            replies = [Reply(error=_told())] * len(requests)
        connection.send_bytes(msgspec.msgpack.encode(replies))


def _each(name: str) -> Callable[[list[Request]], list[Reply]]:
    function = load(name)
    return lambda requests: [score(function, request) for request in requests]


def main() -> None:
    die_with_parent(int(sys.argv[3]))
    serve(Connection(int(sys.argv[1])), lambda: _each(sys.argv[2]))


if __name__ == "__main__":
    main()
