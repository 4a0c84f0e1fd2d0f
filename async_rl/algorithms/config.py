"""Configuration of advantage, loss and regularisers, and which of them go together. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from staleness.config import DEFAULTS, MASKS, CorrectionConfig, Window

Advantage = Literal["grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "gae", "vtrace", "remax", "gigpo"]
Loss = Literal["ppo", "reinforce", "cispo", "gspo", "sapo", "topr", "dppo-tv"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Form = Literal["decoupled", "coupled", "weighted"]

CLIPS: dict[Loss, tuple[float, float]] = {"ppo": (0.2, 0.2), "cispo": (1.0, 0.28), "gspo": (3e-4, 4e-4)}
"""Lower and upper clip of the losses that have one."""
PER_TOKEN: frozenset[Advantage] = frozenset({"reinforce++", "reinforce++-baseline", "gae", "vtrace"})
COMPARING: frozenset[Advantage] = frozenset({"grpo", "dr-grpo", "reinforce++-baseline", "gigpo"})
"""Advantages that are 0 in a group of one."""
COUPLED: frozenset[Loss] = frozenset({"cispo", "gspo", "sapo", "topr", "dppo-tv"})


class KlConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Regulariser towards a frozen reference policy, the model that the run started from."""

    coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Its weight; 0 needs no reference policy."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the `loss`, weighted like a token's own, or a penalty in the `reward` of each token, which takes an
    advantage that has token rewards: `gae`, `vtrace`, `reinforce++`."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """k1 = theta - q (in the reward only: as a loss its expected gradient is 0), k2 = (theta - q)^2 / 2, k3 =
    exp(q - theta) - (q - theta) - 1."""


class ValueConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The value model of `gae` and `vtrace`."""

    trunk: Literal["own", "shared"] = "own"
    """A model of its `own`, begun as a copy of the policy, or a head on the policy's trunk (`shared`)."""
    learning_rate: Annotated[float, Meta(gt=0, lt=1e12)] = 1e-5
    """AdamW learning rate of an own trunk; a shared one has the policy's."""
    coefficient: Annotated[float, Meta(gt=0)] = 0.5
    """Weight of the value loss beside the policy's, on a shared trunk."""
    clip: Annotated[float, Meta(gt=0)] | None = 0.2
    """How far a value may move from that of the start of the batch before the loss stops pulling. None: any way."""


class AlgorithmConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Advantage and loss."""

    preset: str = "grpo"
    """Named set of defaults for this section and others: `async-rl algorithms` shows them."""
    advantage: Advantage = "grpo"
    """How rewards become advantages."""
    loss: Loss = "ppo"
    """What is maximised per token."""
    aggregation: Aggregation = "token-mean"
    """Mean over the tokens of the batch, or over its sequences of their token sums, token means, or token sums divided
    by `rollout.max_tokens`."""
    sample_std: bool = False
    """`grpo` and `gigpo` divide by the sample standard deviation (n - 1) in place of the population's."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Lower clip of the ratio: 1 - clip_low. Default: `ppo` 0.2, `cispo` 1 (no lower clip), `gspo` 3e-4."""
    clip_high: Annotated[float, Meta(ge=0)] | None = None
    """Upper clip of the ratio: 1 + clip_high. Default: `ppo` 0.2, `cispo` 0.28, `gspo` 4e-4."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """`ppo`: a token of negative advantage A counts at least dual_clip * A; 3 is usual."""
    delta: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """`dppo-tv`: how far a token's probability may move."""
    tau_positive: Annotated[float, Meta(gt=0)] = 1.0
    """`sapo`: temperature of the soft clip where the advantage is positive."""
    tau_negative: Annotated[float, Meta(gt=0)] = 1.05
    """`sapo`: temperature of the soft clip where it is not."""
    gamma: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Discount per sampled token, of `gae`, `vtrace`, `reinforce++`; per turn of `gigpo`."""
    lam: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Lambda of `gae` and `vtrace`."""
    rho_max: Annotated[float, Meta(gt=0)] = 1.0
    """Truncation of the ratio in the targets of `vtrace`."""
    c_max: Annotated[float, Meta(gt=0)] = 1.0
    """Truncation of the ratio in the traces of `vtrace`."""
    omega: Annotated[float, Meta(ge=0)] = 1.0
    """`gigpo`: weight of the advantage of a turn beside that of its episode."""
    whiten: bool = False
    """`gae`: advantages normalised over the tokens of the batch."""
    value: ValueConfig = ValueConfig()
    """Value model."""
    entropy: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of an entropy bonus; 0 is none. The entropy of every token then costs memory and time."""
    kl: KlConfig = KlConfig()
    """Regulariser towards a reference policy."""

    @property
    def clip(self) -> tuple[float, float]:
        """The configured clips, or the loss's own."""
        low, high = CLIPS.get(self.loss, (0.0, 0.0))
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def everywhere(self) -> bool:
        """Whether a trajectory without advantage may have a gradient too."""
        return self.per_token or self.entropy > 0 or (self.kl.coefficient > 0 and self.kl.place == "loss")

    @property
    def per_token(self) -> bool:
        """Whether each token has an advantage of its own, of which the trajectory's is but the reward."""
        return self.advantage in PER_TOKEN

    @property
    def critic(self) -> bool:
        """Whether a value model is needed."""
        return self.advantage in ("gae", "vtrace")


