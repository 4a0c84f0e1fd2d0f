"""Who may use a device that a rollout worker and a learner rank share: a lock on their host.

    worker                                   learner
    hold() ─ generates                       with baton.mine(): trains
    asked() → flushes, lets its engine rest, release(), hold() again: it waits until the learner is done

Workers hold the lock together, the learner alone. The kernel releases what a process had when it dies, so nobody waits
for the dead; a learner that asks writes its process id, so that a wish does not outlive it either.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from async_rl.weights.transport import SHM


class Baton:
    """One end of the baton of a device; `name` is that of the run and the device."""

    def __init__(self, name: str) -> None:
        self._file = (SHM / f"async-rl-{name}").open("a+b")
        self._file.truncate(8)
        self._memory = mmap.mmap(self._file.fileno(), 8)
        self._asking = np.frombuffer(self._memory, np.int64, 1)

    # --- the learner -------------------------------------------------------------------------------------------

    @contextmanager
    def mine(self) -> Iterator[None]:
        """The device for the length of the block; waits until every worker has let go."""
        self._asking[0] = os.getpid()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._asking[0] = 0
            fcntl.flock(self._file, fcntl.LOCK_UN)

    # --- a worker ----------------------------------------------------------------------------------------------

    def asked(self) -> bool:
        """Whether a living learner wants the device, or has it."""
        pid = int(self._asking[0])
        return bool(pid) and Path(f"/proc/{pid}").exists()

    def hold(self) -> bool:
        """Takes the device together with other workers; False if a learner has it. Never waits."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        del self._asking
        self._memory.close()
        self._file.close()
