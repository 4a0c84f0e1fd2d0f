"""The process of one learner rank: take, train, publish, commit, until the steps are done."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

import numpy as np
import psutil
import torch
import torch.distributed as dist

from async_rl import adapters, memory, model, process
from async_rl.baton import Baton
from async_rl.data.prompts import Prompts
from async_rl.learner import checkpoint, state
from async_rl.learner.batch import Plan, Share, ages_of, plan, share
from async_rl.learner.emulated import EmulatedStepper
from async_rl.learner.export import export_live
from async_rl.learner.models import build
from async_rl.learner.packing import Member, Segment, pack
from async_rl.learner.policy import accumulate, reshard
from async_rl.learner.report import StepReport, controlled, effective_bound, report
from async_rl.learner.step import Stepper, StepResult, learning_rate
from async_rl.tracking.metrics import MetricsWriter
from async_rl.tracking.timeline import Timeline
from async_rl.weights.manifest import Probe
from async_rl.weights.publisher import publisher_of
from async_rl.weights.transport import device_name
from buffers import messages as m
from staleness.controller import Control
from staleness.versions import pack as pack_version

PROBE_TOKENS = 128


class Learner:
    """One rank. All ranks run the same lines; rank 0 also talks to the buffer, publishes and reports."""

    def __init__(self, run: process.Run) -> None:
        self.run = run
        self.config = run.config
        self._stop = False
        self.publications = self.published_bytes = 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        device = _device(self.rank, self.config.launch.device)
        self.prompts = Prompts.read(run.folder / "prompts.npz")
        path = model.resolve(self.config.model.path)
        tokens = self._tokens(path, device)
        self.models = build(self.config, path, device)
        self.mesh = self.models.mesh
        self.policy = self.models.policy
        self.timeline = Timeline(run.folder, run.name)
        self.lineage = state.lineage(run.folder)
        self.step, self.cursor = self._restore()
        self.control = Control(self.config.staleness.max_staleness)
        models = self.models
        emulated = self.config.emulation.train_s
        self.stepper = EmulatedStepper(emulated) if emulated else Stepper(models, self.config, tokens, self._copied)
        self.checkpoints = checkpoint.Checkpoints(
            run.folder / "checkpoints",
            models.parts(),
            keep_last=self.config.learner.keep_last,
            keep_best=self.config.learner.keep_best,
        )
        self.baton = None
        if self.config.launch.placement == "colocated" and (self.rank == 0 or device.type == "cuda"):
            self.baton = Baton(device_name(run.folder))
        self.publisher = publisher_of(run, models.tied, device)
        self.rewards: list[float] = []
        """Of the steps since the last checkpoint."""
        self.client = process.client(run.folder, run.config, run.name, "learner")
        if self.rank == 0:
            self.metrics = MetricsWriter(run.folder)

    @property
    def version(self) -> int:
        return pack_version(self.lineage.incarnation, self.step)

    def train(self) -> None:
        """The main loop."""
        self._rehearse()
        self._publish()
        if self.rank == 0:
            source = self.publisher.source if self.publisher is not None else ""
            news = m.Published(self.version, list(self.lineage.forks), source=source)
            self.client.ask(news, m.Done)
        while self.step < self.config.steps:
            waited = time.time()
            planned, batch = self._take()
            if planned is None:
                break
            with self._devices():
                mine = self._fetch(planned)
                started = time.time()
                result = self._train(planned, mine) if planned.gradient else None
                self.step += 1
                trained = time.time()
                if result is not None:
                    self._publish()
                else:
                    dist.barrier()  # a commit retires the batch, which every rank must have fetched
                self._commit(planned, changed=result is not None)
            self._report(planned, batch, mine, result, waited, started, trained, time.time())
            self._durable(self.checkpoints.finished())
            if self.step % self.config.learner.checkpoint_every == 0 and self.step < self.config.steps:
                self._save()
        self._save()
        with self.timeline.span("finish checkpoint"):
            self._durable(self.checkpoints.wait())
        with self.timeline.span("export"):
            export_live(self.run.folder, self.policy, self.config, self.step)

    # --- the parts of a step -----------------------------------------------------------------------------------

    def _take(self) -> tuple[Plan | None, m.Batch | None]:
        """The plan of the next batch on every rank, None if the run was asked to stop; on rank 0 the batch as well."""
        with self.timeline.span("wait for a batch"):
            batch = self.client.ask(m.Take(self.version), m.Batch, until=self._stopping) if self.rank == 0 else None
            box = [plan(batch, ranks=self.mesh.data_ranks, algorithm=self.config.algorithm) if batch else None]
            dist.broadcast_object_list(box, src=0)
        return box[0], batch

    @contextmanager
    def _devices(self) -> Iterator[None]:
        """The devices for the length of the block, if workers use them too; on a CPU rank 0 asks for all ranks."""
        if self.config.launch.placement != "colocated":
            yield
            return
        with self.baton.mine() if self.baton is not None else nullcontext():
            dist.barrier()
            yield

    def _fetch(self, planned: Plan) -> Share:
        rows = planned.rows[self.mesh.data_rank]
        request = m.Fetch(planned.lease, [row.ticket for row in rows])
        arrays = self.client.fetch(request)
        ages = ages_of(arrays, self.version, self.lineage)
        trained = ages[arrays.mask.astype(bool)]
        if trained.size and trained.max() > self.config.staleness.max_staleness:
            raise AssertionError(f"a token of age {trained.max()} passed the bound of the buffer")
        return share(planned, self.mesh.data_rank, arrays, ages, self.config)

    def _train(self, planned: Plan, mine: Share) -> StepResult:
        learner = self.config.learner
        with self.timeline.span(f"train step {self.step}", busy=True):
            rate = learning_rate(learner.learning_rate, learner.warmup_steps, self.step) * self.control.scale
            return self.stepper.step(mine, rate=rate)

    def _publish(self) -> None:
        """A snapshot of the weights for the workers; complete when this returns."""
        with self.timeline.span("publish"):
            due = self.publications < 2 or self.publications % self.config.weights.probe_every == 0
            probe = self._probe() if due else None
            self.publications += 1
            tensors = checkpoint.full_tensors(self.policy, trained=True)
            if self.publisher is not None:
                manifest = self.publisher.publish(self.version, tensors, probe)
                self.published_bytes = sum(entry.nbytes for entry in manifest.tensors)
            else:
                _exhaust(tensors)

    def _rehearse(self) -> None:
        """Publishes weights that are visibly others, for a worker to load and be probed with before the real ones.

        The first real version is what the engine loaded from disk, and one step changes it by less than the engine's
        precision: only a rehearsal shows that an update reaches every part, a tied head included.
        """
        with torch.no_grad(), self.timeline.span("rehearse"), self._disturbed():
            probe, tensors = self._probe(), checkpoint.full_tensors(self.policy, trained=True)
            if self.publisher is not None:
                self.publisher.rehearse(tensors, probe)
            else:
                _exhaust(tensors)

    @contextmanager
    def _disturbed(self) -> Iterator[None]:
        """Embeddings are halved, which is exact, or adapters are no longer what they began as, for the block."""
        model = self.policy.model
        if self.config.learner.lora.rank:
            weights = [weight for name, weight in model.named_parameters() if name.endswith(adapters.B)]
            before = [weight.clone() for weight in weights]
            for weight in weights:
                weight.add_(0.02)
            yield
            for weight, as_it_was in zip(weights, before, strict=True):
                weight.copy_(as_it_was)
            return
        embeddings = [model.get_input_embeddings().weight]
        if not self.models.tied:
            embeddings.append(model.get_output_embeddings().weight)
        for weight in embeddings:
            weight.mul_(0.5)
        yield
        for weight in embeddings:
            weight.mul_(2.0)

    def _commit(self, planned: Plan, *, changed: bool) -> None:
        if self.rank == 0:
            bound = effective_bound(self.control, self.config.staleness)
            commit = m.Commit(planned.lease, self.version, changed, bound)
            reply = self.client.ask(commit, m.Committed)
            assert reply is not None
            self.cursor = reply.cursor

    def _probe(self) -> Probe:
        """Log-probs of some prompts' tokens under the weights about to be published, at temperature 1."""
        tokens = np.concatenate(self.prompts.tokens[:PROBE_TOKENS]).astype(np.int64)
        tokens = np.resize(tokens, max(2, min(tokens.size, PROBE_TOKENS)))  # a single token is repeated
        packed = pack([Segment(tokens[:1], [Member(0, tokens[1:])])], tokens=tokens.size)[0]
        temperature, self.policy.temperature = self.policy.temperature, 1.0
        accumulate(self.policy, last=True)
        with torch.no_grad():
            logprobs = self.policy(packed).logprobs
        reshard(self.policy)
        self.policy.temperature = temperature
        return Probe(tokens.tolist(), logprobs.tolist())

    # --- around the steps --------------------------------------------------------------------------------------

    def _tokens(self, path: str, device: torch.device) -> int | None:
        """Of a micro-batch, if memory decides; the same on every rank."""
        described = memory.read(path)
        if self.config.learner.micro_batch_tokens != "auto" or described is None:
            return None
        longest = max(tokens.size for tokens in self.prompts.tokens) + self.config.rollout.max_tokens
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = psutil.virtual_memory().available // self.world
        fits = torch.tensor(memory.micro_batch(described, self.config, free=free, longest=longest), device=device)
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        return int(fits)

    def _restore(self) -> tuple[int, int]:
        """Step and prompt cursor: from the newest checkpoint if there is one."""
        found = state.latest(self.run.folder / "checkpoints")
        if found is None:
            return 0, 0
        path, saved = found
        checkpoint.restore(path, self.models.parts())
        return saved.step, saved.cursor

    def _save(self) -> None:
        """A snapshot of everything, written while the next steps are trained."""
        known = [reward for reward in self.rewards if np.isfinite(reward)]
        reward = float(np.mean(known)) if known else None
        self.rewards.clear()
        with self.timeline.span("checkpoint"):
            durable = self.checkpoints.save(state.State(self.step, self.cursor, self.prompts.fingerprint, reward))
        self._durable(durable)

    def _copied(self) -> None:
        """Waits until a checkpoint that is being taken has its copy of what the optimizer is about to change."""
        if self.checkpoints.copying:
            with self.timeline.span("checkpoint copy"):
                self.checkpoints.copied()

    def _durable(self, saved: state.State | None) -> None:
        """What a checkpoint on disk contains, the buffer may forget."""
        if saved is not None:
            self.client.ask(m.Checkpointed(saved.step), m.Done)

    def _report(
        self,
        planned: Plan,
        batch: m.Batch | None,
        mine: Share,
        result: StepResult | None,
        waited: float,
        started: float,
        trained: float,
        published: float,
    ) -> None:
        shares = [None] * self.world
        dist.all_gather_object(shares, StepReport.of(mine, result) if self.mesh.leads else None)
        parts = [part for part in shares if part]
        self.control = controlled(self.control, parts, self.config.staleness)
        if batch is not None:
            times = {"wait_s": started - waited, "train_s": trained - started, "publish_s": published - trained}
            times["cpu_s"] = time.process_time()
            line = report(planned, batch, parts, self.config, times, self.control)
            line["published_bytes"] = self.published_bytes if result is not None else 0
            self.metrics.write({"step": self.step, "time": published, **line})
            self.rewards.append(line["reward"])

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Asks for an orderly end after the step in progress; usable as a signal handler."""
        self._stop = True

    def _stopping(self) -> bool:
        if self.publisher is not None:
            self.publisher.check()
        return self._stop

    def close(self) -> None:
        if self.publisher is not None:
            # The segments stay until the supervisor removes them: workers may still be reading the last version. Nobody
            # needs another pull.
            self.publisher.stop()
        if self.rank == 0:
            self.metrics.close()
        self.checkpoints.close()
        self.client.close()
        self.timeline.close()


def _exhaust(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Takes part in the gathering of whole tensors without keeping them."""
    for _ in tensors:
        continue


