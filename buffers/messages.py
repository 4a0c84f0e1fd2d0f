"""What goes on the wire: one msgpack header frame, then raw numpy frames for the messages that carry tokens.

Everything a peer may say is one of the structs below; decoding checks types, so a handler never sees a half-formed
message. Token columns travel as raw little-endian frames beside the header and are checked by `Chunks.from_frames`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from buffers.errors import ProtocolError

Role = Literal["worker", "learner", "feeder", "observer"]


class Message(Struct, frozen=True, tag=True, tag_field="type"):
    """Base of everything sent in either direction."""


# --- from a peer to the buffer ---------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of every peer. `slots`: trajectories a worker generates at once."""

    role: Role
    slots: int = 0


class Prompt(Struct, frozen=True):
    """One task instance. `key` is (epoch, index); `row` is the data set's row as JSON, for the reward."""

    key: tuple[int, int]
    tokens: list[int]
    row: bytes


class Submit(Message, frozen=True):
    """Feeder: prompts to make groups of, within the credit granted."""

    prompts: list[Prompt]


class Append(Message, frozen=True):
    """Worker: chunks, in the frames that follow (`Chunks`). `seq` grows by one per message and is acknowledged."""

    seq: int


class Outcome(Struct, frozen=True):
    """How one trajectory ended at its worker.

    `length` counts sampled tokens and must equal what was streamed. A `finished` trajectory has a reward; a `failed`
    one has an error. `span_mismatch`: the engine's own record of versions disagrees with the tags streamed.
    """

    ticket: int
    attempt: int
    length: int
    status: Literal["finished", "failed"]
    finish_reason: str = ""
    reward: float | None = None
    error: str = ""
    span_mismatch: bool = False


class Outcomes(Message, frozen=True):
    """Worker: trajectories that have ended."""

    outcomes: list[Outcome]


class Published(Message, frozen=True):
    """Learner: this version can be pulled. Sent before the first ticket; later versions come with `Commit`."""

    version: int


class Take(Message, frozen=True):
    """Learner: a batch to be trained at `version`. Answered by `Batch` as soon as one can be offered."""

    version: int


class Fetch(Message, frozen=True):
    """Learner rank: the tokens of leased trajectories. Answered by `Samples` and its frames."""

    lease: int
    tickets: list[int]


class Commit(Message, frozen=True):
    """Learner: the lease was trained on (or skipped, `changed=False`) and `version` can be pulled now."""

    lease: int
    version: int
    changed: bool = True


class Status(Message, frozen=True):
    """Anyone: asks for `StatusReply`."""


class Dump(Message, frozen=True):
    """Observer: write everything held to `path`; answered by `Dumped`."""

    path: str


# --- from the buffer to a peer ---------------------------------------------------------------------------------


class Ticket(Struct, frozen=True):
    """Permission to generate one trajectory of at most `max_tokens`, after `min_version` has been applied."""

    id: int
    attempt: int
    member: int
    key: tuple[int, int]
    prompt: list[int]
    row: bytes
    min_version: int
    max_tokens: int


class Tickets(Message, frozen=True):
    """To a worker: start these."""

    tickets: list[Ticket]


class News(Message, frozen=True):
    """To a worker: `version` can be pulled. `changed=False`: it has the weights of the version before."""

    version: int
    changed: bool


class Refusal(Struct, frozen=True):
    """One chunk that was not stored. `gap`: resend from `expected`; `fenced`: stop, the ticket is not yours."""

    ticket: int
    reason: Literal["gap", "fenced", "invalid"]
    expected: int


class Ack(Message, frozen=True):
    """To a worker: the chunks of message `seq` are stored, but for the refused ones."""

    seq: int
    refused: list[Refusal] = []


class Credit(Message, frozen=True):
    """To the feeder: it may have submitted `total` prompts since the start of the run."""

    total: int


class BatchRow(Struct, frozen=True, array_like=True):
    """One trajectory of a batch. `trainable` counts the tokens that the bound lets through."""

    ticket: int
    group: int
    member: int
    prompt_length: int
    length: int
    trainable: int
    reward: float


class Batch(Message, frozen=True):
    """To rank 0: a lease. `rows[i].group` indexes `group_rewards`, which holds every reward known of that group."""

    lease: int
    version: int
    rows: list[BatchRow]
    group_rewards: list[list[float]]
    stats: Stats


class Samples(Message, frozen=True):
    """To a rank: the fetched trajectories, in the frames that follow (`SampleArrays`)."""

    lease: int


