"""What is wrong is refused with field, value, why and remedy; what is right survives a round trip."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from async_rl import config
from async_rl.errors import ConfigError

GOOD: dict = {"data": {"path": "x.jsonl"}, "reward": {"function": "a:b"}}


def tree(**sections: object) -> dict:
    return {**GOOD, **sections}


@pytest.mark.parametrize(
    ("broken", "field", "why"),
    [
        (tree(rolout={}), "rolout", "no such setting"),
        (tree(rollout={"slot": 3}), "rollout.slot", "no such setting"),
        (tree(rollout={"workers": 0}), "rollout.workers", ">= 1"),
        (tree(rollout={"workers": "two"}), "rollout.workers", "expected `int`"),
        (tree(staleness={"correction": {"name": "magic"}}), "staleness.correction.name", "invalid enum value"),
        (tree(learner={"learning_rate": -1.0}), "learner.learning_rate", "> 0"),
        (tree(buffer={"batch_size": 10, "group_size": 4}), "buffer.batch_size", "not a multiple"),
        (tree(launch={"placement": "concurrent", "launcher": "ray"}), "launch.placement", "places of its own"),
        (tree(launch={"ray_address": "auto"}), "launch.ray_address", "starts no process there"),
        (tree(rollout={"engine": "emulated"}), "rollout.engine", "how fast and how long"),
        (tree(data={}), "data.path", "exactly one"),
        (tree(data={"path": "x", "task": {"name": "y"}}), "data.path", "exactly one"),
        (tree(reward={"function": "reasoning_gym"}), "reward.function", "there is none"),
        (tree(reward={"function": "no colon"}), "reward.function", "module:function"),
        (tree(learner={"epochs": 2}), "learner.epochs", "anchor"),
        (tree(name="a/b"), "name", "folder"),
        (tree(name=".."), "name", "folder"),
        (tree(buffer={"group_size": 1}), "buffer.group_size", "never trains"),
        (
            tree(data={"path": "x", "chat_template": False, "system_prompt": "s"}),
            "data.system_prompt",
            "part of a chat",
        ),
        (tree(learner={"betas": [1.0, 0.9]}), "learner.betas[0]", "< 1"),
        (tree(staleness={"correction": {"name": "mis", "low": 3.0}}), "staleness.correction.low", "not below"),
    ],
)
def test_a_wrong_setting_names_field_value_and_remedy(broken: dict, field: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        config.check(config.parse(broken))
    assert caught.value.field == field
    assert why in caught.value.why
    assert caught.value.remedy


def test_a_misspelt_setting_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean rollout\.slots"):
        config.parse(tree(rollout={"slot": 3}))


def test_the_resolved_configuration_reads_back_as_itself() -> None:
    before = config.parse(tree(learner={"learning_rate": 3e-6}))
    assert config.parse(yaml.safe_load(config.dump(before))) == before


def test_overrides_are_yaml_and_1e_5_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {path: x}\nreward: {function: 'a:b'}\nlearner: {learning_rate: 1e-6}\n")
    pairs = dict(
        config.override(text) for text in ["learner.learning_rate=1e-5", "data.holdout=3", "launch.pin_cores=no"]
    )
    loaded = config.load(path, pairs)
    assert (loaded.learner.learning_rate, loaded.data.holdout, loaded.launch.pin_cores) == (1e-5, 3, False)
    assert config.load(path).learner.learning_rate == 1e-6
    with pytest.raises(ConfigError, match=r"a\.b=value"):
        config.override("nonsense")


@pytest.mark.parametrize("preset", sorted(path.stem for path in config.PRESETS.glob("*.yaml")))
def test_every_preset_is_valid(preset: str) -> None:
    config.load(config.find(preset))


@pytest.mark.parametrize("module", ["async_rl/config.py", "buffers/config.py", "staleness/config.py"])
def test_every_setting_is_documented(module: str) -> None:
    """A docstring under every field that is not a section with a docstring of its own."""
    for struct in ast.parse(Path(module).read_text()).body:
        if not isinstance(struct, ast.ClassDef) or not any(
            getattr(base, "id", "") == "Struct" for base in struct.bases
        ):
            continue
        for field, following in itertools.zip_longest(struct.body, struct.body[1:]):
            if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config"):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{module}: {struct.name}.{ast.unparse(field.target)}"


def test_notes_say_what_a_user_should_know() -> None:
    quiet = config.parse(tree(staleness={"correction": {"proximal": "loglinear"}}))
    assert config.notes(quiet) == []
    loud = config.parse(tree(rollout={"slots": 999}, staleness={"correction": {"name": "none"}}))
    assert len(config.notes(loud)) == 3


def test_configuration_and_command_line_load_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "ray", "vllm")
    code = f"import launchers.cli, async_rl.buffer_process, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_structs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        config.parse(GOOD).steps = 3  # type: ignore[misc]
    assert msgspec.structs.replace(config.parse(GOOD), steps=3).steps == 3


@pytest.mark.parametrize(
    ("broken", "field", "why"),
    [
        ({"staleness": {"segments": 4}}, "staleness.segments", "needs the reward"),
        ({"staleness": {"segments": 4}, "algorithm": {"preset": "vtrace"}}, "staleness.segments", "holds a trajectory"),
        (
            {
                "staleness": {"segments": 16},
                "algorithm": {"preset": "ppo"},
                "buffer": {"groups": {"policy": "split"}},
            },
            "staleness.segments",
            "no response is longer",
        ),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p", "mass of those left out"),
        ({"rollout": {"top_k": 5}}, "rollout.top_k", "mass of those left out"),
        ({"rollout": {"min_p": 0.1}}, "rollout.min_p", "mass of those left out"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(broken: dict, field: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        config.check(config.parse(tree(**broken)))
    assert caught.value.field == field
    assert why in caught.value.why


def test_truncated_sampling_can_be_allowed() -> None:
    config.check(config.parse(tree(rollout={"top_p": 0.9, "allow_truncated_sampling": True})))
