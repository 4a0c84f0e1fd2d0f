"""The core on a ZeroMQ ROUTER socket, with its journal.

One loop: take in what has come, let the core decide, put it on disk, send what the core answered once it is there. A
message that cannot be decoded is counted and answered with `Rejected`; it never ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

import msgspec
import zmq
import zmq.auth.thread

from buffers import keys
from buffers import messages as m
from buffers.config import BufferConfig
from buffers.core import Core
from buffers.errors import BufferGone, JournalError, ProtocolError
from buffers.journal import Journal, Outbox
from buffers.liveness import Deadline
from buffers.records import Settings
from buffers.segments import Findings
from buffers.store import SELF, Send

POLL_MS = 100
TAKE_IN_S = 0.01
"""Longest time for which messages are taken in before what has come is put on disk."""
WATCH_S = 0.5
BIND_S = 10.0


class Server:
    """Owns the socket, the core and the journal. `endpoint` is known after construction, also if port 0 was asked for.

    Without a journal answers go out at once and nothing survives the process.
    """

    def __init__(self, core: Core, journal: Journal | None = None, config: BufferConfig | None = None) -> None:
        self.core, self.journal = core, journal
        config = config or BufferConfig()
        self._strict = config.durability == "strict"
        self._boot = uuid.uuid4().hex
        self._workers = Deadline(config.worker_timeout_s)
        self._patience = Deadline(config.pace_timeout_s)
        self._watched = monotonic()
        self._refused = 0
        self._outbox = Outbox()
        self._cuts: deque[tuple[int, int]] = deque()
        """Groups after which the journal needs nothing before a commit's number."""
        self._stop = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        # A peer that has reconnected is heard under its old name at once.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.RCVHWM, 64)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, config.max_frame_bytes)
        self._guard: zmq.auth.thread.ThreadAuthenticator | None = None
        if config.security.keys is not None:
            self._secure(Path(config.security.keys))
        _bind(self._socket, config.security.bind)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._disk = zmq.Poller()
        if journal is not None:
            self._poller.register(journal.woken, zmq.POLLIN)
            self._disk.register(journal.woken, zmq.POLLIN)
            self._go_on(journal)

    def _secure(self, folder: Path) -> None:
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve("*", str(folder / keys.ADMITTED))  # pyright: ignore[reportUnknownMemberType]
        keys.secure_server(self._socket, folder)

    def _go_on(self, journal: Journal) -> None:
        """What a server that crashed was about to do."""
        if self.core.offering.loading:
            self._reload(journal, self.core.offering.reload_request())

    def begin_new_life(self) -> None:
        """Nobody of before is there any more: the whole run has been started again."""
        self._own(m.NewLife())
        if self.journal is not None:
            self.journal.flush()
            self.journal.wait()

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Ends `run` within one poll; usable as a signal handler."""
        self._stop = True

    def run(self) -> None:
        # What was imported lives as long as the process; the collector need not look at it, for it stops the loop.
        gc.collect()
        gc.freeze()
        try:
            while not self._stop:
                self._take_in()
                self._watch(monotonic())
                self._make_durable()
            self._finish()
        finally:
            self.close()

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        if self.journal is not None:
            self.journal.close()
        self._socket.close()
        self._context.term()

    # --- taking in ---------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Waits for something to do; then takes in messages until none is left, or a group is full or old enough."""
        journal = self.journal
        if journal is not None and journal.full and not journal.idle:
            self._disk.poll(POLL_MS)
            self._drain_wake(journal)
            return
        if not self._ready():
            return
        until = monotonic() + TAKE_IN_S
        while journal is None or not journal.full:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.receive(identity.decode("latin-1"), frames)
            if self._strict or monotonic() > until:
                return

    def _ready(self) -> bool:
        """Whether messages have come; waits for them or for the journal's thread."""
        pending = self.journal is not None and self.journal.pending and self.journal.idle
        events = dict(self._poller.poll(0 if pending else POLL_MS))
        if self.journal is not None:
            self._drain_wake(self.journal)
        return self._socket in events

    def _drain_wake(self, journal: Journal) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(journal.woken, 4096)

    def receive(self, peer: str, frames: Sequence[bytes]) -> None:
        """Acts on one message from a peer; answers go out when it is durable."""
        self._workers.seen(peer, monotonic())
        request = 0
        try:
            if not frames:
                raise ProtocolError("an empty message")
            message = m.decode_from_peer(frames[0])
            if isinstance(message, m.Evaluate | m.Evaluated):
                self._pass_on(message)
                return
            request = message.request if isinstance(message, m.Request) else 0
            question = self.core.is_question(peer, message)
            sends = self.core.receive(peer, message, frames[1:])
        except ProtocolError as error:
            self._refused += 1
            self._deliver([Send(peer, m.Rejected(str(error), request))])
            return
        if isinstance(message, m.Status):
            sends = [self._counted(send) for send in sends]
        if isinstance(message, m.Hello):
            sends.append(Send(peer, m.Welcome(self._boot)))
        self._note(peer, frames, sends, question=question)
        if isinstance(message, m.Checkpointed) and self.journal is not None:
            # What was brought back from an old file must be in a new one first.
            self._cuts.append((self.journal.handed + 1, self.core.offering.oldest_needed()))

    def _pass_on(self, message: m.Passed) -> None:
        """Between the feeder and a worker; to nobody if they are not there."""
        to = message.to if isinstance(message, m.Evaluate) else self.core.store.feeder
        if to is not None and (to in self.core.issuing.workers or to == self.core.store.feeder):
            self._deliver([Send(to, message)])

    def _counted(self, send: Send) -> Send:
        """With the messages that this server has refused, which the core never saw."""
        assert isinstance(send.message, m.StatusReply)
        stats = msgspec.structs.replace(send.message.stats, refused_messages=self._refused)
        return send._replace(message=msgspec.structs.replace(send.message, stats=stats))

    def _own(self, message: m.Inbound, frames: Sequence[memoryview] = ()) -> None:
        """An event that the server itself causes."""
        head = m.encode(message)
        self._note(SELF, [head, *frames], self.core.receive(SELF, message, frames), question=False)

    def _note(self, peer: str, frames: Sequence[bytes | memoryview], sends: list[Send], *, question: bool) -> None:
        """Journals what changes the state. Answers wait until all that they may tell of is on disk; a question changes
        nothing, but what it is answered may be news."""
        if self.journal is None:
            self._deliver(sends)
            return
        if not question:
            self.journal.add(peer, frames)
        self._outbox.hold(self.journal.handed + bool(self.journal.pending), sends)

    def _watch(self, now: float) -> None:
        """Workers that are silent, and groups that hold a batch up, for too long."""
        since = now - self._watched
        if since < WATCH_S:
            return
        self._watched = now
        if since > 4 * WATCH_S:
            # This process stood still (a long snapshot, SIGSTOP): what others have said meanwhile is still to be read.
            for worker in self.core.issuing.workers:
                self._workers.seen(worker, now)
            return
        for worker in self._workers.over(list(self.core.issuing.workers), now):
            print(f"{worker} has been silent for too long; its trajectories go to others", file=sys.stderr, flush=True)
            self._own(m.Lost(str(worker)))
        late = [int(serial) for serial in self._patience.over(self.core.offering.late(), now)]
        if late:
            self._own(m.GiveUp(late))

    # --- making durable, answering -----------------------------------------------------------------------------

    def _make_durable(self) -> None:
        """Sends what has become durable; hands the next group to the disk if it is free."""
        journal = self.journal
        if journal is None or not journal.idle:
            return
        self._deliver(self._outbox.release(journal.durable))
        while self._cuts and self._cuts[0][0] <= journal.durable:
            journal.cut(self._cuts.popleft()[1])
        if journal.long:
            self._begin_file(journal)
        if journal.pending:
            journal.flush()
            if self._strict:
                journal.wait()

    def _begin_file(self, journal: Journal) -> None:
        """The old file gets all that has come, since the new one begins with what it has led to."""
        if journal.pending:
            journal.flush()
            journal.wait()
        journal.begin(self.core)
        journal.cut(self.core.offering.oldest_needed())
        self._deliver(self._outbox.release(journal.durable))

    def _deliver(self, sends: Sequence[Send]) -> None:
        for to, message, frames in sends:
            if to != SELF:
                self._socket.send_multipart([to.encode("latin-1"), m.encode(message), *frames])
            elif isinstance(message, m.Reload) and self.journal is not None:
                self._reload(self.journal, message)

    def _reload(self, journal: Journal, reload: m.Reload) -> None:
        """Brings back what was trained after the checkpoint that the learner has gone back to."""
        message, frames = journal.find(reload.tickets)
        self._own(message, frames)

    def _finish(self) -> None:
        """Puts the last messages on disk and answers them."""
        journal = self.journal
        while journal is not None and (journal.pending or not journal.idle or len(self._outbox)):
            journal.wait()
            self._make_durable()


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    """The port of a server that was killed a moment ago may take a while to be free."""
    deadline = monotonic() + BIND_S
    while True:
        try:
            socket.bind(address)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or monotonic() > deadline:
                raise BufferGone(f"the buffer cannot listen on {address}: {error}") from error
            sleep(0.05)


