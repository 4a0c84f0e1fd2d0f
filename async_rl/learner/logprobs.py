"""Log-probs and entropies of chosen tokens without ever holding (tokens x vocabulary) logits.

The head is applied to `CHUNK` tokens at a time. The backward pass computes the logits again, which costs one more head
product and saves the memory of all of them; only those of the last chunk are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 1024
ENTROPY_EVERY = 8
"""For reporting, the entropy of one token in eight is enough: it costs three passes over the logits."""


def _logits(
    hidden: Float[Tensor, "chunk width"], head: Float[Tensor, "vocab width"], temperature: float
) -> Float[Tensor, "chunk vocab"]:
    return (hidden @ head.T).float().div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, every: int, keep: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(targets.shape, dtype=torch.float32)
        normalisers = torch.empty_like(logprobs)
        entropies = torch.full_like(logprobs, torch.nan)
        for start in range(0, targets.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            logits = _logits(hidden[part], head, temperature)
            normaliser = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - normaliser
            normalisers[part] = normaliser
            some = slice(None, None, every)
            probabilities = (logits[some] - normaliser[some, None]).exp_()
            entropies[part][some] = normaliser[some] - torch.linalg.vecdot(probabilities, logits[some])
        ctx.last = logits if keep and targets.numel() else None
        ctx.save_for_backward(hidden, head, targets, normalisers, entropies)
        ctx.temperature, ctx.every = temperature, every
        if every > 1:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, head, targets, normalisers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # A head that is frozen, or a base under adapters, needs none.
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, targets.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            last = start + CHUNK >= targets.numel()
            logits = ctx.last if last and ctx.last is not None else _logits(hidden[part], head, ctx.temperature)
            logs = logits.sub_(normalisers[part, None])
            slope = logs.exp()
            if ctx.every == 1:
                # d H / d logits = -p (log p + H)
                push = slope * logs.add_(entropies[part, None]) * -grad_entropy[part, None]
            # d log p(target) / d logits = onehot - softmax; the sign goes into the factor
            slope.scatter_add_(-1, targets[part, None], torch.full_like(normalisers[part, None], -1.0))
            slope = slope.mul_(-grad[part, None])
            if ctx.every == 1:
                slope += push
            slope = slope.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = slope @ head
            if grad_head is not None:
                grad_head += (slope.T @ hidden[part]).float()
        ctx.last = None
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None


def token_logprobs(
    hidden: Float[Tensor, "tokens width"],
    head: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " tokens"],
    temperature: float,
    *,
    entropy_every: int = ENTROPY_EVERY,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """(log-prob of each target, entropy in nats), both float32, of softmax(hidden @ head.T / temperature).

    Differentiable in `hidden` and `head` through the log-probs. The entropy is nan but for one token in
    `entropy_every`; if that is 1, it is differentiable too.
    """
    keep = torch.is_grad_enabled()
    logprobs, entropies = _TokenLogprobs.apply(hidden, head, targets, temperature, entropy_every, keep)
    return logprobs, entropies
