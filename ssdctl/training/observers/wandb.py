"""Weights & Biases. The variables of W&B apply: WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdctl.training.observers.trackers import GROUPS, Metrics, Tracker

log = logging.getLogger(__name__)


class WeightsAndBiases(Tracker):
    """Logs to W&B, offline to RUN/wandb.

    Each group of metrics has its own step axis (`train/step`), because an evaluation is scored
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
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
        if self._run.url:
            log.info("tracker wandb: %s", self._run.url)
        # Offline nothing is known of earlier starts: every folder in RUN/wandb is complete.
        summary: Any = self._run.summary
        sent = {group: summary.get(f"{group}/step", -1) for group in GROUPS}
        for metrics in run.past_metrics():
            if metrics.step > sent[metrics.group]:
                self.metrics(metrics)

    def metrics(self, metrics: Metrics) -> None:
        values = {f"{metrics.group}/{name}": value for name, value in metrics.values.items()}
        self._run.log({f"{metrics.group}/step": metrics.step, **values})

    def images(self, step: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        shown = {f"images/{n}": self._wandb.Image(pixels) for n, pixels in images.items()}
        self._run.log({"images/step": step, **shown})

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
