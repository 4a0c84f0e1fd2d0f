"""A worker's session: nothing it said is lost, nothing is repeated without need, and it holds no more than its window.

1  the window: messages wait for acknowledgements, which free their place; ended tickets are forgotten then
2  what was missed is repeated, all of it and in order: after a gap, another boot, silence, or an answer out of order
3  tickets are taken once per attempt; cancelled and fenced ones are dropped, and only under the attempt they name
4  failures.md 17: 10,000 numbered messages through a lossy network and a consumer that starts again: no gap, no repeat
"""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from buffers import messages as m
from buffers import snapshot
from buffers.core import Core
from buffers.errors import ProtocolError
from buffers.records import Settings
from buffers.session import SETTLE_S, Frames, WorkerSession
from tests.buffers.driver import chunks, prompt


def ticket(number: int, attempt: int = 1) -> m.Ticket:
    return m.Ticket(number, attempt, 0, (0, number), [1], b"{}", 0, 8)


def seq_of(frames: Frames) -> int:
    message = m.decode_from_peer(frames[0])
    assert isinstance(message, m.Append | m.Outcomes)
    return message.seq


def append(session: WorkerSession, number: int, offset: int = 0) -> Frames:
    return session.append(chunks([(number, offset, 0, [7])]))


def outcome(session: WorkerSession, number: int, status: str = "finished", attempt: int = 1) -> Frames:
    return session.outcomes([m.Outcome(number, attempt, 1, status, "stop", 1.0)])


def holding(session: WorkerSession, *numbers: int, boot: str = "a") -> WorkerSession:
    session.received(m.Welcome(boot), 0.0)
    session.received(m.Tickets([ticket(number) for number in numbers]), 0.0)
    return session


# --- 1 window ----------------------------------------------------------------------------------------------------


def test_the_window_closes_and_opens_with_acknowledgements() -> None:
    session = holding(WorkerSession(4, window=3), 1)
    for i in range(3):
        assert session.open
        assert seq_of(append(session, 1, i)) == i + 1
    assert not session.open
    assert session.unacknowledged == 3
    assert session.received(m.Ack(1), 1.0) == ([], [])
    assert session.open
    session.received(m.Ack(1), 1.0)  # said twice
    session.received(m.Ack(99), 1.0)
    assert session.unacknowledged == 2


def test_a_message_carries_what_was_said() -> None:
    session = holding(WorkerSession(4), 1)
    columns = chunks([(1, 0, 0, [7, 8]), (1, 2, 1, [9])])
    head, frame = session.append(columns)
    message = m.decode_from_peer(head)
    assert message == m.Append(1, 2, 3)
    assert isinstance(message, m.Append)
    assert m.Chunks.from_frames(message, [frame]).tokens.tolist() == [7, 8, 9]
    (head,) = session.outcomes([m.Outcome(1, 1, 3, "finished", "stop", 0.5)], busy_s=2.0, overhead_s=0.5)
    assert m.decode_from_peer(head) == m.Outcomes(2, [m.Outcome(1, 1, 3, "finished", "stop", 0.5)], 2.0, 0.5)


@pytest.mark.parametrize("status", ["finished", "failed", "refused"])
def test_a_ticket_is_held_until_its_end_is_acknowledged(status: str) -> None:
    session = holding(WorkerSession(4), 1, 2)
    outcome(session, 1, "generated")
    session.received(m.Ack(1), 0.0)
    assert session.held == {1: 1, 2: 1}
    outcome(session, 1, status)
    (hello,) = session.hello(0.0)
    assert m.decode_from_peer(hello) == m.Hello("worker", 4, [m.Held(1, 1), m.Held(2, 1)])
    session.received(m.Ack(2), 0.0)
    assert session.held == {2: 1}


# --- 2 repeats ---------------------------------------------------------------------------------------------------


