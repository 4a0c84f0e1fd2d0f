"""A tiny Llama with tied embeddings and a byte-level chat tokenizer, made on the spot; loads anywhere in a second."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]


FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def make(
    folder: Path,
    *,
    seed: int = 0,
    positions: int = 512,
    tied: bool = True,
    heads: tuple[int, int] = (2, 1),
    family: Literal["llama", "qwen3"] = "llama",
) -> Path:
    """Writes a model of about 0.1M parameters; a small head keeps its answers varied. `heads`: of queries, and of keys
    and values."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(SPECIAL + symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1], pad_token=SPECIAL[1])
    fast.chat_template = CHAT
    torch.manual_seed(seed)
    config = FAMILIES[family](
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        head_dim=32,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
