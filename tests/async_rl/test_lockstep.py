"""Every algorithm trains: three steps each of the real core, decoder and learner in one process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from async_rl.algorithms.presets import PRESETS
from async_rl.config import Config, check, parse
from async_rl.learner.batch import Plan, Share
from async_rl.learner.step import Known
from async_rl.lockstep import Lockstep, Problem, one_rank

pytestmark = pytest.mark.e2e

PROBLEMS = [Problem([0, 40 + i, 1, 0], {"answer": i}) for i in range(12)]


def config_of(preset: str, **more: dict) -> Config:
    tree = {
        "steps": 3,
        "data": {"path": "x"},
        "reward": {"function": "tests.e2e.rewards:length"},
        "rollout": {"slots": 8, "max_tokens": 6, "dtype": "float32"},
        "buffer": {"batch_size": 8, "group_size": 4},
        "learner": {"learning_rate": 1e-3, "dtype": "float32"},
        "staleness": {"max_staleness": 1},
        "algorithm": {"preset": preset},
    }
    for section, values in more.items():
        tree[section] = tree.get(section, {}) | values
    config = parse(tree)
    check(config)
    return config


def letters(response: str, _: dict) -> float:
    """Rewards a response for how many different characters it has."""
    return len(set(response)) / 6


def weights(lockstep: Lockstep) -> list[torch.Tensor]:
    return [parameter.detach().to_local().clone() for parameter in lockstep.models.policy.parameters()]


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"remax", "gigpo"}))
def test_every_preset_trains_three_steps(preset: str, tiny_model: Path) -> None:
    with one_rank():
        lockstep = Lockstep(config_of(preset), str(tiny_model), PROBLEMS, letters)
        before = weights(lockstep)
        records = list(lockstep.run())
        after = weights(lockstep)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(np.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)
    assert [record["age_max"] for record in records] == [0, 1, 1]
    lockstep.core.check()
    if preset in ("ppo", "vtrace"):
        assert records[0]["value_loss"] > 0


def test_the_controller_lowers_what_may_start_and_lets_it_rise_again(tiny_model: Path) -> None:
    """Under a rate that moves the policy fast the bound falls, and with it the age of what is trained; when the policy
    stands still the bound comes back to the configured one."""
    target, fast = 0.9, 40
    config = config_of("grpo", staleness={"max_staleness": 6, "controller": {"target_ess": target}})
    config = msgspec.structs.replace(config, steps=130)
    with one_rank():
        lockstep = Lockstep(config, str(tiny_model), PROBLEMS, letters, rate=lambda step: 3e-3 if step < fast else 1e-6)
        records = list(lockstep.run())
    etas = [record["effective_max_staleness"] for record in records]
    assert max(etas) <= 6
    assert min(etas[:fast]) <= 1
    assert min(record["age_mean"] for record in records[10:60]) <= 2
    assert min(record["rate_scale"] for record in records[:fast]) < 0.9
    assert etas[-1] == 6
    assert records[-1]["rate_scale"] == 1.0
    assert np.mean([record["ess"] for record in records[-40:]]) > target


def test_dapo_replaces_groups_of_equal_rewards_and_takes_off_what_is_too_long(tiny_model: Path) -> None:
    """Even prompts give all of their group 1, so none of them is trained on. Answers of the whole budget of six tokens
    lose all of the penalty, those of five a sixth of it."""

    def odd(response: str, row: dict) -> float:
        return len(set(response)) % 2 if row["answer"] % 2 else 1.0

    batches: list[Plan] = []
    config = config_of("dapo", reward={"overlong": {"share": 0.2, "penalty": 0.6}})
    with one_rank():
        lockstep = Lockstep(config, str(tiny_model), PROBLEMS, odd, observe=lambda plan, _: batches.append(plan))
        records = list(lockstep.run())
    assert records[-1]["filtered_groups"] > 0
    assert all(record["skipped"] == 0 for record in records)
    rows = [row for planned in batches for row in planned.rows[0]]
    assert {row.length for row in rows} >= {6}
    assert all(planned.gradient for planned in batches)
    for row in rows:
        raw = row.parts[0] if row.parts else row.reward
        ramp = min(1.0, max(0.0, (row.length - 4.8) / 1.2))
        assert row.reward == pytest.approx(raw - 0.6 * ramp)


@pytest.mark.parametrize("preset", ["ppo", "vtrace"])
def test_segments_of_what_goes_on_train_each_token_once(preset: str, tiny_model: Path) -> None:
    """Three ticks a step and responses of up to twelve tokens: most are trained on in parts."""
    seen: list[tuple[Plan, Share]] = []
    config = config_of(
        preset,
        rollout={"max_tokens": 12, "chunk_tokens": 1},
        staleness={"max_staleness": 2, "segments": 3},
        buffer={"groups": {"policy": "split"}},
    )
    config = msgspec.structs.replace(config, steps=12)
    with one_rank():
        lockstep = Lockstep(
            config, str(tiny_model), PROBLEMS, letters, ticks=3, observe=lambda plan, share: seen.append((plan, share))
        )
        records = list(lockstep.run())
    assert sum(record["segments"] for record in records) > 12
    assert sum(record["samples"] - record["segments"] for record in records) > 6
    # The values begin at 0: while there is no reward either, there is nothing to learn.
    assert all(np.isfinite(record["loss"]) for record in records)
    assert sum(record["grad_norm"] > 0 for record in records) > 8
    assert max(record["age_max"] for record in records) <= 2
    begins: dict[int, int] = {}
    for planned, share in seen:
        for i, row in enumerate(planned.rows[0]):
            assert row.start == begins.get(row.ticket, 0)
            begins[row.ticket] = row.length - row.goes_on
            mask = share.mask[share.starts[i] : share.starts[i + 1]]
            assert not mask[: row.start].any()
            assert not (row.goes_on and mask[-1])
    lockstep.core.check()


def test_a_value_model_stands_for_what_a_segment_does_not_have(tiny_model: Path) -> None:
    """lambda = 0: the advantage of a token is gamma V' - V but for the last one, wherever the response was cut."""
    advantages: list[tuple[bool, np.ndarray, np.ndarray]] = []
    config = config_of(
        "ppo",
        algorithm={"lam": 0.0, "gamma": 0.5, "whiten": False},
        rollout={"max_tokens": 12, "chunk_tokens": 1},
        staleness={"segments": 3},
        buffer={"groups": {"policy": "split"}},
    )
    with one_rank():
        lockstep = Lockstep(config, str(tiny_model), PROBLEMS, letters, ticks=3)
        stepper = lockstep.stepper
        credit = stepper._credit

        def noted(share: Share, known: Known) -> tuple[Share, torch.Tensor]:
            out, targets = credit(share, known)
            assert known.values is not None
            values = known.values.numpy()
            for i, goes_on in enumerate(share.goes_on):
                span = slice(share.starts[i] + share.begin[i], share.starts[i + 1])
                advantages.append((bool(goes_on), out.advantage[span], values[span]))
            return out, targets

        stepper._credit = noted  # type: ignore[method-assign]
        list(lockstep.run())
    assert any(goes_on for goes_on, *_ in advantages)
    for goes_on, advantage, values in advantages:
        expected = 0.5 * values[1:] - values[:-1]
        if not goes_on:
            assert advantage[:-1] == pytest.approx(expected, abs=1e-6)
            assert advantage[-1] != pytest.approx(-values[-1], abs=1e-6)
        else:
            assert advantage[:-1] == pytest.approx(expected, abs=1e-6)
            assert advantage[-1] == 0