def form(algorithm: AlgorithmConfig, correction: CorrectionConfig) -> Form:
    """How loss and correction share the work, so that no ratio counts twice; see `async_rl/algorithms/objective.py`."""
    if algorithm.loss == "ppo":
        return "coupled" if correction.proximal == "behaviour" else "decoupled"
    return "coupled" if algorithm.loss in COUPLED else "weighted"


class Conflict(NamedTuple):
    """Why a setting does not go with the others, and what to do."""

    field: str
    value: object
    reason: str
    remedy: str


def conflict(algorithm: AlgorithmConfig, correction: CorrectionConfig) -> Conflict | None:
    """The first pairing that counts a ratio twice or not at all, or has no meaning; None if all is well."""
    name, proximal = correction.name, correction.proximal
    given = Window(correction.cap, correction.low, correction.high)._asdict()
    for field, wanted in DEFAULTS[name]._asdict().items():
        if wanted is None and given[field] is not None:
            return Conflict(
                f"staleness.correction.{field}", given[field], f"correction {name} has no such number", "Leave it out"
            )
    low, high = correction.window.low, correction.window.high
    if low is not None and high is not None and low >= high:
        return Conflict("staleness.correction.low", low, f"not below high = {high}", "Widen the window")
    if algorithm.advantage == "vtrace" and (algorithm.loss != "reinforce" or name != "none"):
        return Conflict(
            "algorithm.advantage", "vtrace",
            f"it corrects with the ratio itself, and loss {algorithm.loss} with correction {name} would do so again",
            "Set algorithm.loss: reinforce and staleness.correction.name: none",
        )  # fmt: skip
    if form(algorithm, correction) == "coupled" and name not in MASKS:
        return Conflict(
            "staleness.correction.name", name,
            f"loss {algorithm.loss}{' with proximal behaviour' if algorithm.loss == 'ppo' else ''} holds the whole "
            "ratio to the behaviour policy, and these weights would count it twice",
            f"Use one that only masks: {', '.join(sorted(MASKS))}",
        )  # fmt: skip
    anchored = algorithm.loss == "ppo" or (algorithm.advantage == "vtrace" and proximal == "recompute")
    if not anchored and proximal != "current":
        return Conflict(
            "staleness.correction.proximal", proximal,
            f"loss {algorithm.loss} has no anchor, so the ratio to it would not count at all",
            "Leave it at current, or use algorithm.loss: ppo",
        )  # fmt: skip
    if algorithm.loss == "gspo" and algorithm.aggregation != "seq-mean-token-mean":
        return Conflict(
            "algorithm.aggregation", algorithm.aggregation, "gspo has one ratio a sequence, and weighs each alike",
            "Set algorithm.aggregation: seq-mean-token-mean",
        )  # fmt: skip
    for field, value, losses in (
        ("clip_low", algorithm.clip_low, list(CLIPS)),
        ("clip_high", algorithm.clip_high, list(CLIPS)),
        ("dual_clip", algorithm.dual_clip, ["ppo"]),
    ):
        if value is not None and algorithm.loss not in losses:
            return Conflict(
                f"algorithm.{field}", value, f"loss {algorithm.loss} has no such clip", f"Leave it out, or use {losses}"
            )
    return _kl_conflict(algorithm)


def _kl_conflict(algorithm: AlgorithmConfig) -> Conflict | None:
    kl = algorithm.kl
    if kl.coefficient == 0:
        return None
    if kl.place == "loss" and kl.estimator == "k1":
        return Conflict(
            "algorithm.kl.estimator", "k1", "the expected gradient of k1 as a loss is 0",
            "Use k2 or k3, or algorithm.kl.place: reward",
        )  # fmt: skip
    if kl.place == "reward" and not algorithm.per_token:
        return Conflict(
            "algorithm.kl.place", "reward", f"advantage {algorithm.advantage} has no rewards of single tokens",
            f"Use algorithm.kl.place: loss, or one of {', '.join(sorted(PER_TOKEN))}",
        )  # fmt: skip
    return None
