"""One learner step on a rank's share: forward, loss, backward, clip, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from async_rl.algorithms.losses import LossInput, loss
from async_rl.config import Config
from async_rl.learner.batch import Share
from async_rl.learner.packing import Member, Packed, Segment, pack
from async_rl.learner.policy import Policy, Scores, accumulate
from staleness.proximal import loglinear


@dataclass(frozen=True)
class StepResult:
    """What a rank reports of a step. Arrays have one entry per trained token of its share.

    log_ratio   log pi_theta - log mu at the start of the step
    entropy     nats
    loss        this rank's part of the batch's loss
    """

    log_ratio: NDArray[np.float32]
    entropy: NDArray[np.float32]
    loss: float
    clipped: float
    corrected_away: float
    grad_norm: float
    packed_tokens: int


def learning_rate(base: float, warmup_steps: int, step: int) -> float:
    """Linear from base / (warmup + 1) to `base` over the warm-up, then constant."""
    return base * min(1.0, (step + 1) / (warmup_steps + 1))


class Stepper:
    """Trains a sharded policy; every rank calls `step` with its share of the same batch."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._config = config
        self._world = dist.get_world_size()
        self._device = next(policy.parameters()).device

    def step(self, share: Share, *, tokens: int, rate: float) -> StepResult:
        """`tokens`: trainable tokens of the global batch; `rate`: learning rate of this step."""
        micro = self._micro_batches(share)
        proximal = self._proximal(micro) if self._config.staleness.correction.proximal == "recompute" else None
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        result: StepResult | None = None
        for _ in range(self._config.learner.epochs):
            latest = self._epoch(share, micro, proximal, tokens)
            result = result or latest
        assert result is not None
        return result

    def _micro_batches(self, share: Share) -> list[Packed]:
        """This rank's micro-batches, as many on every rank: the collectives of FSDP must meet."""
        micro = pack(share.segments(), tokens=self._config.learner.micro_batch_tokens)
        count = torch.tensor(len(micro), device=self._device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return micro + [_empty()] * (int(count) - len(micro))

    def _proximal(self, micro: list[Packed]) -> list[Tensor]:
        with torch.no_grad():
            return [self._policy(packed).logprobs for packed in micro]

    def _epoch(self, share: Share, micro: list[Packed], proximal: list[Tensor] | None, tokens: int) -> StepResult:
        ratios: list[Tensor] = []
        entropies: list[Tensor] = []
        total = clipped = away = 0.0
        for i, packed in enumerate(micro):
            accumulate(self._policy, last=i == len(micro) - 1)
            scores: Scores = self._policy(packed)
            batch, entropy = self._input(share, packed, scores, None if proximal is None else proximal[i])
            value, metrics = loss(batch, self._config.algorithm, self._config.staleness.correction, tokens=tokens)
            # FSDP averages gradients over the ranks; the loss is a sum over them. An empty mask still takes part.
            (value * self._world + 0.0 * scores.logprobs.sum()).backward()
            ratios.append((batch.current - batch.behaviour).detach())
            entropies.append(entropy)
            total += float(value.detach())
            clipped += float(metrics.clipped)
            away += float(metrics.corrected_away)
        norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepResult(
            torch.cat(ratios).cpu().numpy(),
            torch.cat(entropies).cpu().numpy(),
            total,
            clipped,
            away,
            norm,
            sum(packed.tokens.size for packed in micro),
        )

    def _input(self, share: Share, packed: Packed, scores: Scores, proximal: Tensor | None) -> tuple[LossInput, Tensor]:
        """The trainable tokens of a micro-batch, with their behaviour log-probs and advantages."""
        if packed.source.size and packed.source[0] < 0:
            nothing = scores.logprobs[:0]
            return LossInput(nothing, *[nothing.detach()] * 3), nothing.detach()
        flat = share.starts[packed.source] + packed.offset
        keep = torch.from_numpy(share.mask[flat]).to(self._device)
        behaviour = torch.from_numpy(share.logprobs[flat]).to(self._device)[keep]
        advantage = torch.from_numpy(share.advantage[packed.source].astype(np.float32)).to(self._device)[keep]
        current = scores.logprobs[keep]
        name = self._config.staleness.correction.proximal
        if proximal is not None:
            anchor = proximal[keep]
        elif name == "loglinear":
            anchor = loglinear(behaviour, current, torch.from_numpy(share.age[flat]).to(self._device)[keep])
        else:
            anchor = current.detach()
        return LossInput(current, anchor, behaviour, advantage), scores.entropy[keep]

    def _clip(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.learner.clip_norm)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not torch.isfinite(full):
            raise FloatingPointError(f"the gradient norm is {float(full)}; the weights are unchanged")
        return float(full)


def _empty() -> Packed:
    """A micro-batch that takes part in the collectives and contributes nothing; its source is -1."""
    segment = Segment(np.zeros(1, np.int64), [Member(-1, np.zeros(1, np.int64))])
    return pack([segment], tokens=2)[0]