def test_a_gap_repeats_everything_in_order_once() -> None:
    session = holding(WorkerSession(4), 1)
    said = [append(session, 1, i) for i in range(4)]
    gap = [m.Refusal(1, 1, "gap", 0)]
    assert session.received(m.Ack(1), 1.0) == ([], [])
    assert session.received(m.Ack(3, gap), 1.0) == ([], said[1:])  # 2 was lost
    assert session.received(m.Ack(4, gap), 1.0 + SETTLE_S / 2) == ([], [])  # of the same loss
    assert session.unacknowledged == 3
    for seq in (2, 3, 4):
        assert session.received(m.Ack(seq), 1.1) == ([], [])
    assert session.unacknowledged == 0
    assert session.due(1.2) == []


def test_a_gap_after_the_repeats_repeats_again() -> None:
    session = holding(WorkerSession(4), 1)
    said = [append(session, 1, i) for i in range(3)]
    gap = [m.Refusal(1, 1, "gap", 0)]
    assert session.received(m.Ack(2, gap), 1.0)[1] == said
    assert session.received(m.Ack(3, gap), 1.0 + 2 * SETTLE_S)[1] == said


def test_another_boot_means_hello_and_everything_again() -> None:
    session = WorkerSession(4)
    assert session.received(m.Welcome("a"), 0.0) == ([], [])
    holding(session, 1, 2)
    said = [append(session, 1), outcome(session, 2, "failed")]
    assert session.received(m.Welcome("a"), 1.0) == ([], [])
    news, again = session.received(m.Welcome("b"), 2.0)
    assert news == []
    assert [m.decode_from_peer(again[0][0])] == [m.Hello("worker", 4, [m.Held(1, 1), m.Held(2, 1)])]
    assert again[1:] == said
    assert session.received(m.Welcome("b"), 2.0) == ([], [])
    assert session.received(m.Welcome("a"), 3.0)[1][1:] == said


def test_silence_repeats_everything_and_only_silence_does() -> None:
    session = holding(WorkerSession(4, heartbeat_s=1000, retry_s=5), 1)
    session.due(0.0)
    assert session.due(100.0) == []  # nothing was said
    said = [append(session, 1, i) for i in range(3)]
    assert session.due(104.0) == []
    session.received(m.Ack(1), 104.5)
    assert session.due(109.0) == []
    assert session.due(109.5) == said[1:]
    assert session.due(110.0) == []
    assert session.due(114.5) == said[1:]


def test_a_heartbeat_is_due_again_and_again() -> None:
    session = WorkerSession(4, heartbeat_s=5)
    session.hello(0.0)
    assert session.due(4.9) == []
    assert [m.decode_from_peer(frames[0]) for frames in session.due(5.0)] == [m.Hello("worker", 4)]
    assert session.due(9.9) == []
    assert len(session.due(10.0)) == 1


def test_a_lost_message_is_repeated_though_later_ones_are_acknowledged() -> None:
    """An outcome that was lost makes no gap, and other trajectories go on: it must not wait for them to end."""
    session = holding(WorkerSession(4, window=8, heartbeat_s=1e9, retry_s=5), 1, 2)
    session.received(m.Ack(seq_of(append(session, 1))), 0.0)
    lost = outcome(session, 1)
    now, repeated = 0.0, False
    for i in range(300):
        now += 0.1
        again = session.due(now)
        seq = seq_of(append(session, 2, i))
        _, more = session.received(m.Ack(seq), now)
        repeated |= lost in again + more
    assert repeated
    session.received(m.Ack(seq_of(lost)), now)
    assert session.unacknowledged == 0


def test_what_can_never_be_stored_or_was_rejected_is_an_error() -> None:
    session = holding(WorkerSession(4), 1)
    append(session, 1)
    with pytest.raises(ProtocolError, match="never be stored"):
        session.received(m.Ack(1, [m.Refusal(1, 1, "invalid", 0)]), 0.0)
    with pytest.raises(ProtocolError, match="refused a message: because"):
        session.received(m.Rejected("because"), 0.0)


