"""From the rewards of a response to the one number that is trained on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.rewards.config import OverlongConfig, RewardConfig


def raw(config: RewardConfig, parts: Sequence[float]) -> float:
    """The weighted sum of the rewards, in the order of `config.functions`."""
    return sum(each.weight * part for each, part in zip(config.functions.values(), parts, strict=True))


def shaped(config: RewardConfig, parts: Sequence[float], *, length: int, longest: int) -> float:
    """The sum clipped, less the penalty of a response of `length` tokens out of at most `longest`."""
    total = raw(config, parts)
    if config.clip is not None:
        low, high = config.clip
        total = min(max(total, low), high)
    return total - overlong(config.overlong, length=length, longest=longest)


def overlong(config: OverlongConfig, *, length: int, longest: int) -> float:
    """Linear from 0 at `(1 - share) longest` tokens to the whole penalty at `longest` (DAPO, 2503.14476, eq. 13)."""
    ramp = config.share * longest
    if not ramp:
        return 0.0
    return config.penalty * min(1.0, max(0.0, (length - (longest - ramp)) / ramp))
