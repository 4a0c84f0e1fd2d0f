"""What goes on the wire: one msgpack header frame, then raw numpy frames for the messages that carry tokens.

Everything a peer may say is one of the structs below; decoding checks types, so a handler never sees a half-formed
message. Token columns travel as raw little-endian frames beside the header and are checked by `Chunks.from_frames`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from buffers.errors import ProtocolError

Role = Literal["worker", "learner", "feeder", "observer"]


class Message(Struct, frozen=True, tag=True, tag_field="type"):
    """Base of everything sent in either direction."""


# --- from a peer to the buffer ---------------------------------------------------------------------------------


class Held(Struct, frozen=True, array_like=True):
    """A ticket that a worker has: being generated, or ended and not acknowledged."""

    ticket: int
    attempt: int


class Hello(Message, frozen=True):
    """First message of every peer, a worker's and the feeder's heartbeat, and how what was missed is made good.

    Answered by `Welcome`. `slots`: trajectories a worker generates at once, 0 while it gets ready. `holding`: its
    tickets; the buffer sends those that are missing and cancels those that are not the worker's any more. The feeder is
    told its credit.
    """

    role: Role
    slots: int = 0
    holding: list[Held] = []


class Prompt(Struct, frozen=True):
    """One task instance. `key` is (epoch, index); `row` is the data set's row as JSON, for the reward."""

    key: tuple[int, int]
    tokens: list[int]
    row: bytes


class Submit(Message, frozen=True):
    """Feeder: prompts to make groups of, within the credit granted. `first`: place of the first in the order of all
    prompts. What was submitted before is ignored, what is ahead of its turn or beyond the credit is not taken; a new
    `Credit` then says where to go on."""

    first: int
    prompts: list[Prompt]


class Append(Message, frozen=True):
    """Worker: `rows` chunks of `tokens` tokens in the frame that follows (`Chunks`). Acknowledged by `seq`."""

    seq: int
    rows: int
    tokens: int


class Turn(Struct, frozen=True, array_like=True):
    """A turn of a policy in an environment: where its tokens begin, its reward, a number for the state it began in."""

    start: int
    reward: float
    state: int


class Outcome(Struct, frozen=True):
    """How far one trajectory has come at its worker.

    `length` counts the tokens of the whole response. `generated`: complete, the reward to come. `finished`: with a
    reward. `failed`: with an error; `refused`: with one that a second try would meet again. `span_mismatch`: the
    engine's own record of versions disagrees with the tags streamed.
    """

    ticket: int
    attempt: int
    length: int
    status: Literal["generated", "finished", "failed", "refused"]
    finish_reason: str = ""
    reward: float | None = None
    error: str = ""
    span_mismatch: bool = False
    parts: list[float] = []
    """What the reward was made of, if it is not the reward itself."""
    turns: list[Turn] = []
    """Of an environment."""
    baseline: float | None = None
    """Reward of a greedy response to the same prompt, if this member was to find it out."""


class Outcomes(Message, frozen=True):
    """Worker: what has become of trajectories. Acknowledged by `seq`."""

    seq: int
    outcomes: list[Outcome]
    busy_s: float = 0.0
    """Seconds for which the worker has generated so far."""
    overhead_s: float = 0.0
    """Seconds of its own processor time that it has spent on streaming and accounts so far."""


class Published(Message, frozen=True):
    """Learner: this version can be pulled. Sent at its start; later versions come with `Commit`.

    `forks` is the learner's lineage (`staleness/versions.py`). A version of a new incarnation means that the learner
    has gone back to a checkpoint: leases return, and what was committed after that checkpoint is offered again.
    """

    version: int
    forks: list[int] = []
    request: int = 0
    source: str = ""
    """Where a worker on another host can pull it and those that follow; empty: nowhere."""


class Take(Message, frozen=True):
    """Learner: a batch to be trained at `version`. Answered by `Batch` as soon as one can be offered. Asked again with
    the same version while the batch is not committed, it is answered with the same batch."""

    version: int
    request: int = 0


class Fetch(Message, frozen=True):
    """Learner rank: the tokens of leased trajectories. Answered by `Samples` and its frames."""

    lease: int
    tickets: list[int]
    request: int = 0


class Commit(Message, frozen=True):
    """Learner: the lease was trained on (or skipped, `changed=False`) and `version` can be pulled now."""

    lease: int
    version: int
    changed: bool = True
    max_staleness: Annotated[int, Meta(ge=0)] | None = None
    """Smaller bound for what may start from now on. None: as configured."""
    request: int = 0


