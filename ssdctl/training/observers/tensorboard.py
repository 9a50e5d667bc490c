"""TensorBoard: event files in RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdctl.runs.folder import RunDir
from ssdctl.training.observers.trackers import Metrics, Tracker


class TensorBoard(Tracker):
    """Writes RUN/tensorboard. Later steps of a killed run are hidden: they are trained again."""

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = RunDir(self.run.folder).tensorboard
        self._writer: Any = SummaryWriter(str(folder), purge_step=self.run.start_step + 1)

    def metrics(self, metrics: Metrics) -> None:
        for name, value in metrics.values.items():
            self._writer.add_scalar(f"{metrics.group}/{name}", value, metrics.step)
        if metrics.group != "train":
            self._writer.flush()

    def images(self, step: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        for name, pixels in images.items():
            self._writer.add_image(f"images/{name}", pixels, step, dataformats="HWC")

    def close(self, *, is_success: bool) -> None:
        self._writer.close()
