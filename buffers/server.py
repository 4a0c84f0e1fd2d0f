"""The core on a ZeroMQ ROUTER socket.

One thread, one loop: receive, let the core decide, send what it answers. A frame that cannot be decoded is counted and
answered with `Rejected`; it never ends the process.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import zmq

from buffers import dump
from buffers import messages as m
from buffers.core import Core, Send
from buffers.errors import ProtocolError
from staleness.errors import VersionError

POLL_MS = 100


class Server:
    """Owns the socket and the core. `endpoint` is known after construction, also when port 0 was asked for."""

    def __init__(self, core: Core, bind: str = "tcp://127.0.0.1:*", max_frame_bytes: int = 1 << 28) -> None:
        self.core = core
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.bind(bind)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = False

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Ends `run` within one poll; usable as a signal handler."""
        self._stop = True

    def run(self) -> None:
        while not self._stop:
            if not self._socket.poll(POLL_MS):
                continue
            identity, *frames = self._socket.recv_multipart(copy=False)
            for send in self.receive(bytes(identity.buffer).decode("latin-1"), [frame.buffer for frame in frames]):
                self._deliver(send)
        self._socket.close()
        self._context.term()

    def receive(self, peer: str, frames: Sequence[memoryview]) -> list[Send]:
        """What one message from a peer leads to."""
        try:
            if not frames:
                raise ProtocolError("an empty message")
            message = m.decode_inbound(frames[0])
            if isinstance(message, m.Append):
                return self.core.append(peer, message.seq, m.Chunks.from_frames(frames[1:]))
            if isinstance(message, m.Dump):
                return [Send(peer, self._dump(message.path))]
            return self.core.handle(peer, message)
        except (ProtocolError, VersionError) as error:
            self.core.refused_messages += 1
            return [Send(peer, m.Rejected(str(error)))]

    def _dump(self, path: str) -> m.Dumped:
        try:
            return m.Dumped(path, dump.write(self.core, Path(path)))
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the buffer's content cannot be written to {path!r}: {error}") from error

    def _deliver(self, send: Send) -> None:
        self._socket.send_multipart([send.to.encode("latin-1"), m.encode(send.message), *send.frames])


def serve(core: Core, endpoint_file: Path, max_frame_bytes: int) -> None:
    """Runs until SIGTERM; writes the endpoint to a file as soon as peers may connect."""
    server = Server(core, max_frame_bytes=max_frame_bytes)
    signal.signal(signal.SIGTERM, server.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    partial = endpoint_file.with_suffix(".partial")
    partial.write_text(server.endpoint)
    partial.rename(endpoint_file)
    print(f"buffer listens on {server.endpoint}", file=sys.stderr, flush=True)
    server.run()
