"""When a group's members are offered, and what a failed member does. Pure decisions on a `Group`."""

from __future__ import annotations

from typing import Literal

from buffers.records import Group, Settings

Verdict = Literal["wait", "offer", "cut", "fail"]
"""`wait` for more; `offer` the finished members; `cut` the running members off, then offer; `fail` the whole group."""


def verdict(group: Group, settings: Settings, steps_since_issue: int) -> Verdict:
    """What is to be done about a group now; it is never offered with fewer than `min_group` rewards.

    `steps_since_issue` counts learner steps, along the lineage. Under `split` fewer rewards do, if fewer can come.
    """
    rewards = len(group.rewards)
    possible = len(group.members) - len(group.having("failed"))
    split = settings.group_policy == "split"
    needed = max(1, min(settings.min_group, possible if split else len(group.members)))
    if not group.having("running"):
        return "offer" if rewards >= needed else "fail"
    if split and rewards >= needed:
        return "offer"
    late = settings.group_policy == "deadline_versions" and steps_since_issue >= settings.deadline_versions
    return "cut" if late and rewards >= needed else "wait"


def replaceable(group: Group, member: int, settings: Settings) -> bool:
    """Whether a failed member's slot gets another ticket."""
    return settings.on_failed == "replace" and group.tickets_of[member] < settings.max_attempts


def uninformative(group: Group) -> bool:
    """Whether a comparison of the group's members says nothing: all rewards are equal."""
    return len(set(group.rewards)) < 2
