"""The parent's side of reward processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue

import msgspec

from async_rl.errors import RewardError, RewardTimeout
from async_rl.rewards.child import Reply, Request
from async_rl.rewards.config import RewardConfig

START_S = 60.0
"""Longest time for a child to import the reward's module."""


class RewardProcess:
    """One child. A child that exceeds the limit or dies is killed and replaced at the next call."""

    def __init__(self, function: str, time_limit_s: float) -> None:
        self._function = function
        self._limit = time_limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def score(self, response: str, row: bytes) -> float:
        """The reward of one response. Raises `RewardError`, or `RewardTimeout` after the limit."""
        connection = self._connection or self.start()
        return self._exchange(connection, Request(response, row), self._limit).value

    def start(self) -> Connection:
        """Starts the child, which `score` does by itself when there is none. Raises `RewardError` if it cannot load."""
        ours, theirs = Pipe()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "async_rl.rewards.child", str(theirs.fileno()), self._function, str(os.getpid())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection = ours
        try:
            self._exchange(ours, None, START_S)
        except RewardError:
            self.close()
            raise
        return ours

    def _exchange(self, connection: Connection, request: Request | None, limit: float) -> Reply:
        """The reply to a request, or to having been started."""
        try:
            if request is not None:
                connection.send_bytes(msgspec.msgpack.encode(request))
            answered = connection.poll(limit)
            reply = self._decoder.decode(connection.recv_bytes()) if answered else None
        except (EOFError, OSError) as error:
            self.close()
            raise RewardError(f"the process of reward {self._function} died") from error
        if reply is None:
            self.close()
            raise RewardTimeout(f"the reward {self._function} did not return within {limit:g} s")
        if reply.error:
            raise RewardError(f"the reward {self._function} failed: {reply.error}")
        return reply

    def close(self) -> None:
        if self._child is not None and self._connection is not None:
            self._child.kill()
            self._child.wait()
            self._connection.close()
        self._child = self._connection = None


class Rewards:
    """All rewards of a configuration, for an asyncio program; scoring never blocks its loop."""

    def __init__(self, config: RewardConfig) -> None:
        self._pools = [
            None
            if each.function == "environment"
            else Pool(each.function, time_limit_s=config.time_limit_s, processes=config.processes)
            for each in config.functions.values()
        ]

    async def score(self, response: str, row: bytes, of_environment: float = 0.0) -> list[float]:
        """Each reward of one response, in the order of the configuration; see `RewardProcess.score`."""

        async def given() -> float:
            return of_environment

        scores = (given() if pool is None else pool.score(response, row) for pool in self._pools)
        return list(await asyncio.gather(*scores))

    def close(self) -> None:
        for pool in self._pools:
            if pool is not None:
                pool.close()


class Pool:
    """The processes of one reward."""

    def __init__(self, function: str, *, time_limit_s: float, processes: int) -> None:
        self._idle: SimpleQueue[RewardProcess] = SimpleQueue()
        for _ in range(processes):
            self._idle.put(RewardProcess(function, time_limit_s))
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="reward")

    async def score(self, response: str, row: bytes) -> float:
        """See `RewardProcess.score`."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, response, row)

    def _score(self, response: str, row: bytes) -> float:
        process = self._idle.get()
        try:
            return process.score(response, row)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()
