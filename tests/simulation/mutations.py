"""Ten deliberate bugs. Each replaces one piece of the source of one function, for the length of a block."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from buffers import appends, groups
from buffers.core import Core
from buffers.journal import Outbox
from buffers.offering import Offering
from staleness import bounds


@dataclass(frozen=True)
class Mutation:
    """`before` occurs once in the source of `function`, an attribute of `owner`."""

    name: str
    owner: Any
    function: str
    before: str
    after: str


MUTATIONS = [
    Mutation(
        "no offset check", appends, "_store_distinct",
        "fits = live & valid & (offset == known)", "fits = live & valid",
    ),
    Mutation(
        "no fencing", appends, "_store_distinct",
        "live = (pool.owner[row] == owner) & (pool.ticket[row] == ticket) & (pool.attempt[row] == chunks.attempt[at])",
        "live = pool.ticket[row] == ticket",
    ),
    Mutation(
        "leaked lease", Offering, "give_back",
        "for lease in [lease for lease in reversed(self.leases.values()) if of_holder(lease.holder)]:",
        "for lease in list(self.leases.values())[1:]:",
    ),
    Mutation(
        "lost wake-up", Core, "_settle",
        "self.offering.reload()", "pass  # what waits for a free row is not told of one",
    ),
    Mutation(
        "early retirement", Offering, "commit",
        "if store.settings.retain:", "if store.settings.retain and self.commits % 2:",
    ),
    Mutation(
        "age off by one", bounds, "fresh",
        "young = [age is not None and age <= max_staleness for age in ages]",
        "young = [age is not None and age <= max_staleness + 1 for age in ages]",
    ),
    Mutation(
        "partial group", groups, "verdict",
        'if not group.having("running"):', 'if rewards >= needed or not group.having("running"):',
    ),
    Mutation(
        "double commit", Offering, "commit",
        "del self.leases[lease.id]", "pass  # it can be committed again",
    ),
    Mutation(
        "unbounded admission", bounds, "admissible_groups",
        "(limit - in_flight) // group", "(limit - in_flight) // group + 1",
    ),
    Mutation(
        "acknowledged before durable", Outbox, "release",
        "self._waiting[0][0] <= durable", "self._waiting[0][0] <= durable + 1",
    ),
]  # fmt: skip


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    original = getattr(mutation.owner, mutation.function)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutation.before) == 1, f"{mutation.name}: the source has changed"
    changed = source.replace(mutation.before, mutation.after)
    space: dict[str, Callable[..., object]] = {}
    exec(compile(changed, f"<{mutation.name}>", "exec"), sys.modules[original.__module__].__dict__, space)
    setattr(mutation.owner, mutation.function, space[mutation.function])
    try:
        yield
    finally:
        setattr(mutation.owner, mutation.function, original)