def _device(rank: int, wanted: str) -> torch.device:
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", rank % torch.cuda.device_count())


def _rendezvous(run: process.Run) -> dist.Store:
    """Where the ranks find each other: in a file if they are all on this host; else rank 0 listens, and says where in
    the run's folder."""
    file, world = run.folder / "rendezvous", run.config.learner.ranks
    if run.address == process.LOOPBACK:
        return dist.FileStore(str(file.resolve()), world)
    if run.rank == 0:
        store = dist.TCPStore(run.address, 0, world, is_master=True, wait_for_workers=False)
        partial = file.with_suffix(".partial")
        partial.write_text(f"{run.address} {store.port}")
        partial.rename(file)
        return store
    while not file.exists():  # the supervisor ends a rank whose rank 0 never comes
        time.sleep(0.05)
    address, port = file.read_text().split()
    return dist.TCPStore(address, int(port), world, is_master=False)


def main() -> None:
    run = process.start("learner")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it
    os.environ.update(RANK=str(run.rank), WORLD_SIZE=str(run.config.learner.ranks), LOCAL_RANK=str(run.rank))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(run.config.seed)
    torch.use_deterministic_algorithms(run.config.deterministic)
    on_gpu = run.config.launch.device != "cpu" and torch.cuda.is_available()
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        store=_rendezvous(run),
        rank=run.rank,
        world_size=run.config.learner.ranks,
        # Ranks wait for rank 0 as long as generation takes; the supervisor notices who is dead.
        timeout=datetime.timedelta(days=1),
    )
    learner = Learner(run)
    signal.signal(signal.SIGTERM, learner.stop)
    learner.train()
    learner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    process.guard(main)
