"""The policy's tokenizer."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from async_rl.model import resolve


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    """Tokenizer of a model path as the configuration has it."""
    return AutoTokenizer.from_pretrained(resolve(path))
