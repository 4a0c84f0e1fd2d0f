"""The server over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from buffers import dump, inspect
from buffers import messages as m
from buffers.client import AsyncClient, Client
from buffers.core import Core
from buffers.errors import ProtocolError
from buffers.records import Settings
from buffers.server import Server
from tests.buffers.driver import chunks, prompt


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Core(Settings(batch=2, group=2, max_staleness=1, max_tokens=8)))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join(5)
    assert not thread.is_alive()


async def work(endpoint: str) -> None:
    """A worker that answers four tickets in two chunks each."""
    worker = AsyncClient(endpoint, "worker0", slots=4, window=2)
    await worker.hello()
    tickets: list[m.Ticket] = []
    while len(tickets) < 4:
        message = await asyncio.wait_for(worker.receive(), 10)
        tickets += message.tickets if isinstance(message, m.Tickets) else []
    reader = asyncio.create_task(worker.receive())
    for ticket in tickets:
        await worker.append(chunks([(ticket.id, 0, 0, [1, 2])]))
        await worker.append(chunks([(ticket.id, 2, 0, [3])]))
        await worker.send(m.Outcomes([m.Outcome(ticket.id, 1, 3, "finished", "stop", 0.5)]))
    async with asyncio.timeout(10):
        while worker.unacknowledged:  # noqa: ASYNC110 - the client counts, it does not signal
            await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    worker.close()


def test_prompts_become_a_batch(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = Client(server.endpoint, "rank0", "learner")
    learner.send(m.Published(0))
    feeder = Client(server.endpoint, "feeder", "feeder")
    received = feeder.poll(10)
    assert received is not None
    assert received[0] == m.Credit(2)
    feeder.send(m.Submit([prompt(0), prompt(1)]))
    asyncio.run(work(server.endpoint))
    batch = learner.ask(m.Take(0), m.Batch)
    assert batch is not None
    assert [row.length for row in batch.rows] == [3, 3]
    arrays = learner.fetch(m.Fetch(batch.lease, [row.ticket for row in batch.rows]))
    assert arrays.tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert arrays.prompts.tolist() == [0, 1, 2]
    path = tmp_path / "buffer.npz"
    assert learner.ask(m.Dump(str(path)), m.Dumped) == m.Dumped(str(path), 4)
    committed = learner.ask(m.Commit(batch.lease, 1), m.Committed)
    assert committed == m.Committed(batch.lease, 1)
    feeder.close()
    learner.close()
    records = list(dump.read(path))
    assert [record.state for record in records] == ["leased", "leased", "ready", "ready"]
    assert [tuple(chunk) for chunk in records[0].chunks] == [(0, 2, 0), (2, 1, 0)]
    inspect.show(path)
    out = capsys.readouterr().out
    assert "4 trajectories" in out
    assert "chunk at 2, 1 tokens, version 0" in out
    assert "3:-1.000" in out


def test_a_malformed_message_is_refused_and_survived(server: Server) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.endpoint)
    bad_dump = m.encode(m.Dump("/no/such/folder/x.npz"))
    for frames in ([b"\xff\xff"], [b""], [m.encode(m.Append(1)), b"123"], [m.encode(m.Take(5))], [bad_dump]):
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
