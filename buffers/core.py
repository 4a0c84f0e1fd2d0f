"""The buffer's state machine. Messages in, messages out; no I/O, no clock, no randomness.

    running ──finished──▶ ready ──take──▶ leased ──commit──▶ trained
       │                    │
       ├──failed            └──expired (older than the bound)      parked: trained, then undone by a restore
       └──cancelled (its group is not wanted any more)

    core = Core(Settings(batch=2, group=2, max_staleness=0, max_tokens=8))
    core.handle("feeder", Hello("feeder"))
    core.handle("w", Hello("worker", slots=2))
    core.handle("rank0", Published(0))             # -> Credit(upto=1) to the feeder
    core.handle("feeder", Submit(0, [prompt]))     # -> Tickets to "w"
    core.append("w", 1, chunks)                    # -> Ack
    core.handle("w", Outcomes(2, [...]))           # both members: the group is ready
    core.handle("rank0", Take(0))                  # -> Batch
    core.handle("rank0", Commit(lease, 1))         # -> Committed, News to "w", Credit to the feeder

The same messages in the same order lead to the same state: that is how the journal brings a core back. Any message may
come twice. Every ticket is in one state, and `issued = trained + expired + failed + cancelled + in flight` after every
call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from buffers import groups
from buffers import messages as m
from buffers.errors import ProtocolError
from buffers.issuing import Issuing
from buffers.offering import Offering
from buffers.records import IN_FLIGHT, Group, Settings, State, Trajectory
from buffers.store import SELF, Send, Store
from staleness.versions import Lineage, show, unpack


class Core:
    """See the module. `handle` and `append` return what is to be sent; a `ProtocolError` leaves the state untouched."""

    def __init__(self, settings: Settings) -> None:
        self.store = Store(settings)
        self.issuing = Issuing(self.store)
        self.offering = Offering(self.store)

    @property
    def settings(self) -> Settings:
        return self.store.settings

    # --- events ------------------------------------------------------------------------------------------------

    def append(self, peer: str, seq: int, chunks: m.Chunks) -> list[Send]:
        """Stores the chunks that fit, refuses the others one by one, acknowledges the message.

        See `buffers/appends.py` for what fits. A gap is refused with the offset to resend from; a ticket that is not
        the sender's (any more) is `fenced`.
        """
        self.issuing.append(peer, seq, chunks)
        # More tokens are a reason to look at what is on offer only if they can be offered.
        return self._sent() if self.settings.segments is None else self._settle()

    def reloaded(self, message: m.Reloaded, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> list[Send]:
        """What the journal held of the trajectories that `Reload` asked for."""
        self.offering.reloaded(message, tokens, logprobs)
        return self._settle()

    def handle(self, peer: str, message: m.Inbound) -> list[Send]:
        """Acts on any message but those above and returns what is to be sent."""
        question = self.is_question(peer, message)
        match message:
            case m.Hello():
                self._hello(peer, message)
            case m.Submit():
                if peer != self.store.feeder:
                    raise ProtocolError(f"{peer!r} is not the feeder")
                self.issuing.submit(message)
            case m.Outcomes():
                self._outcomes(peer, message)
            case m.Published():
                self._published(message)
                self.store.send(peer, m.Done(message.request))
            case m.Take():
                self.offering.request(peer, message)
            case m.Fetch():
                arrays = self.offering.fetch(message)
                self.store.send(peer, m.Samples(message.lease, message.request), arrays.to_frames())
            case m.Commit():
                self._commit(peer, message)
            case m.Checkpointed(step):
                self.offering.checkpointed(step)
                self.store.send(peer, m.Done(message.request))
            case m.Status(request):
                self.store.send(peer, m.StatusReply(self.store.stats(), request, list(self.issuing.workers)))
            case m.Lost(name):
                self._lost(name)
            case m.Leave():
                if peer in self.issuing.workers:
                    self._exhausted(self.issuing.lose(peer, by_its_tickets=False))
            case m.NewLife():
                self._new_life()
            case m.GiveUp(serials):
                for serial in serials:
                    self._give_up(serial)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for the buffer")
        return self._sent() if question else self._settle()

    def receive(self, peer: str, message: m.Inbound, frames: Sequence[bytes | memoryview]) -> list[Send]:
        """Any message with its frames; what the server, the journal's recovery and the simulator call."""
        if isinstance(message, m.Append):
            return self.append(peer, message.seq, m.Chunks.from_frames(message, frames))
        if isinstance(message, m.Reloaded):
            if peer != SELF or len(frames) != 2:
                raise ProtocolError("only the server itself brings back what was parked, in 2 frames")
            return self.reloaded(message, np.frombuffer(frames[0], np.int32), np.frombuffer(frames[1], np.float32))
        return self.handle(peer, message)

    def is_question(self, peer: str, message: m.Inbound) -> bool:
        """Whether the message changes nothing, so that the journal need not have it."""
        if isinstance(message, m.Hello):
            worker = self.issuing.workers.get(peer)
            known = {
                "worker": worker is not None and worker.slots == message.slots,
                "feeder": peer == self.store.feeder,
            }
            return known.get(message.role, True)
        return isinstance(message, m.Fetch | m.Status)

    # --- peers -------------------------------------------------------------------------------------------------

    def _hello(self, peer: str, hello: m.Hello) -> None:
        if hello.role == "worker":
            self._exhausted(self.issuing.welcome(peer, hello))
        elif hello.role == "feeder":
            self.store.feeder = peer
            self.issuing.credit(again=True)

    def _lost(self, name: str) -> None:
        for peer in self.issuing.peers_called(name):
            self._exhausted(self.issuing.lose(peer))
        self.offering.give_back(name)

    def _new_life(self) -> None:
        self.offering.give_back()
        for peer in list(self.issuing.workers):
            self._exhausted(self.issuing.lose(peer, by_its_tickets=False))
        self.store.feeder = None
        self.issuing.credited = 0
        self.store.suspended = True

    def _exhausted(self, trajectories: list[Trajectory]) -> None:
        for trajectory in trajectories:
            if trajectory.state != "running":
                continue  # cancelled with its group
            killer = trajectory.deaths >= self.settings.max_attempts
            error = f"{trajectory.deaths} workers died while they had ticket {trajectory.ticket}"
            if not killer:
                error = f"ticket {trajectory.ticket} was trained on in part, cannot be replayed, and lost its worker"
            self._failed(trajectory, error, again=not killer)
        for group in dict.fromkeys(trajectory.group for trajectory in trajectories):
            self._review(group)

    # --- outcomes and groups -----------------------------------------------------------------------------------

    def _outcomes(self, peer: str, message: m.Outcomes) -> None:
        refused: list[m.Refusal] = []
        for outcome in message.outcomes:
            refusal = self.issuing.refusal(peer, outcome)
            if refusal is None:
                self._outcome(outcome)
            else:
                refused.append(refusal)
        if peer in self.issuing.workers:
            self.store.usage[peer] = (message.busy_s, message.overhead_s)
        self.store.send(peer, m.Ack(message.seq, refused))

    def _outcome(self, outcome: m.Outcome) -> None:
        store = self.store
        trajectory = store.trajectories[outcome.ticket]
        row = store.pool.row(outcome.ticket)
        length = int(store.pool.length[row])
        store.tally.span_mismatches += outcome.span_mismatch and not trajectory.finish_reason
        if outcome.status == "generated":
            trajectory.finish_reason = outcome.finish_reason
            return
        status, error = outcome.status, outcome.error
        if status == "finished" and outcome.length != length:
            status, error = "failed", f"{length} tokens stored, the worker counts {outcome.length}"
        sampled, finite = store.pool.count_sampled(row)
        if status == "finished" and not sampled:
            status, error = "failed", "the response is empty"
        if status == "finished" and not finite:
            store.tally.masked_nonfinite += sampled
            status, error = "failed", "the engine gave no token a finite log-prob"
        if status == "finished" and (outcome.reward is None or not np.isfinite(outcome.reward)):
            status, error = "failed", f"the reward is {outcome.reward}"
        if status == "finished":
            trajectory.reward = outcome.reward
            trajectory.parts, trajectory.turns, trajectory.baseline = outcome.parts, outcome.turns, outcome.baseline
            trajectory.finish_reason = outcome.finish_reason
            self.issuing.release(trajectory)
            store.pool.seal(trajectory.ticket)
            store.move(trajectory, "ready")
        else:
            self._failed(trajectory, error, again=status != "refused")
        self._review(trajectory.group)

    def _failed(self, trajectory: Trajectory, error: str, *, again: bool) -> None:
        """A member has failed; `again`: another try may succeed."""
        store, group = self.store, trajectory.group
        store.tally.last_error = error
        self.issuing.release(trajectory)
        store.move(trajectory, "failed")
        if again and group.serial in store.groups and groups.replaceable(group, trajectory.member, store.settings):
            self.issuing.replace(trajectory)
        elif store.settings.on_failed == "fail_group":
            self._fail(group)

    def _review(self, group: Group) -> None:
        """What the group policy says now."""
        if group.serial not in self.store.groups:
            return
        timed = self.settings.group_policy == "deadline_versions"
        decision = groups.verdict(group, self.settings, self.store.age(group.issued_at) if timed else 0)
        if decision == "fail":
            self._fail(group)
        if decision == "cut":
            self.issuing.cancel_running(group)
        if decision in ("offer", "cut"):
            self.store.tally.failed_in_a_row = 0
            if self.settings.dynamic_sampling and groups.uninformative(group):
                self._filter(group)
            else:
                self.store.tally.filtered_in_a_row = 0
                self.offering.refresh(group)

    def _fail(self, group: Group) -> None:
        """The group is not trained on, and counts towards the end of the run."""
        self._drop(group, "cancelled")
        tally = self.store.tally
        tally.failed_groups += 1
        tally.failed_in_a_row += 1
        if tally.failed_in_a_row >= self.settings.max_consecutive_failed_groups:
            self._end_run(
                f"{tally.failed_in_a_row} groups in a row failed entirely; the last error: {tally.last_error}"
            )

    def _filter(self, group: Group) -> None:
        """The group's rewards are all equal: another takes its place."""
        self._drop(group, "cancelled")
        tally = self.store.tally
        tally.filtered_groups += 1
        tally.filtered_in_a_row += 1
        if tally.filtered_in_a_row >= self.settings.max_consecutive_filtered:
            self._end_run(
                f"{tally.filtered_in_a_row} groups in a row had equal rewards, and dynamic sampling leaves those out: "
                "the task is too hard, too easy, or learnt"
            )

    def _end_run(self, reason: str) -> None:
        if self.store.feeder is not None:
            self.store.send(self.store.feeder, m.Fatal(reason, self.store.stats()))

    def _give_up(self, serial: int) -> None:
        group = self.store.groups.get(serial)
        if group is None or serial not in self.offering.late():
            return
        self.store.tally.late_groups += 1
        self._drop(group, "expired")

    def _drop(self, group: Group, finished: State) -> None:
        """Cancels what is running of a group, and ends what has finished as `finished`; what is leased goes on."""
        self.issuing.cancel_running(group)
        for trajectory in group.having("ready"):
            self.store.move(trajectory, finished)
        self.offering.refresh(group)

    # --- versions ----------------------------------------------------------------------------------------------

    def _published(self, message: m.Published) -> None:
        store = self.store
        forks = tuple(message.forks)
        if (message.version, forks) == (store.version, store.lineage.forks) and not store.suspended:
            return
        if forks[: len(store.lineage.forks)] != store.lineage.forks or len(forks) != unpack(message.version)[0]:
            raise ProtocolError(
                f"version {show(message.version)} with restores at {list(forks)} does not continue a run with restores "
                f"at {list(store.lineage.forks)}: the run's lineage.json and its journal do not belong together. "
                "Remove the journal folder to go on from the checkpoint alone"
            )
        self.offering.check_newer(message.version)
        gone_back = forks != store.lineage.forks
        store.lineage = Lineage(forks)
        if gone_back:
            self.offering.restore(unpack(message.version)[1])
            if store.settings.regenerate:
                self._regenerate()
        store.suspended = False
        store.source = message.source
        self._announce(message.version, changed=True)

    def _regenerate(self) -> None:
        """What no checkpoint contains is cancelled, and its prompts are issued again."""
        self.offering.cancel_parked()
        groups = list(self.store.groups.values())
        for group in groups:
            self._drop(group, "cancelled")
        if groups:
            self.issuing.go_back(min(group.index for group in groups))

    def _commit(self, peer: str, commit: m.Commit) -> None:
        if not self.offering.commit(peer, commit):
            return
        self.store.eta = commit.max_staleness
        self._announce(commit.version, changed=commit.changed)
        done = m.Committed(commit.lease, self.cursor(), commit.request)
        self.offering.committed = done
        self.store.send(peer, done)

    def _announce(self, version: int, *, changed: bool) -> None:
        self.store.version = version
        for worker in self.issuing.workers:
            self.store.send(worker, m.News(version, changed, self.store.source))
        if self.settings.group_policy == "deadline_versions":
            for group in [group for group in self.store.groups.values() if group.having("running")]:
                self._review(group)

    # --- what follows from every event -------------------------------------------------------------------------

    def _settle(self) -> list[Send]:
        if self.store.suspended:
            return self._sent()
        self.offering.offer()
        self.offering.reload()
        self.issuing.assign()
        self.issuing.credit()
        return self._sent()

    def _sent(self) -> list[Send]:
        out, self.store.out = self.store.out, []
        return out

    # --- accounts ----------------------------------------------------------------------------------------------

    def cursor(self) -> int:
        """Place in the order of prompts before which none is in flight: where a restart without a journal continues."""
        return min((group.index for group in self.store.groups.values()), default=self.issuing.next_prompt or 0)

    def stats(self) -> m.Stats:
        return self.store.stats()

    def check(self) -> None:
        """Raises AssertionError if the accounts do not add up; for tests and the simulator."""
        store, counts = self.store, self.store.counts
        assert store.tally.issued == sum(counts.values()), counts
        assert store.in_flight - counts["parked"] == len(store.trajectories) == store.pool.rows - store.pool.free_rows
        # A run that is resumed with a smaller limit keeps what it has.
        assert store.in_flight - counts["parked"] <= max(self.settings.limit, store.pool.rows)
        assert counts["parked"] == len(self.offering.parked) + len(self.offering.loading)
        states = [trajectory.state for trajectory in store.trajectories.values()]
        for state in ("running", "ready", "leased"):
            assert states.count(state) == counts[state], state
        leases = self.offering.leases.values()
        assert counts["leased"] == sum(len(lease.trajectories) for lease in leases)
        members = [member for group in store.groups.values() for member in group.having(*IN_FLIGHT)]
        assert len(members) == store.in_flight, (len(members), counts)
        held = [ticket for worker in self.issuing.workers.values() for ticket in worker.tickets]
        waiting = [trajectory.ticket for trajectory in self.issuing.waiting]
        assert sorted(held + waiting) == sorted(t for t, tr in store.trajectories.items() if tr.state == "running")
        for serial, count in self.offering.ready.items():
            assert count == len(store.groups[serial].having("ready")) > 0
        for number, row in ((w.number, store.pool.row(t)) for w in self.issuing.workers.values() for t in w.tickets):
            assert store.pool.owner[row] == number
