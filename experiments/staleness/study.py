"""Which runs there are, and one of them: `python -m experiments.staleness.study [--processes N] [--only PREFIX]`.

Every run is a file in `results/`; what is there is not run again. At the end `findings` makes the page.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from transformers.utils import logging

from async_rl.config import Config, check, parse
from async_rl.learner.batch import Plan, Share
from async_rl.lockstep import Lockstep, Problem, one_rank
from experiments.staleness import task, warmup

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
MODEL = FOLDER / "model"
STEPS, EVERY = 240, 20
SHORT = {2: 1.0, 3: 1.0}
LONG_TAIL = {2: 8.0, 3: 4.0, 4: 2.0, 5: 1.0, 6: 1.0, 7: 0.5, 8: 0.5}

METHODS: dict[str, dict[str, Any]] = {
    "none": {"correction": {"name": "none"}},
    "coupled ppo": {"correction": {"name": "none", "proximal": "behaviour"}},
    "decoupled recompute": {"correction": {"name": "tis", "cap": 5.0, "proximal": "recompute"}},
    "loglinear": {"correction": {"name": "tis", "cap": 5.0, "proximal": "loglinear"}},
    "tis": {"correction": {"name": "tis", "cap": 2.0}},
    "m2": {"correction": {"name": "m2", "proximal": "behaviour"}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "tis-seq": {"correction": {"name": "tis-seq"}},
    "mis": {"correction": {"name": "mis"}},
    "icepop": {"correction": {"name": "icepop"}},
    "geo-mask": {"correction": {"name": "geo-mask"}},
    "seq-mask-tis": {"correction": {"name": "seq-mask-tis"}},
    "tis with veto": {"correction": {"name": "tis", "cap": 2.0, "veto": 1e-4}},
}
"""`staleness` of each method; all have the loss `ppo` and the advantage `grpo`."""
POLICIES = [("mask", "whole"), ("mask", "split"), ("drop", "whole"), ("drop", "split"), ("pace", "whole")]
"""What is stale, and how groups are offered; `pace` takes whole groups only."""
TARGET_ESS = 0.9
FORCED, FAST, USUAL = range(60, 120), 4e-4, 1e-4
"""Steps of the controller's runs whose learning rate is `FAST`, so that the policy leaves its old samples behind."""


@dataclass(frozen=True)
class Run:
    """`kind` is `correction`, `policy` or `controller`."""

    kind: str
    method: str
    eta: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.method.replace(' ', '_')}-{self.eta}-{self.seed}"


def runs() -> list[Run]:
    """In an order in which the first of them say most."""
    main = [Run("correction", method, eta, seed) for seed, eta, method in product(range(6), (0, 4, 64), METHODS)]
    policies = [Run("policy", f"{stale} {groups}", 2, seed) for seed, (stale, groups) in product(range(6), POLICIES)]
    more = [Run("correction", method, eta, seed) for seed, eta, method in product(range(2), (1, 16), METHODS)]
    others = [Run("correction", method, eta, seed) for seed, eta, method in product(range(2), (4, 64), OTHERS)]
    controller = [Run("controller", method, 16, seed) for seed, method in product(range(2), ("on", "off"))]
    return [*main, *policies, *others, *more, *controller]


class Result(Struct):
    """`evaluations` are (step, reward on held-out problems); `series` one number every fourth step; `details` what only
    some runs have."""

    run: dict[str, Any]
    seconds: float
    evaluations: list[tuple[int, float]]
    series: dict[str, list[float | None]]
    details: dict[str, Any] = {}


SERIES = (
    "reward",
    "ess",
    "kl",
    "ratio_max",
    "age_mean",
    "entropy",
    "grad_norm",
    "corrected_away_share",
    "masked_share",
)


CONTROL = ("ess", "effective_max_staleness", "age_mean", "rate_scale")
"""What the controller's runs keep of every step, in `details`."""


def configuration(run: Run) -> Config:
    staleness: dict[str, Any] = {"max_staleness": run.eta}
    buffer: dict[str, Any] = {"batch_size": 64, "group_size": 8}
    rollout: dict[str, Any] = {"slots": 128, "max_tokens": 12, "dtype": "float32"}
    if run.kind == "policy":
        stale, groups = run.method.split()
        staleness |= {"on_stale": stale, "correction": METHODS["tis"]["correction"]}
        buffer |= {"groups": {"policy": groups}}
        rollout |= {"max_tokens": 36, "slots": 192}
    elif run.kind == "controller":
        staleness |= METHODS["tis"] | ({"controller": {"target_ess": TARGET_ESS}} if run.method == "on" else {})
    else:
        staleness |= {**METHODS, **OTHERS}[run.method]
    tree = {
        "steps": STEPS,
        "seed": run.seed,
        "data": {"path": "generated"},
        "reward": {"function": "experiments.staleness.task:reward"},
        "rollout": rollout,
        "buffer": buffer,
        "staleness": staleness,
        "learner": {"learning_rate": USUAL, "dtype": "float32", "micro_batch_tokens": 8192},
    }
    config = parse(tree)
    check(config)
    return config


