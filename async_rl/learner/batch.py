"""A batch as a rank sees it, and how rank 0 shares one out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from async_rl.algorithms.advantages import TurnRecord, advantages, gigpo, returns
from async_rl.algorithms.aggregation import shares
from async_rl.config import AlgorithmConfig, Config
from async_rl.learner.packing import Ints, Member, Segment
from async_rl.rewards.shaping import raw
from buffers.messages import Batch, BatchRow, SampleArrays
from staleness.versions import INJECTED, Lineage


@dataclass(frozen=True)
class Plan:
    """What rank 0 tells every rank: its rows, their advantages, and the size of the whole batch.

    `rows[r]` and `advantages[r]` are those of rank r, whole groups, in order of group; `turns[r]` has for each row what
    its turns add to that, as (first token, advantage). `tokens` counts the trainable tokens of the global batch,
    `sequences` the trajectories that have some; `gradient` is False if no sample of it has a gradient.
    """

    lease: int
    version: int
    rows: list[list[BatchRow]]
    advantages: list[list[float]]
    turns: list[list[list[tuple[int, float]]]]
    tokens: int
    sequences: int
    gradient: bool


def plan(batch: Batch, *, ranks: int, algorithm: AlgorithmConfig) -> Plan:
    """Advantages of a batch and its groups spread over the ranks, each group whole, the costliest first."""
    rewards = np.asarray([row.reward for row in batch.rows], np.float64)
    group_of = np.asarray([row.group for row in batch.rows], np.int64)
    values = advantages(algorithm, rewards, group_of, batch.group_rewards, batch.baselines)
    turns = _turns(batch, algorithm) if algorithm.advantage == "gigpo" else [[] for _ in batch.rows]
    valued = (values != 0) | np.asarray([any(value for _, value in each) for each in turns], np.bool_)
    trained = (np.asarray([row.trainable for row in batch.rows]) > 0) & (valued | algorithm.everywhere)
    cost = np.zeros(len(batch.group_rewards), np.int64)
    for row, wanted in zip(batch.rows, trained, strict=True):
        cost[row.group] += row.length if wanted else 0
    load = [0] * ranks
    owner: dict[int, int] = {}
    for group in np.argsort(-cost, kind="stable").tolist():
        rank = min(range(ranks), key=lambda r: load[r])
        owner[group] = rank
        load[rank] += int(cost[group]) + 1
    shares = [[i for i, row in enumerate(batch.rows) if owner[row.group] == rank] for rank in range(ranks)]
    return Plan(
        lease=batch.lease,
        version=batch.version,
        rows=[[batch.rows[i] for i in share] for share in shares],
        advantages=[[float(values[i]) for i in share] for share in shares],
        turns=[[turns[i] for i in share] for share in shares],
        tokens=sum(row.trainable for row in batch.rows),
        sequences=sum(row.trainable > 0 for row in batch.rows),
        gradient=bool(trained.any()),
    )


def _turns(batch: Batch, algorithm: AlgorithmConfig) -> list[list[tuple[int, float]]]:
    """Of each row what its turns add to its advantage, by comparing those of its group that began in the same state."""
    out: list[list[tuple[int, float]]] = [[] for _ in batch.rows]
    for group in range(len(batch.group_rewards)):
        members = [i for i, row in enumerate(batch.rows) if row.group == group]
        episodes = [
            [
                TurnRecord(float(outcome), turn.state)
                for outcome, turn in zip(
                    returns(np.asarray([turn.reward for turn in batch.rows[i].turns], np.float64), algorithm.gamma),
                    batch.rows[i].turns,
                    strict=True,
                )
            ]
            for i in members
        ]
        for i, values in zip(members, gigpo(episodes, sample_std=algorithm.sample_std), strict=True):
            starts = [turn.start for turn in batch.rows[i].turns]
            out[i] = [(start, algorithm.omega * float(value)) for start, value in zip(starts, values, strict=True)]
    return out


@dataclass(frozen=True)
class Share:
    """A rank's trajectories as flat columns; trajectory i owns `[starts[i], starts[i + 1])` of the token columns.

    logprobs   behaviour log-probs, float32
    age        learner steps between a token's version and this step
    mask       True where a token may be trained on
    sampled    True where a policy has sampled the token
    advantage  one per token
    scale      one per trajectory: how much each of its tokens counts in the loss
    positive   one per trajectory: whether its reward, before shaping, is positive
    everywhere whether a token without advantage has a gradient too
    begin      one per trajectory: its first token that was in no batch before
    goes_on    one per trajectory: whether it is cut before its last token here, which is only looked at
    """

    prompts: list[Ints]
    prompt_of: list[int]
    starts: Ints
    tokens: Ints
    logprobs: NDArray[np.float32]
    age: Ints
    mask: NDArray[np.bool_]
    sampled: NDArray[np.bool_]
    advantage: NDArray[np.float64]
    scale: NDArray[np.float64]
    positive: NDArray[np.bool_]
    everywhere: bool
    begin: Ints
    goes_on: NDArray[np.bool_]

    def segments(self, *, everything: bool = False) -> list[Segment]:
        """What needs a backward pass: groups without the members of which no token has a gradient; or all trainable."""
        members: dict[int, list[Member]] = {}
        everything |= self.everywhere
        for i, prompt in enumerate(self.prompt_of):
            span = slice(self.starts[i], self.starts[i + 1])
            if (self.mask[span] & ((self.advantage[span] != 0) | everything)).any():
                members.setdefault(prompt, []).append(Member(i, self.tokens[span]))
        return [Segment(self.prompts[prompt], group) for prompt, group in members.items()]


def ages_of(arrays: SampleArrays, version: int, lineage: Lineage) -> Ints:
    """Learner steps from each token to `version`; 0 for injected tokens, which have no age."""
    sampled = np.where(arrays.span_version == INJECTED, version, arrays.span_version)
    return np.repeat(lineage.age(version, sampled), arrays.span_length)


def share(planned: Plan, rank: int, arrays: SampleArrays, ages: Ints, config: Config) -> Share:
    """Puts fetched columns and a rank's planned rows together. `ages` has one entry per token."""
    rows, algorithm = planned.rows[rank], config.algorithm
    prompts: list[Ints] = []
    prompt_of: list[int] = []
    seen: dict[int, int] = {}
    at = 0
    for row in rows:
        if row.group not in seen:
            seen[row.group] = len(prompts)
            prompts.append(arrays.prompts[at : at + row.prompt_length].astype(np.int64))
            at += row.prompt_length
        prompt_of.append(seen[row.group])
    starts = np.concatenate([[0], np.cumsum([row.length for row in rows], dtype=np.int64)]).astype(np.int64)
    if not starts[-1] == arrays.tokens.size == ages.size or at != arrays.prompts.size:
        raise ValueError(f"fetched {arrays.tokens.size} tokens for rows of {starts[-1]}")
    scale = shares(
        algorithm.aggregation,
        np.asarray([row.trainable for row in rows], np.int64),
        tokens=planned.tokens,
        sequences=planned.sequences,
        longest=config.rollout.max_tokens,
    )
    advantage = np.repeat(np.asarray(planned.advantages[rank], np.float64), np.diff(starts))
    for first, length, turns in zip(starts, np.diff(starts), planned.turns[rank], strict=False):
        for (begin, value), (end, _) in pairwise([*turns, (int(length), 0.0)]):
            advantage[first + begin : first + end] += value
    return Share(
        prompts,
        prompt_of,
        starts,
        arrays.tokens.astype(np.int64),
        arrays.logprobs,
        ages,
        arrays.mask.astype(np.bool_),
        arrays.versions != INJECTED,
        advantage,
        scale * np.asarray([row.weight for row in rows]),
        np.asarray([(raw(config.reward, row.parts) if row.parts else row.reward) > 0 for row in rows], np.bool_),
        algorithm.everywhere,
        np.asarray([row.start for row in rows], np.int64),
        np.asarray([row.goes_on for row in rows], np.bool_),
    )
