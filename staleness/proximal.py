"""The proximal policy p: the anchor from which a decoupled loss may not move far (Hilton et al., 2110.00641)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def loglinear(
    behaviour: Float[Tensor, " tokens"],
    current: Float[Tensor, " tokens"],
    age: Int[Tensor, " tokens"],
) -> Float[Tensor, " tokens"]:
    """Log-linear interpolation between behaviour and current policy, without a forward pass (A-3PO, 2512.06547).

    With v the learner's step at the start of the batch and u the token's step, `age = v - u` and
    `alpha = clamp((v - u) / (v + 1 - u), 0, 1)`; the result is `mu + alpha (theta - mu)`, detached. Age 0 gives mu
    exactly, age 1 the midpoint.
    """
    alpha = (age / (age + 1)).clamp(0.0, 1.0)
    return behaviour + alpha * (current.detach() - behaviour)
