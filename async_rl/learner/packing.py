"""Packs the trajectories of a batch into rows: the prompt of a group once, then responses of its members.

    row:       [prompt       | response | response | response ... | padding]
    position:   0 1 2 ... P-1  P P+1 ..   P P+1 ..   P P+1 ...
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
    """A prompt and members of its group that are trained on."""

    prompt: Ints
    members: list[Member]

    @property
    def size(self) -> int:
        return self.prompt.size + sum(member.response.size for member in self.members)


@dataclass(frozen=True)
class Packed:
    """A micro-batch of `rows` rows of equal length.

    tokens, positions   (rows, length)  padding comes last; it counts on where rows are single sequences, and stays at
                        the last position where a row is longer than any sequence
    member              (rows, length)  whose response a token belongs to; -1 is the prompt, and padding
    predict             (sampled,)      flat places whose hidden state predicts the sampled tokens
    targets             (sampled,)      the sampled tokens themselves
    source, offset      (sampled,)      the trajectory's index in the batch, and the token's place in its response
    causal              whether every row is one sequence, so that nothing but what comes later is to be masked
    """

    tokens: Ints
    positions: Ints
    member: Ints
    predict: Ints
    targets: Ints
    source: Ints
    offset: Ints
    causal: bool

    def attention(self) -> NDArray[np.bool_]:
        """(rows, length, length): True where a token may attend. Padding comes last, so nothing else attends to it."""
        causal = np.tril(np.ones((self.tokens.shape[1],) * 2, np.bool_))
        readable = (self.member[:, None, :] == PAD) | (self.member[:, :, None] == self.member[:, None, :])
        return causal & readable


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


def pack(segments: list[Segment], *, tokens: int, pairs: int = 4096, light: int = 128) -> list[Packed]:
    """Micro-batches of at most `tokens` packed tokens (one row at least), the longest rows first; see `split`.

    A row is a piece; the rows of a micro-batch are as long as its longest. Of all ways to cut the pieces, ordered by
    length, into micro-batches the one with the fewest tokens is taken, where each micro-batch counts as `light` more.
    """
    pieces = sorted((piece for segment in segments for piece in split(segment, pairs)), key=lambda piece: -piece.size)
    sizes = [piece.size for piece in pieces]
    count = len(pieces)
    best, ends = np.zeros(count + 1), [0] * count
    for start in range(count - 1, -1, -1):
        rows = np.arange(1, min(max(1, tokens // sizes[start]), count - start) + 1)
        cost = rows * sizes[start] + light + best[start + rows]
        chosen = int(cost.argmin())
        best[start], ends[start] = cost[chosen], start + chosen + 1
    out: list[Packed] = []
    start = 0
    while start < count:
        out.append(_stack(pieces[start : ends[start]]))
        start = ends[start]
    return out


def _stack(rows: list[Segment]) -> Packed:
    length = max(segment.size for segment in rows)
    causal = all(len(segment.members) == 1 for segment in rows)
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    member_of = np.full(shape, PAD, np.int64)
    predict: list[Ints] = []
    targets: list[Ints] = []
    source: list[Ints] = []
    offset: list[Ints] = []
    for r, segment in enumerate(rows):
        at = segment.prompt.size
        tokens[r, :at] = segment.prompt
        positions[r, :at] = np.arange(at)
        last_of_prompt = r * length + at - 1
        for m, member in enumerate(segment.members):
            size = member.response.size
            span = slice(at, at + size)
            tokens[r, span] = member.response
            positions[r, span] = segment.prompt.size + np.arange(size)
            member_of[r, span] = m
            # The first sampled token is predicted by the prompt's last, the others by the one before.
            predict.append(np.concatenate([[last_of_prompt], r * length + at + np.arange(size - 1)]))
            targets.append(member.response)
            source.append(np.full(size, member.index))
            offset.append(np.arange(size))
            at += size
        positions[r, at:] = positions[r, at - 1] + (1 + np.arange(length - at)) * causal
    return Packed(
        tokens,
        positions,
        member_of,
        np.concatenate(predict),
        np.concatenate(targets),
        np.concatenate(source),
        np.concatenate(offset),
        causal,
    )
