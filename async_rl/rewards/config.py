"""Configuration of rewards. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class NamedReward(Struct, frozen=True, forbid_unknown_fields=True):
    """One reward among several."""

    function: str
    """As `reward.function`."""
    weight: float = 1.0
    """Factor in the sum."""


class ModelRewardConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How reward models (`model:PATH`) run, each in a process of its own per rollout worker."""

    device: str = "auto"
    """`auto` takes a GPU if there is one; or `cpu`, `cuda:1`."""
    batch_size: Annotated[int, Meta(ge=1)] = 16
    """Most responses in one forward pass."""
    wait_ms: Annotated[float, Meta(ge=0, lt=1e6)] = 20.0
    """How long a response waits for others to be judged with it, in milliseconds."""
    max_tokens: Annotated[int, Meta(ge=1)] = 4096
    """Longest prompt and response in tokens; of a longer one the beginning is left out."""
    load_s: Annotated[float, Meta(gt=0, lt=1e12)] = 600.0
    """Longest time to load."""


class OverlongConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A penalty that grows with the length of a response as it nears its limit (DAPO, 2503.14476)."""

    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Last part of `rollout.max_tokens` over which it grows from 0. 0: no penalty."""
    penalty: Annotated[float, Meta(ge=0)] = 1.0
    """What is taken off the reward at `rollout.max_tokens`."""


class RewardConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What a response is worth."""

    function: str = "reasoning_gym"
    """`module:function`, called as `function(response: str, row: dict) -> float`; `reasoning_gym`; or `environment`,
    the sum of what the environment gives; or `model:PATH`, a sequence-classification model."""
    weight: float = 1.0
    """Factor of this reward beside `others`."""
    others: dict[str, NamedReward] = {}
    """Further rewards by name, each with a function and a weight; the sum is trained on, each is reported."""
    clip: tuple[float, float] | None = None
    """Lowest and highest sum; what is beyond is set to them."""
    overlong: OverlongConfig = OverlongConfig()
    """Penalty for long responses."""
    model: ModelRewardConfig = ModelRewardConfig()
    """Reward models."""
    time_limit_s: Annotated[float, Meta(gt=0, lt=1e12)] = 10.0
    """Seconds after which the process of a reward is killed."""
    on_error: Literal["drop", "fail"] = "drop"
    """A reward that raises or times out: `drop` the trajectory as failed, or `fail` the run."""
    processes: Annotated[int, Meta(ge=1)] = 1
    """Processes of each reward function per rollout worker."""

    @property
    def functions(self) -> dict[str, NamedReward]:
        """All rewards by name, the main one, `reward`, first."""
        return {"reward": NamedReward(self.function, self.weight), **self.others}
