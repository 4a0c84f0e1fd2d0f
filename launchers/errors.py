"""Errors of the launchers package."""

from __future__ import annotations


class LaunchError(Exception):
    """Root of everything this package raises on purpose."""


class ComponentDied(LaunchError, RuntimeError):
    """A process of the run ended before the run did."""


class StartTimeout(LaunchError, TimeoutError):
    """The run was not under way within its limit."""


class RunFailed(LaunchError, RuntimeError):
    """The run cannot go on, though every process lives."""


class Interrupted(LaunchError, RuntimeError):
    """The user asked for the end of the run."""