class Checkpointed(Message, frozen=True):
    """Learner: the checkpoint of `step` is durable; what was trained in earlier steps need not be kept."""

    step: int
    request: int = 0


class Status(Message, frozen=True):
    """Anyone: asks for `StatusReply`."""

    request: int = 0


class Lost(Message, frozen=True):
    """Feeder or server, or whoever knows: the process named so is gone. Its tickets go to others, its leases return."""

    name: str


class Leave(Message, frozen=True):
    """Worker: it goes, and everything it had streamed has been sent. Its tickets go to others."""


class GiveUp(Message, frozen=True):
    """Server: these groups have held a batch up for too long; they are dropped and counted."""

    serials: list[int]


class NewLife(Message, frozen=True):
    """Server: the whole run has been started again. All peers of before are gone, and nothing is issued or offered
    until a learner has published the weights it restored."""


class Reloaded(Message, frozen=True):
    """Server: parked trajectories, read from the journal. `spans[i]` belong to `tickets[i]`; the frames hold all tokens
    and all log-probs. What the journal does not have any more is not in it and will be missed."""

    tickets: list[int]
    lengths: list[int]
    spans: list[list[tuple[int, int]]]
    wanted: list[int]


# --- through the buffer, which only passes them on ---------------------------------------------------------------


class Evaluate(Message, frozen=True):
    """Feeder, for the worker `to`: a prompt to be answered greedily, apart from training, under one version from
    `version` on."""

    to: str
    id: int
    version: int
    prompt: Prompt


class Evaluated(Message, frozen=True):
    """Worker, for the feeder: what the answer was worth, and under which version. No reward: it was not answered."""

    id: int
    version: int | None = None
    reward: float | None = None
    length: int = 0
    error: str = ""


# --- from the buffer to a peer ---------------------------------------------------------------------------------


class Ticket(Struct, frozen=True):
    """Permission to generate one trajectory, after `min_version` has been applied.

    `prefix` is what an earlier attempt has streamed; `max_tokens` more may follow. With a `finish_reason` the response
    is complete and only its reward is wanted.
    """

    id: int
    attempt: int
    member: int
    key: tuple[int, int]
    prompt: list[int]
    row: bytes
    min_version: int
    max_tokens: int
    prefix: list[int] = []
    finish_reason: str = ""
    injected: list[tuple[int, int]] = []
    """(start, end) of what in the prefix no policy has sampled."""


class Tickets(Message, frozen=True):
    """To a worker: start these."""

    tickets: list[Ticket]


class Cancel(Message, frozen=True):
    """To a worker: stop these and forget them, if they are running."""

    tickets: list[Held]


class News(Message, frozen=True):
    """To a worker: `version` can be pulled, from `source` if not from this host. `changed=False`: it has the weights of
    the version before."""

    version: int
    changed: bool
    source: str = ""


class Welcome(Message, frozen=True):
    """To any peer: the answer to its hello. `boot` is new with every start of the server; whoever sees another one
    repeats what was not acknowledged."""

    boot: str


class Refusal(Struct, frozen=True):
    """A chunk or outcome that was not accepted. `gap`: only `expected` tokens are stored, repeat
    what comes after them; `fenced`: stop, the ticket is not yours;
    `invalid`: beyond the token budget, or from a version that does not exist."""

    ticket: int
    attempt: int
    reason: Literal["gap", "fenced", "invalid"]
    expected: int


class Ack(Message, frozen=True):
    """To a worker: message `seq` is stored, but for what is refused; so are the messages `before`, entirely."""

    seq: int
    refused: list[Refusal] = []
    before: list[int] = []


class Credit(Message, frozen=True):
    """To the feeder: prompts before place `upto` of the order of all prompts may be submitted, from place `next` on.

    Before the first prompt ever `next` is None, the feeder chooses where to begin, and `upto` counts from there.
    """

    upto: int
    next: int | None = None


class BatchRow(Struct, frozen=True, array_like=True):
    """One trajectory of a batch. `trainable` counts the tokens that may be trained on; `weight` corrects for a sampler
    that prefers some groups. What is before `start` was in earlier batches. If the trajectory `goes_on`, its reward is
    not known, and its last token here will be in a later batch."""

    ticket: int
    group: int
    member: int
    prompt_length: int
    length: int
    trainable: int
    reward: float
    weight: float = 1.0
    parts: list[float] = []
    turns: list[Turn] = []
    start: int = 0
    goes_on: bool = False


