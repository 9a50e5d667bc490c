"""MLflow. Its variables apply: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, its credentials."""

from __future__ import annotations

import logging
import os
import re
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.training.observers.trackers import Metrics, Tracker

log = logging.getLogger(__name__)

RUN_TAG = "ssdctl.run_id"
MAX_PARAMS, MAX_METRICS = 100, 1000  # per request
MAX_PARAM = 6000  # characters of a value
MAX_NAME = 200
NOT_ALLOWED = re.compile(r"[^\w .-]")


class MLflow(Tracker):
    """Logs to the tracking server, database or folder of MLFLOW_TRACKING_URI."""

    def open(self) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client: Any = MlflowClient()
        experiment = self._experiment_id()
        tags = {RUN_TAG: self.run.id, "mlflow.source.name": "ssdctl train"}
        if commit := self.run.environment.get("git_commit"):
            tags["mlflow.source.git.commit"] = commit
        query = f"tags.`{RUN_TAG}` = '{self.run.id}'"
        if runs := self._client.search_runs([experiment], query, max_results=1):
            run = runs[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=self.run.name, tags=tags)
        self._id = run.info.run_id
        log.info("tracker mlflow: run %s", self._id)
        # MLflow refuses other values of a parameter: a resumed run keeps those of its first start.
        settings = {**self.run.config, **_flat("environment", self.run.environment)}
        new = [
            Param(key, str(value)[:MAX_PARAM])
            for key, value in settings.items()
            if key not in run.data.params
        ]
        for start in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + MAX_PARAMS])
        self._send_missing()

    def _experiment_id(self) -> Any:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ssdctl"
        experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self._client.create_experiment(name)

    def _send_missing(self) -> None:
        """Send the metrics that a killed run recorded but did not send."""
        sent: dict[str, set[int]] = {}
        for metrics in self.run.past_metrics():
            last = _key(metrics.group, list(metrics.values)[-1])  # they are sent in this order
            if last not in sent:
                sent[last] = {m.step for m in self._client.get_metric_history(self._id, last)}
            if metrics.step not in sent[last]:
                self.metrics(metrics)

    def metrics(self, metrics: Metrics) -> None:
        now = int(1000 * time.time())
        entries = [
            self._metric(_key(metrics.group, name), value, now, metrics.step)
            for name, value in metrics.values.items()
        ]
        for start in range(0, len(entries), MAX_METRICS):
            self._client.log_batch(self._id, metrics=entries[start : start + MAX_METRICS])

    def images(self, step: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        for name, pixels in images.items():
            file = f"images/{name}/step-{step:08d}.png"
            self._client.log_image(self._id, Image.fromarray(pixels), artifact_file=file)

    def checkpoint(self, name: str, step: int, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "checkpoints")
        self._client.set_tag(self._id, f"ssdctl.{name}_step", str(step))

    def close(self, *, is_success: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_success else "KILLED")


def _key(group: str, name: str) -> str:
    """Return a name that MLflow accepts; one that had to be changed gets a checksum."""
    clean = NOT_ALLOWED.sub("_", name)[:MAX_NAME]
    if clean != name or clean in ("", ".", ".."):
        clean += f"-{zlib.crc32(name.encode('utf-8', 'backslashreplace')):08x}"
    return f"{group}/{clean}"


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        flat |= _flat(name, value) if isinstance(value, dict) else {name: value}
    return flat
