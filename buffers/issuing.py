"""The rollout side of the core: prompts in on credit, tickets out to workers, chunks and outcomes back, deaths."""

from __future__ import annotations

from collections import deque

from buffers import appends
from buffers import messages as m
from buffers.errors import ProtocolError
from buffers.pool import NOBODY
from buffers.records import Group, Trajectory, Worker
from buffers.store import Store, is_called


class Issuing:
    """Owns the workers, the queue of tickets without a worker, and the place in the order of prompts."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.workers: dict[str, Worker] = {}
        self.waiting: deque[Trajectory] = deque()
        self.next_prompt: int | None = None
        self.groups_made = 0
        self.workers_seen = 0
        self.credited = 0

    # --- workers -----------------------------------------------------------------------------------------------

    def welcome(self, peer: str, hello: m.Hello) -> list[Trajectory]:
        """A worker's first hello, or one by which it and the buffer compare what they hold.

        An older worker of the same name is gone; returns its trajectories that cannot go on.
        """
        if hello.slots < 0:
            raise ProtocolError(f"worker {peer!r} offers {hello.slots} slots")
        store = self.store
        worker = self.workers.get(peer)
        exhausted: list[Trajectory] = []
        if worker is None:
            for older in self.peers_called(peer.split("#")[0]):
                exhausted += self.lose(older)
            self.workers_seen += 1
            worker = self.workers[peer] = Worker(self.workers_seen, hello.slots)
        worker.slots = hello.slots
        if store.version is not None and not store.suspended:
            store.send(peer, m.News(store.version, changed=True, source=store.source))
        held = {(held.ticket, held.attempt) for held in hello.holding}
        ours = {(ticket, store.trajectories[ticket].attempt) for ticket in worker.tickets}
        missing = [store.trajectories[ticket] for ticket, _ in sorted(ours - held)]
        if missing:
            store.send(peer, m.Tickets([self._ticket(trajectory) for trajectory in missing]))
        if held - ours:
            store.send(peer, m.Cancel([m.Held(*pair) for pair in sorted(held - ours)]))
        return exhausted

    def peers_called(self, name: str) -> list[str]:
        """The workers that `name` means; see `store.is_called`."""
        return [peer for peer in self.workers if is_called(peer, name)]

    def lose(self, peer: str, *, by_its_tickets: bool = True) -> list[Trajectory]:
        """The worker is gone: its tickets wait for another, under a new attempt.

        Returns those that cannot go on: they have seen too many workers die, if one of its tickets may have killed this
        one; or they have been trained on in part and cannot be replayed.
        """
        worker = self.workers.pop(peer)
        store = self.store
        store.tally.lost_workers += by_its_tickets
        exhausted: list[Trajectory] = []
        for ticket in sorted(worker.tickets, reverse=True):
            trajectory = store.trajectories[ticket]
            trajectory.worker = None
            row = store.pool.row(ticket)
            store.pool.owner[row] = NOBODY
            trajectory.deaths += by_its_tickets
            out_of_attempts = by_its_tickets and trajectory.deaths >= store.settings.max_attempts
            if out_of_attempts or (trajectory.start and not store.settings.replayable):
                exhausted.append(trajectory)
                continue
            trajectory.attempt += 1
            store.pool.attempt[row] = trajectory.attempt
            store.tally.reissued += 1
            if store.settings.replayable:
                store.tally.kept_tokens += int(store.pool.length[row])
            else:
                store.tally.discarded_tokens += store.pool.clear(ticket)
                trajectory.finish_reason = ""
            self.waiting.appendleft(trajectory)
        return exhausted

    def release(self, trajectory: Trajectory) -> None:
        """The trajectory is not running any more, whoever had it; a worker that has it is told by the caller."""
        if trajectory.worker is not None:
            del self.workers[trajectory.worker].tickets[trajectory.ticket]
            trajectory.worker = None
        elif trajectory in self.waiting:
            self.waiting.remove(trajectory)

    def cancel_running(self, group: Group) -> None:
        """Ends the running trajectories of a group, which nobody wants any more."""
        for trajectory in group.having("running"):
            if trajectory.worker is not None:
                self.store.send(trajectory.worker, m.Cancel([m.Held(trajectory.ticket, trajectory.attempt)]))
            self.release(trajectory)
            self.store.move(trajectory, "cancelled")

    def assign(self) -> None:
        """Hands waiting tickets to the workers with most free slots."""
        running = self.store.counts["running"] - len(self.waiting)
        if not self.waiting or sum(worker.slots for worker in self.workers.values()) <= running:
            return
        free = {name: worker.slots - len(worker.tickets) for name, worker in self.workers.items()}
        given: dict[str, list[m.Ticket]] = {}
        while self.waiting:
            name = max(free, key=free.__getitem__)
            if free[name] <= 0:
                break
            free[name] -= 1
            trajectory = self.waiting.popleft()
            worker = self.workers[name]
            trajectory.worker = name
            if trajectory.attempt > 1:
                trajectory.born = self.store.version or 0  # a continuation must not be born stale either
            worker.tickets[trajectory.ticket] = None
            self.store.pool.owner[self.store.pool.row(trajectory.ticket)] = worker.number
            given.setdefault(name, []).append(self._ticket(trajectory))
        for name, tickets in given.items():
            self.store.send(name, m.Tickets(tickets))

    def _ticket(self, trajectory: Trajectory) -> m.Ticket:
        store = self.store
        prompt = trajectory.group.prompt
        row = store.pool.row(trajectory.ticket)
        length = int(store.pool.length[row])
        left = store.settings.max_tokens - length
        reason = trajectory.finish_reason or ("length" if left <= 0 else "")
        return m.Ticket(
            id=trajectory.ticket,
            attempt=trajectory.attempt,
            member=trajectory.member,
            key=prompt.key,
            prompt=prompt.tokens,
            row=prompt.row,
            min_version=trajectory.born,
            max_tokens=0 if reason else left,
            prefix=store.pool.tokens[row, :length].tolist(),
            injected=store.pool.injected(row),
            finish_reason=reason,
        )

    # --- prompts -----------------------------------------------------------------------------------------------

    def submit(self, submit: m.Submit) -> None:
        """Issues tickets for the prompts that are next, as many as may be."""
        if submit.first < 0:
            raise ProtocolError(f"prompts from place {submit.first} on were submitted; the first place is 0")
        place = submit.first if self.next_prompt is None else self.next_prompt
        new = submit.prompts[place - submit.first :] if submit.first <= place else []
        taken = new[: self.store.admissible_groups]
        if taken:
            self.next_prompt = place
        for prompt in taken:
            self._issue(prompt)
        if len(taken) < len(new) or submit.first > place:
            self.credit(again=True)

    def go_back(self, place: int) -> None:
        """The next prompts are those from `place` on, which have been issued before."""
        self.next_prompt, self.credited = place, 0

    def _issue(self, prompt: m.Prompt) -> None:
        store = self.store
        assert store.version is not None
        assert self.next_prompt is not None
        group = Group(self.groups_made, self.next_prompt, prompt, store.version)
        self.groups_made += 1
        self.next_prompt += 1
        store.groups[group.serial] = group
        for member in range(store.settings.group):
            group.members.append(self._open(group, member))
            group.tickets_of.append(1)

    def _open(self, group: Group, member: int) -> Trajectory:
        assert self.store.version is not None
        trajectory = Trajectory(self.store.pool.open(attempt=1), group, member, born=self.store.version)
        self.store.add(trajectory)
        self.waiting.append(trajectory)
        return trajectory

    def replace(self, failed: Trajectory) -> None:
        """A new ticket for the slot of a failed member; its capacity has just returned."""
        group = failed.group
        group.members[failed.member] = self._open(group, failed.member)
        group.tickets_of[failed.member] += 1

    def credit(self, *, again: bool = False) -> None:
        """Tells the feeder how far it may go, if that is further than it knows or if it asks."""
        upto = self.store.admissible_groups + (self.next_prompt or 0)
        if self.store.feeder is not None and (again or upto > self.credited):
            self.credited = max(upto, self.credited)
            self.store.send(self.store.feeder, m.Credit(upto, self.next_prompt))

    # --- chunks and outcomes -----------------------------------------------------------------------------------

    def append(self, peer: str, seq: int, chunks: m.Chunks) -> None:
        """Stores the chunks that fit, refuses the others one by one, acknowledges the message."""
        store = self.store
        # A version can be pulled a moment before its commit arrives here.
        newest = -1 if store.version is None else store.version + 1
        worker = self.workers.get(peer)
        stored, refused = appends.store(
            store.pool,
            chunks,
            newest=newest,
            owner=-2 if worker is None else worker.number,
            most=store.settings.max_tokens,
        )
        store.tally.chunks += stored.size
        store.tally.tokens += (
            chunks.tokens.size
            if not refused and stored.size == chunks.ticket.size
            else int(chunks.length[stored].sum())
        )
        store.tally.refused_chunks += len(refused)
        store.send(peer, m.Ack(seq, refused))

    def refusal(self, peer: str, outcome: m.Outcome) -> m.Refusal | None:
        """Why an outcome cannot be acted on, if so: not this worker's, or ahead of its chunks."""
        trajectory = self.store.trajectories.get(outcome.ticket)
        ours = trajectory is not None and trajectory.worker == peer and trajectory.attempt == outcome.attempt
        if not ours:
            return m.Refusal(outcome.ticket, outcome.attempt, "fenced", 0)
        length = int(self.store.pool.length[self.store.pool.row(outcome.ticket)])
        if outcome.length > length:
            return m.Refusal(outcome.ticket, outcome.attempt, "gap", length)
        return None
