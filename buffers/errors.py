"""Errors of the buffers package."""

from __future__ import annotations


class BufferFailure(Exception):
    """Root of everything this package raises on purpose."""


class ProtocolError(BufferFailure, ValueError):
    """A message that breaks the protocol: malformed, out of order, or from a peer that may not send it."""


class BufferGone(BufferFailure, TimeoutError):
    """The buffer did not answer within its deadline."""


class JournalError(BufferFailure, OSError):
    """A journal that cannot be written, is damaged before its end, or does not exist."""


class KeysError(BufferFailure, ValueError):
    """Keys that are missing, or an address that needs them."""
