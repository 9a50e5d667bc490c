"""Show the progress of a run from its records: as a bar, and as lines. Torch-free."""

from __future__ import annotations

import logging
from typing import Any

from ssdctl.runs.metrics import Record
from ssdctl.runtime.progress import open_bar

log = logging.getLogger(__name__)


class TrainingBar:
    """Show the records of a run as a progress bar, and log them.

    Args:
        is_shown: Show the bar, on a terminal or in a notebook.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: Any = None

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def show(self, record: Record) -> None:
        """Show one record of the run."""
        if record.get("event") == "started" and self._is_shown and self._bar is None:
            self._bar = open_bar(record["total_steps"], "training", "step")
        if record["kind"] in ("train", "eval", "epoch"):
            log.info("%s", describe(record))
        if self._bar is not None and record["kind"] in ("train", "eval"):
            figure = "loss" if record["kind"] == "train" else "AP"
            if record[figure] >= 0:  # COCO's -1: not defined
                self._bar.set_postfix({figure: f"{record[figure]:.3f}"}, refresh=False)
            self._bar.update(record["step"] - self._bar.n)


def describe(record: dict[str, Any]) -> str:
    """Return one line that summarises a record."""
    position = f"step {record['step']}  epoch {record['epoch']:.2f}"
    if record["kind"] == "eval":
        if record["AP"] < 0:
            return f"{position}  no AP: the validation images have no annotated objects"
        scores = "  ".join(f"{name} {record[name]:.3f}" for name in ("AP", "AP50", "AP75"))
        if "loss" in record:
            scores += f"  validation loss {record['loss']:.3f}"
        return f"{position}  {scores}"
    if record["kind"] == "epoch":
        return (
            f"{position}  done in {record['duration_s']:.0f} s, "
            f"{record['images_per_second']:.1f} img/s"
        )
    wait = f"  waits {record['data_wait']:.0%} for images" if record["data_wait"] >= 0.05 else ""
    return (
        f"{position}  loss {record['loss']:.3f} (box {record['loss_box']:.3f} class "
        f"{record['loss_class']:.3f})  lr {record['lr']:.2e}  "
        f"{record['images_per_second']:.1f} img/s{wait}"
    )
