"""Processes that live and do nothing. Pure: the time comes in as an argument, in seconds."""

from __future__ import annotations

from collections.abc import Collection


class Health:
    """Notes who was heard, and says who has not been for too long.

    A worker is given up by the buffer when it is silent (`buffer.worker_timeout_s`); what lives on is a process that
    hangs, or one that was stopped and may come back within `worker_grace_s`.
    """

    def __init__(self, *, worker_grace_s: float, buffer_silence_s: float) -> None:
        self._worker_grace_s, self._buffer_silence_s = worker_grace_s, buffer_silence_s
        self._known: set[str] = set()
        self._missing: dict[str, float] = {}
        self._killed_at = float("-inf")

    def lost_workers(self, living: Collection[str], peers: Collection[str], now: float) -> list[str]:
        """Of the identities of living processes those whose peers the buffer has had, and has not had for too long."""
        heard = {identity for identity in living if any(peer.startswith(f"{identity}.") for peer in peers)}
        self._known |= heard
        missing = [identity for identity in living if identity in self._known and identity not in heard]
        self._missing = {identity: self._missing.get(identity, now) for identity in missing}
        lost = [identity for identity, since in self._missing.items() if now - since >= self._worker_grace_s]
        self._known -= set(lost)
        return lost

    def buffer_is_silent(self, heard_at: float, now: float) -> bool:
        """Once per silence: who is started again has its whole time to speak."""
        if now - max(heard_at, self._killed_at) < self._buffer_silence_s:
            return False
        self._killed_at = now
        return True
