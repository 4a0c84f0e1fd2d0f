"""A run on this machine: `launch` starts everything, stays until the end, and leaves a summary."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from async_rl import config as configuration
from async_rl import process
from async_rl.config import Config
from async_rl.data.prompts import Prompts
from async_rl.errors import AsyncRLError
from async_rl.learner import state
from async_rl.tracking import plot, summary, timeline
from async_rl.tracking.display import Display
from async_rl.tracking.metrics import EVALUATIONS, MetricsReader, MetricsWriter, Record, read, truncate
from async_rl.tracking.mlflow_log import MlflowLog, uri_of
from async_rl.weights.manifest import MANIFEST, REHEARSAL
from buffers import messages as m
from buffers.client import Client
from buffers.errors import BufferFailure
from launchers import evaluator, folders, pools
from launchers.errors import ComponentDied, Interrupted, LaunchError, RunFailed, StartTimeout
from launchers.feeder import Feeder
from launchers.health import Health
from launchers.hosts import Host, LocalHost
from launchers.supervisor import RESTARTED, Found, Supervisor, how_it_ended

WORKER = "async_rl.rollout.worker"
TURN_S = 0.1
WORKER_GRACE_S = 15.0
"""Time for a worker that the buffer has given up to be heard again, before it is killed."""
LAST_WORD_S = 30.0
BETWEEN_PROCESSES = ("buffer.endpoint", "rendezvous", "prompts.npz", MANIFEST, REHEARSAL)
AT_THE_END = ("summary.json", "timeline.json", "reward.png", "eval.json", pools.FILE)
"""Files of a run's folder that a resumed run makes anew."""


