"""The process of a reward model: `python -m async_rl.rewards.judge FD PATH DEVICE TOKENS COLUMN PARENT`.

A sequence-classification model scores prompt and response together, all requests of a message in one forward pass. One
label: its logit. Two: the log-odds of the second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from async_rl.errors import RewardError
from async_rl.model import resolve
from async_rl.process import die_with_parent
from async_rl.rewards.child import Reply, Request, serve


def load(path: str, *, device: str, tokens: int, column: str) -> Callable[[list[Request]], list[Reply]]:
    """What scores a batch. Longer texts lose their beginning: the response is what is judged."""
    place = resolve(path)
    on = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    tokenizer = AutoTokenizer.from_pretrained(place, padding_side="right", truncation_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = torch.float32 if on.type == "cpu" else torch.bfloat16
    model = AutoModelForSequenceClassification.from_pretrained(place, dtype=dtype).to(on).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.config.num_labels > 2:
        raise RewardError(f"{path} has {model.config.num_labels} labels; a reward model has one or two")

    def text(request: Request) -> str:
        prompt = json.loads(request.row)[column]
        if tokenizer.chat_template is None:
            return f"{prompt}{request.response}"
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        answer = {"role": "assistant", "content": request.response}
        return tokenizer.apply_chat_template([*messages, answer], tokenize=False)

    @torch.inference_mode()
    def score(requests: list[Request]) -> list[Reply]:
        texts = [text(request) for request in requests]
        batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=tokens)
        logits = model(**batch.to(on)).logits.float()
        values = logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
        return [Reply(value) for value in values.tolist()]

    return score


def main() -> None:
    descriptor, path, device, tokens, column, parent = sys.argv[1:]
    die_with_parent(int(parent))
    serve(Connection(int(descriptor)), lambda: load(path, device=device, tokens=int(tokens), column=column))


if __name__ == "__main__":
    main()
