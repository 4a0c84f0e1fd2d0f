"""What an environment is.

    environment = find("calculator")(row, latency_s=0.5)
    environment.reset(seed)
    answer = environment.step("12*3")   # Step("36", reward=0.1, done=False)

One episode a trajectory: `reset` once, then `step` with the text of each turn until `done`. The trajectory's reward is
the sum of the steps' (`reward.function: environment`), beside other rewards if there are any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from async_rl.environments.calculator import Calculator
from async_rl.named import named


class Step(NamedTuple):
    """`text` is put into the context, not trained on; nothing is put there once the episode is `done`."""

    text: str
    reward: float
    done: bool


class Environment(Protocol):
    """Called from a thread of its own, one call at a time. May sleep; an exception fails the trajectory."""

    replayable: bool
    """Whether the same seed and turns get the same answers again."""

    def reset(self, seed: int) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """The answer to a turn as (text, reward, done)."""
        ...


Factory = Callable[..., Environment]


def find(name: str) -> Factory:
    """The factory of that name; the working directory is importable."""
    return Calculator if name == "calculator" else named(name)


def anchor(text: str) -> int:
    """A number for a state that a turn begins in, the same in every process: where GiGPO compares."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
