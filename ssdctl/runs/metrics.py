"""metrics.jsonl: one JSON object a line, each step once, whatever was resumed. Torch-free."""

from __future__ import annotations

import json
import math
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ssdctl.files import disk_errors, write_text

Record = dict[str, Any]
PACKAGES = ("ssdctl", "torch", "torchvision", "numpy", "pillow", "pyarrow", "hotcoco")


class MetricsFile:
    """The metrics of a run.

    Args:
        path: The file; lines are appended.
        start_step: What a killed run wrote beyond this step is dropped: it will come again.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.last_evaluation: int | None = None  # the step of the last one that is kept
        self.past_aps: list[float] = []  # of those that are kept
        if path.exists():
            kept = [r for r in read_metrics(path) if r.get("step", 0) <= start_step]
            evaluations = [r for r in kept if r.get("kind") == "eval"]
            self.last_evaluation = max((int(r["step"]) for r in evaluations), default=None)
            self.past_aps = [float(r["AP"]) for r in evaluations]
            write_text(path, "".join(_line(r) for r in kept))

    def write(self, record: Record) -> None:
        """Append one line. It reaches the system at once; a power cut may take the last ones."""
        with disk_errors(self.path, "writing"), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics file; a last line cut short by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _line(record: Record) -> str:
    return json.dumps({k: _figure(v) for k, v in record.items()}, allow_nan=False) + "\n"


def _figure(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is -1, as in pycocotools."""
    return -1 if isinstance(value, float) and not math.isfinite(value) else value


def environment(device_label: str, world_size: int) -> Record:
    """What a run ran on, for environment.json."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": device_label,
        "world_size": world_size,
        "packages": {name: _version(name) for name in PACKAGES},
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