# --- 3 tickets ---------------------------------------------------------------------------------------------------


def test_tickets_sent_twice_are_started_once() -> None:
    session = WorkerSession(4)
    one, two, three = ticket(1), ticket(2), ticket(3)
    assert session.received(m.Tickets([one, two]), 0.0) == ([m.Tickets([one, two])], [])
    assert session.received(m.Tickets([one, two]), 0.0) == ([], [])
    assert session.received(m.Tickets([two, three]), 0.0) == ([m.Tickets([three])], [])


def test_a_newer_attempt_ends_the_older_one_and_an_older_one_is_ignored() -> None:
    session = holding(WorkerSession(4), 1)
    newer = ticket(1, attempt=2)
    assert session.received(m.Tickets([newer]), 0.0) == ([m.Cancel([m.Held(1, 1)]), m.Tickets([newer])], [])
    assert session.received(m.Tickets([ticket(1)]), 0.0) == ([], [])
    assert session.received(m.Cancel([m.Held(1, 1)]), 0.0) == ([], [])  # it has ended
    assert session.held == {1: 2}


def test_cancelled_tickets_are_dropped_once() -> None:
    session = holding(WorkerSession(4), 1, 2)
    cancel = m.Cancel([m.Held(1, 1), m.Held(5, 1), m.Held(2, 7)])
    assert session.received(cancel, 0.0) == ([m.Cancel([m.Held(1, 1)])], [])
    assert session.received(cancel, 0.0) == ([], [])
    assert session.held == {2: 1}


def test_fenced_tickets_are_cancelled_and_their_message_is_done() -> None:
    session = holding(WorkerSession(4), 1, 2)
    session.append(chunks([(1, 0, 0, [7]), (2, 0, 0, [7])]))
    append(session, 1, 1)
    fenced = [m.Refusal(1, 1, "fenced", 0)]
    assert session.received(m.Ack(1, fenced), 0.0) == ([m.Cancel([m.Held(1, 1)])], [])
    assert session.received(m.Ack(2, fenced), 0.0) == ([], [])
    assert (session.held, session.unacknowledged) == ({2: 1}, 0)


def test_other_news_goes_to_the_worker() -> None:
    assert WorkerSession(4).received(m.News(3, changed=False), 0.0) == ([m.News(3, changed=False)], [])


# --- 4 a lossy network -------------------------------------------------------------------------------------------

LENGTH = 250


class Network:
    """A session and a core that loses messages both ways, in order otherwise, and starts again from its last sync.

    As over the real socket: an answer leaves after the sync that covers its message; a new start has another boot.
    """

    def __init__(self, seed: int, trajectories: int, loss: float, crashes: float) -> None:
        self.rng = random.Random(seed)
        self.loss, self.crashes = loss, crashes
        self.core = Core(Settings(trajectories, 1, 0, LENGTH))
        for peer, message in (("feeder", m.Hello("feeder")), ("rank0", m.Published(0))):
            self.core.handle(peer, message)
        self.core.handle("feeder", m.Submit(0, [prompt(i) for i in range(trajectories)]))
        self.session = WorkerSession(4, window=10, heartbeat_s=5, retry_s=5)
        self.up: deque[Frames] = deque()
        self.down: deque[m.Message] = deque()
        self.unsynced: list[m.Message] = []
        self.boots = 0
        self.saved = snapshot.take(self.core)
        self.now = 0.0

    def send(self, frames: Frames) -> None:
        if self.rng.random() >= self.loss:
            self.up.append(frames)

    def deliver(self) -> None:
        """One message reaches the core."""
        frames = self.up.popleft()
        message = m.decode_from_peer(frames[0])
        sends = self.core.receive("w", message, frames[1:])
        self.unsynced += [send.message for send in sends if send.to == "w"]
        if isinstance(message, m.Hello):
            self.unsynced.append(m.Welcome(str(self.boots)))

    def sync(self) -> None:
        if self.crashes:
            self.saved = snapshot.take(self.core)
        self.down += [message for message in self.unsynced if self.rng.random() >= self.loss]
        self.unsynced = []

    def crash(self) -> None:
        """Everything on the way is gone, and what was not synced."""
        self.core = snapshot.restore(*self.saved)
        self.up.clear()
        self.down.clear()
        self.unsynced = []
        self.boots += 1

    def hear(self) -> list[m.Outbound]:
        news, again = self.session.received(self.down.popleft(), self.now)
        for frames in again:
            self.send(frames)
        return news


