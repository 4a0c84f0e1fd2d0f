"""Every named algorithm resolves to what its paper says, gives way to the user, and what cannot work is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from async_rl.algorithms.presets import PRESETS, show
from async_rl.config import Config, check, dump, parse
from async_rl.errors import ConfigError

CORRECTION = "staleness.correction"


def tree(settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration that is valid but for these dotted settings."""
    out: dict[str, Any] = {"data": {"path": "x"}, "reward": {"function": "a:b"}}
    for path, value in settings.items():
        *parents, leaf = path.split(".")
        section = out
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return out


def resolve(name: str, **settings: Any) -> Config:
    """The checked configuration of a preset; `settings` have paths with `__` for the dot."""
    if name == "gigpo":
        settings["environment__name"] = "calculator"
    config = parse(tree({"algorithm.preset": name, **{k.replace("__", "."): v for k, v in settings.items()}}))
    check(config)
    return config


def get(config: object, path: str) -> object:
    for part in path.split("."):
        config = getattr(config, part)
    return config


WANTED: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo", "name": "tis", "cap": 5.0, "clip": (0.2, 0.2)},
    "dr-grpo": {"advantage": "dr-grpo", "loss": "ppo", "name": "tis", "aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"advantage": "grpo", "loss": "ppo", "name": "tis", "clip": (0.2, 0.28), "aggregation": "token-mean"},
    "rloo": {"advantage": "rloo", "loss": "reinforce", "name": "tis"},
    "reinforce++": {"advantage": "reinforce++", "loss": "ppo", "name": "tis", "cap": 5.0},
    "ppo": {"advantage": "gae", "loss": "ppo", "name": "tis", "cap": 5.0},
    "vtrace": {"advantage": "vtrace", "loss": "reinforce", "name": "none", "rho_max": 1.0, "c_max": 1.0, "lam": 1.0},
    "remax": {"advantage": "remax", "loss": "reinforce", "name": "tis", "cap": 2.0},
    "gigpo": {"advantage": "gigpo", "loss": "ppo", "name": "tis", "omega": 1.0},
    "gspo": {"loss": "gspo", "name": "none", "clip": (3e-4, 4e-4), "aggregation": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "name": "none", "clip": (1.0, 0.28)},
    "m2po": {"loss": "ppo", "name": "m2", "tau": 0.04},
    "topr": {"loss": "topr", "name": "none"},
    "aipo": {"loss": "reinforce", "name": "tis", "cap": 4.0},
    "dppo-tv": {"loss": "dppo-tv", "name": "none", "delta": 0.2},
    "sapo": {"loss": "sapo", "name": "none", "tau_positive": 1.0, "tau_negative": 1.05},
}
"""Defaults by the formulas, those of a correction under their own names."""


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_its_formula(name: str) -> None:
    """Resolved and checked: the settings it lists, and the numbers of the paper."""
    config = resolve(name)
    for path, value in PRESETS[name].settings.items():
        assert get(config, path) == value, path
    for field, value in WANTED[name].items():
        section = config.staleness.correction if field in ("name", "cap", "tau") else config.algorithm
        assert getattr(section, field) == value, field


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_resolved_preset_reads_back_as_itself(name: str) -> None:
    config = resolve(name)
    assert parse(yaml.safe_load(dump(config))) == config


def test_without_a_preset_it_is_grpo() -> None:
    config = parse(tree({}))
    assert config == resolve("grpo")
    assert config.algorithm.preset == "grpo"


def test_a_tree_is_not_changed_by_reading_it() -> None:
    given = tree({"algorithm.preset": "cispo", f"{CORRECTION}.veto": 1e-4})
    before = copy.deepcopy(given)
    parse(given)
    assert given == before


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("grpo", f"{CORRECTION}.cap", 3.0),
        ("grpo", f"{CORRECTION}.cap", None),
        ("grpo", "algorithm.advantage", "rloo"),
        ("grpo", f"{CORRECTION}.name", "mis"),
        ("dapo", "algorithm.clip_high", 0.3),
        ("dapo", "algorithm.aggregation", "seq-mean-token-mean"),
        ("ppo", "algorithm.lam", 0.9),
        ("ppo", "algorithm.whiten", False),
        ("vtrace", "algorithm.rho_max", 2.0),
        ("gspo", "algorithm.clip_low", 1e-3),
        ("cispo", f"{CORRECTION}.name", "geo-mask"),
        ("m2po", f"{CORRECTION}.tau", 0.1),
        ("m2po", f"{CORRECTION}.proximal", "current"),
        ("aipo", f"{CORRECTION}.cap", 2.0),
        ("dppo-tv", "algorithm.delta", 0.1),
        ("sapo", "algorithm.tau_negative", 2.0),
    ],
)
def test_what_the_user_sets_wins(name: str, path: str, value: object) -> None:
    """The rest of the preset stays, but for the numbers of a correction that is another's. It reads back as well."""
    config = resolve(name, **{"algorithm.preset": name, path: value})
    assert get(config, path) == value
    for other, kept in PRESETS[name].settings.items():
        if other != path and not (path == f"{CORRECTION}.name" and other.startswith(CORRECTION)):
            assert get(config, other) == kept, other
    assert parse(yaml.safe_load(dump(config))) == config


def test_another_correction_has_its_own_numbers() -> None:
    """Not those that the preset has for its correction."""
    correction = resolve("grpo", staleness__correction__name="tis-seq").staleness.correction
    assert correction.window == (5.0, None, None)
    correction = resolve("aipo", staleness__correction__name="seq-mask-tis").staleness.correction
    assert correction.window == (2.0, 0.999, 1.002)
    correction = resolve("m2po", staleness__correction__name="tis").staleness.correction
    assert (correction.window.cap, correction.proximal) == (2.0, "current")


