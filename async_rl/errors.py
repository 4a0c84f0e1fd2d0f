"""Errors of the async_rl package."""

from __future__ import annotations


class AsyncRLError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """A configuration that cannot run: names the field, its value, why, and what to do."""

    def __init__(self, field: str, value: object, why: str, remedy: str) -> None:
        self.field, self.value, self.why, self.remedy = field, value, why, remedy
        super().__init__(f"{field} = {value!r}: {why}. {remedy}")


class DataError(AsyncRLError, ValueError):
    """A data set that cannot be read or does not hold what the configuration says."""


class RewardError(AsyncRLError, RuntimeError):
    """A reward function that raised or returned something other than a finite number."""


class RewardTimeout(RewardError, TimeoutError):
    """A reward function that did not return within its limit; its process was killed."""


class WeightsError(AsyncRLError, RuntimeError):
    """Weights that did not arrive as they were published."""


class WeightsLate(WeightsError, TimeoutError):
    """A learner that has not been heard of for long; a new process may hear of it."""


class EngineError(AsyncRLError, RuntimeError):
    """A generation engine that failed or broke its contract."""


class EngineStuck(EngineError, TimeoutError):
    """An engine that has requests and yields nothing; a new process may do better."""


class RequestRefused(EngineError, ValueError):
    """A request that can never succeed, such as one that is too long; trying again would not help."""


class EnvironmentFailed(AsyncRLError):
    """An environment that raised, did not answer in time, or answered otherwise than before; fails its trajectory."""