class Batch(Message, frozen=True):
    """To rank 0: a lease. `rows[i].group` indexes `group_rewards`, which holds every reward known of that group."""

    lease: int
    version: int
    rows: list[BatchRow]
    group_rewards: list[list[float]]
    stats: Stats
    request: int = 0
    baselines: list[float | None] = []
    """Of each group the reward of its greedy response, if it has one."""


class Samples(Message, frozen=True):
    """To a rank: the fetched trajectories, in the frames that follow (`SampleArrays`)."""

    lease: int
    request: int = 0


class Committed(Message, frozen=True):
    """To rank 0: the lease is retired. `cursor`: prompts before this place have ended in one way or another."""

    lease: int
    cursor: int
    request: int = 0


class Done(Message, frozen=True):
    """To a learner: `Published` or `Checkpointed` has been noted."""

    request: int = 0


class Stats(Struct, frozen=True):
    """Counters since the start of the run. Trajectories unless the name says otherwise."""

    issued: int = 0
    trained: int = 0
    expired: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    ready: int = 0
    leased: int = 0
    parked: int = 0
    limit: int = 0
    tokens: int = 0
    chunks: int = 0
    masked_stale_tokens: int = 0
    masked_nonfinite_tokens: int = 0
    multi_version: int = 0
    span_mismatches: int = 0
    refused_chunks: int = 0
    refused_messages: int = 0
    failed_groups: int = 0
    segments: int = 0
    """Parts of trajectories that were trained on while the trajectories went on."""
    filtered_groups: int = 0
    """Groups of equal rewards that dynamic sampling has replaced."""
    late_groups: int = 0
    lost_workers: int = 0
    reissued: int = 0
    """Tickets that were given to another worker after a death."""
    kept_tokens: int = 0
    """Tokens that such tickets went on from."""
    discarded_tokens: int = 0
    """Tokens of such tickets that had to be generated again."""
    expired_lengths: list[int] = []
    """Expired trajectories by length: entry i counts lengths below 2 ** i and not below 2 ** (i - 1)."""
    version: int = -1
    worker_busy_s: float = 0.0
    worker_overhead_s: float = 0.0
    last_error: str = ""

    @property
    def in_flight(self) -> int:
        return self.running + self.ready + self.leased + self.parked


class StatusReply(Message, frozen=True):
    """`workers`: the names of those that are there."""

    stats: Stats
    request: int = 0
    workers: list[str] = []


class Fatal(Message, frozen=True):
    """To the feeder: the run cannot go on, why, and where it stands."""

    reason: str
    stats: Stats


class Rejected(Message, frozen=True):
    """To a peer: its message broke the protocol and was not acted on."""

    reason: str
    request: int = 0


class Reload(Message, frozen=True):
    """To the server itself: read these parked trajectories from the journal."""

    tickets: list[int]


FromPeer = Hello | Submit | Append | Outcomes | Leave | Published | Take | Fetch | Commit | Checkpointed | Status | Lost
Inbound = FromPeer | GiveUp | NewLife | Reloaded
ToWorker = Tickets | Cancel | News | Ack
ToLearner = Batch | Samples | Committed | Done
Passed = Evaluate | Evaluated
Outbound = ToWorker | ToLearner | Credit | Fatal | Welcome | StatusReply | Rejected | Passed
Request = Published | Take | Fetch | Commit | Checkpointed | Status
"""Messages that their sender repeats until an answer with the same `request` comes."""

_encoder = msgspec.msgpack.Encoder()
_from_peer = msgspec.msgpack.Decoder(FromPeer | Passed)
_inbound = msgspec.msgpack.Decoder(Inbound)
_outbound = msgspec.msgpack.Decoder(Outbound)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_from_peer(frame: bytes | memoryview) -> FromPeer | Passed:
    """What came over the wire."""
    try:
        return _from_peer.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def decode_inbound(frame: bytes | memoryview) -> Inbound:
    """What the journal holds: messages of peers and of the server itself."""
    try:
        return _inbound.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def decode_outbound(frame: bytes | memoryview) -> Outbound:
    try:
        return _outbound.decode(frame)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed message from the buffer: {error}") from error


# --- raw columns -----------------------------------------------------------------------------------------------


