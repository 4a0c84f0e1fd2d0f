"""Continuous batching on a transformers model, one step at a time: no threads, no event loop.

A step admits waiting requests into free slots (prompts of equal length together), then decodes all slots together. KV
lives in one tensor per layer, a row per slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache

from async_rl import adapters
from async_rl.config import LoraConfig, RolloutConfig
from async_rl.errors import RequestRefused
from async_rl.rollout.engines.protocol import Delta, Request
from async_rl.rollout.seeds import generator
from async_rl.weights.manifest import check_names


class SlotCache(Cache):
    """KV of all slots; `rows` and `at` say which slots a forward pass writes, and where."""

    def __init__(self, layers: int, slots: int, heads: int, length: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        shape = (slots, heads, length, width)
        self._keys = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self._rows = torch.zeros(0, dtype=torch.long)
        self._at = torch.zeros(0, 0, dtype=torch.long)

    def aim(self, rows: Tensor, at: Tensor) -> None:
        """The next pass holds tokens of slots `rows` (batch,) at positions `at` (batch, new)."""
        self._rows, self._at = rows, at

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores (batch, heads, new, width) and returns the slots' KV up to the longest of them."""
        rows, at = self._rows, self._at
        self._keys[layer][rows[:, None], :, at] = keys.transpose(1, 2)
        self._values[layer][rows[:, None], :, at] = values.transpose(1, 2)
        longest = int(at.max()) + 1
        return self._keys[layer][rows, :, :longest], self._values[layer][rows, :, :longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._at.min()) if self._at.numel() else 0


@dataclass(eq=False)
class Running:
    """A request that has been submitted. `dropped`: whoever asked for it does not want it any more."""

    request: Request
    slot: int = -1
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    dropped: bool = False


Stepped = list[tuple[Running, Delta]]


