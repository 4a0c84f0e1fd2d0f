"""The parent's side of reward processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue

import msgspec

from async_rl.errors import RewardError, RewardTimeout
from async_rl.rewards.child import Reply, Request
from async_rl.rewards.config import ModelRewardConfig, RewardConfig

MODEL = "model:"
"""What the name of a reward model begins with."""
START_S = 60.0
"""Longest time for a child to import the reward's module."""


class RewardProcess:
    """One child. A child that exceeds the limit or dies is killed and replaced at the next call."""

    def __init__(self, function: str, time_limit_s: float, model: Judge | None = None) -> None:
        self._function = function
        self._limit = time_limit_s
        self._model = model
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._decoder = msgspec.msgpack.Decoder(list[Reply])

    def score(self, response: str, row: bytes) -> float:
        """The reward of one response. Raises `RewardError`, or `RewardTimeout` after the limit."""
        return self.score_all([Request(response, row)])[0].value

    def score_all(self, requests: list[Request]) -> list[Reply]:
        """The same for several at once."""
        connection = self._connection or self.start()
        return self._exchange(connection, requests, self._limit)

    def start(self) -> Connection:
        """Starts the child, which `score` does by itself when there is none. Raises `RewardError` if it cannot load."""
        ours, theirs = Pipe()
        module, arguments = "async_rl.rewards.child", [self._function]
        if self._model is not None:
            module, arguments = "async_rl.rewards.judge", self._model.arguments(self._function)
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments, str(os.getpid())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection = ours
        try:
            self._exchange(ours, None, START_S if self._model is None else self._model.config.load_s)
        except RewardError:
            self.close()
            raise
        return ours

    def _exchange(self, connection: Connection, requests: list[Request] | None, limit: float) -> list[Reply]:
        """The replies to requests, or the one to having been started."""
        try:
            if requests is not None:
                connection.send_bytes(msgspec.msgpack.encode(requests))
            answered = connection.poll(limit)
            replies = self._decoder.decode(connection.recv_bytes()) if answered else None
        except (EOFError, OSError) as error:
            self.close()
            raise RewardError(f"the process of reward {self._function} died") from error
        if replies is None:
            self.close()
            raise RewardTimeout(f"the reward {self._function} did not return within {limit:g} s")
        for reply in replies:
            if reply.error:
                raise RewardError(f"the reward {self._function} failed: {reply.error}")
        return replies

    def close(self) -> None:
        if self._child is not None and self._connection is not None:
            self._child.kill()
            self._child.wait()
            self._connection.close()
        self._child = self._connection = None


class Rewards:
    """All rewards of a configuration, for an asyncio program; scoring never blocks its loop."""

    def __init__(self, config: RewardConfig, prompt_column: str = "prompt") -> None:
        self._pools = [_pool(each.function, config, prompt_column) for each in config.functions.values()]

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


@dataclass(frozen=True)
class Judge:
    """How a reward model is run. `prompt_column`: where a row has the prompt."""

    config: ModelRewardConfig
    prompt_column: str

    def arguments(self, function: str) -> list[str]:
        path = function.removeprefix(MODEL)
        return [path, self.config.device, str(self.config.max_tokens), self.prompt_column]


def process_of(function: str, config: RewardConfig, prompt_column: str) -> RewardProcess:
    """The process of a reward function, or of a reward model."""
    judge = Judge(config.model, prompt_column) if function.startswith(MODEL) else None
    return RewardProcess(function, config.time_limit_s, judge)


def _pool(function: str, config: RewardConfig, prompt_column: str) -> Pool | Batcher | None:
    if function == "environment":
        return None
    if function.startswith(MODEL):
        return Batcher(process_of(function, config, prompt_column), config.model)
    return Pool(function, time_limit_s=config.time_limit_s, processes=config.processes)


class Batcher:
    """One process that judges responses together: those that come within `wait_ms` of the first, up to a batch."""

    def __init__(self, process: RewardProcess, config: ModelRewardConfig) -> None:
        self._process, self._config = process, config
        self._waiting: deque[tuple[Request, asyncio.Future[float]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._pump: asyncio.Task[None] | None = None

    async def score(self, response: str, row: bytes) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((Request(response, row), future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        """Until nobody waits. An error of the process is that of every response in the batch."""
        while self._waiting:
            if len(self._waiting) < self._config.batch_size:
                await asyncio.sleep(self._config.wait_ms / 1000)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._config.batch_size))]
            requests = [request for request, _ in batch]
            try:
                replies = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._process.score_all, requests
                )
            except RewardError as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(type(error)(str(error)))
                continue
            for (_, future), reply in zip(batch, replies, strict=True):
                if not future.done():
                    future.set_result(reply.value)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()


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