Scalar = TypeVar("Scalar", bound=np.generic)


def _frame(column: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(column).view(np.uint8).data


def _column(frame: bytes | memoryview, dtype: type[Scalar], name: str) -> NDArray[Scalar]:
    itemsize = np.dtype(dtype).itemsize
    size = len(frame)
    if size % itemsize:
        raise ProtocolError(f"column {name!r} has {size} bytes, not a multiple of {itemsize}")
    return np.frombuffer(frame, dtype=dtype)


ROW_BYTES = 28
TOKEN_BYTES = 8
LEAST = np.array([1, 0, 1], np.int32)
"""Of a chunk's attempt, offset and length."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of one flush, as columns: the first five have one entry a chunk, the last two one a token.

    On the wire they are one frame, 28 bytes a chunk and 8 a token: ticket, version, attempt, offset, length, tokens,
    log-probs. A chunk of injected tokens has version `INJECTED` and log-probs that nobody reads.
    """

    ticket: NDArray[np.int64]
    attempt: NDArray[np.int32]
    offset: NDArray[np.int32]
    length: NDArray[np.int32]
    version: NDArray[np.int64]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def to_frame(self) -> bytes:
        columns = (self.ticket, self.version, self.attempt, self.offset, self.length, self.tokens, self.logprobs)
        return b"".join(_frame(column) for column in columns)

    def header(self, seq: int) -> Append:
        return Append(seq, self.ticket.size, self.tokens.size)

    @classmethod
    def from_frames(cls, head: Append, frames: Sequence[bytes | memoryview]) -> Chunks:
        """Checks that the columns belong together; what they say is for the core to check."""
        rows, tokens = head.rows, head.tokens
        if len(frames) != 1:
            raise ProtocolError(f"chunks come in 1 frame, got {len(frames)}")
        size = len(frames[0])
        if rows < 0 or tokens < 0 or size != rows * ROW_BYTES + tokens * TOKEN_BYTES:
            raise ProtocolError(f"{rows} chunks of {tokens} tokens do not make {size} bytes")
        data = memoryview(frames[0])
        at = 0

        def column(dtype: type[Scalar], count: int) -> NDArray[Scalar]:
            nonlocal at
            start, at = at, at + count * np.dtype(dtype).itemsize
            return np.frombuffer(data[start:at], dtype=dtype)

        ticket, version = column(np.int64, rows), column(np.int64, rows)
        numbers = column(np.int32, 3 * rows).reshape(3, rows)
        attempt, offset, length = numbers
        chunks = cls(ticket, attempt, offset, length, version, column(np.int32, tokens), column(np.float32, tokens))
        if rows and (ticket.min() < 0 or (numbers.min(1) < LEAST).any()):
            raise ProtocolError("a chunk has a negative ticket or offset, an attempt below 1, or no tokens")
        total = int(length.sum(dtype=np.int64))
        if total != tokens:
            raise ProtocolError(f"lengths add up to {total} tokens, but {tokens} came")
        return chunks


@dataclass(frozen=True)
class SampleArrays:
    """Fetched trajectories as columns, in the order asked for.

    `prompts` concatenates the prompts of the trajectories' groups, each once, in order of first use. The next three
    concatenate the tokens; `mask` is 1 where a token may be trained on. The last two are run-length versions: span i is
    `span_length[i]` tokens of `span_version[i]` (`INJECTED` where nobody sampled).
    """

    prompts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.uint8]
    span_length: NDArray[np.int32]
    span_version: NDArray[np.int64]

    @property
    def versions(self) -> NDArray[np.int64]:
        """The version of each token."""
        return np.repeat(self.span_version, self.span_length)

    def to_frames(self) -> list[memoryview]:
        columns = (self.prompts, self.tokens, self.logprobs, self.mask, self.span_length, self.span_version)
        return [_frame(column) for column in columns]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes | memoryview]) -> SampleArrays:
        if len(frames) != 6:
            raise ProtocolError(f"samples come in 6 frames, got {len(frames)}")
        return cls(
            prompts=_column(frames[0], np.int32, "prompts"),
            tokens=_column(frames[1], np.int32, "tokens"),
            logprobs=_column(frames[2], np.float32, "logprobs"),
            mask=_column(frames[3], np.uint8, "mask"),
            span_length=_column(frames[4], np.int32, "span_length"),
            span_version=_column(frames[5], np.int64, "span_version"),
        )
