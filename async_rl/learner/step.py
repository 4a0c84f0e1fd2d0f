"""One learner step on a rank's share: what is to be known before, then forward, loss, backward, clip, optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from async_rl import adapters
from async_rl.algorithms import losses
from async_rl.algorithms.advantages import whiten
from async_rl.algorithms.config import form
from async_rl.algorithms.credit import Episode, credit, last_of
from async_rl.algorithms.objective import LossInput, LossMetrics, log_rho, loss
from async_rl.config import Config
from async_rl.learner.batch import Share
from async_rl.learner.mesh import clip
from async_rl.learner.models import Critic, Models
from async_rl.learner.packing import Member, Packed, Segment, pack
from async_rl.learner.policy import Policy, Scores, ValueModel, accumulate, pairs_per_token, reshard
from async_rl.learner.tensor import add_up
from staleness.corrections import Sequences, Tokens, m2_keep
from staleness.proximal import loglinear

DEFAULT_TOKENS = 4096
LIGHT_CPU, LIGHT_GPU = 128, 2048
"""What a forward and backward pass costs beside its tokens, in tokens: reading the weights; or starting kernels."""


@dataclass(frozen=True)
class StepResult:
    """What a rank reports of a step. Arrays have one entry per trained token of its share.

    log_ratio   log pi_theta - log mu at the start of the step
    log_r       log pi_theta - log p of the proximal policy p, before the last of the step's updates
    entropy     nats
    loss        this rank's part of the batch's loss
    sums        of `LossMetrics`, over the first epoch
    value_loss  this rank's part of the value model's loss, if there is one
    """

    log_ratio: NDArray[np.float32]
    log_r: NDArray[np.float32]
    entropy: NDArray[np.float32]
    loss: float
    sums: dict[str, float]
    grad_norm: float
    packed_tokens: int
    value_loss: float = 0.0


@dataclass(frozen=True)
class Known:
    """Of every token of a share, before the first optimizer step; 0 for those that no micro-batch has.

    logprobs, reference   under the policy and the reference policy
    values                of the states that the tokens were sampled in
    kept                  False where `m2` has masked the token
    """

    logprobs: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    kept: Tensor | None = None


class Chosen(NamedTuple):
    """Of a micro-batch's sampled tokens those that may be trained on.

    keep     which they are, on the device
    source   the trajectory of each that is chosen
    flat     its place in the share
    """

    keep: Tensor
    source: NDArray[np.int64]
    flat: NDArray[np.int64]


def learning_rate(base: float, warmup_steps: int, step: int) -> float:
    """Linear from base / (warmup + 1) to `base` over the warm-up, then constant."""
    return base * min(1.0, (step + 1) / (warmup_steps + 1))


class Stepper:
    """Trains a policy, and its value model if it has one; every rank calls `step` with its share of the batch."""

    def __init__(
        self,
        models: Models,
        config: Config,
        tokens: int | None = None,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        """`tokens` of a micro-batch, in place of `learner.micro_batch_tokens: auto`. `before_update` is called when
        gradients are there and nothing has changed yet."""
        self._before_update = before_update
        self._policy, self._optimizer = models.policy, models.optimizer
        self._reference, self._critic = models.reference, models.critic
        self._config, self._mesh = config, models.mesh
        self._algorithm, self._correction = config.algorithm, config.staleness.correction
        self._device = models.policy.device
        configured = config.learner.micro_batch_tokens
        self._tokens = tokens or (DEFAULT_TOKENS if configured == "auto" else configured)
        self._pairs = pairs_per_token(models.policy.model.config.hidden_size)
        self._light = LIGHT_CPU if self._device.type == "cpu" else LIGHT_GPU

    def step(self, share: Share, *, rate: float) -> StepResult:
        """`rate`: learning rate of the policy in this step."""
        micro = self._micro_batches(share.segments())
        known = self._look(share, micro)
        targets = None
        if self._algorithm.per_token:
            share, targets = self._credit(share, known)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        epochs = [self._epoch(share, micro, known, targets) for _ in range(self._config.learner.epochs)]
        return replace(epochs[0], log_r=epochs[-1].log_r)

    def _micro_batches(self, segments: list[Segment]) -> list[Packed]:
        """This rank's micro-batches, as many on every rank: the collectives of FSDP must meet."""
        micro = pack(segments, tokens=self._tokens, pairs=self._pairs, light=self._light)
        count = torch.tensor(len(micro), device=self._device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return micro + [_empty()] * (int(count) - len(micro))

    # --- before the first optimizer step -----------------------------------------------------------------------

    def _look(self, share: Share, micro: list[Packed]) -> Known:
        correction, algorithm = self._correction, self._algorithm
        m2, shared = correction.name == "m2", algorithm.critic and self._critic is None
        known = Known()
        if m2 or shared or correction.proximal == "recompute" or algorithm.advantage == "vtrace":
            # m2 is of the whole batch: also of what has no advantage.
            seen = self._micro_batches(share.segments(everything=True)) if m2 else micro
            logprobs, *more = self._sweep(
                share, seen, self._policy, lambda scores: [scores.logprobs, *([scores.values] if shared else [])]
            )
            known = Known(logprobs, values=more[0] if more else None)
        if m2:
            known = replace(known, kept=self._kept(share, known))
        if self._reference is not None:
            with adapters.off(self._reference):
                (reference,) = self._sweep(share, micro, self._reference, lambda scores: [scores.logprobs])
            known = replace(known, reference=reference)
        if self._critic is not None:
            (values,) = self._sweep(share, micro, self._critic.model, lambda found: [found])
            known = replace(known, values=values)
        return known

    def _sweep(
        self, share: Share, micro: list[Packed], model: nn.Module, columns: Callable[..., list[Tensor]]
    ) -> list[Tensor]:
        """Columns of a model's output for all tokens of a share."""
        out: list[Tensor] = []
        with torch.no_grad():
            for packed in micro:
                found = columns(model(packed))
                out = out or [torch.zeros(share.tokens.size, device=self._device) for _ in found]
                if not _is_empty(packed):
                    flat = self._tensor(share.starts[packed.source] + packed.offset)
                    for column, part in zip(out, found, strict=True):
                        column[flat] = part
        if model is not self._policy:
            reshard(model)
        return out

    def _kept(self, share: Share, known: Known) -> Tensor:
        """What `m2` leaves of the tokens of the global batch."""
        assert known.logprobs is not None
        at = np.flatnonzero(share.mask)
        current, behaviour = known.logprobs[self._tensor(at)], self._tensor(share.logprobs[at])
        proximal = self._anchor(share, at, current, behaviour, known)
        seen = log_rho(current, proximal, behaviour, form(self._algorithm, self._correction))
        everyone: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * self._mesh.data_ranks
        dist.all_gather_object(everyone, seen.cpu().numpy(), group=self._mesh.data)
        keep = m2_keep(np.concatenate(everyone), self._correction.tau)
        first = sum(part.size for part in everyone[: self._mesh.data_rank])
        out = np.ones(share.tokens.size, np.bool_)
        out[at] = keep[first : first + at.size]
        return self._tensor(out)

    def _credit(self, share: Share, known: Known) -> tuple[Share, Tensor]:
        """The share with an advantage for each token, and what its value should have been."""
        advantage, target = np.zeros(share.tokens.size), np.zeros(share.tokens.size)
        reference = known.reference if self._algorithm.kl.place == "reward" else None
        values, reference, logprobs = (
            None if column is None else column.double().cpu().numpy()
            for column in (known.values, reference, known.logprobs)
        )
        for start, end, begin, goes_on in zip(
            share.starts[:-1].tolist(), share.starts[1:].tolist(), share.begin.tolist(), share.goes_on, strict=True
        ):
            at = start + begin + np.flatnonzero(share.sampled[start + begin : end])
            if not share.mask[start:end].any():
                continue
            bootstrap = float(values[at[-1]]) if goes_on and values is not None else 0.0
            at = at[:-1] if goes_on else at
            episode = Episode(
                last_of(at.size, float(share.advantage[start])),
                None if values is None else values[at],
                None if logprobs is None else logprobs[at] - share.logprobs[at],
                None if reference is None else share.logprobs[at] - reference[at],
                bootstrap,
            )
            advantage[at], target[at] = credit(self._algorithm, episode)
        if self._algorithm.advantage.startswith("reinforce++") or self._algorithm.whiten:
            advantage = self._whiten(advantage, share.mask)
        return replace(share, advantage=advantage), self._tensor(target.astype(np.float32))

    def _whiten(self, values: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        some = values[mask]
        count, total = self._sum_over_ranks(some.size, some.sum())
        mean = total / max(count, 1.0)
        (squares,) = self._sum_over_ranks(np.square(some - mean).sum())
        return whiten(values, mean, squares / max(count, 1.0))

    def _sum_over_ranks(self, *numbers: float) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums, group=self._mesh.data)
        return sums.tolist()

    # --- the step ----------------------------------------------------------------------------------------------

    def _epoch(self, share: Share, micro: list[Packed], known: Known, targets: Tensor | None) -> StepResult:
        ratios: list[Tensor] = []
        anchored: list[Tensor] = []
        entropies: list[Tensor] = []
        sums = dict.fromkeys(LossMetrics._fields, 0.0)
        total = value_total = 0.0
        for i, packed in enumerate(micro):
            accumulate(self._policy, last=self._config.learner.reshard or i == len(micro) - 1)
            scores: Scores = self._policy(packed)
            chosen = self._chosen(share, packed)
            entropy = scores.entropy[chosen.keep]
            batch = self._input(share, chosen, scores.logprobs[chosen.keep], known)
            if self._algorithm.entropy:
                batch = batch._replace(entropy=entropy)
            value, metrics = loss(batch, self._algorithm, self._correction)
            total += float(value.detach())
            if scores.values is not None:
                error = self._value_loss(share, chosen, scores.values, known, targets)
                value_total += float(error.detach())
                value = value + self._algorithm.value.coefficient * error
            # FSDP averages gradients over the ranks; the loss is a sum over them. An empty mask still takes part.
            (value * self._mesh.averaged + 0.0 * scores.logprobs.sum()).backward()
            ratios.append((batch.current - batch.behaviour).detach())
            anchored.append((batch.current - batch.proximal).detach())
            entropies.append(entropy.detach())
            for name, part in metrics._asdict().items():
                sums[name] += float(part)
        norm = self._update(self._policy, self._optimizer)
        if self._critic is not None:
            value_total = self._train_critic(self._critic, share, micro, known, targets)
        return StepResult(
            torch.cat(ratios).cpu().numpy(),
            torch.cat(anchored).cpu().numpy(),
            torch.cat(entropies).cpu().numpy(),
            total,
            sums,
            norm,
            sum(packed.tokens.size for packed in micro),
            value_total,
        )

    def _train_critic(
        self, critic: Critic, share: Share, micro: list[Packed], known: Known, targets: Tensor | None
    ) -> float:
        total = 0.0
        for i, packed in enumerate(micro):
            accumulate(critic.model, last=self._config.learner.reshard or i == len(micro) - 1)
            values: Tensor = critic.model(packed)
            error = self._value_loss(share, self._chosen(share, packed), values, known, targets)
            (error * self._mesh.averaged + 0.0 * values.sum()).backward()
            total += float(error.detach())
        self._update(critic.model, critic.optimizer)
        return total

    def _value_loss(self, share: Share, chosen: Chosen, values: Tensor, known: Known, targets: Tensor | None) -> Tensor:
        """Of the chosen ones of a micro-batch's `values`."""
        assert known.values is not None
        assert targets is not None
        at = self._tensor(chosen.flat)
        clip = self._algorithm.value.clip
        each = losses.value_loss(values[chosen.keep], known.values[at], targets[at], clip)
        return (self._scale(share, chosen) * each).sum()

    def _update(self, module: Policy | ValueModel, optimizer: torch.optim.Optimizer) -> float:
        """Clips the gradient and steps; returns its norm."""
        if self._mesh.tensor is not None:
            add_up(module.summed, self._mesh.tensor)
        norm = clip(module.parameters(), self._config.learner.clip_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; the weights are unchanged")
        self._before_update()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    # --- columns -----------------------------------------------------------------------------------------------

    def _chosen(self, share: Share, packed: Packed) -> Chosen:
        if _is_empty(packed):
            none = np.empty(0, np.int64)
            return Chosen(torch.zeros(packed.source.size, dtype=torch.bool, device=self._device), none, none)
        flat = share.starts[packed.source] + packed.offset
        keep = share.mask[flat]
        return Chosen(self._tensor(keep), packed.source[keep], flat[keep])

    def _scale(self, share: Share, chosen: Chosen) -> Tensor:
        return self._tensor(share.scale[chosen.source].astype(np.float32))

    def _input(self, share: Share, chosen: Chosen, current: Tokens, known: Known) -> LossInput:
        """The trainable tokens of a micro-batch, of log-probs `current`, with all that the loss wants to know."""
        source, flat = chosen.source, chosen.flat
        at = self._tensor(flat)
        behaviour = self._tensor(share.logprobs[flat])
        return LossInput(
            current=current,
            proximal=self._anchor(share, flat, current, behaviour, known),
            behaviour=behaviour,
            advantage=self._tensor(share.advantage[flat].astype(np.float32)),
            scale=self._scale(share, chosen),
            sequences=Sequences(self._tensor(source), share.scale.size),
            positive=self._tensor(share.positive[source]),
            kept=None if known.kept is None else known.kept[at],
            reference=None if known.reference is None else known.reference[at],
        )

    def _anchor(
        self, share: Share, flat: NDArray[np.int64], current: Tokens, behaviour: Tokens, known: Known
    ) -> Tokens:
        """The proximal policy's log-probs of the tokens at `flat`."""
        match self._correction.proximal:
            case "recompute" if known.logprobs is not None:
                return known.logprobs[self._tensor(flat)]
            case "loglinear":
                return loglinear(behaviour, current, self._tensor(share.age[flat]))
            case "behaviour":
                return behaviour
            case _:
                return current.detach()

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _empty() -> Packed:
    """A micro-batch that takes part in the collectives and contributes nothing; its source is -1."""
    segment = Segment(np.zeros(1, np.int64), [Member(-1, np.zeros(1, np.int64))])
    return pack([segment], tokens=2)[0]


def _is_empty(packed: Packed) -> bool:
    return bool(packed.source[0] < 0)
