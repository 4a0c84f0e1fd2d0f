"""`async-rl bench learner`: a learner step beside a padded Hugging Face loop that computes the same gradient.

    python -m async_rl.benchmarks.learner [--json FILE] [--model PATH] [--repeat N] [--shape NAME ...]

Both see the same samples, none of advantage 0, with the same budget of tokens per forward pass, in turns; the medians
are compared, and the gradients. The loop is what one writes first: each sample a row, right-padded to the longest of
its micro-batch, all logits, log-softmax. In bfloat16 both keep float32 master weights.

Progress goes to stderr, the result as JSON to stdout.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl import model
from async_rl.benchmarks import machine
from async_rl.benchmarks.machine import Machine
from async_rl.config import Config, parse
from async_rl.learner.batch import Share, ages_of, plan, share
from async_rl.learner.logprobs import token_logprobs
from async_rl.learner.models import build
from async_rl.learner.step import Stepper
from async_rl.lockstep import one_rank
from buffers import messages as m
from staleness.versions import Lineage

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """`groups` groups of `size` samples of one prompt; `lengths` draws those of the responses."""

    name: str
    dtype: str
    groups: int
    size: int
    prompt: int
    lengths: Callable[[np.random.Generator, int], Ints]


def _constant(length: int) -> Callable[[np.random.Generator, int], Ints]:
    return lambda _, count: np.full(count, length, np.int64)


def _lognormal(rng: np.random.Generator, count: int) -> Ints:
    """50 to 1,500 tokens, median 250."""
    return np.clip(rng.lognormal(np.log(250), 0.9, count), 50, 1500).astype(np.int64)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("quickstart-float32", "float32", 8, 8, 35, _constant(16)),
        Shape("quickstart-bfloat16", "bfloat16", 8, 8, 35, _constant(16)),
        Shape("mixed-float32", "float32", 3, 8, 35, _lognormal),
    )
}
LOGPROBS = (8192, 49152, 576)
"""Tokens, vocabulary and width of the measure of the log-prob path."""


class Result(Struct, frozen=True):
    """Of one shape. Peaks are above what the process holds with the model loaded."""

    shape: str
    samples: int
    tokens: int
    """Prompts and responses, as the padded loop computes them, padding left out."""
    samples_per_s: float
    tokens_per_s: float
    ratio_padded: float
    """Samples per second over those of the padded loop."""
    gradient_difference: float
    """Largest difference of an element of the gradient, over the largest element of its tensor."""
    peak_bytes: int
    peak_bytes_padded: int
    mfu: float
    """Floating-point operations of the tokens computed (6 a parameter and token), over those of a plain matrix product
    in the same type and the same run."""
    other_cpu: float
    """Cores that were busy with other processes: above 0.1, measure again."""


class Report(Struct, frozen=True):
    machine: Machine
    versions: dict[str, str | None]
    model: str
    parameters: int
    threads: int
    results: list[Result]
    logprobs_peak_bytes: int
    """Of forward and backward of the log-prob path for 8,192 tokens and a vocabulary of 49,152."""


class _Keeper(torch.optim.Optimizer):
    """Takes the gradient in place of a step."""

    def __init__(self, named: Iterator[tuple[str, torch.nn.Parameter]]) -> None:
        self.named = dict(named)
        self.gradients: dict[str, Tensor] = {}
        super().__init__(list(self.named.values()), {})

    def step(self, closure: Any = None) -> None:
        self.gradients = {
            name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad  # type: ignore[union-attr]
            for name, parameter in self.named.items()
            if parameter.grad is not None
        }


def settings(shape: Shape, path: str) -> Config:
    return parse(
        {
            "model": {"path": path},
            "data": {"path": "none"},
            "rollout": {"max_tokens": 1500},
            "buffer": {"batch_size": shape.groups * shape.size, "group_size": shape.size},
            "staleness": {"correction": {"name": "none"}},
            "learner": {"dtype": shape.dtype, "clip_norm": 1e9, "micro_batch_tokens": 4096},
        }
    )


def samples(shape: Shape, config: Config, vocabulary: int) -> Share:
    """Random tokens; the rewards of a group all differ."""
    rng = np.random.default_rng(0)
    count = shape.groups * shape.size
    lengths = shape.lengths(rng, count)
    rewards = rng.permuted(np.tile(np.arange(shape.size, dtype=np.float64), (shape.groups, 1)), axis=1)
    rows = [
        m.BatchRow(i, i // shape.size, i % shape.size, shape.prompt, int(n), int(n), float(rewards.flat[i]))
        for i, n in enumerate(lengths)
    ]
    batch = m.Batch(0, 0, rows, rewards.tolist(), m.Stats())
    total = int(lengths.sum())
    arrays = m.SampleArrays(
        rng.integers(5, vocabulary, shape.groups * shape.prompt).astype(np.int32),
        rng.integers(5, vocabulary, total).astype(np.int32),
        np.full(total, -1.0, np.float32),
        np.ones(total, np.uint8),
        lengths.astype(np.int32),
        np.zeros(count, np.int64),
    )
    planned = plan(batch, ranks=1, algorithm=config.algorithm)
    return share(planned, 0, arrays, ages_of(arrays, 0, Lineage()), config)


def padded(policy: torch.nn.Module, mine: Share, config: Config) -> dict[str, Tensor]:
    """The gradient by one padded row a sample."""
    policy.zero_grad()
    budget, dtype = config.learner.micro_batch_tokens, getattr(torch, config.learner.dtype)
    rows = [
        (mine.prompts[prompt], mine.tokens[mine.starts[i] : mine.starts[i + 1]], i)
        for i, prompt in enumerate(mine.prompt_of)
    ]
    batch: list[tuple[Ints, Ints, int]] = []
    longest = 0
    for row in [*rows, None]:
        size = 0 if row is None else row[0].size + row[1].size
        if batch and (row is None or max(longest, size) * (len(batch) + 1) > budget):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                _padded_loss(policy, batch, mine).backward()
            batch, longest = [], 0
        if row is not None:
            batch.append(row)
            longest = max(longest, size)
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def _padded_loss(policy: torch.nn.Module, batch: list[tuple[Ints, Ints, int]], mine: Share) -> Tensor:
    longest = max(prompt.size + response.size for prompt, response, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    weight = torch.zeros(len(batch), longest - 1)
    attention = torch.zeros(len(batch), longest, dtype=torch.long)
    for r, (prompt, response, i) in enumerate(batch):
        end = prompt.size + response.size
        ids[r, :end] = torch.from_numpy(np.concatenate([prompt, response]))
        attention[r, :end] = 1
        weight[r, prompt.size - 1 : end - 1] = float(mine.advantage[mine.starts[i]] * mine.scale[i])
    logits = policy(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(torch.exp(logprobs - logprobs.detach()) * weight).sum()


@contextmanager
def peak(into: list[int]) -> Iterator[None]:
    """Appends the largest resident size during the block, above that before it, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, so that it counts when it is used again
    process, done = psutil.Process(), Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, process.memory_info().rss)

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        into.append(most - before)


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product."""
    size = 2048
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    times: list[float] = []
    for _ in range(5):
        begun = perf_counter()
        left @ right
        times.append(perf_counter() - begun)
    return 2 * size**3 / min(times)


def measure(shape: Shape, path: str, repeat: int) -> Result:
    config = settings(shape, path)
    peaks: list[int] = []
    peaks_padded: list[int] = []
    ours: list[float] = []
    theirs: list[float] = []
    with one_rank():
        models = build(config, path, torch.device("cpu"))
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        keeper = _Keeper(models.policy.model.named_parameters())
        stepper = Stepper(replace(models, optimizer=keeper), config)
        mine = samples(shape, config, plain.config.vocab_size)
        cpu, begun = psutil.cpu_times(), perf_counter()
        own = psutil.Process().cpu_times()
        gradients: dict[str, Tensor] = {}
        for _ in range(repeat + 1):
            with peak(peaks):
                start = perf_counter()
                stepper.step(mine, rate=0.0)
                ours.append(perf_counter() - start)
            gradients = {}
            plain.zero_grad()
            with peak(peaks_padded):
                start = perf_counter()
                gradients = padded(plain, mine, config)
                theirs.append(perf_counter() - start)
            print(f"{shape.name}: {ours[-1]:.1f} s, padded {theirs[-1]:.1f} s", file=sys.stderr, flush=True)
        other = _other_cpu(cpu, own, perf_counter() - begun)
    difference = max(
        float((keeper.gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in gradients.items()
    )
    seconds = statistics.median(ours[1:])
    total = int(mine.tokens.size) + shape.groups * shape.size * shape.prompt
    computed = int(mine.tokens.size) + shape.groups * shape.prompt
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    return Result(
        shape.name,
        shape.groups * shape.size,
        total,
        round(shape.groups * shape.size / seconds, 2),
        round(total / seconds, 1),
        round(statistics.median(theirs[1:]) / seconds, 2),
        difference,
        max(peaks),
        max(peaks_padded),
        round(6 * parameters * computed / seconds / matmul_rate(getattr(torch, shape.dtype)), 3),
        round(other, 2),
    )


def _other_cpu(before: Any, own_before: Any, seconds: float) -> float:
    now, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = sum(getattr(now, name) - getattr(before, name) for name in ("user", "system", "nice"))
    mine = (own.user + own.system) - (own_before.user + own_before.system)
    return max(0.0, busy - mine) / seconds


def logprobs_peak() -> int:
    tokens, vocabulary, width = LOGPROBS
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    peaks: list[int] = []
    with peak(peaks):
        token_logprobs(hidden, head, targets, 1.0)[0].sum().backward()
    return peaks[0]


def run(path: str, shapes: list[str], repeat: int) -> Report:
    path = model.resolve(path)
    config = AutoModelForCausalLM.from_pretrained(path)
    parameters = sum(parameter.numel() for parameter in config.parameters())
    del config
    logprobs = logprobs_peak()
    results = [measure(SHAPES[name], path, repeat) for name in shapes]
    return Report(
        machine.describe(), machine.versions(), Path(path).name, parameters, torch.get_num_threads(), results, logprobs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--model", default="smollm2-135m", metavar="PATH")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measured turns, after one to warm up")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    out = msgspec.json.format(msgspec.json.encode(run(args.model, args.shape, args.repeat)), indent=2) + b"\n"
    if args.json:
        args.json.write_bytes(out)
    sys.stdout.write(out.decode())


if __name__ == "__main__":
    main()