@pytest.mark.parametrize(
    ("seed", "trajectories", "loss", "crashes"),
    [(0, 40, 0.01, 0.001), (1, 8, 0.0, 0.0), (2, 8, 0.1, 0.0), (3, 8, 0.0, 0.01), (4, 8, 0.05, 0.005)],
)
def test_ten_thousand_numbered_messages_arrive_once_each(
    seed: int, trajectories: int, loss: float, crashes: float
) -> None:
    """failures.md 17. Each message is one numbered token, 250 to a trajectory; the window is 10."""
    net = Network(seed, trajectories, loss, crashes)
    rng = net.rng
    at: dict[int, int] = {}
    said = 0
    net.send(net.session.hello(0.0))
    for _ in range(400_000):
        net.now += 0.01
        for frames in net.session.due(net.now):
            net.send(frames)
        assert len(net.session._said) <= 10
        if net.session.open and at and rng.random() < 0.8:
            number = rng.choice(sorted(at))
            if at[number] < LENGTH:
                net.send(net.session.append(chunks([(number, at[number], 0, [at[number]])])))
                at[number] += 1
                said += 1
            else:
                net.send(net.session.outcomes([m.Outcome(number, 1, LENGTH, "finished", "length", 1.0)]))
                del at[number]
        for _ in range(2):
            if net.up:
                net.deliver()
        if rng.random() < 0.1:
            net.sync()
        if rng.random() < net.crashes:
            net.crash()
        while net.down:
            for news in net.hear():
                if isinstance(news, m.Tickets):
                    at.update({one.id: len(one.prefix) for one in news.tickets})
                elif isinstance(news, m.Cancel):
                    for held in news.tickets:
                        at.pop(held.ticket, None)
        if net.core.stats().ready == trajectories:
            break
    stats = net.core.stats()
    assert said >= trajectories * LENGTH
    assert (stats.ready, stats.running, stats.failed) == (trajectories, 0, 0)
    pool = net.core.store.pool
    for number in net.core.store.trajectories:
        row = pool.row(number)
        assert pool.tokens[row, : pool.length[row]].tolist() == list(range(LENGTH))
    assert stats.tokens == trajectories * LENGTH
    assert (net.boots > 3) == (crashes > 0)


def test_the_end_of_an_old_attempt_does_not_end_the_new_one() -> None:
    """A worker that was falsely counted as dead: its outcome of attempt 1 is fenced while it has attempt 2."""
    session = WorkerSession(4)
    ticket = m.Ticket(7, 1, 0, (0, 0), [1], b"{}", 0, 8)
    session.received(m.Tickets([ticket]), 0.0)
    session.outcomes([m.Outcome(7, 1, 0, "finished", "stop", 1.0)])
    session.received(m.Cancel([m.Held(7, 1)]), 0.0)
    news, _ = session.received(m.Tickets([msgspec.structs.replace(ticket, attempt=2)]), 0.0)
    assert [item.tickets[0].attempt for item in news if isinstance(item, m.Tickets)] == [2]
    session.received(m.Ack(1, [m.Refusal(7, 1, "fenced", 0)]), 0.0)
    assert session.held == {7: 2}
    assert session.received(m.Tickets([msgspec.structs.replace(ticket, attempt=2)]), 0.0) == ([], [])
