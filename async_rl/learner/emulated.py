"""A learner step that takes as long as a device would need, and trains nothing."""

from __future__ import annotations

import time

import numpy as np

from async_rl.algorithms.objective import LossMetrics
from async_rl.learner.batch import Share
from async_rl.learner.step import StepResult


class EmulatedStepper:
    """In the place of `step.Stepper`. The weights stay as they are; they are published all the same."""

    def __init__(self, train_s: float) -> None:
        self._train_s = train_s

    def step(self, share: Share, *, rate: float) -> StepResult:
        time.sleep(self._train_s)
        nothing = np.zeros(int(np.count_nonzero(share.mask)), np.float32)
        return StepResult(nothing, nothing, nothing, 0.0, dict.fromkeys(LossMetrics._fields, 0.0), 0.0, 0)
