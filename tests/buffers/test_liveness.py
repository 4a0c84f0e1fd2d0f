"""Deadlines over changing sets, with the time passed in.

1  a thing has its whole time from when it is first met or last seen
2  a thing that is not asked about is forgotten
"""

from __future__ import annotations

import random

from buffers.liveness import Deadline


def test_a_thing_has_its_whole_time_from_its_first_meeting() -> None:
    deadline = Deadline(10.0)
    assert deadline.over(["a"], 5.0) == []
    assert deadline.over(["a", "b"], 14.5) == []
    assert deadline.over(["a", "b"], 15.0) == ["a"]
    assert deadline.over(["a", "b"], 24.0) == ["a"]
    assert deadline.over(["a", "b"], 24.5) == ["a", "b"]


def test_being_seen_starts_the_time_again() -> None:
    deadline = Deadline(10.0)
    deadline.over(["a"], 0.0)
    deadline.seen("a", 9.0)
    assert deadline.over(["a"], 18.9) == []
    assert deadline.over(["a"], 19.0) == ["a"]
    deadline.seen("a", 19.5)
    assert deadline.over(["a"], 20.0) == []


def test_what_was_seen_before_it_was_watched_counts_from_then() -> None:
    deadline = Deadline(10.0)
    deadline.seen("a", 3.0)
    assert deadline.over(["a"], 12.0) == []
    assert deadline.over(["a"], 13.0) == ["a"]


def test_a_thing_that_is_not_asked_about_is_forgotten() -> None:
    deadline = Deadline(10.0)
    deadline.over([1, 2], 0.0)
    assert deadline.over([2], 9.0) == []
    assert dict(deadline.since) == {2: 0.0}
    assert deadline.over([1, 2], 10.0) == [2]
    assert deadline.over([1], 19.9) == []
    assert deadline.over([1], 20.0) == [1]


def test_nothing_watched_is_nothing_late() -> None:
    assert Deadline(0.0).over([], 1e9) == []
    assert Deadline(0.0).over(["a"], 1.0) == ["a"]


def test_any_history_equals_the_definition() -> None:
    """A thing is over if it has been in every call since `since`, and `since` is its last sight or first call."""
    rng = random.Random(0)
    deadline, since, now = Deadline(3.0), dict[str | int, float](), 0.0
    for _ in range(2000):
        now += rng.random()
        if rng.random() < 0.5:
            thing = rng.randrange(6)
            deadline.seen(thing, now)
            since[thing] = now
        else:
            things = [thing for thing in range(6) if rng.random() < 0.8]
            since = {thing: since.get(thing, now) for thing in things}
            assert deadline.over(things, now) == [thing for thing in things if now >= since[thing] + 3.0]