@pytest.mark.parametrize("name", ["grop", "", 3, None, ["grpo"]])
def test_an_unknown_preset_names_the_choices(name: object) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.preset") as caught:
        parse(tree({"algorithm.preset": name}))
    assert caught.value.field == "algorithm.preset"
    assert caught.value.value == name
    for preset in PRESETS:
        assert preset in caught.value.remedy


def test_presets_are_shown_with_formula_source_and_settings() -> None:
    text = show(sorted(PRESETS))
    for name, preset in PRESETS.items():
        assert f"{name}\n  {preset.formula}\n  source: {preset.source}\n" in text
        for path, value in preset.settings.items():
            assert f"{path}: {value}" in text


def weighting(*names: str) -> list[tuple[dict, str, object, str]]:
    """Coupled losses refuse weights."""
    aggregation = {"gspo": {"algorithm.aggregation": "seq-mean-token-mean"}}
    field = f"{CORRECTION}.name"
    return [
        ({"algorithm.loss": loss, field: name, **aggregation.get(loss, {})}, field, name, "geo-mask")
        for loss in ("cispo", "gspo", "sapo", "topr", "dppo-tv")
        for name in names
    ]  # fmt: skip


REFUSED: list[tuple[dict, str, object, str]] = [
    *weighting("tis", "tis-seq", "mis", "icepop", "seq-mask-tis"),
    ({f"{CORRECTION}.proximal": "behaviour"}, f"{CORRECTION}.name", "tis", "m2"),
    ({"algorithm.preset": "vtrace", "algorithm.loss": "ppo"}, "algorithm.advantage", "vtrace", "reinforce"),
    ({"algorithm.preset": "vtrace", "algorithm.loss": "cispo"}, "algorithm.advantage", "vtrace", "reinforce"),
    ({"algorithm.preset": "vtrace", f"{CORRECTION}.name": "tis"}, "algorithm.advantage", "vtrace", "none"),
    ({"algorithm.preset": "vtrace", f"{CORRECTION}.name": "geo-mask"}, "algorithm.advantage", "vtrace", "none"),
    *(
        ({"algorithm.preset": name, f"{CORRECTION}.proximal": proximal}, f"{CORRECTION}.proximal", proximal, "ppo")
        for name in ("rloo", "aipo", "cispo", "gspo", "sapo", "topr", "dppo-tv")
        for proximal in ("recompute", "loglinear", "behaviour")
    ),
    *(
        (
            {"algorithm.preset": "gspo", "algorithm.aggregation": aggregation},
            "algorithm.aggregation",
            aggregation,
            "seq-mean-token-mean",
        )
        for aggregation in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    ),
    (
        {"algorithm.kl.coefficient": 0.1, "algorithm.kl.estimator": "k1"},
        "algorithm.kl.estimator",
        "k1",
        "k2",
    ),
    ({"algorithm.kl.coefficient": 0.1, "algorithm.kl.place": "reward"}, "algorithm.kl.place", "reward", "loss"),
    ({f"{CORRECTION}.name": "mis", f"{CORRECTION}.low": 3.0}, f"{CORRECTION}.low", 3.0, "window"),
    ({f"{CORRECTION}.name": "icepop", f"{CORRECTION}.high": 0.5}, f"{CORRECTION}.low", 0.5, "window"),
    ({f"{CORRECTION}.name": "geo-mask", f"{CORRECTION}.high": 0.9}, f"{CORRECTION}.low", 0.99, "window"),
    ({f"{CORRECTION}.low": 0.5}, f"{CORRECTION}.low", 0.5, "leave it out"),
    ({f"{CORRECTION}.name": "mis", f"{CORRECTION}.cap": 2.0}, f"{CORRECTION}.cap", 2.0, "leave it out"),
    ({"algorithm.preset": "sapo", "algorithm.clip_high": 0.2}, "algorithm.clip_high", 0.2, "ppo"),
    ({"algorithm.preset": "cispo", "algorithm.dual_clip": 3.0}, "algorithm.dual_clip", 3.0, "ppo"),
]


@pytest.mark.parametrize(
    ("settings", "field", "value", "remedy"), REFUSED, ids=[f"{i}-{case[1]}" for i, case in enumerate(REFUSED)]
)
def test_a_pairing_that_cannot_be_right_is_refused(settings: dict, field: str, value: object, remedy: str) -> None:
    """With the field, its value, why, and what to do instead."""
    with pytest.raises(ConfigError, match=r".") as caught:
        check(parse(tree(settings)))
    assert (caught.value.field, caught.value.value) == (field, value)
    assert remedy in caught.value.remedy.lower()
    assert f"{field} = {value!r}" in str(caught.value)
    assert caught.value.why


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.preset": "vtrace", f"{CORRECTION}.proximal": "recompute"},
        {"algorithm.preset": "ppo", "algorithm.kl.place": "reward", "algorithm.kl.coefficient": 0.1,
         "algorithm.kl.estimator": "k1"},
        {"algorithm.kl.estimator": "k1"},
        {"algorithm.kl.coefficient": 0.1, "algorithm.kl.estimator": "k3"},
        {"algorithm.preset": "gspo", f"{CORRECTION}.name": "geo-mask", f"{CORRECTION}.veto": 1e-4},
        {f"{CORRECTION}.proximal": "recompute", "learner.epochs": 2},
    ],
)  # fmt: skip
def test_a_pairing_that_is_right_passes(settings: dict) -> None:
    """k1 in the reward, or without weight; masks beside a coupled loss; an anchor for several steps."""
    check(parse(tree(settings)))
