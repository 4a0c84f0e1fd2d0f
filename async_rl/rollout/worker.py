"""The process of one rollout worker.

Its tasks share one loop and own nothing that cannot be lost: the inbox starts trajectories and notes news of weights,
the flusher sends chunks when they are due, the updater brings the engine to the newest version, and where the learner
uses the same devices the sharing one lets it have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from async_rl import model, process
from async_rl.baton import Baton
from async_rl.config import Config
from async_rl.data.prompts import Prompts
from async_rl.environments.config import EnvironmentConfig
from async_rl.environments.protocol import find
from async_rl.errors import EngineError, EngineStuck, EnvironmentFailed, RequestRefused, RewardError
from async_rl.rewards.runner import Rewards
from async_rl.rewards.shaping import shaped
from async_rl.rollout.engines import make
from async_rl.rollout.engines.protocol import Engine
from async_rl.rollout.engines.yielding import YieldingEngine
from async_rl.rollout.episode import Episode, Played, Talk, unwatched
from async_rl.rollout.seeds import mix
from async_rl.rollout.streamer import Streamer
from async_rl.tokenizer import tokenizer_of
from async_rl.tracking.slots import Slots
from async_rl.tracking.timeline import BusyMeter, Timeline
from async_rl.tracking.usage import Usage
from async_rl.weights.client import WeightsClient
from async_rl.weights.receiver import Broadcast, Elsewhere, Here, Joinable, Receiver, Source
from async_rl.weights.transport import device_name, segment_name, served
from buffers import messages as m
from buffers.client import AsyncClient, Meter, read_endpoint
from staleness.versions import show

ASKED_EVERY_S = 0.02
"""How often a worker looks whether the learner wants the devices that they share."""
LEAVE_S = 10.0
"""Longest time for the buffer to acknowledge what a worker sends before it goes."""


def rewarded(outcome: m.Outcome, parts: list[float], config: Config) -> m.Outcome:
    """The outcome with the reward that its parts come to; they go with it if they are not the reward itself."""
    reward = shaped(config.reward, parts, length=outcome.length, longest=config.rollout.max_tokens)
    return msgspec.structs.replace(outcome, reward=reward, parts=[] if parts == [reward] else parts)


def talk(tokenizer: PreTrainedTokenizerBase, config: EnvironmentConfig) -> Talk:
    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Talk(
        decode, encode, frozenset({tokenizer.eos_token_id}), config.template, config.time_limit_s, config.turn_tokens
    )


class Worker:
    """Generates the trajectories that the buffer grants tickets for."""

    def __init__(self, run: process.Run, engine: Engine) -> None:
        config = run.config
        self.run, self.config, self.engine = run, config, engine
        self.exchange = asyncio.Lock()
        """Held while weights are loaded, or the devices are the learner's: a worker that waits for the devices must not
        hold a segment that the learner, who has them, wants to write."""
        self.baton = None
        if config.launch.placement == "colocated":
            self.baton = Baton(device_name(run.folder))
            self.engine = self.yielding = YieldingEngine(engine)
        self.resting = False
        self.tokenizer = tokenizer_of(config.model.path)
        endpoint = read_endpoint(run.folder / "buffer.endpoint")
        self.client = AsyncClient(endpoint, run.name, 0, keys=process.keys(config))
        self.heard_at = time.monotonic()
        """When the engine last yielded a token, or began to generate."""
        self.trajectories: dict[int, asyncio.Task[None]] = {}
        self.exams: dict[int, tuple[m.Evaluate, asyncio.Task[None]]] = {}
        self.exam_slots = asyncio.Semaphore(config.evaluation.slots)
        self.overhead = Meter()
        self.remote = None
        if served(config):
            self.remote = WeightsClient(f"{segment_name(run.folder)}-{run.name}", process.keys(config))
        self.receiver = Receiver(self.engine, self._source(), config.rollout.dtype)
        self.streamer = Streamer(chunk_tokens=config.rollout.chunk_tokens, flush_s=config.rollout.flush_ms / 1000)
        self.rewards = Rewards(config.reward, config.data.prompt_column)
        self.environments = None if config.environment.name is None else find(config.environment.name)
        self.talk = talk(self.tokenizer, config.environment)
        self.timeline = Timeline(run.folder, run.name)
        self.busy = BusyMeter(self.timeline, "generate")
        self.slots = Slots(config.rollout.slots, time.monotonic())
        self.usage = Usage(run.folder, run.name)
        self.applied = asyncio.Condition()
        self.version: int | None = None
        self.news: asyncio.Queue[m.News] = asyncio.Queue()

    def _source(self) -> Source:
        if self.remote is None:
            return Here(self.run.folder)
        if self.config.weights.transport == "zmq":
            return Elsewhere(self.remote)
        assert isinstance(self.engine, Joinable)
        return Broadcast(self.remote, self.run.name, self.engine)

    async def main(self) -> None:
        """Runs until cancelled; the first task that fails ends the worker with its error."""
        # Every trajectory may wait for its environment at once.
        threads = ThreadPoolExecutor(self.config.rollout.slots + 4, thread_name_prefix="environment")
        asyncio.get_running_loop().set_default_executor(threads)
        await self.engine.start()
        if self.baton is not None:
            await self._hold(self.baton)
        await self.client.hello()  # without slots: it gets tickets when it has weights
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._inbox(tasks))
            tasks.create_task(self._flusher())
            tasks.create_task(self._updater())
            if self.baton is not None:
                tasks.create_task(self._sharing(self.baton))

    # --- the tasks ---------------------------------------------------------------------------------------

    async def _inbox(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            match await self.client.receive():
                case m.Tickets(tickets):
                    for ticket in tickets:
                        self._cancel(ticket.id)  # an attempt that was given up for dead
                        self.trajectories[ticket.id] = tasks.create_task(self._trajectory(ticket))
                case m.Cancel(cancelled):
                    for held in cancelled:
                        self._cancel(held.ticket)
                case m.Evaluate() as asked:
                    self.exams[asked.id] = asked, tasks.create_task(self._evaluated(asked))
                case m.News() as news:
                    if self.remote is not None and news.source:
                        self.remote.connect(news.source)
                    self.news.put_nowait(news)
                case other:
                    raise EngineError(f"a worker cannot act on {type(other).__name__}")

    def _cancel(self, ticket: int) -> None:
        """Nobody wants the trajectory any more: its request ends, and what has not been sent of it is forgotten."""
        task = self.trajectories.pop(ticket, None)
        if task is not None:
            task.cancel()
        self.streamer.drop(ticket)

    async def _flusher(self) -> None:
        """Sends what is due; sleeps at most a quarter of `flush_ms`, so that a token waits at most 1.25 of it."""
        nap = self.config.rollout.flush_ms / 4000
        while True:
            await asyncio.sleep(nap)
            self.busy.tick()
            self._watch_engine(time.monotonic())
            self.usage.note(lambda: self.slots.seconds(time.monotonic()))
            if self.streamer.due(time.monotonic()):
                await self._flush()

    async def _sharing(self, baton: Baton) -> None:
        """Lets the learner have the devices when it asks for them, and goes on when it is done."""
        while True:
            await asyncio.sleep(ASKED_EVERY_S)
            if not baton.asked():
                continue
            async with self.exchange:
                await self._yield(baton)

    async def _yield(self, baton: Baton) -> None:
        begun = time.monotonic()
        await self.yielding.rest()
        self.resting = True
        self._count_busy()
        await self._flush()
        with self.timeline.span("yield"):
            baton.release()
            await self._hold(baton)
        self.slots.paused("yield", time.monotonic() - begun, time.monotonic())
        self.resting = False
        self._count_busy()
        await self.yielding.resume()

    async def _hold(self, baton: Baton) -> None:
        while baton.asked() or not baton.hold():  # noqa: ASYNC110 - another process's
            await asyncio.sleep(ASKED_EVERY_S)

    def _count_busy(self) -> None:
        self.busy.set(0 if self.resting else self.slots.now("generate"))

    def _watch_engine(self, now: float) -> None:
        """An engine that hangs is found by its silence."""
        if self.resting or not self.slots.now("generate"):
            self.heard_at = now
        elif now - self.heard_at > self.config.rollout.engine_timeout_s:
            raise EngineStuck(
                f"{self.slots.now('generate')} requests are running, and the engine has yielded no token for "
                f"rollout.engine_timeout_s = {self.config.rollout.engine_timeout_s:g} s"
            )

    async def _updater(self) -> None:
        """Brings the engine to the newest version."""
        while True:
            news = await self._newest()
            if self.version is not None and news.version <= self.version:
                continue
            if self.version is None:
                await self._rehearse()
            await self._exams_done()
            if news.changed or self.version is None:
                while not await self._pull():
                    await self._flush()
            if self.version is None or self.version < news.version:
                # The steps since the last publication changed nothing: it is what the newest version is.
                await self.engine.relabel(news.version)
                await self._applied(news.version)
            await self._flush()

    async def _newest(self) -> m.News:
        """What all news that have piled up come to. Between versions that do not follow each other the weights may have
        changed, though nobody said so here."""
        last, changed, source = self.version, False, ""
        while True:
            news = await self.news.get()
            if last is None or news.version > last:
                changed |= news.changed or news.version - 1 != last
                last, source = news.version, news.source
            if self.news.empty() and last is not None:
                return m.News(last, changed, source)

    async def _rehearse(self) -> None:
        async with self.exchange:
            error = await self.receiver.rehearse()
        print("rehearsal: " + ("missed" if error is None else f"probe differs by {error:.4f}"), flush=True)

    async def _pull(self) -> bool:
        """Whether the engine has the newest version now."""
        start = time.time()
        async with self.exchange:
            receipt = await self.receiver.pull(self._applied)
        self.slots.paused("update", receipt.pause_s, time.monotonic())
        end = time.time()
        if end - start > receipt.pause_s:
            self.timeline.add(f"pull {show(receipt.version)}", start, end - receipt.pause_s)
        self.timeline.add(f"update to {show(receipt.version)}", end - receipt.pause_s, end)
        probed = "" if receipt.probe_error is None else f", probe differs by {receipt.probe_error:.4f}"
        print(f"version {show(receipt.version)} applied in {receipt.pause_s:.2f} s{probed}", flush=True)
        return receipt.newest

    async def _applied(self, version: int) -> None:
        first = self.version is None
        async with self.applied:
            self.version = version
            self.applied.notify_all()
        if first:
            self.client.session.slots = self.config.rollout.slots
            await self.client.hello()

    # --- one trajectory ----------------------------------------------------------------------------------------

    async def _trajectory(self, ticket: m.Ticket) -> None:
        """Waits for `min_version`, streams the response, scores it, reports how it ended."""
        with self.slots.taken("wait for weights", time.monotonic) as doing:

            def noted(state: str) -> None:
                doing(state)
                self._count_busy()

            async with self.applied:
                await self.applied.wait_for(lambda: self.version is not None and self.version >= ticket.min_version)
            try:
                await self._generated(ticket, noted)
            finally:
                noted("reward")

    async def _generated(self, ticket: m.Ticket, doing: Callable[[str], None]) -> None:
        self.streamer.open(ticket.id, ticket.attempt, len(ticket.prefix))
        # With `remax` one member of a group finds out what the greedy response is worth.
        asked = self.config.algorithm.advantage == "remax" and ticket.member == 0
        greedy = asyncio.create_task(self._baseline(ticket)) if asked else None
        try:
            played = await self._played(ticket, doing)
            doing("reward")
            outcome = await self._scored(ticket, played)
            if greedy is not None and outcome.status == "finished":
                outcome = msgspec.structs.replace(outcome, baseline=await greedy)
        except RequestRefused as error:
            outcome = self._failure(ticket, "refused", error)
        except EnvironmentFailed as error:
            outcome = self._failure(ticket, "failed", error)
        finally:
            if greedy is not None:
                greedy.cancel()
        await self._end(outcome)

    def _episode(self, ticket: m.Ticket, doing: Callable[[str], None] = unwatched, *, priority: int = 0) -> Episode:
        environment = None
        if self.environments is not None:
            environment = self.environments(json.loads(ticket.row), **self.config.environment.params)
        seed = mix(self.config.seed, *ticket.key, ticket.member) if self.config.deterministic else None
        return Episode(ticket, self.engine, self.talk, environment, seed, doing, priority)

    async def _played(self, ticket: m.Ticket, doing: Callable[[str], None]) -> Played:
        """The response, the tokens of an earlier attempt first; every token is on its way when this returns."""

        def emit(tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
            self.heard_at = time.monotonic()
            with self.overhead:
                self.streamer.add(ticket.id, tokens, logprobs, versions, now=time.monotonic())

        doing("generate")
        played = await self._episode(ticket, doing).play(emit)
        if not ticket.finish_reason and not played.turns:
            # The reward of a complete response may take its time: whoever takes over needs nothing but that.
            await self._report(self._outcome(ticket, played, "generated"))
        return played

    async def _baseline(self, ticket: m.Ticket) -> float | None:
        """Reward of the greedy response to the same prompt; None if it has none."""
        budget = self.config.rollout.max_tokens
        alone = msgspec.structs.replace(ticket, prefix=[], injected=[], finish_reason="", max_tokens=budget)
        try:
            played = await self._episode(alone).play(greedy=True)
        except EnvironmentFailed:
            return None
        return (await self._scored(alone, played)).reward

    # --- evaluation --------------------------------------------------------------------------------------------

    async def _evaluated(self, asked: m.Evaluate) -> None:
        """Answers a prompt under the version that the engine has when it may begin; `_exams_done` keeps it so."""
        async with self.applied:
            await self.applied.wait_for(lambda: self.version is not None and self.version >= asked.version)
        version, budget = self.version, self.config.rollout.max_tokens
        prompt = asked.prompt
        ticket = m.Ticket(-asked.id, 1, 0, prompt.key, prompt.tokens, prompt.row, asked.version, budget)
        async with self.exam_slots:
            try:
                played = await self._episode(ticket, priority=1).play(greedy=True)
                outcome = await self._scored(ticket, played)
                answer = m.Evaluated(asked.id, version, outcome.reward, outcome.length, outcome.error)
            except (RequestRefused, EnvironmentFailed, RewardError) as error:
                answer = m.Evaluated(asked.id, error=str(error))
        del self.exams[asked.id]
        await self.client.say(answer)

    async def _exams_done(self) -> None:
        """Waits for the answers that belong to the version loaded; what takes too long is given up."""
        due = {task: asked for asked, task in self.exams.values() if asked.version <= (self.version or 0)}
        if not due or self.version is None:
            return
        _, late = await asyncio.wait(due, timeout=self.config.evaluation.hold_s)
        for task in late:
            task.cancel()
            self.exams.pop(due[task].id, None)
            await self.client.say(m.Evaluated(due[task].id, error="not done within evaluation.hold_s"))
        if late:
            await asyncio.wait(late)

    # --- the parts of a trajectory -----------------------------------------------------------------------------

    def _outcome(self, ticket: m.Ticket, played: Played, status: Literal["generated", "finished"]) -> m.Outcome:
        return m.Outcome(
            ticket.id,
            ticket.attempt,
            len(played.tokens),
            status,
            played.finish_reason,
            span_mismatch=played.span_mismatch and (status == "generated" or bool(played.turns)),
            turns=played.turns if status == "finished" else [],
        )

    def _failure(self, ticket: m.Ticket, status: Literal["failed", "refused"], error: Exception) -> m.Outcome:
        print(f"ticket {ticket.id} {status}: {error}", flush=True)
        return m.Outcome(ticket.id, ticket.attempt, len(ticket.prefix), status, error=str(error))

    async def _scored(self, ticket: m.Ticket, played: Played) -> m.Outcome:
        """The outcome with the reward of the whole response."""
        outcome = self._outcome(ticket, played, "finished")
        response = self.tokenizer.decode(played.tokens, skip_special_tokens=True)
        try:
            parts = await self.rewards.score(response, ticket.row, played.reward)
        except RewardError as error:
            if self.config.reward.on_error == "fail":
                raise
            return self._failure(ticket, "failed", error)
        return rewarded(outcome, parts, self.config)

    async def _end(self, outcome: m.Outcome) -> None:
        await self._flush()  # what is dropped is never sent
        self.streamer.drop(outcome.ticket)
        self.trajectories.pop(outcome.ticket, None)
        await self._report(outcome)

    async def _report(self, outcome: m.Outcome) -> None:
        """After all chunks of the ticket."""
        await self._flush()
        spent = self.overhead.seconds + self.client.spent.seconds
        await self.client.outcomes([outcome], busy_s=self.busy.seconds, overhead_s=spent)

    async def _flush(self) -> None:
        await self.client.flush(self.streamer.flush)

    async def leave(self) -> None:
        """Hands back what it has: all that was generated is sent, and others go on with it."""
        await self.client.leave(self.streamer.flush, LEAVE_S)

    async def close(self) -> None:
        self.rewards.close()
        self.client.close()
        self.timeline.close()
        self.usage.close()
        await self.engine.stop()
        if self.remote is not None:
            self.remote.close()
        if self.baton is not None:
            self.baton.close()


async def serve(run: process.Run) -> None:
    if run.config.deterministic:
        torch.set_num_threads(1)  # sums do not depend on how many cores there are
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
    leaving = asyncio.Event()

    def leave() -> None:
        leaving.set()
        main.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, leave)
    try:
        await main
    except asyncio.CancelledError:
        if leaving.is_set():
            await worker.leave()
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
