"""Errors of the buffers package."""

from __future__ import annotations


class BufferFailure(Exception):
    """Root of everything this package raises on purpose."""


class ProtocolError(BufferFailure, ValueError):
    """A message that breaks the protocol: malformed, out of order, or from a peer that may not send it."""


class Exhausted(BufferFailure, RuntimeError):
    """No further batch can come: the prompts have ended and nothing is in flight."""


class BufferGone(BufferFailure, TimeoutError):
    """The buffer did not answer within its deadline."""