def test_the_mass_that_survives_truncation_is_in_the_metrics(tiny_model: Path) -> None:
    config = config_of("grpo", rollout={"top_k": 8, "allow_truncated_sampling": True}, staleness={"max_staleness": 0})
    with one_rank():
        records = list(Lockstep(config, str(tiny_model), PROBLEMS, letters).run())
    assert all(0 < record["surviving_mass"] < 0.9 for record in records)


EXTRAS: dict[str, dict] = {
    "k2 in the loss": {"algorithm": {"kl": {"coefficient": 0.1}}},
    "k3 in the loss": {"algorithm": {"kl": {"coefficient": 0.1, "estimator": "k3"}}},
    "k1 in the reward": {
        "algorithm": {"preset": "ppo", "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}}
    },
    "k3 in the reward": {
        "algorithm": {"preset": "reinforce++", "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k3"}}
    },
    "entropy": {"algorithm": {"entropy": 0.01}},
    "values on a trunk of their own": {"algorithm": {"preset": "ppo", "value": {"trunk": "own"}}},
    "v-trace on the policy's trunk": {"algorithm": {"preset": "vtrace", "value": {"trunk": "shared", "clip": None}}},
    "v-trace with a second pass": {
        "algorithm": {"preset": "vtrace"},
        "staleness": {"max_staleness": 1, "correction": {"proximal": "recompute"}},
    },
    "several optimizer steps": {
        "learner": {"epochs": 3},
        "staleness": {"max_staleness": 1, "correction": {"proximal": "recompute"}},
    },
    "loglinear with veto": {"staleness": {"max_staleness": 1, "correction": {"proximal": "loglinear", "veto": 1e-4}}},
    "m2 between anchor and behaviour": {
        "staleness": {"max_staleness": 1, "correction": {"name": "m2", "proximal": "loglinear"}}
    },
}


@pytest.mark.parametrize("name", EXTRAS)
def test_every_extra_trains_three_steps(name: str, tiny_model: Path) -> None:
    settings = {section: dict(values) for section, values in EXTRAS[name].items()}
    preset = settings.get("algorithm", {}).pop("preset", "grpo")
    with one_rank():
        lockstep = Lockstep(config_of(preset, **settings), str(tiny_model), PROBLEMS, letters)
        before = weights(lockstep)
        reference = lockstep.models.reference
        frozen = [] if reference is None else [p.detach().to_local().clone() for p in reference.parameters()]  # type: ignore[attr-defined]
        records = list(lockstep.run())
        after = weights(lockstep)
        kept = [] if reference is None else [p.detach().to_local() for p in reference.parameters()]  # type: ignore[attr-defined]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(np.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)
    assert all(torch.equal(one, other) for one, other in zip(frozen, kept, strict=True))
    if name.startswith("k"):
        # The reference is where the policy began, and the policy moves away from it.
        assert records[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)
        assert records[-1]["kl_reference"] > 1e-6
    if "trunk" in name:
        assert records[0]["value_loss"] > 0
    if name == "several optimizer steps":
        assert records[-1]["kl_proximal"] >= 0
