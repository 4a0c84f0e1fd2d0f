"""The live server among hostile peers: it neither ends nor errs, and those who keep to the protocol do not notice."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import zmq

from async_rl.benchmarks.server import ServerProcess
from buffers import keys, segments
from buffers import messages as m
from buffers.client import Client
from buffers.config import BufferConfig, SecurityConfig
from buffers.errors import KeysError
from buffers.records import Settings
from tests.processes.fuzz import hostile
from tests.processes.peers import FeederPeer, Learner, Worker, wait_for

pytestmark = pytest.mark.e2e

SETTINGS = Settings(batch=16, group=4, max_staleness=2, max_tokens=128, retain=True)
FRAMES = 100_000


@pytest.mark.timeout(300)
def test_a_hundred_thousand_hostile_frames_change_nothing(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, SETTINGS, BufferConfig(max_frame_bytes=1 << 16))
    learner = Learner(server.endpoint, group=SETTINGS.group)
    peers = [Worker(server.endpoint, 32, 128, pause_s=0.01), FeederPeer(server.endpoint), learner]
    for peer in peers:
        peer.start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(server.endpoint)
    answers = sent = 0
    for frames in hostile(0, FRAMES):
        socket.send_multipart(frames)
        sent += 1
        while sent - answers > 500:  # each is answered: nothing is swallowed
            assert socket.poll(20_000), "the server does not answer any more"
            socket.recv_multipart()
            answers += 1
    while answers < sent and socket.poll(5000):
        socket.recv_multipart()
        answers += 1
    assert answers == sent
    socket.send_multipart([b"x" * (1 << 17)])  # beyond the limit: the connection ends, nobody else's does
    step = learner.step
    wait_for(lambda: learner.step >= step + 3, peers, 60, "training among hostile frames")
    status = Client(server.endpoint, "observer", "observer")
    reply = status.ask(m.Status(), m.StatusReply)
    assert reply is not None
    assert reply.stats.refused_messages > FRAMES // 2
    assert (reply.stats.failed, reply.stats.cancelled, reply.stats.span_mismatches) == (0, 0, 0)
    for peer in (*peers[::2], peers[1]):
        peer.stop()
    status.close()
    socket.close()
    context.term()
    server.close()
    core, _ = segments.recover(segments.of(tmp_path / "journal"))
    core.check()
    assert core.stats().trained == learner.step * SETTINGS.batch


def ask(endpoint: str, folder: Path | None) -> bool:
    """Whether a client with the keys in `folder` is answered within two seconds."""
    client = Client(endpoint, "observer", "observer", folder)
    begun = time.monotonic()
    reply = client.ask(m.Status(), m.StatusReply, until=lambda: time.monotonic() > begun + 2)
    client.close()
    return reply is not None


def test_with_keys_nobody_gets_in_without_them(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "keys", tmp_path / "other"
    keys.make(ours)
    keys.make(theirs)
    # Of a stranger who knows the server's public key but is not admitted.
    (theirs / "server.key").write_bytes((ours / "server.key").read_bytes())
    server = ServerProcess(tmp_path, SETTINGS, BufferConfig(security=SecurityConfig(keys=str(ours))))
    assert ask(server.endpoint, ours)
    assert not ask(server.endpoint, None)
    assert not ask(server.endpoint, theirs)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(server.endpoint)
    for frames in hostile(1, 1000):
        # A handshake that was refused leaves the socket without a peer: what is sent then would wait for ever.
        with contextlib.suppress(zmq.Again):
            socket.send_multipart(frames, zmq.NOBLOCK)
    assert not socket.poll(1000)
    socket.close()
    context.term()
    client = Client(server.endpoint, "observer", "observer", ours)
    reply = client.ask(m.Status(), m.StatusReply)
    assert reply is not None
    assert reply.stats == m.Stats(limit=SETTINGS.limit, expired_lengths=reply.stats.expired_lengths)
    client.close()
    server.close()


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys")
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "keys").glob("*.key_secret")} == {0}
    with pytest.raises(KeysError, match="never overwritten"):
        keys.make(tmp_path / "keys")


def test_an_address_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"0\.0\.0\.0.*async-rl keys"):
        keys.check("tcp://0.0.0.0:5555", None)
    with pytest.raises(KeysError, match="cannot be read"):
        keys.check("tcp://0.0.0.0:5555", str(tmp_path))
    keys.make(tmp_path / "keys")
    keys.check("tcp://0.0.0.0:5555", str(tmp_path / "keys"))
    keys.check("tcp://127.0.0.1:*", None)
