"""How far generation and training overlap: `async-rl bench overlap`.

The same work under several bounds of staleness and both synchronous baselines, one run each, on emulated devices
(`async_rl/emulation.py`): real processes, messages, admission, journal and weights, while the compute of both pools is
waited for. Pools are balanced: a learner step takes as long as generating its batch.

    sync disjoint     eta = 0, each pool on its own devices, so that one of them always waits
    sync colocated    eta = 0, all devices generate, then all train: the strong baseline
    eta = 1, 2, ...   asynchronous, each pool on its own devices

Efficiency is trajectories per second, after the first eta + 1 steps, over B / max(Tg, Tt): Tg = B * mean tokens /
(slots * rate), with the tools' latency if there are any, and Tt the learner's time for a batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec
import yaml
from msgspec import Struct

from async_rl.benchmarks import machine
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.tracking import metrics, summary, usage

T = TypeVar("T", int, float)
Lengths = Literal["constant", "lognormal", "agentic"]
Placement = Literal["disjoint", "colocated"]
LIMIT = 0.7
"""Largest share of a core that a pool's own work may take: above it, waiting is no stand-in for a device."""
PROMPTS = 4096


class Options(Struct, frozen=True):
    """The work and the devices, in unscaled time; see `arguments` for units."""

    rollout_workers: int = 1
    learner_ranks: int = 1
    slots: int = 128
    rate: float = 50.0
    mean_tokens: float = 400.0
    batch: int = 256
    group: int = 8
    policy: Literal["whole", "split"] = "whole"
    latency_s: float = 1.0
    turns: int = 4
    time_scale: float = 10.0
    steps: int = 40
    sync_steps: int = 12


class Setting(Struct, frozen=True):
    """One run. `sigma` is that of lognormal lengths."""

    lengths: Lengths
    sigma: float
    eta: int
    placement: Placement = "disjoint"

    @property
    def name(self) -> str:
        pools = "sync colocated" if self.placement == "colocated" else "sync disjoint" if not self.eta else "async"
        return f"{self.lengths} sigma {self.sigma:g}, {pools}, eta {self.eta}"


class Record(Struct, frozen=True):
    """What came of a setting. Shares are of 1; `bubbles` are shares of a worker's slots and of the learner's time;
    `own_cpu` is in cores."""

    lengths: Lengths
    sigma: float
    eta: int
    placement: Placement
    efficiency: float
    speedup_vs_sync_colocated: float | None
    speedup_vs_sync_disjoint: float | None
    masked_share: float
    lost_share: float
    trajectories_per_s: float
    ideal_per_s: float
    steps: int
    time_scale: float
    bubbles: dict[str, dict[str, float]]
    own_cpu: dict[str, float]
    valid: bool


def settings(lengths: Iterable[Lengths], sigmas: Iterable[float], etas: Iterable[int]) -> list[Setting]:
    """The runs of a benchmark: for each work both baselines, then the asynchronous ones."""
    works = [(each, sigma) for each in lengths for sigma in (sigmas if each != "constant" else [0.0])]
    bounds: list[tuple[int, Placement]] = [(0, "colocated"), (0, "disjoint"), *((eta, "disjoint") for eta in etas)]
    return [Setting(*work, *bound) for work, bound in itertools.product(works, bounds)]


def seconds(options: Options, lengths: Lengths) -> float:
    """Tg: the generators' time for a batch, unscaled."""
    each = options.mean_tokens / options.rate
    if lengths == "agentic":
        each += (options.turns - 1) * options.latency_s
    return options.batch * each / (options.slots * options.rollout_workers)


def tree(setting: Setting, options: Options, folder: Path) -> dict[str, object]:
    """The configuration of a run. A colocated baseline has the devices of both pools for each of them in turn."""
    scale, workers, ranks = options.time_scale, options.rollout_workers, options.learner_ranks
    shared = setting.placement == "colocated"
    turns = options.turns if setting.lengths == "agentic" else 1
    longest = 20 * options.mean_tokens
    config: dict[str, object] = {
        "name": "overlap",
        "folder": str(folder),
        "steps": (options.steps if setting.eta else options.sync_steps) + setting.eta + 1,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "chat_template": False},
        "reward": {"function": "async_rl.benchmarks.overlap:coin"},
        "rollout": {
            "engine": "emulated",
            "workers": workers,
            "slots": round(options.slots * ((workers + ranks) / workers if shared else 1)),
            "max_tokens": round(longest),
            "chunk_tokens": 64,
            "dtype": "float32",
        },
        "buffer": {
            "batch_size": options.batch, "group_size": options.group, "groups": {"policy": options.policy},
        },
        "staleness": {"max_staleness": setting.eta},
        "learner": {"ranks": ranks, "dtype": "float32", "checkpoint_every": 10**6},
        "weights": {"probe_every": 10**6},
        "tracking": {"mlflow": False},
        "emulation": {
            "tokens_per_s": options.rate * scale,
            "mean_tokens": options.mean_tokens / turns,
            "sigma": setting.sigma,
            "train_s": seconds(options, setting.lengths) / scale * (ranks / (workers + ranks) if shared else 1),
        },
    }  # fmt: skip
    if turns > 1:
        params = {"latency_s": options.latency_s / scale, "turns": turns}
        config["environment"] = {"name": "async_rl.environments.emulated:Tool", "params": params}
    return config


