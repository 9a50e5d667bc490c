"""The trackers TensorBoard, Weights & Biases and MLflow.

The variables of W&B (WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY) and of MLflow
(MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, its credentials) apply.
"""

from __future__ import annotations

import contextlib
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

from ssdctl.runs.folder import RunDir
from ssdctl.training.observers.trackers import GROUPS, Metrics, Tracker

log = logging.getLogger(__name__)

RUN_TAG = "ssdctl.run_id"
MAX_PARAMS, MAX_METRICS = 100, 1000  # per request
MAX_PARAM = 6000  # characters of a value
MAX_NAME = 200
NO_SERVER = (
    "set MLFLOW_TRACKING_URI to the URL of a server, or `pip install mlflow` for a database on "
    "this machine (sqlite:///FILE)"
)
NOT_ALLOWED = re.compile(r"[^\w .-]")


class MLflow(Tracker):
    """Logs to the tracking server or database of MLFLOW_TRACKING_URI."""

    def open(self) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient, get_tracking_uri

        self._metric = Metric
        try:
            self._client: Any = MlflowClient()
            experiment = self._experiment_id()
        except MlflowException as error:
            if get_tracking_uri().startswith("http"):
                raise
            raise MlflowException(f"{NO_SERVER} ({str(error).strip()})") from None
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


class WeightsAndBiases(Tracker):
    """Logs to W&B, offline to RUN/wandb.

    Each group of metrics has its own step axis (`step/train`), because an evaluation is scored
    while training continues and W&B's own steps cannot go back.
    """

    def open(self) -> None:
        import wandb

        self._wandb: Any = wandb
        # Command lines may contain secrets (x_disable_meta); `silent` also prevents the prompt for
        # an API key.
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True
        )
        wandb.setup(settings)
        run = self.run
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "ssdctl",
            name=os.environ.get("WANDB_NAME") or run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config={**run.config, "environment": run.environment},
            allow_val_change=True,
        )
        for group in (*GROUPS, "images"):
            self._run.define_metric(f"{group}/*", step_metric=f"step/{group}")
        if self._run.url:
            log.info("tracker wandb: %s", self._run.url)
        # Offline nothing is known of earlier starts: every folder in RUN/wandb is complete.
        summary: Any = self._run.summary
        sent = {group: summary.get(f"step/{group}", -1) for group in GROUPS}
        for metrics in run.past_metrics():
            if metrics.step > sent[metrics.group]:
                self.metrics(metrics)

    def metrics(self, metrics: Metrics) -> None:
        values = {f"{metrics.group}/{name}": value for name, value in metrics.values.items()}
        self._run.log({f"step/{metrics.group}": metrics.step, **values})

    def images(self, step: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        shown = {f"images/{n}": self._wandb.Image(pixels) for n, pixels in images.items()}
        self._run.log({"step/images": step, **shown})

    def checkpoint(self, name: str, step: int, path: Path) -> None:
        artifact = self._wandb.Artifact(f"checkpoint-{self.run.id}", type="model")
        artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact, aliases=[name, f"step-{step}"])

    def close(self, *, is_success: bool) -> None:
        self._run.finish(exit_code=0 if is_success else 1)

    def abandon(self) -> None:
        """Kill W&B's own process, for which its exit hook would wait without limit."""
        with contextlib.suppress(Exception):  # private attributes: no public ones exist
            connection = self._wandb.setup()._connection
            connection._cleanup()
            connection._proc._process.kill()


class TensorBoard(Tracker):
    """Writes RUN/tensorboard. Steps that are trained again, as after a kill, are hidden before."""

    def open(self) -> None:
        self._open_after(self.run.start_step)

    def _open_after(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = RunDir(self.run.folder).tensorboard
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def metrics(self, metrics: Metrics) -> None:
        for name, value in metrics.values.items():
            self._writer.add_scalar(f"{metrics.group}/{name}", value, metrics.step)
        if metrics.group != "train":
            self._writer.flush()

    def images(self, step: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        for name, pixels in images.items():
            self._writer.add_image(f"images/{name}", pixels, step, dataformats="HWC")

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._open_after(step)

    def close(self, *, is_success: bool) -> None:
        self._writer.close()


# By the names of the packages, which are the values of `--tracker`.
tensorboard, wandb, mlflow = TensorBoard, WeightsAndBiases, MLflow
