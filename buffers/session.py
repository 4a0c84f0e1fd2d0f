"""What a worker must remember to lose nothing: its tickets, and what it has said that was not acknowledged. No I/O.

    session = WorkerSession(slots=64)
    socket.send(session.hello(now))
    socket.send(session.append(chunks))          # while `session.open`
    news, again = session.received(message, now) # what concerns the worker; what to send again
    socket.send(*session.due(now))               # heartbeats, and repeats of what nobody answers

Messages are kept until they are acknowledged and sent again, all of them and in order, when the buffer has started
anew, when it has missed an earlier one, or when it is silent for `retry_s`. The buffer ignores what it has already.
"""

from __future__ import annotations

from dataclasses import dataclass

from buffers import messages as m
from buffers.errors import ProtocolError

Frames = list[bytes]
SETTLE_S = 0.2
"""Time after a repeat for which gaps cause no other one."""


@dataclass
class _Said:
    """A message that is not acknowledged; `ends`: the (ticket, attempt) that its acknowledgement ends."""

    frames: Frames
    ends: list[tuple[int, int]]


class WorkerSession:
    """See the module. Times are seconds of any clock that does not go back."""

    def __init__(self, slots: int, *, window: int = 16, heartbeat_s: float = 5.0, retry_s: float = 5.0) -> None:
        self.slots = slots
        self.held: dict[int, int] = {}
        """Attempt of each ticket that is generated here, or has ended and is not acknowledged."""
        self._window = window
        self._heartbeat_s = heartbeat_s
        self._retry_s = retry_s
        self._said: dict[int, _Said] = {}
        self._seq = 0
        self._boot: str | None = None
        self._hello_at = self._progress_at = 0.0
        self._again_at = float("-inf")

    @property
    def open(self) -> bool:
        """Whether another message may be sent; if not, wait for acknowledgements."""
        return len(self._said) < self._window

    @property
    def unacknowledged(self) -> int:
        return len(self._said)

    def hello(self, now: float) -> Frames:
        self._hello_at = now
        holding = [m.Held(ticket, attempt) for ticket, attempt in self.held.items()]
        return [m.encode(m.Hello("worker", self.slots, holding))]

    def append(self, chunks: m.Chunks) -> Frames:
        self._seq += 1
        return self._say([m.encode(chunks.header(self._seq)), chunks.to_frame()], [])

    def outcomes(self, outcomes: list[m.Outcome], *, busy_s: float = 0.0, overhead_s: float = 0.0) -> Frames:
        self._seq += 1
        ends = [(outcome.ticket, outcome.attempt) for outcome in outcomes if outcome.status != "generated"]
        return self._say([m.encode(m.Outcomes(self._seq, outcomes, busy_s, overhead_s))], ends)

    def _say(self, frames: Frames, ends: list[tuple[int, int]]) -> Frames:
        self._said[self._seq] = _Said(frames, ends)
        return frames

    def received(self, message: m.Outbound, now: float) -> tuple[list[m.Outbound], list[Frames]]:
        """What of a message is for the worker to act on, and what to send again because of it."""
        match message:
            case m.Ack():
                return self._acknowledged(message, now)
            case m.Welcome(boot):
                anew = self._boot not in (None, boot)
                self._boot = boot
                return [], ([self.hello(now), *self._again(now)] if anew else [])
            case m.Tickets(tickets):
                return self._granted(tickets), []
            case m.Cancel(cancelled):
                gone = [held for held in cancelled if self._drop(held.ticket, held.attempt)]
                return ([m.Cancel(gone)] if gone else []), []
            case m.Rejected(reason):
                raise ProtocolError(f"the buffer refused a message: {reason}")
            case _:
                return [message], []

    def _acknowledged(self, ack: m.Ack, now: float) -> tuple[list[m.Outbound], list[Frames]]:
        self._progress_at = now
        invalid = [refusal for refusal in ack.refused if refusal.reason == "invalid"]
        if invalid:
            raise ProtocolError(f"the buffer refused chunks that can never be stored: {invalid[:3]}")
        fenced = [m.Held(r.ticket, r.attempt) for r in ack.refused if r.reason == "fenced"]
        gone = [held for held in fenced if self._drop(held.ticket, held.attempt)]
        news: list[m.Outbound] = [m.Cancel(gone)] if gone else []
        if any(refusal.reason == "gap" for refusal in ack.refused):
            # One lost message makes gaps of all that follow: they are repeated once, not once for each.
            recently = now - self._again_at < SETTLE_S
            return news, [] if recently else self._again(now)
        for seq in (*ack.before, ack.seq):
            said = self._said.pop(seq, None)
            for ticket, attempt in said.ends if said else []:
                self._drop(ticket, attempt)
        # Acknowledgements come in the order of messages: an earlier one that has none was lost.
        missed = any(seq < ack.seq for seq in self._said)
        return news, self._again(now) if missed and now - self._again_at >= SETTLE_S else []

    def _granted(self, tickets: list[m.Ticket]) -> list[m.Outbound]:
        """Tickets that are new here. One held under an older attempt was given up for dead: that attempt ends."""
        new = [ticket for ticket in tickets if self.held.get(ticket.id, 0) < ticket.attempt]
        ended = [m.Held(ticket.id, self.held[ticket.id]) for ticket in new if ticket.id in self.held]
        for ticket in new:
            self.held[ticket.id] = ticket.attempt
        return [*([m.Cancel(ended)] if ended else []), *([m.Tickets(new)] if new else [])]

    def _drop(self, ticket: int, attempt: int) -> bool:
        if self.held.get(ticket) != attempt:
            return False
        del self.held[ticket]
        return True

    def _again(self, now: float) -> list[Frames]:
        self._progress_at = self._again_at = now
        return [said.frames for said in self._said.values()]

    def due(self, now: float) -> list[Frames]:
        """What to send because time has passed."""
        out: list[Frames] = []
        if now - self._hello_at >= self._heartbeat_s:
            out.append(self.hello(now))
        if not self._said:
            self._progress_at = now
        elif now - self._progress_at >= self._retry_s:
            out += self._again(now)
        return out