class Decoder:
    """decoder = Decoder(path, config.rollout, length=512, seed=0)
    running = decoder.submit(request)
    while decoder.busy: for running, delta in decoder.step(): ...
    decoder.load(tensors, version)  # between two steps; running requests keep their KV, or have it computed again

    `alone`: every forward pass has one token of one sequence. Then a token depends on the weights, its request's seed
    and what comes before it, to the last bit: not on what else is running, nor on where its request began.
    """

    def __init__(
        self,
        path: str,
        rollout: RolloutConfig,
        *,
        length: int,
        seed: int,
        slots: int | None = None,
        alone: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        dtype: torch.dtype = getattr(torch, rollout.dtype)
        slots = slots or rollout.slots
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        if lora is not None and lora.rank:
            adapters.inject(self._model, lora)
            for parameter in self._model.parameters():  # not the buffers, which a cast of the model would round too
                parameter.data = parameter.data.to(dtype)
        config = self._model.config
        self.length = min(length, config.max_position_embeddings)
        self.version = 0
        self._alone = alone
        self._temperature = rollout.temperature
        self._truncation = truncation(rollout)
        self._published = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        stops = self._model.generation_config.eos_token_id
        self._stops = set(stops if isinstance(stops, list) else [stops])
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache = SlotCache(config.num_hidden_layers, slots, config.num_key_value_heads, self.length, width, dtype)
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: deque[Running] = deque()
        self._running: dict[int, Running] = {}
        self._free = list(range(slots))

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def check(self, request: Request) -> None:
        """Raises `RequestRefused` for a request that can never succeed."""
        if len(request.prompt) + request.max_tokens > self.length:
            raise RequestRefused(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones exceed the engine's "
                f"{self.length}"
            )

    def submit(self, request: Request) -> Running:
        running = Running(request)
        self._waiting.append(running)
        return running

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, recompute: bool = False) -> None:
        """New weights, complete and under the model's own names: of all that is trained."""
        published = dict(tensors)
        check_names(set(published), set(self._published))
        with torch.no_grad():
            for name, parameter in self._published.items():
                parameter.copy_(published[name])
        self.version = version
        if recompute:
            self._recompute()

    def _recompute(self) -> None:
        """The KV of all that is running, as if the weights loaded had made it."""
        with torch.inference_mode():
            for running in self._running.values():
                running.length = 0
                if not self._alone:  # else the next step does it, token by token
                    self._logits([running], torch.tensor([running.request.prompt + running.tokens[:-1]]))

    def score(self, tokens: list[int]) -> list[float]:
        """Log-probs at temperature 1 of `tokens[1:]`, each given all before it."""
        ids = torch.tensor(tokens)
        with torch.inference_mode():
            logprobs = self._model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[1:, None])[:, 0].tolist()

    # --- steps -------------------------------------------------------------------------------------------------

    def step(self) -> Stepped:
        """At most two tokens for each request: one after its prompt, one more with all others."""
        with torch.inference_mode():
            for running in [running for running in self._running.values() if running.dropped]:
                self._leave(running)
            out: Stepped = []
            if self._alone:
                self._admit()
                for running in list(self._running.values()):
                    out += self._advance_alone(running)
                return out
            admitted = sorted(self._admit(), key=lambda running: len(running.request.prompt))
            for _, together in groupby(admitted, key=lambda running: len(running.request.prompt)):
                batch = list(together)
                out += self._advance(batch, torch.tensor([running.request.prompt for running in batch]))
            decoding = list(self._running.values())
            if decoding:
                out += self._advance(decoding, torch.tensor([[running.tokens[-1]] for running in decoding]))
            return out

    def _admit(self) -> list[Running]:
        admitted: list[Running] = []
        while self._waiting and self._free:
            running = min(self._waiting, key=lambda waiting: waiting.request.priority)
            self._waiting.remove(running)
            if not running.dropped:
                running.slot = self._free.pop()
                self._running[running.slot] = running
                admitted.append(running)
        return admitted

    def _advance_alone(self, running: Running) -> Stepped:
        """The tokens of one sequence that have no KV yet, one by one, then one sampled token."""
        *earlier, last = (running.request.prompt + running.tokens)[running.length :]
        for token in earlier:
            self._logits([running], torch.tensor([[token]]))
        return self._advance([running], torch.tensor([[last]]))

    def _advance(self, batch: list[Running], tokens: Tensor) -> Stepped:
        """One forward pass over `tokens` (batch, new), then one sampled token for each."""
        logits = self._logits(batch, tokens)
        logprobs = self._truncation(tokens, logits.float() / self._temperature).log_softmax(-1)
        chosen = self._sample(batch, logprobs)
        taken = zip(batch, chosen.tolist(), logprobs.gather(-1, chosen[:, None])[:, 0].tolist(), strict=True)
        return [(running, self._take(running, token, logprob)) for running, token, logprob in taken]

    def _logits(self, batch: list[Running], tokens: Tensor) -> Tensor:
        """Of the tokens after `tokens` (batch, new), whose KV is kept."""
        new = tokens.shape[1]
        at = torch.tensor([running.length for running in batch])[:, None] + torch.arange(new)
        self._cache.aim(torch.tensor([running.slot for running in batch]), at)
        mask = (torch.arange(int(at.max()) + 1) <= at[..., None])[:, None]
        for running in batch:
            running.length += new
        return self._model(
            tokens, position_ids=at, attention_mask=mask, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]

    def _sample(self, batch: list[Running], logprobs: Tensor) -> Tensor:
        probabilities = logprobs.exp()
        chosen = torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]
        for row, running in enumerate(batch):
            if running.request.greedy:
                chosen[row] = logprobs[row].argmax()
            elif running.request.seed is not None:
                drawn = generator(running.request.seed, running.length)
                chosen[row] = torch.multinomial(probabilities[row], 1, generator=drawn)[0]
        return chosen

    def _take(self, running: Running, token: int, logprob: float) -> Delta:
        running.tokens.append(token)
        running.versions.append(self.version)
        reason = None
        if token in self._stops:
            reason = "stop"
        elif len(running.versions) >= running.request.max_tokens:
            reason = "length"
        if reason is not None:
            self._leave(running)
        spans = _spans(running.versions) if reason is not None else None
        return Delta([token], [logprob], [self.version], reason, spans)

    def _leave(self, running: Running) -> None:
        self._free.append(running.slot)
        del self._running[running.slot]


def truncation(rollout: RolloutConfig) -> LogitsProcessorList:
    """What sets the logits of tokens that are not to be sampled to -inf; in vLLM's order."""
    out = LogitsProcessorList()
    if rollout.min_p > 0:
        out.append(MinPLogitsWarper(rollout.min_p))
    if rollout.top_k > 0:
        out.append(TopKLogitsWarper(rollout.top_k))
    if rollout.top_p < 1:
        out.append(TopPLogitsWarper(rollout.top_p))
    return out


def _spans(versions: list[int]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    at = 0
    for version, run in groupby(versions):
        size = len(list(run))
        out.append((version, at, at + size))
        at += size
    return out
