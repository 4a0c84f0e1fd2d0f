"""Packs the trajectories of a batch into rows: the prompt of a group once, then responses of its members.

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
DEAR = 8
"""Attention over a row of `pairs / DEAR` tokens costs an eighth of all else."""


@dataclass(frozen=True)
class Member:
    """A trajectory to train on. `response` are its sampled token ids; `index` is its place in the batch."""

    index: int
    response: Ints


@dataclass(frozen=True)
class Segment:
    """A prompt and members of its group that are trained on."""

    prompt: Ints
    members: list[Member]

    @property
    def size(self) -> int:
        return self.prompt.size + sum(member.response.size for member in self.members)


@dataclass(frozen=True)
class Packed:
    """A micro-batch of `rows` packed rows of equal length.

    tokens, positions   (rows, length)  padding comes last and counts on
    segment, member     (rows, length)  who a token belongs to; member -1 is the prompt, segment -1 is padding
    predict             (sampled,)      flat places whose hidden state predicts the sampled tokens
    targets             (sampled,)      the sampled tokens themselves
    source, offset      (sampled,)      the trajectory's index in the batch, and the token's place in its response
    causal              whether every row is one sequence, so that nothing but what came before is to be masked
    """

    tokens: Ints
    positions: Ints
    segment: Ints
    member: Ints
    predict: Ints
    targets: Ints
    source: Ints
    offset: Ints
    causal: bool

    def attention(self) -> NDArray[np.bool_]:
        """(rows, length, length): True where a token may attend; padding attends to itself, so no row is empty."""
        causal = np.tril(np.ones((self.tokens.shape[1],) * 2, np.bool_))
        together = self.segment[:, :, None] == self.segment[:, None, :]
        readable = (self.member[:, None, :] == -1) | (self.member[:, :, None] == self.member[:, None, :])
        return causal & together & readable


def split(segment: Segment, pairs: int) -> list[Segment]:
    """The group in pieces that each compute the prompt, as few or many as cost least.

    Attention over a row costs its length squared, everything else its length: `pairs` is how many pairs of tokens cost
    as much as one token. So short groups stay together, and long responses have rows of their own.
    """
    members = sorted(segment.members, key=lambda member: -member.response.size)
    prompt, total = segment.prompt.size, segment.size - segment.prompt.size

    def cost(count: int) -> float:
        size = prompt + total / count
        return count * size * (1 + size / pairs / (1 if count < len(members) else 2))  # a row of one is causal

    count = min(range(1, len(members) + 1), key=cost)
    pieces: list[list[Member]] = [[] for _ in range(count)]
    sizes = [0] * count
    for member in members:
        smallest = sizes.index(min(sizes))
        pieces[smallest].append(member)
        sizes[smallest] += member.response.size
    return [Segment(segment.prompt, sorted(piece, key=lambda member: member.index)) for piece in pieces]


def fill(segments: list[Segment], capacity: int, most: int) -> tuple[list[list[Segment]], list[Segment]]:
    """At most `most` rows of at most `capacity` tokens, first fit in the order given; and the segments left over."""
    rows: list[list[Segment]] = []
    room: list[int] = []
    left: list[Segment] = []
    for segment in segments:
        place = next((i for i, free in enumerate(room) if free >= segment.size), None)
        if place is not None:
            rows[place].append(segment)
            room[place] -= segment.size
        elif len(rows) < most:
            rows.append([segment])
            room.append(capacity - segment.size)
        else:
            left.append(segment)
    return rows, left


def pack(segments: list[Segment], *, tokens: int, pairs: int = 4096) -> list[Packed]:
    """Micro-batches of at most `tokens` packed tokens (one row at least), the longest rows first; see `split`.

    The rows of a micro-batch are as long as the longest piece that is left, so that lengths in it are alike.
    """
    left = sorted((piece for segment in segments for piece in split(segment, pairs)), key=lambda piece: -piece.size)
    out: list[Packed] = []
    while left:
        capacity = left[0].size
        most = max(1, tokens // capacity)
        # Where attention is dear, a row that is not full is cheaper than one in which it is not causal.
        rows, left = (
            fill(left, capacity, most) if capacity * DEAR <= pairs else ([[s] for s in left[:most]], left[most:])
        )
        out.append(_stack(rows))
    return out


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
        positions[r, at:] = positions[r, at - 1] + 1 + np.arange(length - at)
    return Packed(
        tokens,
        positions,
        owner,
        member_of,
        np.concatenate(predict),
        np.concatenate(targets),
        np.concatenate(source),
        np.concatenate(offset),
        all(len(row) == 1 and len(row[0].members) == 1 for row in rows),
    )