class Committed(Message, frozen=True):
    """To rank 0: the lease is retired. `cursor`: prompts up to here have ended in one way or another."""

    lease: int
    cursor: int


class Stats(Struct, frozen=True):
    """Counters since the start of the buffer. Trajectories unless the name says otherwise."""

    issued: int = 0
    trained: int = 0
    expired: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    ready: int = 0
    leased: int = 0
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
    version: int = -1
    last_error: str = ""

    @property
    def in_flight(self) -> int:
        return self.running + self.ready + self.leased


class StatusReply(Message, frozen=True):
    stats: Stats


class Dumped(Message, frozen=True):
    path: str
    trajectories: int


class Fatal(Message, frozen=True):
    """To the feeder: the run cannot go on, why, and where it stands."""

    reason: str
    stats: Stats


class Rejected(Message, frozen=True):
    """To a peer: its message broke the protocol and was not acted on."""

    reason: str


Inbound = Hello | Submit | Append | Outcomes | Published | Take | Fetch | Commit | Status | Dump
Outbound = Tickets | News | Ack | Credit | Batch | Samples | Committed | StatusReply | Dumped | Fatal | Rejected

_encoder = msgspec.msgpack.Encoder()
_inbound = msgspec.msgpack.Decoder(Inbound)
_outbound = msgspec.msgpack.Decoder(Outbound)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_inbound(frame: bytes | memoryview) -> Inbound:
    try:
        return _inbound.decode(frame)
    except msgspec.DecodeError as error:
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


@dataclass(frozen=True)
class Chunks:
    """Chunks of one flush, as columns: the first five have one entry a chunk, the last two one a token."""

    ticket: NDArray[np.int64]
    attempt: NDArray[np.int32]
    offset: NDArray[np.int32]
    length: NDArray[np.int32]
    version: NDArray[np.int64]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def to_frames(self) -> list[memoryview]:
        columns = (self.ticket, self.attempt, self.offset, self.length, self.version, self.tokens, self.logprobs)
        return [_frame(column) for column in columns]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes | memoryview]) -> Chunks:
        """Checks that the columns belong together; what they say is for the core to check."""
        if len(frames) != 7:
            raise ProtocolError(f"chunks come in 7 frames, got {len(frames)}")
        chunks = cls(
            ticket=_column(frames[0], np.int64, "ticket"),
            attempt=_column(frames[1], np.int32, "attempt"),
            offset=_column(frames[2], np.int32, "offset"),
            length=_column(frames[3], np.int32, "length"),
            version=_column(frames[4], np.int64, "version"),
            tokens=_column(frames[5], np.int32, "tokens"),
            logprobs=_column(frames[6], np.float32, "logprobs"),
        )
        rows = chunks.ticket.size
        if not rows == chunks.attempt.size == chunks.offset.size == chunks.length.size == chunks.version.size:
            raise ProtocolError("chunk columns differ in length")
        if rows and (
            chunks.length.min() < 1 or chunks.offset.min() < 0 or chunks.ticket.min() < 0 or chunks.attempt.min() < 1
        ):
            raise ProtocolError("a chunk has a negative ticket or offset, an attempt below 1, or no tokens")
        total = int(chunks.length.sum(dtype=np.int64))
        if not total == chunks.tokens.size == chunks.logprobs.size:
            raise ProtocolError(f"lengths add up to {total} tokens, but {chunks.tokens.size} came")
        return chunks


@dataclass(frozen=True)
class SampleArrays:
    """Fetched trajectories as columns, in the order asked for.

    `prompts` concatenates the prompts of the trajectories' groups, each once, in order of first use; the other columns
    concatenate the sampled tokens. `mask` is 1 where a token may be trained on.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    mask: NDArray[np.uint8]
    prompts: NDArray[np.int32]

    def to_frames(self) -> list[memoryview]:
        columns = (self.tokens, self.logprobs, self.versions, self.mask, self.prompts)
        return [_frame(column) for column in columns]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes | memoryview]) -> SampleArrays:
        if len(frames) != 5:
            raise ProtocolError(f"samples come in 5 frames, got {len(frames)}")
        return cls(
            tokens=_column(frames[0], np.int32, "tokens"),
            logprobs=_column(frames[1], np.float32, "logprobs"),
            versions=_column(frames[2], np.int64, "versions"),
            mask=_column(frames[3], np.uint8, "mask"),
            prompts=_column(frames[4], np.int32, "prompts"),
        )
