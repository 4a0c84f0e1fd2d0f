"""The server over real sockets, with and without its journal."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from buffers import messages as m
from buffers.client import AsyncClient, Client
from buffers.config import BufferConfig, Durability, SecurityConfig
from buffers.core import Core
from buffers.errors import ProtocolError
from buffers.journal import Journal
from buffers.records import Settings
from buffers.server import Server
from tests.buffers.driver import chunks, prompt

SETTINGS = Settings(batch=2, group=2, max_staleness=1, max_tokens=8, retain=True)


@contextmanager
def serving(folder: Path, durability: Durability, *, bind: str = "tcp://127.0.0.1:*") -> Iterator[Server]:
    """A server in a thread of this process."""
    journal, core = None, Core(SETTINGS)
    if durability != "none":
        journal, core, _ = Journal.open(folder / "journal", SETTINGS, 1 << 20)
    server = Server(core, journal, BufferConfig(durability=durability, security=SecurityConfig(bind=bind)))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)
    assert not thread.is_alive()


@pytest.fixture(params=["none", "batch", "strict"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, request.param) as server:
        yield server


async def work(endpoint: str, trajectories: int = 4) -> None:
    """A worker that answers tickets in two chunks each."""
    worker = AsyncClient(endpoint, "worker0", slots=4, window=2)
    await worker.hello()
    tickets: list[m.Ticket] = []
    while len(tickets) < trajectories:
        message = await asyncio.wait_for(worker.receive(), 10)
        tickets += message.tickets if isinstance(message, m.Tickets) else []
    reader = asyncio.create_task(worker.receive())
    for ticket in tickets:
        await worker.flush(lambda ticket=ticket: chunks([(ticket.id, 0, 0, [1, 2])]))
        await worker.flush(lambda ticket=ticket: chunks([(ticket.id, 2, 0, [3])]))
        await worker.outcomes([m.Outcome(ticket.id, 1, 3, "finished", "stop", 0.5)])
    async with asyncio.timeout(10):
        while worker.unacknowledged:  # noqa: ASYNC110 - the session counts, it does not signal
            await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    worker.close()


def credit(feeder: Client) -> m.Credit:
    """The first credit that allows something."""
    while True:
        received = feeder.poll(10)
        assert received is not None
        if isinstance(received[0], m.Credit) and received[0].upto:
            return received[0]


def test_prompts_become_a_batch(server: Server) -> None:
    learner = Client(server.endpoint, "rank0", "learner")
    assert learner.ask(m.Published(0), m.Done) is not None
    feeder = Client(server.endpoint, "feeder", "feeder")
    assert credit(feeder) == m.Credit(2)
    feeder.send(m.Submit(0, [prompt(0), prompt(1)]))
    asyncio.run(work(server.endpoint))
    batch = learner.ask(m.Take(0), m.Batch)
    assert batch is not None
    assert [row.length for row in batch.rows] == [3, 3]
    arrays = learner.fetch(m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
    assert arrays.tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert arrays.versions.tolist() == [0] * 6
    assert arrays.prompts.tolist() == [0, 1, 2]
    committed = learner.ask(m.Commit(batch.lease, 1), m.Committed)
    assert committed is not None
    assert (committed.lease, committed.cursor) == (batch.lease, 1)
    feeder.close()
    learner.close()


def test_a_malformed_message_is_refused_and_survived(server: Server) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.endpoint)
    own = m.encode(m.GiveUp([1]))  # only the server itself says that
    for frames in ([b"\xff\xff"], [b""], [m.encode(m.Append(1, 1, 1)), b"123"], [m.encode(m.Take(5))], [own]):
        socket.send_multipart(frames)
        assert socket.poll(5000)
        assert isinstance(m.decode_outbound(socket.recv_multipart()[0]), m.Rejected)
    socket.close()
    context.term()
    client = Client(server.endpoint, "observer", "observer")
    reply = client.ask(m.Status(), m.StatusReply)
    assert reply is not None
    assert reply.stats.refused_messages == 5
    client.close()


def test_a_refusal_reaches_whoever_broke_the_protocol(server: Server) -> None:
    client = Client(server.endpoint, "rank0", "learner")
    with pytest.raises(ProtocolError, match="not outstanding"):
        client.ask(m.Commit(3, 9), m.Committed)
    client.close()


def test_a_server_that_is_started_again_knows_everything(tmp_path: Path) -> None:
    """Peers stay connected: the second server listens where the first did."""
    with serving(tmp_path, "batch") as first:
        learner = Client(first.endpoint, "rank0", "learner")
        learner.ask(m.Published(0), m.Done)
        feeder = Client(first.endpoint, "feeder", "feeder")
        credit(feeder)
        feeder.send(m.Submit(0, [prompt(0), prompt(1)]))
        asyncio.run(work(first.endpoint))
    with serving(tmp_path, "batch", bind=first.endpoint):
        batch = learner.ask(m.Take(0), m.Batch)
        assert batch is not None
        arrays = learner.fetch(m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
        assert arrays.tokens.tolist() == [1, 2, 3, 1, 2, 3]
    with serving(tmp_path, "batch", bind=first.endpoint) as third:
        committed = learner.ask(m.Commit(batch.lease, 1), m.Committed)
        assert committed is not None
        assert third.core.stats().trained == 2
        third.core.check()
    feeder.close()
    learner.close()


def test_files_begin_anew_under_a_load_that_never_pauses(tmp_path: Path) -> None:
    """Something is always waiting for the disk: the next file begins all the same."""
    journal, core, _ = Journal.open(tmp_path / "journal", SETTINGS, 1 << 14)
    server = Server(core, journal, BufferConfig())
    server.receive("feeder", [m.encode(m.Hello("feeder"))])
    body = [m.encode(m.Submit(9, [prompt(0, tokens=500)]))]
    for _ in range(300):
        server.receive("feeder", body)
        server.receive("feeder", body)
        journal.wait()
        assert journal.pending
        server._make_durable()
    server.close()
    assert max(int(path.stem) for path in (tmp_path / "journal").iterdir()) > 10
