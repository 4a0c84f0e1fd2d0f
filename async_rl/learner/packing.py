"""Packs the trajectories of a batch into rows: the prompt of a group once, then its members' responses.

    row:       [prompt of g0 | response | response | prompt of g1 | response ...]
    position:   0 1 2 ... P-1  P P+1 ..   P P+1 ..   0 1 2 ...
    attends:    causally to its own prompt and its own response, to nothing else

Pure: numpy in, numpy out. The same gradient as one padded row per trajectory, at a fraction of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
PAD = -1


@dataclass(frozen=True)
class Member:
    """A trajectory to train on. `response` are its sampled token ids; `index` is its place in the batch."""

    index: int
    response: Ints


@dataclass(frozen=True)
class Segment:
    """A prompt and the members of its group that are trained on."""

    prompt: Ints
    members: list[Member]

    @property
    def size(self) -> int:
        return self.prompt.size + sum(member.response.size for member in self.members)


@dataclass(frozen=True)
class Packed:
    """A micro-batch of `rows` packed rows of equal length.

    tokens, positions   (rows, length)  padding has position 0
    segment, member     (rows, length)  who a token belongs to; member -1 is the prompt, segment -1 is padding
    predict             (sampled,)      flat places whose hidden state predicts the sampled tokens
    targets             (sampled,)      the sampled tokens themselves
    source, offset      (sampled,)      the trajectory's index in the batch, and the token's place in its response
    """

    tokens: Ints
    positions: Ints
    segment: Ints
    member: Ints
    predict: Ints
    targets: Ints
    source: Ints
    offset: Ints

    def attention(self) -> NDArray[np.bool_]:
        """(rows, length, length): True where a token may attend; padding attends to itself, so no row is empty."""
        causal = np.tril(np.ones((self.tokens.shape[1],) * 2, np.bool_))
        together = self.segment[:, :, None] == self.segment[:, None, :]
        readable = (self.member[:, None, :] == -1) | (self.member[:, :, None] == self.member[:, None, :])
        return causal & together & readable


def fill(segments: list[Segment], capacity: int) -> list[list[Segment]]:
    """Rows of at most `capacity` tokens, no less than the largest segment; first fit in order of decreasing size."""
    rows: list[list[Segment]] = []
    room: list[int] = []
    for segment in sorted(segments, key=lambda s: -s.size):
        place = next((i for i, left in enumerate(room) if left >= segment.size), None)
        if place is None:
            rows.append([segment])
            room.append(capacity - segment.size)
        else:
            rows[place].append(segment)
            room[place] -= segment.size
    return rows


def pack(segments: list[Segment], *, tokens: int) -> list[Packed]:
    """Micro-batches of at most `tokens` packed tokens (one row at least), rows as long as the longest segment.

    Longer rows would pad less, but attention over a row costs its length squared.
    """
    if not segments:
        return []
    capacity = max(segment.size for segment in segments)
    filled = sorted(fill(segments, capacity), key=lambda row: -sum(segment.size for segment in row))
    rows = max(1, tokens // capacity)
    return [_stack(filled[i : i + rows]) for i in range(0, len(filled), rows)]


def _stack(rows: list[list[Segment]]) -> Packed:
    length = max(sum(segment.size for segment in row) for row in rows)
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    owner, member_of = np.full(shape, PAD, np.int64), np.full(shape, PAD, np.int64)
    predict: list[Ints] = []
    targets: list[Ints] = []
    source: list[Ints] = []
    offset: list[Ints] = []
    for r, row in enumerate(rows):
        at = 0
        for s, segment in enumerate(row):
            prompt = segment.prompt.size
            tokens[r, at : at + prompt] = segment.prompt
            positions[r, at : at + prompt] = np.arange(prompt)
            owner[r, at : at + segment.size] = s
            last_of_prompt = r * length + at + prompt - 1
            at += prompt
            for m, member in enumerate(segment.members):
                size = member.response.size
                span = slice(at, at + size)
                tokens[r, span] = member.response
                positions[r, span] = prompt + np.arange(size)
                member_of[r, span] = m
                # The first sampled token is predicted by the prompt's last, the others by the one before.
                predict.append(np.concatenate([[last_of_prompt], r * length + at + np.arange(size - 1)]))
                targets.append(member.response)
                source.append(np.full(size, member.index))
                offset.append(np.arange(size))
                at += size
    return Packed(
        tokens,
        positions,
        owner,
        member_of,
        np.concatenate(predict),
        np.concatenate(targets),
        np.concatenate(source),
        np.concatenate(offset),
    )