def coin(response: str, row: dict[str, object]) -> float:
    """A reward without a meaning, so that every group has a gradient."""
    return float(sum(response.encode()) % 2)


def run(setting: Setting, options: Options, folder: Path) -> Record:
    """One run through the command line, and what its metrics say."""
    runs = folder / setting.name.replace(" ", "-")
    runs.mkdir()
    for name in ("model", "prompts.jsonl"):
        (runs / name).symlink_to(folder / name)
    (runs / "config.yaml").write_text(yaml.safe_dump(tree(setting, options, runs)))
    command = [sys.executable, "-m", "launchers.cli", "train", str(runs / "config.yaml")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise AsyncRLError(f"the run of {setting.name} failed:\n{done.stdout[-3000:]}")
    return measure(setting, options, runs / "overlap")


def measure(setting: Setting, options: Options, folder: Path) -> Record:
    """From the run's metrics, after its first eta + 1 steps."""
    steps = metrics.read(folder)
    before, measured = steps[setting.eta], steps[setting.eta + 1 :]
    start, end = before["time"], measured[-1]["time"]
    span = end - start
    rate = sum(step["samples"] for step in measured) / span
    ideal = options.batch / (seconds(options, setting.lengths) / options.time_scale)
    total = summary.read(folder).tickets
    workers = [usage.between(folder, f"worker{i}", start, end) for i in range(options.rollout_workers)]
    cpu = {f"worker{i}": used["cpu_s"] / used["time"] for i, used in enumerate(workers)}
    cpu["learner"] = (measured[-1]["cpu_s"] - before["cpu_s"]) / span
    return Record(
        lengths=setting.lengths,
        sigma=setting.sigma,
        eta=setting.eta,
        placement=setting.placement,
        efficiency=round(rate / ideal, 3),
        speedup_vs_sync_colocated=None,
        speedup_vs_sync_disjoint=None,
        masked_share=round(sum(s["masked_stale"] for s in measured) / sum(s["tokens"] for s in measured), 4),
        lost_share=round(total.expired / max(1, total.trained + total.expired), 4),
        trajectories_per_s=round(rate, 2),
        ideal_per_s=round(ideal, 2),
        steps=len(measured),
        time_scale=options.time_scale,
        bubbles={"workers": _worker_bubbles(workers), "learner": _learner_bubbles(measured, span)},
        own_cpu={name: round(share, 3) for name, share in cpu.items()},
        valid=max(cpu.values()) <= LIMIT,
    )  # fmt: skip


def _worker_bubbles(workers: list[dict[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for used in workers:
        for state, spent in used.items():
            if state not in ("time", "cpu_s"):
                totals[state] = totals.get(state, 0.0) + spent
    whole = sum(totals.values())
    return {state: round(spent / whole, 4) for state, spent in totals.items()}


def _learner_bubbles(steps: list[metrics.Record], span: float) -> dict[str, float]:
    spent = {
        "train": sum(step["train_s"] for step in steps),
        "wait for a batch": sum(step["wait_s"] for step in steps),
        "publish": sum(step["publish_s"] for step in steps),
    }
    return {name: round(value / span, 4) for name, value in spent.items()} | {
        "other": round(1 - sum(spent.values()) / span, 4)
    }


def compared(records: list[Record]) -> list[Record]:
    """With speed-ups over the baselines of the same work."""
    rates = {(r.lengths, r.sigma, r.placement): r.trajectories_per_s for r in records if r.eta == 0}

    def speedup(record: Record, placement: Placement) -> float | None:
        base = rates.get((record.lengths, record.sigma, placement))
        return round(record.trajectories_per_s / base, 2) if base else None

    return [
        msgspec.structs.replace(
            record,
            speedup_vs_sync_colocated=speedup(record, "colocated"),
            speedup_vs_sync_disjoint=speedup(record, "disjoint"),
        )
        for record in records
    ]


COLUMNS = ("lengths", "sigma", "eta", "placement", "of ideal", "x colocated", "x disjoint", "masked", "lost", "own cpu")


def table(records: list[Record]) -> str:
    """One line a setting."""
    rows = [COLUMNS] + [
        (
            r.lengths, f"{r.sigma:g}", str(r.eta), r.placement, f"{r.efficiency:.2f}",
            f"{r.speedup_vs_sync_colocated or 0:.2f}", f"{r.speedup_vs_sync_disjoint or 0:.2f}",
            f"{100 * r.masked_share:.1f}%", f"{100 * r.lost_share:.1f}%",
            f"{max(r.own_cpu.values()):.2f}" + ("" if r.valid else " invalid"),
        )
        for r in records
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def bubbles(records: list[Record]) -> str:
    """Where the time of slots and learner went, one line a setting."""
    lines: list[str] = []
    for record in records:
        setting = Setting(record.lengths, record.sigma, record.eta, record.placement)
        lines.append(setting.name)
        for pool, shares in record.bubbles.items():
            parts = ", ".join(f"{name} {100 * share:.1f}%" for name, share in shares.items() if share >= 0.0005)
            lines.append(f"  {pool}: {parts}")
    return "\n".join(lines)


def benchmark(options: Options, chosen: list[Setting]) -> dict[str, object]:
    """All runs, one after the other, as data."""
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="async-rl-overlap-") as temporary:
        folder = Path(temporary)
        subprocess.run([sys.executable, "-m", "async_rl.benchmarks.tiny", str(folder / "model")], check=True)
        rows = (json.dumps({"prompt": f"{i:08d}"}) + "\n" for i in range(PROMPTS))
        (folder / "prompts.jsonl").write_text("".join(rows))
        for number, setting in enumerate(chosen, 1):
            print(f"{number}/{len(chosen)} {setting.name} ...", end=" ", file=sys.stderr, flush=True)
            records.append(run(setting, options, folder))
            print(f"{records[-1].efficiency:.2f} of the ideal", file=sys.stderr, flush=True)
    return {
        "machine": msgspec.to_builtins(machine.describe()),
        "versions": machine.versions(),
        "options": msgspec.to_builtins(options),
        "records": msgspec.to_builtins(compared(records)),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `async-rl bench overlap`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the result here")
    add("--lengths", default="lognormal", metavar="A,B", help="constant, lognormal, agentic (default: lognormal)")
    add("--sigma", default="0.5,0.8", metavar="S,T", help="spreads of lognormal and agentic lengths")
    add("--eta", default="1,2,4,8", metavar="N,M", help="bounds of staleness beside the two synchronous baselines")
    for name, what in (
        ("rollout-workers", "rollout workers"), ("learner-ranks", "learner ranks"),
        ("slots", "slots of a worker"), ("rate", "tokens per second of a slot"),
        ("mean-tokens", "mean length of a response"), ("batch", "trajectories of a learner step"),
        ("group", "trajectories of a prompt"), ("latency-s", "seconds of a tool's answer (agentic)"),
        ("turns", "turns (agentic)"), ("time-scale", "times faster than stated that everything runs"),
        ("steps", "measured steps"), ("sync-steps", "measured steps of the synchronous baselines"),
    ):  # fmt: skip
        default = getattr(Options(), name.replace("-", "_"))
        add(f"--{name}", type=type(default), default=default, metavar="N", help=f"{what} (default: {default:g})")
    add("--policy", choices=("whole", "split"), default="whole", help="how groups are offered (default: whole)")


def command(args: argparse.Namespace) -> int:
    """Runs what `arguments` asked for; prints JSON on stdout, progress and tables on stderr."""
    options = Options(**{name: getattr(args, name) for name in Options.__struct_fields__})
    chosen = settings(
        _choices("--lengths", args.lengths, get_args(Lengths)),
        [_number("--sigma", text, float) for text in args.sigma.split(",")],
        [_number("--eta", text, int) for text in args.eta.split(",") if text],
    )
    result = benchmark(options, chosen)
    records = msgspec.convert(result["records"], list[Record])
    print(json.dumps(result, indent=2))
    print(f"\n{table(records)}\n\n{bubbles(records)}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(record.valid for record in records) else 1


def _choices(name: str, text: str, known: tuple[str, ...]) -> list[str]:
    for each in text.split(","):
        if each not in known:
            raise ConfigError(name, text, f"there are no {each!r} lengths", f"Choose from {', '.join(known)}")
    return text.split(",")


def _number(name: str, text: str, kind: type[T]) -> T:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(name, text, "not numbers with commas between them", "Write for example 1,2,4") from error
