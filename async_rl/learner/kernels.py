"""Fused kernels for the parts of a decoder layer, where Triton runs."""

from __future__ import annotations

import importlib.util

import torch
from transformers import PreTrainedModel


def fuse(model: PreTrainedModel, device: torch.device) -> bool:
    """Puts liger's norms, rotary embeddings and gated MLP (Hsu et al., 2024) in place of the model's, if it can.

    Families that liger does not know stay as they are. Its fused linear losses are not used: they compute one loss
    each, while ours are functions of log-probs, whose logits `logprobs.py` never holds whole either.
    """
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return True
