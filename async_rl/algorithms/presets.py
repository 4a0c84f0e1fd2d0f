"""Named algorithms as plain data: what `algorithm.preset` sets where a configuration says nothing itself.

`async-rl algorithms` prints them. A preset sets paths of the whole configuration; whatever the file or the command line
sets wins. If they name another loss or correction, the preset's numbers for its own are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CORRECTION = "staleness.correction."
LOSS = ("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "algorithm.delta", "algorithm.tau_")
"""Settings that belong to the loss of a preset."""


class Preset(NamedTuple):
    """`formula` in words of `docs/algorithms.md`; `source` is where it comes from; `settings` are paths and values."""

    formula: str
    source: str
    settings: Mapping[str, Any]


def _preset(formula: str, source: str, advantage: str, loss: str, correction: str = "none", **more: Any) -> Preset:
    """`more` has paths with `__` for the dot."""
    settings = {"algorithm.advantage": advantage, "algorithm.loss": loss, f"{CORRECTION}name": correction}
    return Preset(formula, source, settings | {path.replace("__", "."): value for path, value in more.items()})


PRESETS: dict[str, Preset] = {
    "grpo": _preset(
        "A = (R - mean) / std of the group; PPO's clip on exp(theta - p); w = min(exp(p - mu), 5)",
        "DeepSeekMath, arXiv 2402.03300; decoupled as in 2505.24298",
        "grpo", "ppo", "tis", staleness__correction__cap=5.0,
    ),
    "dr-grpo": _preset(
        "A = R - mean of the group; each sequence's sum over rollout.max_tokens; otherwise grpo",
        "Dr. GRPO, arXiv 2503.20783",
        "dr-grpo", "ppo", "tis", staleness__correction__cap=5.0, algorithm__aggregation="seq-mean-token-sum-norm",
    ),
    "dapo": _preset(
        "grpo with the clip at 1 - 0.2 and 1 + 0.28 and the mean over the tokens of the batch; groups of equal rewards "
        "replaced; up to 1 off the reward over the last fifth of rollout.max_tokens",
        "DAPO, arXiv 2503.14476",
        "grpo", "ppo", "tis", staleness__correction__cap=5.0,
        algorithm__clip_low=0.2, algorithm__clip_high=0.28, algorithm__aggregation="token-mean",
        buffer__groups__dynamic_sampling=True, reward__overlong__share=0.2, reward__overlong__penalty=1.0,
    ),
    "rloo": _preset(
        "A = R - mean of the others; f = A theta; w = min(exp(theta - mu), 2)",
        "RLOO, arXiv 2402.14740",
        "rloo", "reinforce", "tis", staleness__correction__cap=2.0,
    ),
    "reinforce++": _preset(
        "A = R, normalised over the tokens of the batch; PPO's clip; w = min(exp(p - mu), 5)",
        "REINFORCE++, arXiv 2501.03262",
        "reinforce++", "ppo", "tis", staleness__correction__cap=5.0,
    ),
    "ppo": _preset(
        "A by GAE (gamma = 1, lambda = 0.95) on a value head of the policy's trunk, normalised; PPO's clip; "
        "w = min(exp(p - mu), 5)",
        "PPO, arXiv 1707.06347; GAE, 1506.02438",
        "gae", "ppo", "tis", staleness__correction__cap=5.0,
        algorithm__gamma=1.0, algorithm__lam=0.95, algorithm__whiten=True, algorithm__value__trunk="shared",
    ),
    "vtrace": _preset(
        "f = A theta, A and value targets by V-trace with exp(p - mu) truncated at 1",
        "IMPALA, arXiv 1802.01561",
        "vtrace", "reinforce",
        algorithm__gamma=1.0, algorithm__lam=1.0, algorithm__rho_max=1.0, algorithm__c_max=1.0,
    ),
    "remax": _preset(
        "A = R - R of the greedy response to the same prompt; f = A theta; w = min(exp(theta - mu), 2)",
        "ReMax, arXiv 2310.10505",
        "remax", "reinforce", "tis", staleness__correction__cap=2.0,
    ),
    "gigpo": _preset(
        "A = that of grpo + omega * the same of the returns of turns that began in the same state; otherwise grpo",
        "GiGPO, arXiv 2505.10978",
        "gigpo", "ppo", "tis", staleness__correction__cap=5.0, algorithm__omega=1.0, algorithm__gamma=0.95,
    ),
    "gspo": _preset(
        "PPO's clip on exp(mean(theta - mu)) of the sequence, at 3e-4 and 4e-4; mean over tokens, then sequences",
        "GSPO, arXiv 2507.18071",
        "grpo", "gspo", algorithm__aggregation="seq-mean-token-mean",
    ),
    "cispo": _preset(
        "f = clip(exp(theta - mu), 0, 1.28) A theta, the clipped ratio without gradient",
        "MiniMax-M1, arXiv 2506.13585",
        "grpo", "cispo",
    ),
    "m2po": _preset(
        "PPO's clip on exp(theta - mu); tokens of the largest (theta - mu)^2 masked until the mean is at most 0.04",
        "M2PO, arXiv 2510.01161",
        "grpo", "ppo", "m2", staleness__correction__proximal="behaviour", staleness__correction__tau=0.04,
    ),
    "topr": _preset(
        "f = A theta where R > 0, else clip(prod exp(theta - mu), 0, 1) A theta",
        "Tapered off-policy REINFORCE, arXiv 2503.14286",
        "dr-grpo", "topr",
    ),
    "aipo": _preset(
        "f = A theta; w = min(exp(theta - mu), 4)",
        "LlamaRL, arXiv 2505.24034",
        "dr-grpo", "reinforce", "tis", staleness__correction__cap=4.0,
    ),
    "dppo-tv": _preset(
        "f = A exp(theta - mu), without tokens that have moved by more than 0.2 in probability the way A pushes",
        "DPPO, arXiv 2602.04879",
        "grpo", "dppo-tv", algorithm__delta=0.2,
    ),
    "sapo": _preset(
        "f = (4 / tau) sigmoid(tau (exp(theta - mu) - 1)) A, tau = 1 for A > 0 and 1.05 else",
        "SAPO, arXiv 2511.20347",
        "grpo", "sapo", algorithm__tau_positive=1.0, algorithm__tau_negative=1.05,
    ),
}  # fmt: skip


def defaults(preset: Preset, given: Mapping[str, object]) -> dict[str, Any]:
    """The settings of a preset that `given` (path → value) leaves open."""
    names = "algorithm.loss", f"{CORRECTION}name"
    other_loss, other_correction = (given.get(name, preset.settings[name]) != preset.settings[name] for name in names)
    foreign = (*(LOSS if other_loss else ()), *((CORRECTION,) if other_loss or other_correction else ()))
    return {
        path: value for path, value in preset.settings.items() if path not in given and not path.startswith(foreign)
    }


def show(names: list[str]) -> str:
    """Presets as text."""
    return "\n\n".join(_show(name, PRESETS[name]) for name in names)


def _show(name: str, preset: Preset) -> str:
    settings = "\n".join(f"    {path}: {value}" for path, value in preset.settings.items())
    return f"{name}\n  {preset.formula}\n  source: {preset.source}\n{settings}"