def _open(folder: Path, settings: Settings, config: BufferConfig) -> tuple[Journal, Core, Findings | None]:
    try:
        return Journal.open(folder, settings, config.segment_mib << 20)
    except PermissionError as error:
        raise JournalError(f"the journal in {folder} cannot be opened: {error}. Make the folder writable") from error


def serve(settings: Settings, config: BufferConfig, folder: Path) -> None:
    """Runs until SIGTERM on the journal in `folder/journal`.

    Writes the endpoint to `folder/buffer.endpoint` as soon as peers may connect. If the file exists, this server takes
    the place of one that died: it listens where that one did, and the peers are the same. If not, a new life begins.
    """
    endpoint_file = folder / "buffer.endpoint"
    taking_over = endpoint_file.exists()
    if taking_over:
        security = msgspec.structs.replace(config.security, bind=endpoint_file.read_text().strip())
        config = msgspec.structs.replace(config, security=security)
    journal, core, findings = None, Core(settings), None
    if config.durability != "none":
        journal, core, findings = _open(folder / "journal", settings, config)
        if findings is not None:
            print(f"journal: {findings}; {core.stats().in_flight} trajectories in flight", file=sys.stderr, flush=True)
    server = Server(core, journal, config)
    if not taking_over and findings is not None:
        server.begin_new_life()
    signal.signal(signal.SIGTERM, server.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    partial = endpoint_file.with_suffix(".partial")
    partial.write_text(server.endpoint)
    partial.rename(endpoint_file)
    print(f"buffer listens on {server.endpoint}", file=sys.stderr, flush=True)
    server.run()
