"""Errors of the staleness package."""

from __future__ import annotations


class StalenessError(Exception):
    """Root of everything this package raises on purpose."""


class VersionError(StalenessError, ValueError):
    """A policy version that cannot exist in this lineage."""


class CorrectionError(StalenessError, ValueError):
    """A correction that does not exist or cannot be combined as asked."""
