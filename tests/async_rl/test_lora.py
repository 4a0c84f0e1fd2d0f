"""Adapters: nothing at first, the only thing trained, published and saved, and exact when merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from msgspec import to_builtins
from peft import PeftModel
from transformers import AutoModelForCausalLM

from async_rl import adapters
from async_rl.config import Config, LoraConfig, check, parse
from async_rl.errors import ConfigError
from async_rl.learner import checkpoint, export, state
from async_rl.learner.models import build
from async_rl.learner.packing import pack
from async_rl.learner.policy import Policy, load
from async_rl.lockstep import Lockstep, Problem, one_rank
from async_rl.rollout.engines.decoder import Decoder
from tests.async_rl.test_packing import segments

LORA = LoraConfig(rank=4, alpha=8)


def disturbed(model: Path) -> Policy:
    """A policy whose adapters do something."""
    policy = load(str(model), 1.0, torch.device("cpu"), lora=LORA)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith(adapters.B):
                parameter.normal_(0, 0.2)
    return policy


def logprobs(policy: Policy) -> torch.Tensor:
    (packed,) = pack(segments(), tokens=4096)
    with torch.no_grad():
        return policy(packed).logprobs


def test_a_fresh_adapter_changes_nothing_and_is_the_same_everywhere(tiny_model: Path) -> None:
    base = load(str(tiny_model), 1.0, torch.device("cpu"))
    torch.manual_seed(7)
    one = load(str(tiny_model), 1.0, torch.device("cpu"), lora=LORA)
    torch.manual_seed(8)
    two = load(str(tiny_model), 1.0, torch.device("cpu"), lora=LORA)
    torch.testing.assert_close(logprobs(one), logprobs(base))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    trained = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed" in name for name in trained)


def test_merged_weights_are_the_model_under_its_adapters(tiny_model: Path) -> None:
    policy, base = disturbed(tiny_model), load(str(tiny_model), 1.0, torch.device("cpu"))
    before = logprobs(base)
    with adapters.off(policy):
        torch.testing.assert_close(logprobs(policy), before)
    assert float((logprobs(policy) - before).abs().max()) > 0.1
    merged = adapters.merged(dict(checkpoint.full_tensors(policy)), LORA)
    assert merged.keys() == dict(base.model.named_parameters()).keys()
    base.model.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logprobs(base), logprobs(policy), atol=1e-5, rtol=1e-5)


def test_a_written_adapter_is_one_that_peft_loads(tiny_model: Path, tmp_path: Path) -> None:
    policy = disturbed(tiny_model)
    adapters.write(tmp_path, checkpoint.full_tensors(policy, trained=True), LORA)
    assert all(
        name.startswith("base_model.model.model.layers.")
        for name in safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    )
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    theirs = PeftModel.from_pretrained(plain, tmp_path)
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, policy.model(tokens).logits)


def settings(model: Path, **sections: object) -> Config:
    tree = {
        "steps": 4,
        "model": {"path": str(model)},
        "data": {"path": "x"},
        "reward": {"function": "tests.e2e.rewards:length"},
        "rollout": {"slots": 8, "max_tokens": 8, "dtype": "float32"},
        "buffer": {"batch_size": 8, "group_size": 4},
        "staleness": {"max_staleness": 1},
        "learner": {"dtype": "float32", "learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 8}},
        "algorithm": {"kl": {"coefficient": 0.1}},
    }
    return parse(tree | sections)


def test_only_adapters_are_trained_published_and_saved(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tiny_model)
    problems = [Problem(list(range(2 + i, 8 + i)), {}) for i in range(8)]
    with one_rank():
        run = Lockstep(config, str(tiny_model), problems, lambda text, _: float(len(text) % 3))
        before = {name: tensor.clone() for name, tensor in checkpoint.full_tensors(run.models.policy)}
        records = list(run.run())
        after = dict(checkpoint.full_tensors(run.models.policy))
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed
        assert all(".lora_" in name for name in changed)
        # The reference is the model without adapters: at first there is no distance to it.
        assert records[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)
        assert records[-1]["kl_reference"] > 1e-5
        # What the engine has is what the learner has.
        mine = dict(checkpoint.full_tensors(run.models.policy, trained=True))
        assert all(torch.equal(run.decoder._published[name], tensor) for name, tensor in mine.items())
        checkpoints = checkpoint.Checkpoints(tmp_path, run.models.parts(), keep_last=1, keep_best=False)
        checkpoints.save(state.State(4, 0, "x"))
        checkpoints.wait()
        saved = torch.distributed.checkpoint.FileSystemReader(tmp_path / state.folder_name(4)).read_metadata()
        weights = [name for name in saved.state_dict_metadata if name.startswith("policy.weights.")]
        assert len(weights) == len(mine)
        fresh = Lockstep(config, str(tiny_model), problems, lambda text, _: 0.0).models
        checkpoint.restore(tmp_path / state.folder_name(4), fresh.parts())
        restored = dict(checkpoint.full_tensors(fresh.policy))
        assert all(torch.equal(restored[name], after[name]) for name in after)


def test_an_export_is_merged(tiny_model: Path) -> None:
    policy = disturbed(tiny_model)
    config = settings(tiny_model)
    merged = export._merged(dict(checkpoint.full_tensors(policy)), config, torch.float32)
    weight = "model.layers.0.self_attn.q_proj.weight"
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_parameter(weight)
    layer = policy.model.get_submodule(weight.removesuffix(".weight"))
    product = layer.lora_B.default.weight @ layer.lora_A.default.weight  # type: ignore[union-attr]
    np.testing.assert_allclose(merged[weight], (before + 2 * product).detach(), rtol=1e-6, atol=1e-7)  # pyright: ignore


def test_a_checkpoint_of_adapters_is_exported_merged(tiny_model: Path, tmp_path: Path) -> None:
    """On a tied model, whose frozen head has a second name."""
    config = settings(tiny_model)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(to_builtins(config)))
    with one_rank():
        models = build(config, str(tiny_model), torch.device("cpu"))
        with torch.no_grad():
            for name, parameter in models.policy.named_parameters():
                if name.endswith(adapters.B):
                    parameter.fill_(0.1)
        tensors = {name: tensor.clone() for name, tensor in checkpoint.full_tensors(models.policy)}
        checkpoints = checkpoint.Checkpoints(run / "checkpoints", models.parts(), keep_last=1, keep_best=False)
        checkpoints.save(state.State(3, 0, "x"))
        checkpoints.wait()
    folder = export.export(run, None, None, "float32", "5GB")
    exported = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    merged = adapters.merged(tensors, config.learner.lora)
    assert exported.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(exported[name].detach(), tensor)


def test_an_engine_rounds_weights_and_no_buffers(tiny_model: Path) -> None:
    rollout = settings(tiny_model, rollout={"dtype": "bfloat16", "slots": 1}).rollout
    plain, adapted = (Decoder(str(tiny_model), rollout, length=64, seed=0, lora=lora) for lora in (None, LORA))
    assert {parameter.dtype for parameter in adapted._model.parameters()} == {torch.bfloat16}
    for one, two in zip(plain._model.buffers(), adapted._model.buffers(), strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)


def test_what_an_adapter_cannot_be_is_refused(tiny_model: Path) -> None:
    for learner, words in (
        ({"lora": {"rank": 1024}}, "up to 512"),
        ({"ranks": 2, "lora": {"rank": 8}, "parallel": {"tensor": 2}}, "tensor-parallel"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(settings(tiny_model, learner=learner))
