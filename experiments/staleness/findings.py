"""From the results to the table, the plots and the page: `python -m experiments.staleness.findings`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import msgspec
import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

from experiments.staleness.study import (
    FAST,
    FOLDER,
    FORCED,
    METHODS,
    OTHERS,
    POLICIES,
    RESULTS,
    STEPS,
    TARGET_ESS,
    USUAL,
    Result,
    runs,
)

LAST = 4
"""Evaluations at the end whose mean is a run's score."""
SETTLED = 20
"""Forced steps after which what was in flight before them has been trained on."""
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}
"""Student's t for 95%, by degrees of freedom."""
MARGIN = -0.03


class Interval(NamedTuple):
    """Mean and the half-width of its 95% interval; nan for one value."""

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half:.3f}"


def interval(values: list[float]) -> Interval:
    count = len(values)
    if count < 2:
        return Interval(values[0] if values else float("nan"), float("nan"), count)
    half = T95[count - 1] * float(np.std(values, ddof=1)) / count**0.5
    return Interval(float(np.mean(values)), half, count)


def score(result: Result) -> float:
    return float(np.mean([reward for _, reward in result.evaluations[-LAST:]]))


def load(folder: Path = RESULTS) -> list[Result]:
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(folder.glob("*.json"))]


class Scores:
    """Scores of the runs of one kind, by method, bound and seed."""

    def __init__(self, results: list[Result], kind: str) -> None:
        self.of = {(r.run["method"], r.run["eta"], r.run["seed"]): score(r) for r in results if r.run["kind"] == kind}

    def all(self, method: str, eta: int) -> list[float]:
        return [value for (m, e, _), value in sorted(self.of.items()) if (m, e) == (method, eta)]

    def difference(self, one: tuple[str, int], other: tuple[str, int]) -> Interval:
        """Of the same seeds."""
        pairs = [
            value - self.of[(*other, seed)]
            for (m, e, seed), value in sorted(self.of.items())
            if (m, e) == one and (*other, seed) in self.of
        ]
        return interval(pairs)

    def best(self, eta: int) -> str:
        """The method of METHODS with the highest mean at a bound; `none` is not one."""
        known = [method for method in METHODS if method != "none" and self.all(method, eta)]
        return max(known, key=lambda method: float(np.mean(self.all(method, eta))))


def differences(scores: Scores, *etas: int) -> str:
    """Of each method at these bounds to itself at 0, over the same seeds."""
    lines = [f"| method | {' | '.join(f'η = {eta}' for eta in etas)} |", f"| --- |{' --- |' * len(etas)}"]
    for method in METHODS:
        each = [scores.difference((method, eta), (method, 0)) for eta in etas]
        lines.append(f"| {method} | {' | '.join(f'{difference}' for difference in each)} |")
    return "\n".join(lines)


def masked_away(results: list[Result], method: str, eta: int) -> float:
    """Mean share of tokens that a correction has left out."""
    runs_of = [r for r in results if (r.run["kind"], r.run["method"], r.run["eta"]) == ("correction", method, eta)]
    shares = [share for r in runs_of for share in r.series["corrected_away_share"] if share is not None]
    return float(np.mean(shares)) if shares else float("nan")


def failures(results: list[Result], scores: Scores) -> str:
    """What did not work, and why as far as the data tells."""

    def mean(method: str, eta: int) -> float:
        return float(np.mean(scores.all(method, eta) or [float("nan")]))

    lines = [
        f"* `none`: {mean('none', 4):.2f} at η = 4, {mean('none', 16):.2f} at 16, {mean('none', 64):.2f} at 64, where "
        "it unlearns what the model could do before."
    ]
    lines += [
        f"* `{method}` with the limits of its paper leaves out {masked_away(results, method, 4):.0%} of the tokens at "
        f"η = 4 and {masked_away(results, method, 64):.0%} at 64, and ends at {mean(method, 4):.2f} and "
        f"{mean(method, 64):.2f}. The limits are for the mean of a long response; one of 5 to 12 tokens leaves them at "
        "once."
        for method in ("geo-mask", "seq-mask-tis")
    ]
    lines.append(
        "* Telling the other corrections apart: at η = 4 all of them are within the seeds' noise of each other, at 64 "
        "nearly so. The study shows that one is needed and that sequence masks need limits of their own; which of the "
        "rest is best it does not show."
    )
    lines.append(
        "* Finding a bias of `drop` against what ends late: see below. The members of a group have the same problem, "
        "and here that fixes their length, so that dropping loses whole groups and not the late members of each."
    )
    return "\n".join(lines)


