"""A learner step against its bars: `python -m experiments.proof.learner`; the benchmark's report is kept with them."""

from __future__ import annotations

import msgspec

from async_rl.benchmarks import learner
from experiments.proof.bars import keep

LEAST = {"quickstart-float32": 2.4, "quickstart-bfloat16": 1.8, "mixed-float32": 1.5}
"""Samples per second over those of a padded Hugging Face loop."""


def main() -> None:
    report = learner.run("smollm2-135m", list(LEAST), repeat=3)
    bars: dict[str, bool] = {}
    for result in report.results:
        least = LEAST[result.shape]
        bars[f"{result.shape}: {least} times the padded loop"] = result.ratio_padded >= least
        if result.shape.endswith("float32"):
            bars[f"{result.shape}: the same gradient to 1e-4"] = result.gradient_difference <= 1e-4
    bars["log-probs of 8,192 tokens in under 1 GiB"] = report.logprobs_peak_bytes < 2**30
    keep("learner", {"bars": bars, **msgspec.to_builtins(report)})


if __name__ == "__main__":
    main()
