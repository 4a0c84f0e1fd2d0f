"""Chunks: when they are due, what they hold, and that they put a response back together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.rollout.streamer import Streamer


def add(streamer: Streamer, ticket: int, count: int, version: int = 0, now: float = 0.0) -> None:
    streamer.add(ticket, [1] * count, [-0.5] * count, [version] * count, now=now)


def test_a_flush_is_due_by_tokens_or_by_time() -> None:
    streamer = Streamer(chunk_tokens=4, flush_s=0.1)
    streamer.open(7, 1)
    assert not streamer.due(100.0)
    add(streamer, 7, 3, now=1.0)
    assert not streamer.due(1.05)
    assert streamer.due(1.1)
    add(streamer, 7, 1, now=1.01)
    assert streamer.due(1.02)
    assert streamer.flush() is not None
    assert not streamer.due(100.0)


def test_a_chunk_never_spans_two_versions() -> None:
    streamer = Streamer(chunk_tokens=4, flush_s=1.0)
    streamer.open(7, 3)
    add(streamer, 7, 2, version=1)
    streamer.flush()
    streamer.add(7, [5, 6, 7], [-1.0, -2.0, -3.0], [1, 2, 2], now=0.0)
    chunks = streamer.flush()
    assert chunks is not None
    assert chunks.offset.tolist() == [2, 3]
    assert chunks.length.tolist() == [1, 2]
    assert chunks.version.tolist() == [1, 2]
    assert chunks.attempt.tolist() == [3, 3]
    assert chunks.tokens.tolist() == [5, 6, 7]


def test_unequal_lists_are_refused() -> None:
    streamer = Streamer(chunk_tokens=4, flush_s=1.0)
    streamer.open(7, 1)
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs, 2 versions"):
        streamer.add(7, [1, 2], [-1.0], [0, 0], now=0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=60))
def test_any_interleaving_puts_every_response_back_together(events: list[tuple[int, int, int, bool]]) -> None:
    streamer = Streamer(chunk_tokens=4, flush_s=1.0)
    sampled: dict[int, list[tuple[int, int]]] = {ticket: [] for ticket in range(4)}
    stored: dict[int, list[tuple[int, int]]] = {ticket: [] for ticket in range(4)}
    for ticket in sampled:
        streamer.open(ticket, 1)

    def flush() -> None:
        chunks = streamer.flush()
        at = 0
        for ticket, offset, length, version in (
            zip(chunks.ticket, chunks.offset, chunks.length, chunks.version, strict=True) if chunks else ()
        ):
            assert offset == len(stored[ticket])
            stored[ticket] += [(int(token), int(version)) for token in chunks.tokens[at : at + length]]
            at += length

    for number, (ticket, count, version, now) in enumerate(events):
        tokens = [number * 10 + i for i in range(count)]
        streamer.add(ticket, tokens, [-1.0] * count, [version] * count, now=0.0)
        sampled[ticket] += [(token, version) for token in tokens]
        if now:
            flush()
    flush()
    assert stored == sampled
    assert [streamer.close(ticket) for ticket in sampled] == [len(tokens) for tokens in sampled.values()]