def launch(config: Config, folder: Path, host: Host | None = None) -> summary.Summary:
    """Runs `config` in `folder` (new, or that of a run to resume) and returns what it came to. Never raises for a
    failed run: the summary says so. `host`: where pools are; this machine if not given."""
    begun = time.monotonic()
    with folders.alone(folder), Display(folder.name, config.steps, folder) as display:
        _forget_the_past(folder, display)
        host = host or LocalHost(config)
        config = host.configured(config, folder)
        (folder / "config.yaml").write_text(configuration.dump(config))
        run = _Run(config, folder, host)
        with _interruptible(run):
            tracker = _tracker(config, folder, display)
            status, error = run.live(display, tracker)
            result = _conclude(run, display, status, error, time.monotonic() - begun)
            if tracker is not None:
                tracker.finish({"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[status])
    display.summary(result)
    return result


class _Run:
    """The processes of a run in progress and what connects them."""

    def __init__(self, config: Config, folder: Path, host: Host) -> None:
        self.config = config
        self.folder = folder
        # A buffer without a journal has nothing to go on from, nor to offer again to a learner that goes back.
        restarted = ("worker",) if config.buffer.durability == "none" else RESTARTED
        self.supervisor = Supervisor(folder, host, config.launch.max_restarts, restarted)
        self._health = Health(worker_grace_s=WORKER_GRACE_S, buffer_silence_s=config.launch.heartbeat_s)
        self.metrics = MetricsReader(folder)
        self.earlier_steps = len(list(self.metrics.new()))
        self.feeder: Feeder | None = None
        self.client: Client | None = None
        self.interrupted = 0
        self.step = self._furthest = 0
        self._limit = 0.0
        self._moved = (0, 0, 0, -1)
        self._moved_at = time.monotonic()
        self._stalled = False
        """Whether the learner has been started again since anything moved."""
        self._workers = config.rollout.workers
        self._refused = 0
        """The size of the pool of workers that there was no room for."""
        self._tokens_before: int | None = None
        self._ticked = 0.0

    def live(self, display: Display, tracker: MlflowLog | None) -> tuple[summary.Status, str]:
        """The whole run, and how it ended: the status and, unless it finished, why."""
        try:
            self.go(display, tracker)
            return "finished", ""
        except Interrupted as interruption:
            return "interrupted", str(interruption)
        except ComponentDied as death:
            # SIGTERM on Ctrl-C may reach a learner that has not begun to heed it.
            return ("interrupted" if self.interrupted else "failed"), str(death)
        except (LaunchError, AsyncRLError, BufferFailure, OSError) as failure:
            return "failed", str(failure)
        finally:
            self.end()

    def go(self, display: Display, tracker: MlflowLog | None) -> None:
        """The run, from the first process to the last step."""
        deadline = time.monotonic() + self.config.launch.startup_s
        self._start(display, deadline)
        assert self.feeder is not None
        while not self.supervisor.done("learner"):
            self._turn()
            self._heed_deaths(self.supervisor.check(), display)
            self._heed_interrupt(display)
            for record in self.metrics.new():
                _show(record, display, tracker)
                self.step = record["step"]
                if self.step > self._furthest:  # not a step that is made again after a restart
                    self._furthest = self.step
                    self.supervisor.progress()
            if self._every(1.0):
                self.feeder.ask_status()
                display.stats(self.feeder.stats)
                self._scale(display)
                self._watch_health(display)
            self._evaluate(display, tracker)
            self._watch_progress(deadline, display)
        for record in self.metrics.new():
            _show(record, display, tracker)
        self._finish()

    def _heed_deaths(self, found: Found, display: Display) -> None:
        assert self.feeder is not None
        for died in found.died:
            display.line(f"{died.name} {how_it_ended(died.process.poll() or 0)} and is started again")
        for gone in (*found.died, *found.left):
            if gone.role == "worker" and gone.process.identity:
                self.feeder.lost(gone.process.identity)
        for left in found.left:
            display.line(f"{left.name} has left")
        if found.ranks_lost:
            self._restart_learner(display)

    def _restart_learner(self, display: Display) -> None:
        """All ranks from the newest checkpoint, or from the beginning; the others go on."""
        reached = state.latest(self.folder / "checkpoints")
        step = reached[1].step if reached else 0
        truncate(self.folder, step)
        self.metrics = MetricsReader(self.folder)
        self.step = max((record["step"] for record in self.metrics.new()), default=0)
        state.restored(self.folder, step)
        for name in ("rendezvous", REHEARSAL):
            (self.folder / name).unlink(missing_ok=True)
        display.line(f"the learner goes on from step {step}")
        self._start_ranks()

    def _start_ranks(self) -> None:
        for rank in range(self.config.learner.ranks):
            self.supervisor.start("learner", "async_rl.learner.rank", rank)

    def _scale(self, display: Display) -> None:
        """What `async-rl scale` has asked for."""
        wanted = pools.asked(self.folder)
        most = self.supervisor.most_workers()
        if wanted is not None and most is not None and wanted > most:
            if wanted != self._refused:
                display.line(f"rollout workers: {wanted} were asked for, and the GPUs here are enough for {most}")
            self._refused, wanted = wanted, most
        if wanted is None or wanted == self._workers:
            return
        supervisor = self.supervisor
        leaving = {child.spec.rank for child in supervisor.children if child.role == "worker" and child.leaving}
        taken = supervisor.ranks("worker")
        start, dismiss = pools.changes(taken - leaving, taken, wanted)
        for rank in start:
            supervisor.start("worker", WORKER, rank)
        for child in supervisor.having("worker"):
            if child.spec.rank in dismiss:
                supervisor.dismiss(child)
        for rank in dismiss:
            supervisor.give_up("worker", rank)
        display.line(f"rollout workers: {self._workers} -> {wanted}")
        self._workers = wanted

    def _evaluate(self, display: Display, tracker: MlflowLog | None) -> None:
        feeder = self.feeder
        if feeder is None or feeder.evaluator is None:
            return
        if feeder.stats.version < 0:
            feeder.ask_status()  # the first version is not to be missed
            if len(feeder.workers) < self._workers:
                return
        for record in feeder.evaluator.turn(feeder.stats.version, feeder.workers, time.monotonic()):
            record["time"] = time.time()
            self.evaluations.write(record)
            display.line(evaluator.told(record))
            if tracker is not None:
                tracker.log(record)

    def _watch_health(self, display: Display) -> None:
        """A process that hangs is killed, so that it is started again."""
        assert self.feeder is not None
        now = time.monotonic()
        workers = {child.process.identity: child for child in self.supervisor.having("worker")}
        for identity in self._health.lost_workers(workers, self.feeder.workers, now):
            display.line(f"{workers[identity].name} lives and is silent: it is killed")
            workers[identity].process.kill()
        if self._health.buffer_is_silent(self.feeder.heard_at, now):
            display.line("the buffer lives and is silent: it is killed")
            for child in self.supervisor.having("buffer"):
                child.process.kill()

    def _turn(self) -> None:
        """Hears the buffer. That it can go no further does not matter to a run whose steps are done."""
        assert self.feeder is not None
        try:
            self.feeder.turn(TURN_S)
        except RunFailed:
            if self.step < self.config.steps:
                raise

    def _start(self, display: Display, deadline: float) -> None:
        display.line(f"run folder {self.folder}")
        supervisor, folder = self.supervisor, self.folder
        supervisor.start("buffer", "async_rl.buffer_process", 0)
        display.line("preparing prompts")
        supervisor.start("prepare", "async_rl.data.prepare", 0)
        self._wait_for(lambda: supervisor.done("prepare"), "the preparation of prompts", deadline)
        supervisor.forget("prepare")
        self._wait_for((folder / "buffer.endpoint").exists, "the buffer's start", deadline)
        display.line(
            f"starting {self.config.rollout.workers} rollout workers, {self.config.learner.ranks} learner ranks"
        )
        self._start_ranks()
        for rank in range(self.config.rollout.workers):
            supervisor.start("worker", WORKER, rank)
        self._feed()

    def _wait_for(self, ready: Callable[[], bool], what: str, deadline: float) -> None:
        """Returns when `ready()` holds; Ctrl-C, a death or the deadline (monotonic seconds) raises."""
        while not ready():
            self.supervisor.check()
            if self.interrupted:
                raise Interrupted("stopped before the first step")
            if time.monotonic() > deadline:
                raise StartTimeout(f"{what} did not happen in time; logs are in {self.folder / 'logs'}")
            time.sleep(0.05)

    def _feed(self) -> None:
        prompts = Prompts.read(self.folder / "prompts.npz")
        found = state.latest(self.folder / "checkpoints")
        self.client = process.client(self.folder, self.config, "feeder", "feeder")
        self.feeder = Feeder(
            self.client,
            prompts,
            self.config.data,
            start=found[1].cursor if found else 0,
        )
        evaluation = self.config.evaluation
        if evaluation.every:
            held_out = Prompts.read(self.folder / "heldout.npz")
            limit_s = 2 * evaluation.hold_s + self.config.launch.stall_s
            self.evaluations = MetricsWriter(self.folder, EVALUATIONS)
            self.feeder.evaluator = evaluator.Evaluator(evaluation, held_out, self.client.send, limit_s)

    def _watch_progress(self, deadline: float, display: Display) -> None:
        """A process that hangs does not die: if nothing moves for too long, the learner that has a batch is started
        again, or the run fails."""
        assert self.feeder is not None
        now, stats, launch = time.monotonic(), self.feeder.stats, self.config.launch
        moved = (stats.tokens, stats.trained, stats.failed, stats.version)
        if moved != self._moved:
            self._moved, self._moved_at, self._stalled = moved, now, False
        if self._tokens_before is None and stats.limit:
            self._tokens_before = stats.tokens  # of the lives before this one
        generated = stats.tokens - (self._tokens_before or 0)
        if generated == 0 and now > deadline:
            raise RunFailed(f"no token was generated within launch.startup_s = {launch.startup_s:g} s")
        if not generated or now - self._moved_at <= launch.stall_s:
            return
        ranks = self.supervisor.having("learner")
        if stats.leased and ranks and not self._stalled:
            self._stalled, self._moved_at = True, now
            display.line(f"nothing has moved for launch.stall_s = {launch.stall_s:g} s: the learner is killed")
            ranks[0].process.kill()
        else:
            raise RunFailed(
                f"no token was generated and no batch was trained for launch.stall_s = {launch.stall_s:g} s: "
                f"a process hangs; logs are in {self.folder / 'logs'}"
            )

    def _finish(self) -> None:
        """Last counters, once the learner has ended well."""
        assert self.feeder is not None
        deadline = time.monotonic() + LAST_WORD_S
        self.feeder.ask_status()
        while not self.feeder.last_word:
            self.supervisor.check()
            self.feeder.turn(TURN_S)
            if self._every(2.0):
                self.feeder.ask_status()
            if time.monotonic() > deadline:
                raise RunFailed(f"the buffer did not say how the run ended within {LAST_WORD_S:g} s")
        steps = read(self.folder)[-1:]
        if self.interrupted:
            raise Interrupted("stopped by the user; resume with --resume")
        if not steps or steps[0]["step"] < self.config.steps:
            raise RunFailed(f"the learner ended before step {self.config.steps}")

    def _heed_interrupt(self, display: Display) -> None:
        """First Ctrl-C: an orderly end within `shutdown_s`. The second, or the limit: now."""
        if not self.interrupted:
            return
        if self.interrupted == 1:
            display.line("stopping after this step; press Ctrl-C again to stop at once")
            self.supervisor.let_die("learner")
            self.supervisor.signal("learner", signal.SIGTERM)
            self._limit = time.monotonic() + self.config.launch.shutdown_s
            self.interrupted = 2
        elif self.interrupted > 2 or time.monotonic() > self._limit:
            raise Interrupted("stopped at once; the last checkpoint is intact")

    def interrupt(self, sig: int, _frame: FrameType | None) -> None:
        """Signal handler: SIGTERM counts as both Ctrl-C at once."""
        self.interrupted += 1 if sig == signal.SIGINT else 3

    def _every(self, seconds: float) -> bool:
        now = time.monotonic()
        if now - self._ticked < seconds:
            return False
        self._ticked = now
        return True

    def end(self) -> None:
        if self.client is not None:
            self.client.close()
        self.supervisor.end()


def _forget_the_past(folder: Path, display: Display) -> None:
    """Removes what an earlier life of the run left that the checkpoint does not know of."""
    for name in (*BETWEEN_PROCESSES, *AT_THE_END):
        (folder / name).unlink(missing_ok=True)
    for name in ("errors", "model"):
        shutil.rmtree(folder / name, ignore_errors=True)
    found = state.latest(folder / "checkpoints")
    truncate(folder, found[1].step if found else 0)
    if found:
        state.restored(folder, found[1].step)
        display.line(f"going on from {found[0]}")


def _tracker(config: Config, folder: Path, display: Display) -> MlflowLog | None:
    if not config.tracking.mlflow:
        return None
    runs = folder.parent
    uri = uri_of(config.tracking, runs)
    if uri.startswith("sqlite"):
        display.line(f"MLflow: mlflow ui --backend-store-uri {shlex.quote(uri)}")
    params = dict(_flat(msgspec.to_builtins(config)))
    return MlflowLog(config.tracking, runs, folder.name, params, lambda text: display.line(f"warning: {text}"))


def _flat(tree: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _show(record: Record, display: Display, tracker: MlflowLog | None) -> None:
    display.step(record)
    if tracker is not None:
        tracker.log(record)


def _conclude(run: _Run, display: Display, status: summary.Status, error: str, wall_s: float) -> summary.Summary:
    """Makes everything that is made at the end; a failed run has it too, as far as it went and the disk takes it."""
    records = read(run.folder)
    stats = run.feeder.stats if run.feeder else m.Stats()
    result = summary.summarise(
        run.folder, records, stats, status=status, error=error, wall_s=wall_s, earlier=run.earlier_steps
    )
    try:
        summary.write(result, run.folder)
        timeline.merge(run.folder)
        if records:
            plot.plot(records, run.folder / "reward.png")
    except OSError as failure:
        display.line(f"warning: not everything could be written to {run.folder}: {failure}")
    return result


@contextmanager
def _interruptible(run: _Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM reach `run` for the length of the block."""
    before = {sig: signal.signal(sig, run.interrupt) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def exit_code(status: summary.Status) -> int:
    """0 for a run that finished its steps, 130 after Ctrl-C, 1 otherwise."""
    return {"finished": os.EX_OK, "interrupted": 130, "failed": 1}[status]
