"""The life of a run's processes: start, watch, start again, end. A death is never silent."""

from __future__ import annotations

import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from launchers.errors import ComponentDied
from launchers.hosts import Handle, Host, Spec

RESTARTED = ("buffer", "worker", "learner")
TRY_AGAIN = 75
"""Exit code (EX_TEMPFAIL) of a process that found itself stuck: a new one may get further."""
BACKOFF_S = 1.0
MOST_BACKOFF_S = 30.0
LEAVE_S = 60.0
"""Time for a worker to leave in good order."""
KILL_S = 5.0
"""Longest time between the decision to end everything and its end."""


@dataclass
class Child:
    """A process of the run. `leave_by`: it was asked to go by then, in monotonic seconds; its end is no death."""

    spec: Spec
    process: Handle
    leave_by: float | None = None

    @property
    def leaving(self) -> bool:
        return self.leave_by is not None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def role(self) -> str:
        return self.spec.role


@dataclass
class Found:
    """What `check` has seen: processes that had died and were dealt with, and those that left as they were asked to.

    `ranks_lost`: a learner rank had died, and no rank is left; whoever knows what they start from starts them again.
    """

    died: list[Child] = field(default_factory=list)
    left: list[Child] = field(default_factory=list)
    ranks_lost: bool = False


class Supervisor:
    """Starts processes on a host and looks after them. A death by a signal, or by `TRY_AGAIN`, is made good:

        rollout worker   started again, the second time after a second, then two, four, ...
        buffer           started again at once, from its journal
        learner rank     all ranks are ended; `check` says so, and the caller starts the group from a checkpoint

    each at most `max_restarts` times between two calls of `progress`. Any other end is an error.
    """

    def __init__(self, folder: Path, host: Host, max_restarts: int = 0, restarted: tuple[str, ...] = RESTARTED) -> None:
        self.folder = folder
        self._host = host
        self._restarted = restarted
        self._max_restarts = max_restarts
        self._restarts: Counter[str] = Counter()
        self._due: list[tuple[float, Spec]] = []
        """Processes to be started again, and when."""
        self.children: list[Child] = []
        (folder / "logs").mkdir(exist_ok=True)

    def start(self, role: str, module: str, rank: int) -> Child:
        """Starts `python -m module --run FOLDER` with its output in `logs/`."""
        return self._start(Spec(self.folder, role, module, rank))

    def _start(self, spec: Spec) -> Child:
        child = Child(spec, self._host.start(spec))
        self.children.append(child)
        return child

    def check(self) -> Found:
        """Starts again what can be. Raises `ComponentDied` if another process has ended with an error, or at all where
        it should not."""
        found = Found()
        for child in list(self.children):
            if child.leave_by is not None and time.monotonic() > child.leave_by:
                child.process.kill()
            code = child.process.poll()
            if code is None or child not in self.children:
                continue
            if child.leaving:
                self.children.remove(child)
                self._host.release(child.name)
                found.left.append(child)
            elif code != 0 or child.role not in ("learner", "prepare"):
                self._died(child, code, found)
        now = time.monotonic()
        for moment, spec in list(self._due):
            if now >= moment:
                self._due.remove((moment, spec))
                self._start(spec)
        return found

    def _died(self, child: Child, code: int, found: Found) -> None:
        name = "learner" if child.role == "learner" else child.name
        spent = self._restarts[name] >= self._max_restarts
        if not (code < 0 or code == TRY_AGAIN) or child.role not in self._restarted or spent:
            raise ComponentDied(f"{child.name} {how_it_ended(code)}{self._first_error(child)}")
        self._restarts[name] += 1
        found.died.append(child)
        again = [child] if child.role != "learner" else [each for each in self.children if each.role == "learner"]
        for each in again:
            each.process.kill()  # an engine's own processes too
            self.children.remove(each)
            with each.spec.log.open("a") as log:
                print(f"--- {child.name} {how_it_ended(code)}; {each.name} is started again", file=log)
        if child.role == "learner":
            found.ranks_lost = True
        elif child.role == "buffer":
            self._start(child.spec)
        else:
            wait = min(MOST_BACKOFF_S, BACKOFF_S * 2 ** (self._restarts[name] - 2)) if self._restarts[name] > 1 else 0
            self._due.append((time.monotonic() + wait, child.spec))

    def let_die(self, role: str) -> None:
        """Processes of a role are not started again any more."""
        self._restarted = tuple(each for each in self._restarted if each != role)

    def progress(self) -> None:
        """The run has come further: what has died so far did not stop it."""
        self._restarts.clear()

    def forget(self, role: str) -> None:
        """Drops processes that have ended well; their ids may be given to others."""
        self.children = [child for child in self.children if child.role != role]

    def having(self, role: str) -> list[Child]:
        """Those of a role that live and stay, in order of rank."""
        return sorted((c for c in self.children if c.role == role and not c.leaving), key=lambda child: child.spec.rank)

    def ranks(self, role: str) -> set[int]:
        """Numbers of a role that are taken, those of processes yet to be started again too."""
        taken = {child.spec.rank for child in self.children if child.role == role}
        return taken | {spec.rank for _, spec in self._due if spec.role == role}

    def most_workers(self) -> int | None:
        return self._host.most_workers()

    def dismiss(self, child: Child) -> None:
        """Asks a worker to hand back what it has and to go; it is made to after `LEAVE_S`."""
        child.leave_by = time.monotonic() + LEAVE_S
        child.process.signal(signal.SIGUSR1)

    def give_up(self, role: str, rank: int) -> bool:
        """Does not start again a process that has died; True if there was one to be."""
        before = len(self._due)
        self._due = [each for each in self._due if (each[1].role, each[1].rank) != (role, rank)]
        if len(self._due) == before:
            return False
        self._host.release(f"{role}{rank}")
        return True

    def done(self, role: str) -> bool:
        """All processes of a role have ended well."""
        children = [child for child in self.children if child.role == role]
        return bool(children) and all(child.process.poll() == 0 for child in children)

    def signal(self, role: str, sig: signal.Signals) -> None:
        for child in self.children:
            if child.role == role:
                child.process.signal(sig)

    def end(self) -> None:
        """Ends everything within `KILL_S`: SIGTERM to all, then SIGKILL to whole groups and to what they left."""
        living = [child.process for child in self.children if child.process.poll() is None]
        for process in living:
            process.prepare_end()
        for process in living:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + KILL_S / 2
        for process in living:
            process.finish(max(0.05, deadline - time.monotonic()))
        self._host.close()

    def _first_error(self, died: Child) -> str:
        """The oldest recorded error of any process, else the end of the dead one's log."""
        found = [path for path in (self.folder / "errors").glob("*.txt") if path.stat().st_size]  # empty: a full disk
        errors = sorted(found, key=lambda path: path.stat().st_mtime)
        if errors:
            return f"; the first error, of {errors[0].stem}:\n{errors[0].read_text().rstrip()}"
        tail = died.spec.log.read_text(errors="replace").splitlines()[-15:]
        return f"; the end of {died.spec.log}:\n" + "\n".join(tail)


def how_it_ended(code: int) -> str:
    """`was killed by SIGKILL` or `ended with exit code 1`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
