"""Frames that no honest peer sends: random bytes, and messages with a part changed, cut off or repeated.

What decodes to a message by which a peer plays a part (learner, feeder, worker) is left out: whoever may connect is
trusted to be who it says; CURVE keys say who may connect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from buffers import messages as m
from buffers.errors import ProtocolError

PARTS = (m.Published, m.Take, m.Commit, m.Checkpointed, m.Lost, m.Submit, m.Hello)


def honest(rng: random.Random) -> list[bytes]:
    """A message as a peer might send it, of tickets that may exist."""
    tickets = [rng.randrange(1 << 24) for _ in range(rng.randint(1, 4))]
    tokens = 4 * len(tickets)
    chunks = m.Chunks(
        ticket=np.asarray(tickets, np.int64),
        attempt=np.ones(len(tickets), np.int32),
        offset=np.zeros(len(tickets), np.int32),
        length=np.full(len(tickets), 4, np.int32),
        version=np.zeros(len(tickets), np.int64),
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
    )
    outcome = m.Outcome(tickets[0], 1, 4, "finished", "stop", 1.0)
    return rng.choice(
        [
            [m.encode(chunks.header(rng.randrange(99))), chunks.to_frame()],
            [m.encode(m.Outcomes(rng.randrange(99), [outcome]))],
            [m.encode(m.Fetch(rng.randrange(9), tickets))],
            [m.encode(m.Take(rng.randrange(1 << 40)))],
            [m.encode(m.Commit(rng.randrange(99), rng.randrange(1 << 40)))],
            [m.encode(m.Submit(rng.randrange(99), [m.Prompt((0, 1), [1, 2], b"{}")]))],
            [m.encode(m.Hello("worker", rng.randrange(9)))],
            [m.encode(m.Status())],
        ]
    )


def mutated(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """One or more changes."""
    frames = [bytes(frame) for frame in frames]
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(frames)) if frames else 0
        kind = rng.randrange(7)
        if not frames or kind == 0:
            frames.insert(place, rng.randbytes(rng.randrange(64)))
        elif kind == 1:
            frames.pop(place)
        elif kind == 2:
            frames.append(frames[place])
        elif kind == 3:
            frames[place] = frames[place][: rng.randrange(len(frames[place]) + 1)]
        elif kind == 4:
            frames[place] += rng.randbytes(rng.randint(1, 40))
        elif frames[place]:
            data = bytearray(frames[place])
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            frames[place] = bytes(data)
    return frames


def hostile(seed: int, count: int) -> Iterator[list[bytes]]:
    """`count` messages, the same for the same seed."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        frames = mutated(rng, honest(rng)) if rng.random() < 0.8 else [rng.randbytes(rng.randrange(200))]
        if frames and not _plays_a_part(frames[0]):
            made += 1
            yield frames


def _plays_a_part(head: bytes) -> bool:
    try:
        return isinstance(m.decode_from_peer(head), PARTS)
    except ProtocolError:
        return False
