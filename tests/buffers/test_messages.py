"""What goes on the wire comes back as it was; what is malformed is refused and named.

1  every kind of message survives encoding, and peers cannot say what only the server may
2  chunks are one frame of exactly 28 bytes a chunk and 8 a token; anything else is refused
3  fetched samples survive their six frames
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from buffers import messages as m
from buffers.errors import ProtocolError
from staleness.versions import INJECTED
from tests.buffers.driver import chunks

FROM_PEERS: list[m.FromPeer] = [
    m.Hello("worker", 4, [m.Held(1 << 40, 2)]),
    m.Submit(3, [m.Prompt((0, 1), [1, 2], b"\x00\xff")]),
    m.Append(7, 2, 9),
    m.Outcomes(8, [m.Outcome(5, 1, 3, "finished", "stop", 0.25)], 1.5, 0.5),
    m.Published((1 << 32) | 4, [4], 9),
    m.Take(7, 2),
    m.Fetch(1, [5, 6], 3),
    m.Commit(1, 8, changed=False, request=4),
    m.Checkpointed(12, 1),
    m.Status(3),
    m.Lost("w#1"),
]
OWN: list[m.Inbound] = [m.GiveUp([3, 4]), m.NewLife(), m.Reloaded([5], [2], [[(0, 1), (1, INJECTED)]], [5, 6])]


@pytest.mark.parametrize("message", FROM_PEERS, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: m.FromPeer) -> None:
    assert m.decode_from_peer(m.encode(message)) == message
    assert m.decode_inbound(m.encode(message)) == message


@pytest.mark.parametrize("message", OWN, ids=lambda message: type(message).__name__)
def test_what_the_server_says_to_itself_is_journalled_but_not_taken_from_peers(message: m.Inbound) -> None:
    assert m.decode_inbound(m.encode(message)) == message
    with pytest.raises(ProtocolError, match="malformed"):
        m.decode_from_peer(m.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        m.Tickets([m.Ticket(1, 2, 0, (0, 3), [1], b"{}", 4, 5, [6, 7], "stop")]),
        m.Cancel([m.Held(1, 2)]),
        m.News(3, changed=False),
        m.Welcome("abc"),
        m.Ack(4, [m.Refusal(1, 1, "gap", 3)]),
        m.Credit(5, None),
        m.Batch(1, 2, [m.BatchRow(1, 0, 1, 3, 4, 2, 0.5, 0.25)], [[0.5, 1.0]], m.Stats(issued=4), 6),
        m.Committed(1, 2, request=3),
        m.StatusReply(m.Stats(expired_lengths=[0, 1]), 2),
        m.Fatal("why", m.Stats()),
        m.Rejected("no", 3),
        m.Done(2),
        m.Samples(1, 2),
    ],
    ids=lambda message: type(message).__name__,
)
def test_answers_survive_the_wire(message: m.Message) -> None:
    assert m.decode_outbound(m.encode(message)) == message


def test_chunks_survive_the_wire() -> None:
    before = chunks([(7 << 20, 0, 3, [1, 2]), (8 << 20 | 5, 5, INJECTED, [3]), (9, 0, 1 << 32 | 4, [2**31 - 1])])
    before.logprobs[:] = [-0.5, np.nan, -np.inf, 0.0]
    frame = before.to_frame()
    assert len(frame) == 3 * 28 + 4 * 8
    after = m.Chunks.from_frames(before.header(4), [frame])
    for name in ("ticket", "attempt", "offset", "length", "version", "tokens", "logprobs"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
        assert getattr(before, name).dtype == getattr(after, name).dtype


def test_no_chunks_at_all_is_a_message_too() -> None:
    empty = chunks([])
    assert m.Chunks.from_frames(empty.header(1), [empty.to_frame()]).ticket.size == 0


@pytest.mark.parametrize(
    "frame", [b"", b"\xff\xff", b"\x81\xa4type\xa5Hello", b"\x81\xa4type\xa3Foo", b"\x93\x01\x02\x03"]
)
def test_a_malformed_header_is_refused(frame: bytes) -> None:
    for decode in (m.decode_inbound, m.decode_from_peer, m.decode_outbound):
        with pytest.raises(ProtocolError, match="malformed"):
            decode(frame)


def test_a_header_of_wrong_types_is_refused() -> None:
    wrong = msgspec.msgpack.encode({"type": "Take", "version": "seven"})
    with pytest.raises(ProtocolError, match="malformed"):
        m.decode_from_peer(wrong)


def changed(chunk: m.Chunks, **columns: list[int]) -> m.Chunks:
    arrays = {name: np.asarray(values, getattr(chunk, name).dtype) for name, values in columns.items()}
    return m.Chunks(**{**chunk.__dict__, **arrays})


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"attempt": [0]}, "attempt below 1"),
        ({"offset": [-1]}, "negative"),
        ({"ticket": [-5]}, "negative"),
        ({"length": [0]}, "no tokens"),
        ({"length": [3]}, "add up to 3 tokens, but 2"),
    ],
)
def test_columns_that_cannot_be_true_are_refused(columns: dict[str, list[int]], reason: str) -> None:
    broken = changed(chunks([(7, 0, 3, [1, 2])]), **columns)
    with pytest.raises(ProtocolError, match=reason):
        m.Chunks.from_frames(m.Append(1, 1, 2), [broken.to_frame()])


def test_lengths_that_wrap_around_do_not_add_up() -> None:
    """Two lengths whose sum is right only in 32 bits."""
    broken = changed(chunks([(7, 0, 3, [1]), (8, 0, 3, [2])]), length=[2**31 - 1, 2**31 - 1])
    with pytest.raises(ProtocolError, match="add up"):
        m.Chunks.from_frames(m.Append(1, 2, 2), [broken.to_frame()])


@pytest.mark.parametrize("head", [m.Append(1, 1, 3), m.Append(1, 2, 2), m.Append(1, -1, 6), m.Append(1, 1, -1)])
def test_a_frame_of_another_size_than_its_header_says_is_refused(head: m.Append) -> None:
    frame = chunks([(7, 0, 3, [1, 2])]).to_frame()
    with pytest.raises(ProtocolError, match="do not make 44 bytes"):
        m.Chunks.from_frames(head, [frame])


@pytest.mark.parametrize("frames", [0, 2, 7])
def test_chunks_come_in_one_frame(frames: int) -> None:
    frame = chunks([(7, 0, 3, [1, 2])]).to_frame()
    with pytest.raises(ProtocolError, match=f"1 frame, got {frames}"):
        m.Chunks.from_frames(m.Append(1, 1, 2), [frame] * frames)


def test_samples_survive_the_wire_and_say_the_version_of_each_token() -> None:
    before = m.SampleArrays(
        prompts=np.asarray([1, 2, 3], np.int32),
        tokens=np.asarray([4, 5, 6], np.int32),
        logprobs=np.asarray([-1, np.nan, -3], np.float32),
        mask=np.asarray([1, 0, 1], np.uint8),
        span_length=np.asarray([2, 1], np.int32),
        span_version=np.asarray([INJECTED, 1 << 32], np.int64),
    )
    frames = before.to_frames()
    after = m.SampleArrays.from_frames(frames)
    for name in ("prompts", "tokens", "logprobs", "mask", "span_length", "span_version"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert after.versions.tolist() == [INJECTED, INJECTED, 1 << 32]
    with pytest.raises(ProtocolError, match="6 frames, got 5"):
        m.SampleArrays.from_frames(frames[:5])
    with pytest.raises(ProtocolError, match="'tokens' has 11 bytes, not a multiple of 4"):
        m.SampleArrays.from_frames([frames[0], frames[1][:11], *frames[2:]])
