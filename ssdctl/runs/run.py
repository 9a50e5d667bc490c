"""A run folder as an object of the Python API."""

from __future__ import annotations

import base64
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdctl.config.resolve import resolve
from ssdctl.config.settings import Config
from ssdctl.errors import SsdctlError, UsageError, hints_in_messages
from ssdctl.runs.layout import RunDir, find_checkpoint
from ssdctl.runs.metrics import Record, read_metrics
from ssdctl.runtime.safe_text import html_table

if TYPE_CHECKING:
    from PIL import Image

SHOWN = ("AP", "AP50", "AP75", "APs", "APm", "APl")


class Run:
    """A run folder of `train` or `ssdctl train`. Functions that take a checkpoint take a run too.

    Args:
        path: The run folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    @hints_in_messages()
    def metrics(self) -> list[Record]:
        """The records of metrics.jsonl, one dictionary each; `pandas.DataFrame(run.metrics)`.

        Raises:
            ssdctl.errors.UsageError: It is not a run folder.
        """
        file = RunDir(self.path).metrics
        if not file.is_file():
            raise UsageError(f"{self.path}: not a run folder (it has no {file.name})")
        return read_metrics(file)[0]

    @property
    @hints_in_messages()
    def best(self) -> Path:
        """The checkpoint with the best AP, else the last one.

        Raises:
            ssdctl.errors.UsageError: There is none.
        """
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: no such run folder")
        return find_checkpoint(self.path)

    @property
    @hints_in_messages()
    def best_metrics(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation: AP, AP50, ... 0 to 1; None if there was none."""
        from ssdctl.runs.reader import read_run

        return read_run(self.path).best

    @property
    @hints_in_messages()
    def config(self) -> Config:
        """The settings of the run."""
        file = str(RunDir(self.path).config)
        return resolve(file=file, environment={}, default_file=False)

    @hints_in_messages()
    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the report, a self-contained HTML page, and return its path.

        Args:
            out: The file; None is report.html in the run folder.

        Raises:
            ssdctl.errors.DiskError: It cannot be written.
        """
        # The public function of the package: the layer of reports is above this one.
        target: Path = sys.modules["ssdctl"].report(self.path, out=out)
        return target

    @hints_in_messages()
    def plot(self) -> Image.Image:
        """Return the curves of the loss and, if it was evaluated, of AP over the steps."""
        from matplotlib.figure import Figure  # late: it takes half a second
        from PIL import Image

        steps = [r for r in self.metrics if r["kind"] == "train"]
        evals = [r for r in self.metrics if r["kind"] == "eval"]
        count = 2 if evals else 1
        figure = Figure(figsize=(5 * count, 3.5), layout="constrained")
        loss, *others = figure.subplots(1, count, squeeze=False)[0]
        loss.plot([r["step"] for r in steps], [r["loss"] for r in steps])
        loss.set(xlabel="step", ylabel="training loss")
        for axes in others:
            for name in ("AP", "AP50", "AP75"):
                axes.plot([r["step"] for r in evals], [r[name] for r in evals], ".-", label=name)
            axes.set(xlabel="step", ylabel="AP", ylim=(0, 1))
            axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
        return Image.open(buffer).convert("RGB")

    def __repr__(self) -> str:
        try:
            steps = max((int(r["step"]) for r in self.metrics), default=0)
            best = self.best_metrics
        except SsdctlError:  # not trained yet, or broken
            return f"Run({self.path})"
        ap = "" if best is None else f", AP {best['AP']:.3f}"
        return f"Run({self.path}: {steps} steps{ap})"

    def _repr_html_(self) -> str:
        try:
            metrics = self.best_metrics or {}
            buffer = io.BytesIO()
            self.plot().save(buffer, "PNG")
        except SsdctlError:
            return html_table((), [], repr(self))
        heads = [name for name in SHOWN if name in metrics]
        rows = [[f"{metrics[name]:.3f}" for name in heads]] if heads else []
        image = base64.b64encode(buffer.getvalue()).decode()
        table = html_table(heads, rows, repr(self))
        return f'{table}<img src="data:image/png;base64,{image}"/>'
