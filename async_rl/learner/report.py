"""From what the ranks saw to one line of metrics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from async_rl.config import Config
from async_rl.learner.batch import Plan, Share
from async_rl.learner.step import StepResult
from async_rl.tracking.metrics import Record
from buffers.messages import Batch
from staleness import monitor
from staleness.config import StalenessConfig
from staleness.controller import Control, decide


@dataclass(frozen=True)
class StepReport:
    """A rank's part: ages of the tokens that the bound let through, how many others there are by reason, and how many
    trajectories needed a backward."""

    ages: NDArray[np.int64]
    masked: dict[str, int]
    trained: int
    result: StepResult | None

    @classmethod
    def of(cls, share: Share, result: StepResult | None) -> StepReport:
        members = sum(len(segment.members) for segment in share.segments()) if result is not None else 0
        return cls(share.age[share.mask], _masked(share), members, result)


def _masked(share: Share) -> dict[str, int]:
    """Tokens new in this batch that are not trained on, by reason."""
    place = np.arange(share.tokens.size) - np.repeat(share.starts[:-1], np.diff(share.starts))
    new = place >= np.repeat(share.begin, np.diff(share.starts))
    new[share.starts[1:][share.goes_on] - 1] = False
    unknown = share.sampled & ~np.isfinite(share.logprobs)
    reasons = {"injected": ~share.sampled, "nonfinite": unknown, "stale": share.sampled & ~unknown & ~share.mask}
    return {name: int(np.count_nonzero(reason & new)) for name, reason in reasons.items()}


def controlled(control: Control, parts: list[StepReport], staleness: StalenessConfig) -> Control:
    """What the controller makes of a step; as it was if there is no controller, or no gradient."""
    target = staleness.controller.target_ess
    ratios = [monitor.ratios(part.result.log_ratio) for part in parts if part.result is not None]
    if target is None or not ratios:
        return control
    return decide(control, monitor.ess(np.concatenate(ratios)), target=target, most=staleness.max_staleness)


def effective_bound(control: Control, staleness: StalenessConfig) -> int | None:
    """What the learner asks of the buffer; None without a controller."""
    return None if staleness.controller.target_ess is None else control.eta


def report(
    plan: Plan, batch: Batch, parts: list[StepReport], config: Config, times: dict[str, float], control: Control
) -> Record:
    """The metrics of one step. Shares are of 1; tokens and trajectories are counts; times are seconds."""
    ages = np.concatenate([part.ages for part in parts])
    results = [part.result for part in parts if part.result is not None]
    lengths = [row.length for row in batch.rows]
    fresh = sum(row.length - row.start - row.goes_on for row in batch.rows)
    stats = batch.stats
    trained_tokens = sum(result.log_ratio.size for result in results)
    groups = [np.asarray(rewards) for rewards in batch.group_rewards]
    record: Record = {
        "group_reward_std": float(np.mean([rewards.std() for rewards in groups if rewards.size] or [0.0])),
        "groups_equal": sum(bool(rewards.size) and bool(rewards.max() == rewards.min()) for rewards in groups),
        "reward": float(np.mean([reward for rewards in batch.group_rewards for reward in rewards] or [float("nan")])),
        "samples": len(batch.rows),
        "samples_backward": sum(part.trained for part in parts),
        "segments": sum(row.goes_on for row in batch.rows),
        "tokens": fresh,
        "tokens_trainable": plan.tokens,
        "length_mean": float(np.mean(lengths)),
        "length_p50": float(np.quantile(lengths, 0.5)),
        "length_p90": float(np.quantile(lengths, 0.9)),
        "length_max": max(lengths),
        "expired_lengths": stats.expired_lengths,
        "age_mean": float(ages.mean()) if ages.size else float("nan"),
        "age_max": int(ages.max()) if ages.size else 0,
        "ages": monitor.age_histogram(ages, config.staleness.max_staleness),
        "masked_share": 1 - plan.tokens / max(1, fresh),
        **{f"masked_{why}": sum(part.masked[why] for part in parts) for why in ("stale", "nonfinite", "injected")},
        "skipped": int(not plan.gradient),
        "effective_max_staleness": control.eta,
        "rate_scale": control.scale,
        **times,
        "buffer_running": stats.running,
        "buffer_ready": stats.ready,
        "buffer_leased": stats.leased,
        "buffer_limit": stats.limit,
        "buffer_tokens": stats.tokens,
        "issued": stats.issued,
        "expired": stats.expired,
        "failed": stats.failed,
        "cancelled": stats.cancelled,
        "filtered_groups": stats.filtered_groups,
    }
    record |= {f"reward_{name}": value for name, value in _named_rewards(batch, config).items()}
    if results:
        mean = {name: sum(result.sums[name] for result in results) / max(1, trained_tokens) for name in results[0].sums}
        record |= monitor.ratio_summary(np.concatenate([result.log_ratio for result in results]))
        record |= monitor.proximal_summary(np.concatenate([result.log_r for result in results]))
        if config.rollout.truncated:
            # E_mu[pi / mu] is the mass of pi where mu is not 0.
            record["surviving_mass"] = record["ratio_mean"]
        record |= {
            "loss": sum(result.loss for result in results),
            "grad_norm": results[0].grad_norm,
            "entropy": _mean_known(np.concatenate([result.entropy for result in results])),
            "clipped_share": mean["clipped"],
            "corrected_away_share": mean["corrected_away"],
            "weight_mean": mean["weight"],
            "kl_proximal": mean["kl_proximal"],
            **({"kl_reference": mean["kl_reference"]} if config.algorithm.kl.coefficient else {}),
            **({"value_loss": sum(result.value_loss for result in results)} if config.algorithm.critic else {}),
            "packed_tokens": sum(result.packed_tokens for result in results),
        }
    return record


def _mean_known(values: NDArray[np.float32]) -> float:
    """Without those that are nan; nan if all are."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _named_rewards(batch: Batch, config: Config) -> dict[str, float]:
    """Means of the single rewards, before weights and shaping, where they are not the reward itself."""
    parts = [row.parts for row in batch.rows if row.parts]
    means = np.mean(parts, axis=0).tolist() if parts else []
    return dict(zip(config.reward.functions, means, strict=False))
