"""reward.png: reward and age over time."""

from __future__ import annotations

from pathlib import Path

from async_rl.tracking.metrics import Record


def plot(records: list[Record], path: Path) -> None:
    """Two panels over wall-clock minutes since the first step: mean reward, and mean and largest trained age."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [(record["time"] - records[0]["time"]) / 60 for record in records]
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5.5), height_ratios=[2, 1])
    top.plot(minutes, [record["reward"] for record in records], marker="o", markersize=3, color="#1b6ca8")
    top.set_ylabel("mean reward")
    top.grid(alpha=0.3)
    bottom.step(minutes, [record["age_max"] for record in records], where="post", label="largest", color="#c44536")
    bottom.plot(minutes, [record["age_mean"] for record in records], label="mean", color="#e09f3e")
    bottom.set_ylabel("age of trained tokens\n(learner steps)")
    bottom.set_xlabel("minutes since the first step")
    bottom.legend(loc="lower right")
    bottom.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
