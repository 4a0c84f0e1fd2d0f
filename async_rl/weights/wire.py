"""What the weights' server and its clients say to each other; one msgpack frame, and for `Part` one of bytes."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from async_rl.weights.manifest import Manifest


class Message(Struct, frozen=True, tag=True, tag_field="type"):
    """Base of everything sent in either direction. An answer has the `request` of its question."""


class Wanted(Message, frozen=True):
    """What is there? `have`: the version that the asker holds, if it holds one. `rehearsal`: that, not the newest."""

    request: int
    have: int | None = None
    rehearsal: bool = False


class Get(Message, frozen=True):
    """`length` bytes from `offset` of a piece."""

    request: int
    version: int
    base: int | None
    offset: int
    length: int


class Join(Message, frozen=True):
    """A worker's engine, of so many ranks, will take part in a communicator of its own with the learner."""

    request: int
    worker: str
    engine_ranks: int


class Send(Message, frozen=True):
    """A worker's engine takes part in the broadcast of a version from now on."""

    request: int
    worker: str
    version: int


class Piece(Struct, frozen=True, array_like=True):
    """A delta from version `base`, or with None the whole segment of a version; `size` in bytes."""

    version: int
    base: int | None
    size: int


class Offer(Message, frozen=True):
    """The manifest, and what to get for it: pieces to be applied one after the other. No manifest: nothing is there.

    `newest`: whether there is no newer version than this, which is an older one only while many are asking for that.
    """

    request: int
    manifest: Manifest | None
    pieces: list[Piece] = []
    newest: bool = True


class Soon(Message, frozen=True):
    """A new version is being compared with the one before: ask again in a moment."""

    request: int


class Joined(Message, frozen=True):
    """Where the communicator is made: the init info of vLLM's NCCL engine, as JSON."""

    request: int
    init: bytes


class Sending(Message, frozen=True):
    """The learner takes part in the broadcast too."""

    request: int


class Alone(Message, frozen=True):
    """The learner shares no communicator with the asker: it may ask to join."""

    request: int


class Part(Message, frozen=True):
    """The bytes asked for, in the frame that follows, and their CRC-32."""

    request: int
    crc: int


class Gone(Message, frozen=True):
    """A newer version has taken the place of what was asked for: ask again what is there."""

    request: int


Question = Wanted | Get | Join | Send
Answer = Offer | Soon | Part | Gone | Joined | Sending | Alone
encode = msgspec.msgpack.Encoder().encode
question = msgspec.msgpack.Decoder(Question).decode
answer = msgspec.msgpack.Decoder(Answer).decode
