"""How much each token counts in the loss of a batch. Numpy, pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from async_rl.algorithms.config import Aggregation


def shares(
    aggregation: Aggregation, trainable: NDArray[np.int64], *, tokens: int, sequences: int, longest: int
) -> NDArray[np.float64]:
    """a for the tokens of each trajectory of a rank.

    `trainable` are their numbers of trainable tokens; `tokens` and `sequences` count the trainable tokens, and the
    trajectories that have some, of the whole batch on all ranks. `longest` is the constant that `-norm` divides by
    (Dr. GRPO, 2503.20783).

        token-mean                1 / tokens
        seq-mean-token-sum        1 / sequences
        seq-mean-token-mean       1 / (sequences * trainable)
        seq-mean-token-sum-norm   1 / (sequences * longest)
    """
    ones = np.ones(trainable.size)
    if aggregation == "token-mean":
        return ones / max(tokens, 1)
    each = ones / max(sequences, 1)
    if aggregation == "seq-mean-token-mean":
        return each / np.maximum(trainable, 1)
    return each / longest if aggregation == "seq-mean-token-sum-norm" else each