def table(scores: Scores) -> str:
    etas = sorted({eta for _, eta, _ in scores.of})
    lines = [f"| method | {' | '.join(f'η = {eta}' for eta in etas)} |", f"| --- |{' --- |' * len(etas)}"]
    for method in (*METHODS, *OTHERS):
        cells = [scores.all(method, eta) for eta in etas]
        shown = [f"{np.mean(cell):.3f} (n={len(cell)})" if cell else "" for cell in cells]
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join(lines)


def policies(results: list[Result]) -> str:
    grouped: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.run["kind"] == "policy":
            grouped[result.run["method"]].append(result)
    lines = [
        "| policy | reward | masked share, length < 8, 16, 24, 37 | expired | mean trained advantage by order of end |",
        "| --- | --- | --- | --- | --- |",
    ]
    for stale, groups in POLICIES:
        some = grouped.get(f"{stale} {groups}", [])
        if not some:
            continue
        masked, advantage = (
            np.mean([result.details[name] for result in some], axis=0)
            for name in ("masked_share", "advantage_by_order")
        )
        expired = np.mean([result.details["expired"] for result in some])
        lines.append(
            f"| {stale}, {groups} | {np.mean([score(r) for r in some]):.3f} (n={len(some)}) | "
            f"{', '.join(f'{share:.2f}' for share in masked)} | {expired:.0f} | "
            f"{', '.join(f'{value:+.2f}' for value in advantage)} |"
        )
    return "\n".join(lines)


def bias(results: list[Result]) -> str:
    """By how much the members of a group that end late are trained with another advantage than the early ones."""
    lines: list[str] = []
    for stale, groups in POLICIES:
        some = [r for r in results if (r.run["kind"], r.run["method"]) == ("policy", f"{stale} {groups}")]
        if len(some) < 2:
            continue
        gaps = interval(
            [float(np.diff([np.mean(half) for half in np.split(np.asarray(each), 2)])[0]) for each in _orders(some)]
        )
        verdict = "none that can be seen" if abs(gaps.mean) <= gaps.half else "yes"
        lines.append(f"* {stale}, {groups}: {verdict}; {gaps} ({gaps.count} seeds)")
    return "\n".join(lines)


def _orders(results: list[Result]) -> list[list[float]]:
    return [result.details["advantage_by_order"] for result in results]


def controller(results: list[Result]) -> str:
    """What the controller did while the policy moved fast, and after."""
    lines = [
        "| controller | mean ESS, first forced steps | the others | of these under the target | lowest bound | last "
        "bound | reward |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method in ("off", "on"):
        some = [r for r in results if (r.run["kind"], r.run["method"]) == ("controller", method)]
        for result in some:
            forced, eta = column(result, "ess")[FORCED.start : FORCED.stop], column(result, "effective_max_staleness")
            settled = forced[SETTLED:]
            lines.append(
                f"| {method} | {np.nanmean(forced[:SETTLED]):.2f} | {np.nanmean(settled):.2f} | "
                f"{np.count_nonzero(settled < TARGET_ESS)} of {settled.size} | {eta.min():.0f} | {eta[-1]:.0f} | "
                f"{score(result):.3f} |"
            )
    return "\n".join(lines)


def column(result: Result, name: str) -> NDArray[np.float64]:
    """Of every step; nan for one without a gradient."""
    return np.asarray([np.nan if value is None else value for value in result.details[name]], np.float64)


def plot_controller(results: list[Result]) -> None:
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5), sharex=True)
    for result in results:
        if (result.run["kind"], result.run["seed"]) == ("controller", 0):
            label = f"controller {result.run['method']}"
            steps = range(1, len(result.details["ess"]) + 1)
            (line,) = top.plot(steps, column(result, "ess"), label=label)
            bottom.plot(steps, column(result, "age_mean"), color=line.get_color(), label=f"mean age, {label}")
            if result.run["method"] == "on":
                bottom.plot(
                    steps, result.details["effective_max_staleness"], "--", color=line.get_color(), label="its bound"
                )
    top.axhline(TARGET_ESS, color="grey", linewidth=0.8)
    for axis in (top, bottom):
        axis.axvspan(FORCED.start, FORCED.stop, color="grey", alpha=0.15)
        axis.legend(fontsize=8)
    top.set_ylabel("ESS, share of tokens")
    bottom.set_ylabel("learner steps")
    bottom.set_xlabel(f"learner step; {FAST / USUAL:.0f} times the learning rate where grey")
    figure.tight_layout()
    figure.savefig(FOLDER / "controller.png", dpi=110)
    plt.close(figure)


