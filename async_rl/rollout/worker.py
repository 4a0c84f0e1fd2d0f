"""The process of one rollout worker.

Three tasks share one loop and own nothing that cannot be lost: the inbox starts trajectories and notes news of weights,
the flusher sends chunks when they are due, the updater brings the engine to the newest version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine

import msgspec

from async_rl import model, process
from async_rl.data.prompts import Prompts
from async_rl.errors import EngineError, RequestRefused, RewardError
from async_rl.rewards.runner import Rewards
from async_rl.rollout.engines import make
from async_rl.rollout.engines.protocol import Delta, Engine, Request
from async_rl.rollout.streamer import Streamer
from async_rl.tokenizer import tokenizer_of
from async_rl.tracking.timeline import BusyMeter, Timeline
from async_rl.weights.receiver import Receiver
from buffers import messages as m
from buffers.client import AsyncClient, read_endpoint
from staleness.versions import show


class Worker:
    """Generates the trajectories that the buffer grants tickets for."""

    def __init__(self, run: process.Run, engine: Engine) -> None:
        config = run.config
        self.run, self.config, self.engine = run, config, engine
        self.tokenizer = tokenizer_of(config.model.path)
        self.client = AsyncClient(read_endpoint(run.folder / "buffer.endpoint"), run.name, config.rollout.slots)
        self.receiver = Receiver(engine, run.folder, config.rollout.dtype)
        self.streamer = Streamer(chunk_tokens=config.rollout.chunk_tokens, flush_s=config.rollout.flush_ms / 1000)
        self.rewards = Rewards(
            config.reward.function, time_limit_s=config.reward.time_limit_s, processes=config.reward.processes
        )
        self.timeline = Timeline(run.folder, run.name)
        self.busy = BusyMeter(self.timeline, "generate")
        self.applied = asyncio.Condition()
        self.version: int | None = None
        self.news: asyncio.Queue[m.News] = asyncio.Queue()
        self.flushing = asyncio.Lock()

    async def main(self) -> None:
        """Runs until cancelled; the first task that fails ends the worker with its error."""
        await self.engine.start()
        await self.client.hello()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._inbox(tasks))
            tasks.create_task(self._flusher())
            tasks.create_task(self._updater())

    # --- the three tasks ---------------------------------------------------------------------------------------

    async def _inbox(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            match await self.client.receive():
                case m.Tickets(tickets):
                    for ticket in tickets:
                        tasks.create_task(self._trajectory(ticket))
                case m.News() as news:
                    self.news.put_nowait(news)
                case other:
                    raise EngineError(f"a worker cannot act on {type(other).__name__}")

    async def _flusher(self) -> None:
        """Sends what is due; sleeps at most a quarter of `flush_ms`, so that a token waits at most 1.25 of it."""
        nap = self.config.rollout.flush_ms / 4000
        while True:
            await asyncio.sleep(nap)
            self.busy.tick()
            if self.streamer.due(time.monotonic()):
                await self._flush()

    async def _updater(self) -> None:
        """Brings the engine to the newest version."""
        while True:
            news = await self._newest()
            if self.version is not None and news.version <= self.version:
                continue
            if self.version is None:
                await self._rehearse()
            if news.changed:
                await self._pull()
            if self.version is None or self.version < news.version:
                # The steps since the last publication changed nothing: it is what the newest version is.
                await self.engine.relabel(news.version)
                await self._applied(news.version)
            await self._flush()

    async def _newest(self) -> m.News:
        """The next news, or what all that have piled up come to."""
        news = await self.news.get()
        while not self.news.empty():
            newer = self.news.get_nowait()
            news = m.News(newer.version, news.changed or newer.changed)
        return news

    async def _rehearse(self) -> None:
        error = await self.receiver.rehearse()
        print("rehearsal: " + ("missed" if error is None else f"probe differs by {error:.4f}"), flush=True)

    async def _pull(self) -> None:
        start = time.time()
        receipt = await self.receiver.pull(self._applied)
        self.timeline.add(f"update to {show(receipt.version)}", start, start + receipt.pause_s)
        probed = "" if receipt.probe_error is None else f", probe differs by {receipt.probe_error:.4f}"
        print(f"version {show(receipt.version)} applied in {receipt.pause_s:.2f} s{probed}", flush=True)

    async def _applied(self, version: int) -> None:
        async with self.applied:
            self.version = version
            self.applied.notify_all()

    # --- one trajectory ----------------------------------------------------------------------------------------

    async def _trajectory(self, ticket: m.Ticket) -> None:
        """Waits for `min_version`, streams the response, scores it, reports how it ended."""
        async with self.applied:
            await self.applied.wait_for(lambda: self.version is not None and self.version >= ticket.min_version)
        self.streamer.open(ticket.id, ticket.attempt)
        try:
            tokens, last, mismatch = await self._generate(ticket)
        except RequestRefused as error:
            await self._end(ticket, m.Outcome(ticket.id, ticket.attempt, 0, "failed", error=str(error)))
            return
        reason = last.finish_reason or ""
        outcome = m.Outcome(ticket.id, ticket.attempt, len(tokens), "finished", reason, span_mismatch=mismatch)
        await self._end(ticket, await self._scored(outcome, tokens, ticket.row))

    async def _generate(self, ticket: m.Ticket) -> tuple[list[int], Delta, bool]:
        """All sampled tokens, the last delta, and whether the streamed tags differ from the engine's own spans."""
        request = Request(f"{ticket.id}.{ticket.attempt}", ticket.prompt, ticket.max_tokens)
        tokens: list[int] = []
        versions: list[int] = []
        last = None
        with self.busy:
            async for delta in self.engine.generate(request):
                self.streamer.add(ticket.id, delta.tokens, delta.logprobs, delta.versions, now=time.monotonic())
                tokens += delta.tokens
                versions += delta.versions
                last = delta
        if last is None or last.finish_reason is None:
            raise EngineError(f"ticket {ticket.id}: the engine ended a request without saying how")
        spans = [version for version, start, end in last.spans or [] for _ in range(end - start)]
        return tokens, last, spans != versions

    async def _scored(self, outcome: m.Outcome, tokens: list[int], row: bytes) -> m.Outcome:
        response = self.tokenizer.decode(tokens, skip_special_tokens=True)
        try:
            reward = await self.rewards.score(response, row)
        except RewardError as error:
            if self.config.reward.on_error == "fail":
                raise
            print(f"ticket {outcome.ticket} failed: {error}", flush=True)
            return msgspec.structs.replace(outcome, status="failed", error=str(error))
        return msgspec.structs.replace(outcome, reward=reward)

    async def _end(self, ticket: m.Ticket, outcome: m.Outcome) -> None:
        await self._flush()
        self.streamer.close(ticket.id)
        await self.client.send(m.Outcomes([outcome]))

    async def _flush(self) -> None:
        async with self.flushing:
            chunks = self.streamer.flush()
            if chunks is not None:
                await self.client.append(chunks)

    async def close(self) -> None:
        self.rewards.close()
        self.client.close()
        self.timeline.close()
        await self.engine.stop()


async def serve(run: process.Run) -> None:
    prompts = Prompts.read(run.folder / "prompts.npz")
    longest = max(tokens.size for tokens in prompts.tokens)
    cores = sorted(os.sched_getaffinity(0)) if run.config.launch.pin_cores else []
    engine = make(
        run.config,
        model=model.resolve(run.config.model.path),
        # A probe has 128 tokens and yields one more.
        max_model_tokens=max(256, longest + run.config.rollout.max_tokens),
        cores=cores,
        # No two workers draw the same samples.
        seed=run.config.seed * 1000 + run.rank,
    )
    worker = Worker(run, engine)
    main = asyncio.create_task(_unwrapped(worker.main()))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    try:
        await main
    finally:
        await worker.close()


async def _unwrapped(main: Coroutine[None, None, None]) -> None:
    """Raises the first error of a task group instead of the group."""
    try:
        await main
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def main() -> None:
    run = process.start("worker")
    with contextlib.suppress(asyncio.CancelledError):  # SIGTERM
        asyncio.run(serve(run))


if __name__ == "__main__":
    process.guard(main)
