"""What goes on the wire comes back as it was; what is malformed is refused."""

from __future__ import annotations

import numpy as np
import pytest

from buffers import messages as m
from buffers.errors import ProtocolError
from tests.buffers.driver import chunks


def test_messages_survive_the_wire() -> None:
    for message in (m.Hello("worker", 4), m.Take(7), m.Submit([m.Prompt((0, 1), [1, 2], b"{}")]), m.Status()):
        assert m.decode_inbound(m.encode(message)) == message


def test_chunks_survive_the_wire() -> None:
    before = chunks([(7, 0, 3, [1, 2]), (8, 5, 4, [3])])
    after = m.Chunks.from_frames(before.to_frames())
    for name in ("ticket", "attempt", "offset", "length", "version", "tokens", "logprobs"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def test_no_chunks_at_all_is_a_message_too() -> None:
    assert m.Chunks.from_frames(chunks([]).to_frames()).ticket.size == 0


@pytest.mark.parametrize(
    "frame", [b"", b"\xff\xff", b"\x81\xa4type\xa5Hello", b"\x81\xa4type\xa3Foo", b"\x93\x01\x02\x03"]
)
def test_a_malformed_header_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        m.decode_inbound(frame)


def test_columns_that_do_not_belong_together_are_refused() -> None:
    frames = [bytes(frame) for frame in chunks([(7, 0, 3, [1, 2])]).to_frames()]
    for broken, reason in [
        (frames[:6], "7 frames"),
        ([*frames[:6], frames[6] + b"\0"], "multiple"),
        ([frames[0] * 2, *frames[1:]], "differ"),
        ([*frames[:5], frames[5] * 2, frames[6]], "add up"),
        ([frames[0], np.asarray([0], np.int32).tobytes(), *frames[2:]], "attempt below 1"),
        ([*frames[:3], np.asarray([-1], np.int32).tobytes(), *frames[4:]], "negative"),
    ]:
        with pytest.raises(ProtocolError, match=reason):
            m.Chunks.from_frames(broken)