def train(run: Run) -> Result:
    """One run; held-out problems are the same for all."""
    config = configuration(run)
    weights = LONG_TAIL if run.kind == "policy" else SHORT
    problems, held_out = task.problems(4000, 10 + run.seed, weights), task.problems(512, 1, weights)
    begun = perf_counter()
    lengths = Lengths()
    series: dict[str, list[float | None]] = {name: [] for name in SERIES}
    evaluations: list[tuple[int, float]] = []
    control: dict[str, list[float]] = {name: [] for name in CONTROL}
    rate = (lambda step: FAST if step in FORCED else USUAL) if run.kind == "controller" else None
    with one_rank():
        ticks = 6 if run.kind == "policy" else None
        lockstep = Lockstep(config, str(MODEL), problems, task.reward, ticks=ticks, observe=lengths.observe, rate=rate)
        lengths.lockstep = lockstep
        for record in lockstep.run():
            for name, column in control.items():
                column.append(round(float(record.get(name, float("nan"))), 4))
            if record["step"] % 4 == 0:
                for name in SERIES:
                    value = record.get(name)
                    series[name].append(None if value is None else round(float(value), 5))
            if record["step"] % EVERY == 0:
                evaluations.append((record["step"], evaluate(lockstep, held_out)[0]))
        details: dict[str, Any] = control if run.kind == "controller" else {}
        if run.kind == "policy":
            details = lengths.details(evaluate(lockstep, held_out)[1])
    return Result(vars(run).copy(), round(perf_counter() - begun, 1), evaluations, series, details)


def evaluate(lockstep: Lockstep, problems: list[Problem]) -> tuple[float, dict[int, float]]:
    """Mean reward of answers sampled as in training, and the same by number of terms."""
    by_terms: dict[int, list[float]] = defaultdict(list)
    for problem, response in zip(problems, lockstep.sample(problems, seed=lockstep.step), strict=True):
        by_terms[problem.row["terms"]].append(task.reward(response, problem.row))
    rewards = [reward for each in by_terms.values() for reward in each]
    return round(float(np.mean(rewards)), 4), {k: round(float(np.mean(v)), 4) for k, v in sorted(by_terms.items())}


class Lengths:
    """What becomes of responses of different lengths, and of members that end early or late in their group."""

    EDGES = (0, 8, 16, 24, 37)

    def __init__(self) -> None:
        self.lockstep: Lockstep | None = None
        self.tokens = np.zeros(len(self.EDGES) - 1)
        self.masked = np.zeros(len(self.EDGES) - 1)
        self.samples = np.zeros(len(self.EDGES) - 1)
        self.advantage = np.zeros((2, 8))
        """Sum and number by the order in which the members of a group ended, among those in the batch."""

    def observe(self, planned: Plan, share: Share) -> None:
        assert self.lockstep is not None
        place = {ticket: i for i, ticket in enumerate(self.lockstep.ended)}
        rows = planned.rows[0]
        bins = np.digitize([row.length for row in rows], self.EDGES) - 1
        np.add.at(self.samples, bins, 1)
        np.add.at(self.tokens, bins, [row.length for row in rows])
        np.add.at(self.masked, bins, [row.length - row.trainable for row in rows])
        groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for row, start in zip(rows, share.starts[:-1].tolist(), strict=True):
            trained = float(share.advantage[start]) * row.trainable / row.length
            groups[row.group].append((place[row.ticket], trained))
        for members in groups.values():
            for order, (_, trained) in enumerate(sorted(members)):
                self.advantage[:, order] += trained, 1

    def details(self, by_terms: dict[int, float]) -> dict[str, Any]:
        assert self.lockstep is not None
        stats = self.lockstep.core.stats()
        return {
            "edges": list(self.EDGES),
            "samples": self.samples.tolist(),
            "masked_share": np.round(self.masked / np.maximum(self.tokens, 1), 4).tolist(),
            "expired_by_power_of_two": stats.expired_lengths,
            "expired": stats.expired,
            "advantage_by_order": np.round(self.advantage[0] / np.maximum(self.advantage[1], 1), 4).tolist(),
            "reward_by_terms": {str(terms): reward for terms, reward in by_terms.items()},
        }


def perform(run: Run) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    result = train(run)
    path = RESULTS / f"{run.name}.json"
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(result))
    partial.rename(path)
    print(f"{run.name}: {result.evaluations[-1][1]:.3f} in {result.seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="runs at once")
    parser.add_argument("--only", default="", metavar="PREFIX", help="runs whose name begins so")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    warmup.teach(MODEL)
    left = [run for run in runs() if run.name.startswith(args.only) and not (RESULTS / f"{run.name}.json").exists()]
    print(f"{len(left)} of {len(runs())} runs to do", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for _ in pool.imap_unordered(perform, left):
            pass


if __name__ == "__main__":
    main()
