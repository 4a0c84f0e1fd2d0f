"""The model of the study: a Llama of 0.45M parameters, taught running sums until it gets a third of them right.

python -m experiments.staleness.warmup FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from time import perf_counter

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.staleness import task

TERMS = {2: 3.0, 3: 3.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}
TARGET = 0.35
"""Share of sampled answers to sums of two and three terms that are right when the warm-up ends."""
BATCH, RATE, EVERY, MOST = 128, 2e-3, 100, 6000


def blank() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(task.SYMBOLS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=96,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=task.END,
        pad_token_id=task.PAD,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel(task.ID, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")


def batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), targets of the prompt and of padding ignored."""
    rows: list[list[int]] = []
    prompts: list[int] = []
    for _ in range(BATCH):
        terms = task.draw(rng, TERMS)
        prompt = task.problem(terms).tokens
        rows.append([*prompt, *task.encode(task.answer(terms)), task.END])
        prompts.append(len(prompt))
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [task.PAD] * (longest - len(row)) for row in rows])
    targets = torch.where(tokens == task.PAD, -100, tokens)
    for i, size in enumerate(prompts):
        targets[i, :size] = -100
    return tokens, targets


@torch.inference_mode()
def accuracy(model: LlamaForCausalLM, seed: int) -> float:
    """Of answers sampled at temperature 1 to 512 sums of two and three terms."""
    torch.manual_seed(seed)
    right: list[float] = []
    by_length: dict[int, list[task.Problem]] = {}
    for problem in task.problems(512, seed, {2: 1.0, 3: 1.0}):
        by_length.setdefault(len(problem.tokens), []).append(problem)
    for problems in by_length.values():
        prompts = torch.tensor([problem.tokens for problem in problems])
        out = model.generate(prompts, max_new_tokens=12, do_sample=True, top_k=0, pad_token_id=task.PAD)
        for row, problem in zip(out[:, prompts.shape[1] :].tolist(), problems, strict=True):
            response = "".join(task.SYMBOLS[token] for token in row if token > task.END)
            right.append(task.reward(response, problem.row))
    return sum(right) / len(right)


def teach(folder: Path) -> Path:
    """Writes the model and its tokenizer; a folder that has them is left alone."""
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    rng = random.Random(0)
    model, begun = blank(), perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for step in range(1, MOST + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 100)
        tokens, targets = batch(rng)
        logits = model(tokens).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            known = accuracy(model, 1)
            print(f"step {step}: loss {loss.item():.3f}, {known:.2f} right, {perf_counter() - begun:.0f} s", flush=True)
            if known >= TARGET:
                model.save_pretrained(folder)
                tokenizer().save_pretrained(folder)
                return folder
    raise RuntimeError(f"after {MOST} steps less than {TARGET} of the answers are right")


if __name__ == "__main__":
    teach(Path(sys.argv[1]))
