"""A run in one process and without a clock: buffer core, torch decoder, learner step by step.

For studies of staleness and for tests: the same parts as in a run of many processes, but which token meets which
weights is settled by counting steps. A learner step comes after `ticks` decoding steps, or, without `ticks`, once the
bound lets nothing more be generated: then every batch is as old as it may be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from async_rl.buffer_process import settings
from async_rl.config import Config
from async_rl.data.prompts import order
from async_rl.learner import checkpoint
from async_rl.learner.batch import Plan, Share, ages_of, plan, share
from async_rl.learner.models import build
from async_rl.learner.report import StepReport, controlled, effective_bound, report
from async_rl.learner.step import Stepper, learning_rate
from async_rl.rollout.engines.decoder import Decoder, Running
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.rollout.streamer import Streamer
from async_rl.rollout.worker import rewarded
from async_rl.tokenizer import tokenizer_of
from async_rl.tracking.metrics import Record
from buffers import messages as m
from buffers.core import Core
from buffers.store import Send
from staleness.controller import Control
from staleness.versions import pack as pack_version

Reward = Callable[[str, dict[str, Any]], float]
Observer = Callable[[Plan, Share], None]


@dataclass
class Problem:
    """A prompt and the row that its reward wants."""

    tokens: list[int]
    row: dict[str, Any]


class Lockstep:
    """with one_rank(): for record in Lockstep(config, path, problems, reward).run(): ...

    `ticks` is the number of decoding steps between two learner steps; None generates all that may be generated.
    `observe` sees each batch before it is trained on. `rate` gives the learning rate of each step, in place of the
    configured one.
    """

    def __init__(
        self,
        config: Config,
        path: str,
        problems: Sequence[Problem],
        reward: Reward,
        *,
        ticks: int | None = None,
        observe: Observer | None = None,
        rate: Callable[[int], float] | None = None,
    ) -> None:
        self.config, self.problems, self.reward, self.ticks = config, problems, reward, ticks
        self.observe = observe
        learner = config.learner
        self.rate = rate or (lambda step: learning_rate(learner.learning_rate, learner.warmup_steps, step))
        self.ended: list[int] = []
        """Tickets in the order in which they ended."""
        self.step = 0
        self.control = Control(config.staleness.max_staleness)
        self.core = Core(msgspec.structs.replace(settings(config), retain=False))
        self.tokenizer = tokenizer_of(path)
        self.models = build(config, path, torch.device("cpu"))
        self.stepper = Stepper(self.models, config)
        self._path = path
        self.decoder = self._decoder(problems, config.rollout.slots, config.seed)
        self.streamer = Streamer(chunk_tokens=config.rollout.chunk_tokens, flush_s=float("inf"))
        self._order = order(len(problems), seed=config.seed, shuffle=config.data.shuffle)
        self._running: dict[Running, m.Ticket] = {}
        self._batch: m.Batch | None = None
        self._submitted = self._seq = 0

    def run(self) -> Iterator[Record]:
        """The metrics of each learner step."""
        self._tell("worker", m.Hello("worker", slots=self.config.rollout.slots))
        self._tell("feeder", m.Hello("feeder"))
        self._tell("rank0", m.Published(0))
        while self.step < self.config.steps:
            begun = perf_counter()
            self._tell("rank0", m.Take(pack_version(0, self.step)))
            ticked = 0
            while self._running and (self.ticks is None or ticked < self.ticks or self._batch is None):
                self._tick()
                ticked += 1
            if self._batch is None:
                raise RuntimeError(f"no batch can come at step {self.step}: {self.core.stats()}")
            yield self._learn(self._batch, perf_counter() - begun)

    def sample(self, problems: Sequence[Problem], *, greedy: bool = False, seed: int = 0) -> list[str]:
        """Responses by the weights of now, apart from what is being generated."""
        decoder = self._decoder(problems, len(problems), seed)
        decoder.load(checkpoint.full_tensors(self.models.policy, trained=True), 0)
        budget = self.config.rollout.max_tokens
        asked = [
            decoder.submit(Request(str(i), problem.tokens, budget, greedy=greedy)) for i, problem in enumerate(problems)
        ]
        while decoder.busy:
            decoder.step()
        return [self._text(running.tokens) for running in asked]

    def _decoder(self, problems: Sequence[Problem], slots: int, seed: int) -> Decoder:
        rollout = msgspec.structs.replace(self.config.rollout, slots=slots)
        longest = max(len(problem.tokens) for problem in problems) + rollout.max_tokens
        return Decoder(self._path, rollout, length=longest, seed=seed, lora=self.config.learner.lora)

    # --- the core's peers --------------------------------------------------------------------------------------

    def _tell(self, peer: str, message: m.Inbound, frames: Sequence[bytes] = ()) -> None:
        """One message, and all that follows from it."""
        sends = deque(self.core.receive(peer, message, frames))
        while sends:
            for answer, more in self._received(sends.popleft()):
                sends += self.core.receive(answer, more, ())

    def _received(self, send: Send) -> list[tuple[str, m.Inbound]]:
        match send.message:
            case m.Tickets(tickets):
                for ticket in tickets:
                    self._start(ticket)
            case m.Cancel(cancelled):
                gone = {held.ticket for held in cancelled}
                for running in [running for running, ticket in self._running.items() if ticket.id in gone]:
                    running.dropped = True
                    self.streamer.drop(self._running.pop(running).id)
            case m.Credit(upto):
                count, self._submitted = upto - self._submitted, upto
                if count > 0:
                    return [("feeder", m.Submit(upto - count, [self._prompt() for _ in range(count)]))]
            case m.Batch() as batch:
                self._batch = batch
            case m.Ack(_, refused) if refused:
                raise RuntimeError(f"the core refused {refused}")
            case m.Fatal(reason):
                raise RuntimeError(reason)
            case _:
                pass
        return []

    def _prompt(self) -> m.Prompt:
        key = next(self._order)
        problem = self.problems[key[1]]
        return m.Prompt(key, problem.tokens, msgspec.json.encode(problem.row))

    # --- generation --------------------------------------------------------------------------------------------

    def _start(self, ticket: m.Ticket) -> None:
        request = Request(f"{ticket.id}.{ticket.attempt}", ticket.prompt + ticket.prefix, ticket.max_tokens)
        self._running[self.decoder.submit(request)] = ticket
        self.streamer.open(ticket.id, ticket.attempt, len(ticket.prefix))

    def _tick(self) -> None:
        """One decoding step; what has ended is scored."""
        ended: list[tuple[Running, Delta]] = []
        for running, delta in self.decoder.step():
            if running in self._running:
                self.streamer.add(self._running[running].id, delta.tokens, delta.logprobs, delta.versions, now=0.0)
                ended += [(running, delta)] if delta.finish_reason is not None else []
        if ended or self.streamer.due(0.0):
            chunks = self.streamer.flush()
            if chunks is not None:
                self._seq += 1
                self._tell("worker", chunks.header(self._seq), [chunks.to_frame()])
        if ended:
            self._seq += 1
            self._tell("worker", m.Outcomes(self._seq, [self._outcome(*each) for each in ended]))

    def _outcome(self, running: Running, delta: Delta) -> m.Outcome:
        ticket = self._running.pop(running)
        self.ended.append(ticket.id)
        self.streamer.drop(ticket.id)
        tokens = ticket.prefix + running.tokens
        reward = self.reward(self._text(tokens), msgspec.json.decode(ticket.row))
        outcome = m.Outcome(ticket.id, ticket.attempt, len(tokens), "finished", delta.finish_reason or "")
        return rewarded(outcome, [reward], self.config)

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    # --- learning ----------------------------------------------------------------------------------------------

    def _learn(self, batch: m.Batch, waited: float) -> Record:
        begun = perf_counter()
        planned = plan(batch, ranks=1, algorithm=self.config.algorithm)
        fetched = self.core.handle("rank0", m.Fetch(batch.lease, [row.ticket for row in planned.rows[0]]))
        arrays = m.SampleArrays.from_frames([bytes(frame) for frame in fetched[0].frames])
        ages = ages_of(arrays, pack_version(0, self.step), self.core.store.lineage)
        mine = share(planned, 0, arrays, ages, self.config)
        if self.observe is not None:
            self.observe(planned, mine)
        result = None
        if planned.gradient:
            result = self.stepper.step(mine, rate=self.rate(self.step) * self.control.scale)
        self.step += 1
        self._batch = None
        version = pack_version(0, self.step)
        if result is not None:
            self.decoder.load(checkpoint.full_tensors(self.models.policy, trained=True), version)
        self.decoder.version = version
        parts = [StepReport.of(mine, result)]
        self.control = controlled(self.control, parts, self.config.staleness)
        bound = effective_bound(self.control, self.config.staleness)
        self._tell("rank0", m.Commit(batch.lease, version, result is not None, bound))
        times = {"wait_s": waited, "train_s": perf_counter() - begun}
        return {"step": self.step, **report(planned, batch, parts, self.config, times, self.control)}


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for the length of the block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
