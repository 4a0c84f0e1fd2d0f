"""Metrics in MLflow, from a thread of its own: a slow or absent server never holds up the run."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from async_rl.config import TrackingConfig
from async_rl.tracking.metrics import Record

Status = Literal["FINISHED", "FAILED", "KILLED"]
FINISH_S = 20.0
"""Longest wait for the last metrics to be recorded."""


def uri_of(config: TrackingConfig, runs: Path) -> str:
    """The configured tracking URI, or a SQLite file beside the runs."""
    return config.uri or f"sqlite:///{(runs / 'mlflow.db').resolve()}"


class MlflowLog:
    """Records one run. The first error is reported once through `warn`; from then on metrics are on disk only."""

    def __init__(
        self, config: TrackingConfig, runs: Path, name: str, params: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._config = config
        self._runs = runs
        self._name = name
        self._params = params
        self._warn = warn
        self._status: Status | None = None
        self._queue: queue.SimpleQueue[Record | Status] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        self._queue.put(record)

    def finish(self, status: Status) -> None:
        self._queue.put(status)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._warn(f"MLflow has not taken the last metrics within {FINISH_S:g} s; they are in the run's folder")

    def _work(self) -> None:
        try:
            self._record()
        except Exception as error:
            self._warn(f"MLflow failed ({type(error).__name__}: {error}); metrics go on in the run's folder only")
            while self._status is None:
                self._take()

    def _record(self) -> None:
        # One quick try: a server that is gone must not keep retrying for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        client = MlflowClient(uri_of(self._config, self._runs))
        experiment = client.get_experiment_by_name(self._config.experiment)
        artifacts = (self._runs / "mlartifacts").resolve().as_uri() if self._config.uri is None else None
        identity = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(self._config.experiment, artifact_location=artifacts)
        )
        run = client.create_run(identity, run_name=self._name).info.run_id
        client.log_batch(run, params=[Param(key, str(value)[:500]) for key, value in self._params.items()])
        while (item := self._take()) is not None:
            step, time_ms = int(item["step"]), int(item["time"] * 1000)
            values = {key: value for key, value in item.items() if isinstance(value, int | float)}
            client.log_batch(run, metrics=[Metric(key, value, time_ms, step) for key, value in values.items()])
        client.set_terminated(run, self._status)

    def _take(self) -> Record | None:
        """The next metrics; None at the end, when the status is known."""
        item = self._queue.get()
        if isinstance(item, str):
            self._status = item
            return None
        return item