def plot(results: list[Result]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
    for axis, eta in zip(axes, (0, 4, 64), strict=True):
        for method in METHODS:
            wanted = ("correction", method, eta)
            curves = [r.evaluations for r in results if (r.run["kind"], r.run["method"], r.run["eta"]) == wanted]
            if curves:
                steps = [step for step, _ in curves[0]]
                axis.plot(steps, np.mean([[reward for _, reward in curve] for curve in curves], axis=0), label=method)
        axis.set_title(f"η = {eta}")
        axis.set_xlabel("learner step")
    axes[0].set_ylabel("reward on held-out problems")
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(FOLDER / "curves.png", dpi=110)
    plt.close(figure)


def page(results: list[Result]) -> str:
    scores = Scores(results, "correction")
    found: list[str] = []
    near = scores.best(4)
    paired = scores.difference((near, 4), (near, 0))
    verdict = "no worse than" if paired.mean - paired.half >= MARGIN else "not shown to be no worse than"
    found.append(
        f"* At η = 4 the best correction, `{near}`, is {verdict} {MARGIN} of its η = 0: paired difference {paired} "
        f"(95%, {paired.count} seeds)."
    )
    far = scores.best(64)
    lost = scores.difference(("none", 64), (far, 64))
    found.append(f"* At η = 64 `none` against the best correction, `{far}`: {lost} ({lost.count} seeds).")
    cost = scores.difference((far, 64), (far, 0))
    found.append(f"* What η = 64 costs with `{far}`, against η = 0: {cost} ({cost.count} seeds).")
    return f"""# What staleness costs, and what corrections are worth

Made by `python -m experiments.staleness.findings` from {len(results)} of {len(runs())} runs in `results/`;
`python -m experiments.staleness.study` makes the runs that are missing, and the model first if need be.

A Llama of 0.45M parameters that gets a third of its running sums right ("7+15+20=" → "22,42") is trained for
{STEPS} steps of 64 trajectories, in one process with the real buffer core, decoder and learner
(`async_rl/lockstep.py`). What the bound admits is generated before each learner step, so that in steady state every
token is η steps old when it is trained on. All runs see equally many samples. The score is the reward on 512 held-out
problems, sampled at temperature 1, mean of the last {LAST} evaluations.

## Found

{chr(10).join(found)}

![learning curves](curves.png)

{table(scores)}

The best is chosen here by the same runs that it is judged by. Each method against itself at η = 0, over the same seeds:

{differences(scores, 4, 64)}

With one optimizer step a batch `decoupled recompute` has ratio 1 to its anchor, and differs from `tis` by its cap
only; at η = 0 all methods are the same.

## What did not work

{failures(results, scores)}

## What is stale, and how groups are offered

η = 2, lengths with a long tail, six decoding steps a learner step, so that a long answer takes more steps than the
bound allows.

{policies(results)}

Is there a bias? The mean advantage is counted as far as it is trained, token by token. That of the four members of a
group that end last, less that of the four that end first:

{bias(results)}

## The controller

η = 16; the learning rate is {FAST / USUAL:.0f} times the usual one from step {FORCED.start} to {FORCED.stop}, so
that the policy leaves its old samples behind. With `staleness.controller.target_ess: {TARGET_ESS}` the bound falls
until the effective sample size is back, and rises again when the rate is the usual one. What was in flight when the
bound falls is still trained on, so that the first {SETTLED} steps of the forced ones are apart; single steps fall under
the target later too, which is what the controller acts on.

{controller(results)}

![the controller](controller.png)
"""


def main() -> None:
    results = load()
    plot(results)
    plot_controller(results)
    (FOLDER / "README.md").write_text(page(results))


if __name__ == "__main__":
    main()
