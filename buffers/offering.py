"""The learner's side of the core: which groups are ready, what a batch holds, leases, what is kept after a commit.

ready ──take──▶ leased ──commit──▶ trained ──checkpoint──▶ (forgotten)
  ▲               │                   │
  └──its holder dies                  └──restore of an earlier step──▶ parked ──read from the journal──▶ ready
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from buffers import messages as m
from buffers.errors import ProtocolError
from buffers.records import Earlier, Excerpt, Group, Lease, Trajectory
from buffers.sampler import SAMPLERS, Choice, Offer
from buffers.store import SELF, Store, is_called
from staleness import bounds
from staleness.versions import INJECTED, show, unpack

Scalar = TypeVar("Scalar", bound=np.generic)


class Offering:
    """Owns the groups on offer, the waiting `take`, the leases, and the trajectories that no checkpoint contains."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ready: dict[int, int] = {}
        """Serial of each group on offer, and how many of its members are ready."""
        self.take: tuple[str, int, int] | None = None
        """Who waits for a batch, for which version, under which request."""
        self.leases: dict[int, Lease] = {}
        self.leased_ever = 0
        self.commits = 0
        self.committed: m.Committed | None = None
        self.retained: list[Trajectory] = []
        """Trained, in no checkpoint."""
        self.parked: list[Trajectory] = []
        self.loading: dict[int, Trajectory] = {}
        """Parked trajectories asked for from the journal."""

    # --- groups on offer ---------------------------------------------------------------------------------------

    def refresh(self, group: Group) -> None:
        """Notes how many members of an offered group are ready now; of one that comes back from the journal, when all
        of it has."""
        count = len(group.having("ready"))
        coming_back = self.store.settings.group_policy != "split" and group.having("parked")
        if count and not coming_back:
            self.ready[group.serial] = count
        else:
            self.ready.pop(group.serial, None)
            self.store.forget_if_ended(group)

    def late(self) -> list[int]:
        """Under `pace`: unfinished groups without which the waiting batch must not go.

        Of the trajectories whose group was issued at or before `v - eta + k`, at most k batches can be trained after
        this one while they are fresh. So this batch, the oldest first, waits until it holds all but k * B of them.
        """
        settings = self.store.settings
        if self.take is None or settings.on_stale != "pace" or sum(self.ready.values()) < settings.batch:
            return []
        groups = [group for group in self.store.groups.values() if group.having("running", "ready")]
        ages = [self.store.lineage.age_of(self.take[1], group.issued_at) for group in groups]
        room = settings.batch
        chosen: dict[int, int] = {}
        for serial in sorted(self.ready):
            if room > 0:
                chosen[serial] = self.ready[serial]
                room -= self.ready[serial]
        for k in range(settings.max_staleness + 1):
            old = [group for group, age in zip(groups, ages, strict=True) if age >= settings.max_staleness - k]
            held = sum(chosen.get(group.serial, 0) for group in old)
            outstanding = sum(len(group.having("running", "ready")) for group in old)
            unfinished = [group.serial for group in old if group.having("running")]
            if unfinished and held < outstanding - k * settings.batch:
                return unfinished
        return []

    # --- take --------------------------------------------------------------------------------------------------

    def request(self, peer: str, take: m.Take) -> None:
        """A learner wants a batch; if it holds that one already, it gets it again."""
        newest, version = self.store.version, take.version
        for lease in self.leases.values():
            if lease.version == version and lease.holder == peer:
                self.store.send(peer, _answering(lease.batch, take.request))
                return
        if newest is None or version not in (newest, newest + 1):
            known = "none" if newest is None else show(newest)
            raise ProtocolError(
                f"a batch for version {show(version)} was asked for, but the newest published is {known}"
            )
        if self.take is not None and self.take[:2] != (peer, version):
            raise ProtocolError("a take is already waiting; one batch at most is prefetched")
        self.take = (peer, version, take.request)

    def offer(self) -> None:
        """Answers the waiting `take` if a batch can be offered; trajectories found fully stale expire on the way."""
        batch = self.store.settings.batch
        if self.take is None or not (self._on_offer() >= batch or self._stalled()) or self.late():
            return
        peer, version, request = self.take
        offers: list[Offer] = []
        excerpts: dict[int, list[Excerpt]] = {}
        for serial in list(self.ready if self.store.settings.segments is None else self.store.groups):
            group = self.store.groups[serial]
            if serial in self.ready:
                self._expire(group, version)
            excerpts[serial] = self._excerpts(group, version)
            members = self.ready.get(serial, 0) + len(excerpts[serial])
            if members:
                offers.append(Offer(serial, members, group.rewards))
        if sum(offer.members for offer in offers) < batch and not self._stalled():
            return
        settings = self.store.settings
        rng = np.random.default_rng([settings.seed, self.leased_ever])
        chosen = SAMPLERS[settings.sampler](offers, batch, rng, exponent=settings.priority_exponent)
        if chosen:
            self.take = None
            self._lease(peer, version, request, chosen, excerpts)

    def _on_offer(self) -> int:
        """Trajectories that are ready, and at most so many segments of others."""
        least = self.store.settings.segments
        ready = sum(self.ready.values())
        if least is None or ready >= self.store.settings.batch:
            return ready
        running = [each for each in self.store.trajectories.values() if each.state == "running"]
        length = self.store.pool.length
        return ready + sum(int(length[self.store.pool.row(each.ticket)]) > each.start + least for each in running)

    def _excerpts(self, group: Group, version: int) -> list[Excerpt]:
        """Segments of the group's running members that may be trained on now."""
        least, pool = self.store.settings.segments, self.store.pool
        out: list[Excerpt] = []
        for member in group.having("running") if least is not None else ():
            row = pool.row(member.ticket)
            end = bounds.cut(pool.sampled(row), start=member.start, least=least or 0)
            if end is None:
                continue
            usable = self._fresh(member, version)[: end + 1]
            usable[end] = False
            if usable.any():
                tokens, logprobs = pool.tokens[row, : end + 1].copy(), pool.logprobs[row, : end + 1].copy()
                spans = [span for span in pool.spans_of(row) if span.start <= end]
                edges = [*(span.start for span in spans), end + 1]
                lengths = [after - before for before, after in pairwise(edges)]
                versions = [span.version for span in spans]
                out.append(Excerpt(member, member.start, end, tokens, logprobs, usable, lengths, versions))
        return out

    def _stalled(self) -> bool:
        """Nothing more can become ready before the next commit: a batch short of B is better than none."""
        coming = self.store.counts["running"] or self.loading or self._loadable()
        return not (coming or self.leases or self.store.admissible_groups)

    def _expire(self, group: Group, version: int) -> None:
        """Applies the bound to a group on offer; its members of which nothing may be trained on expire."""
        before = len(group.having("ready"))
        for trajectory in group.having("ready"):
            if not self.usable(trajectory, version).any():
                self.store.move(trajectory, "expired")
        if len(group.having("ready")) < before:
            self.refresh(group)

    def usable(self, trajectory: Trajectory, version: int) -> NDArray[np.bool_]:
        """Which tokens may be trained on at `version`."""
        if trajectory.usable is None or trajectory.usable_at != version:
            trajectory.usable = self._fresh(trajectory, version)
            trajectory.usable_at = version
        return trajectory.usable

    def _fresh(self, trajectory: Trajectory, version: int) -> NDArray[np.bool_]:
        """Of all tokens so far."""
        store, pool, settings = self.store, self.store.pool, self.store.settings
        row = pool.row(trajectory.ticket)
        lengths = pool.span_lengths(row)
        # None: injected, handed out before, or from the future, of a worker that is ahead of its learner's commit.
        ages = [
            None
            if sampled == INJECTED or sampled > version or end <= trajectory.start
            else store.lineage.age_of(version, sampled)
            for sampled, end in zip(pool.versions_of(row), accumulate(lengths), strict=True)
        ]
        fresh = bounds.fresh(ages, max_staleness=settings.max_staleness, on_stale=settings.on_stale)
        usable = np.isfinite(pool.logprobs[row, : int(pool.length[row])])
        if not all(fresh):
            usable &= np.repeat(fresh, lengths)
        usable[: trajectory.start] = False
        return usable

    # --- leases ------------------------------------------------------------------------------------------------

    def _lease(
        self, peer: str, version: int, request: int, chosen: list[Choice], excerpts: dict[int, list[Excerpt]]
    ) -> None:
        store = self.store
        rows: list[m.BatchRow] = []
        members: list[Trajectory] = []
        parts: list[Excerpt] = []
        groups = [store.groups[choice.serial] for choice in chosen]
        for index, (group, choice) in enumerate(zip(groups, chosen, strict=True)):
            on_offer = choice.serial in self.ready
            for member in group.having("ready") if on_offer else ():
                if store.settings.group_policy == "split" and len(rows) == store.settings.batch:
                    break
                rows.append(self._row(member, index, choice.weight))
                members.append(member)
                store.move(member, "leased")
            for excerpt in excerpts[choice.serial][: store.settings.batch - len(rows)]:
                rows.append(_part(excerpt, index, choice.weight))
                parts.append(excerpt)
                excerpt.trajectory.start = excerpt.end
            if on_offer:
                self.refresh(group)
        rewards = [group.rewards for group in groups]
        baselines = [group.baseline for group in groups]
        batch = m.Batch(self.leased_ever, version, rows, rewards, store.stats(), request, baselines)
        self.leases[batch.lease] = Lease(batch.lease, version, peer, members, parts, batch)
        self.leased_ever += 1
        store.send(peer, batch)

    def _row(self, member: Trajectory, index: int, weight: float) -> m.BatchRow:
        length = int(self.store.pool.length[self.store.pool.row(member.ticket)])
        assert member.usable is not None
        assert member.reward is not None
        trainable = int(np.count_nonzero(member.usable))
        prompt = len(member.group.prompt.tokens)
        return m.BatchRow(
            member.ticket,
            index,
            member.member,
            prompt,
            length,
            trainable,
            member.reward,
            weight,
            member.parts,
            member.turns,
            member.start,
        )

    def fetch(self, fetch: m.Fetch) -> m.SampleArrays:
        """The tokens of some trajectories of a lease, in the order asked for."""
        lease = self.leases.get(fetch.lease)
        if lease is None:
            raise ProtocolError(f"lease {fetch.lease} is not outstanding")
        held = {trajectory.ticket: trajectory for trajectory in lease.trajectories}
        parts = {excerpt.trajectory.ticket: excerpt for excerpt in lease.excerpts}
        foreign = [ticket for ticket in fetch.tickets if ticket not in held and ticket not in parts]
        if foreign:
            raise ProtocolError(f"tickets {foreign[:4]} are not of lease {fetch.lease}")
        wanted = [parts.get(ticket) or self._whole(held[ticket]) for ticket in fetch.tickets]
        groups = dict.fromkeys(each.trajectory.group for each in wanted)
        return m.SampleArrays(
            prompts=_concatenate([np.asarray(group.prompt.tokens, np.int32) for group in groups], np.int32),
            tokens=_concatenate([each.tokens for each in wanted], np.int32),
            logprobs=_concatenate([each.logprobs for each in wanted], np.float32),
            mask=_concatenate([each.usable.view(np.uint8) for each in wanted], np.uint8),
            span_length=np.asarray([length for each in wanted for length in each.span_lengths], np.int32),
            span_version=np.asarray([version for each in wanted for version in each.versions], np.int64),
        )

    def _whole(self, trajectory: Trajectory) -> Excerpt:
        """Views of all that a trajectory has."""
        pool = self.store.pool
        row = pool.row(trajectory.ticket)
        length = int(pool.length[row])
        assert trajectory.usable is not None
        return Excerpt(
            trajectory,
            trajectory.start,
            length,
            pool.tokens[row, :length],
            pool.logprobs[row, :length],
            trajectory.usable,
            pool.span_lengths(row),
            pool.versions_of(row),
        )

    def commit(self, peer: str, commit: m.Commit) -> bool:
        """Retires a lease; False if this is the repeat of a commit whose answer was lost, which is answered again."""
        done = self.committed
        if done is not None and done.lease == commit.lease:
            self.store.send(peer, _answering(done, commit.request))
            return False
        lease = self.leases.get(commit.lease)
        if lease is None:
            raise ProtocolError(
                f"lease {commit.lease} is not outstanding: it was committed before, returned, or never handed out"
            )
        self.check_newer(commit.version)
        del self.leases[lease.id]
        store = self.store
        step = unpack(lease.version)[1]
        for excerpt in lease.excerpts:
            part = Earlier(step, excerpt.start, *_masked(excerpt))
            excerpt.trajectory.earlier.append(part)
            self._count_part(part, 1)
        for trajectory in lease.trajectories:
            several = store.pool.sampled_versions(store.pool.row(trajectory.ticket)) > 1
            trajectory.counted = *_masked(self._whole(trajectory)), several
            self._count(trajectory, 1)
            trajectory.step, trajectory.commit = step, self.commits
            store.move(trajectory, "trained")
            if store.settings.retain:
                self.retained.append(trajectory)
        for group in dict.fromkeys(trajectory.group for trajectory in lease.trajectories):
            store.forget_if_ended(group)
        self.commits += 1
        return True

    def _count(self, trajectory: Trajectory, sign: int) -> None:
        """Adds a trained trajectory to the counters, or takes it back."""
        stale, nonfinite, several = trajectory.counted
        self.store.tally.masked_stale += sign * stale
        self.store.tally.masked_nonfinite += sign * nonfinite
        self.store.tally.multi_version += sign * several

    def _count_part(self, part: Earlier, sign: int) -> None:
        self.store.tally.masked_stale += sign * part.stale
        self.store.tally.masked_nonfinite += sign * part.nonfinite
        self.store.tally.segments += sign

    def check_newer(self, version: int) -> None:
        newest = self.store.version
        if newest is not None and version <= newest:
            raise ProtocolError(f"version {show(version)} is not newer than {show(newest)}")

    def give_back(self, holder: str | None = None) -> None:
        """Leases and the waiting `take` of a learner that is gone (of every learner if None): offered again."""

        def of_holder(peer: str) -> bool:
            return holder is None or is_called(peer, holder)

        # The newest first: where a trajectory's first segment in them began is where it goes on.
        for lease in [lease for lease in reversed(self.leases.values()) if of_holder(lease.holder)]:
            del self.leases[lease.id]
            for excerpt in lease.excerpts:
                excerpt.trajectory.start, excerpt.trajectory.usable = excerpt.start, None
            for trajectory in lease.trajectories:
                self.store.move(trajectory, "ready")
            for group in dict.fromkeys(trajectory.group for trajectory in lease.trajectories):
                self.refresh(group)
        if self.take is not None and of_holder(self.take[0]):
            self.take = None

    # --- after the commit --------------------------------------------------------------------------------------

    def checkpointed(self, step: int) -> None:
        """What was trained before `step` is in a checkpoint and need not be kept."""
        self.retained = [trajectory for trajectory in self.retained if trajectory.step >= step]

    def restore(self, step: int) -> None:
        """A learner has gone back to the checkpoint of `step`: what was trained since is to be offered again."""
        self.give_back()
        self.committed = None
        again = [trajectory for trajectory in self.retained if trajectory.step >= step]
        self.retained = []
        store = self.store
        for trajectory in (*store.trajectories.values(), *again, *self.parked, *self.loading.values()):
            self._undo_parts(trajectory, step)
        for trajectory in again:
            store.counts["trained"] -= 1
            store.counts["parked"] += 1
            trajectory.state = "parked"
            self._count(trajectory, -1)
            store.groups.setdefault(trajectory.group.serial, trajectory.group)
        self.parked = sorted([*self.parked, *again], key=lambda trajectory: (trajectory.step, trajectory.commit))
        store.groups = dict(sorted(store.groups.items()))

    def cancel_parked(self) -> None:
        """What was trained since the checkpoint, and is not to be offered again."""
        for trajectory in (*self.parked, *self.loading.values()):
            self.store.counts["parked"] -= 1
            self.store.counts["cancelled"] += 1
            trajectory.state = "cancelled"
        self.parked, self.loading = [], {}

    def _undo_parts(self, trajectory: Trajectory, step: int) -> None:
        """Its segments that were trained from `step` on are to be offered again."""
        undone = [part for part in trajectory.earlier if part.step >= step]
        for part in undone:
            self._count_part(part, -1)
        if undone:
            trajectory.start, trajectory.usable = undone[0].start, None
            trajectory.earlier = [part for part in trajectory.earlier if part.step < step]

    def reload(self) -> None:
        """Asks for parked trajectories, the first trained first, group by group, as long as there is room."""
        chosen = [] if self.loading else self._loadable()
        if chosen:
            self.loading = {trajectory.ticket: trajectory for trajectory in chosen}
            self.parked = [trajectory for trajectory in self.parked if trajectory.ticket not in self.loading]
            self.store.send(SELF, self.reload_request())

    def _loadable(self) -> list[Trajectory]:
        room = self.store.settings.limit - len(self.store.trajectories)
        if not self.parked or room <= 0:
            return []
        groups: dict[Group, list[Trajectory]] = {}
        for trajectory in self.parked:
            groups.setdefault(trajectory.group, []).append(trajectory)
        chosen: list[Trajectory] = []
        for members in groups.values():
            # A run resumed with a smaller limit may have groups that are larger than it: one at a time.
            if len(chosen) + len(members) > room and (chosen or self.store.trajectories):
                break
            chosen += members
        return chosen

    def reload_request(self) -> m.Reload:
        return m.Reload(list(self.loading))

    def oldest_needed(self) -> int:
        """Number of the first commit whose trajectories the journal must still have."""
        kept = (*self.retained, *self.parked, *self.loading.values())
        return min((trajectory.commit for trajectory in kept), default=self.commits)

    def reloaded(self, reloaded: m.Reloaded, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Parked trajectories get rows under new tickets and are ready; those that were not found have failed."""
        store, pool = self.store, self.store.pool
        found = dict(zip(reloaded.tickets, zip(reloaded.lengths, reloaded.spans, strict=True), strict=True))
        offsets = np.concatenate([[0], np.cumsum(reloaded.lengths, dtype=np.int64)]).tolist()
        starts = dict(zip(reloaded.tickets, offsets[:-1], strict=True))
        groups: dict[Group, None] = {}
        for old in reloaded.wanted:
            trajectory = self.loading.pop(old, None)
            if trajectory is None:
                continue
            groups[trajectory.group] = None
            trajectory.ticket = pool.open(attempt=1)
            store.trajectories[trajectory.ticket] = trajectory
            row = pool.row(trajectory.ticket)
            if old in found:
                length, spans = found[old]
                part = slice(starts[old], starts[old] + length)
                pool.fill(row, tokens[part], logprobs[part], spans)
                pool.seal(trajectory.ticket)
                store.move(trajectory, "ready")
            else:
                store.tally.last_error = f"prompt {trajectory.group.prompt.key} is not in the journal any more"
                store.move(trajectory, "failed")
        for group in groups:
            self.refresh(group)


Answer = TypeVar("Answer", m.Batch, m.Committed)


def _answering(answer: Answer, request: int) -> Answer:
    """The same answer to a repeated request."""
    return msgspec.structs.replace(answer, request=request)


def _part(excerpt: Excerpt, index: int, weight: float) -> m.BatchRow:
    member = excerpt.trajectory
    return m.BatchRow(
        member.ticket,
        index,
        member.member,
        len(member.group.prompt.tokens),
        excerpt.tokens.size,
        int(np.count_nonzero(excerpt.usable)),
        0.0,
        weight,
        start=excerpt.start,
        goes_on=True,
    )


def _masked(part: Excerpt) -> tuple[int, int]:
    """How many sampled tokens are not trained on because they are stale, and because they have no finite log-prob."""
    if part.usable.all():
        return 0, 0
    sampled = np.repeat([version != INJECTED for version in part.versions], part.span_lengths)[part.start : part.end]
    nonfinite = int(np.count_nonzero(sampled & ~np.isfinite(part.logprobs[part.start : part.end])))
    return int(np.count_nonzero(sampled)) - int(np.count_nonzero(part.usable)) - nonfinite, nonfinite


def _concatenate(parts: list[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
