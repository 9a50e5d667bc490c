"""What a run folder tells: metrics, config, environment, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ssdctl.errors import DataError, UsageError
from ssdctl.train.metrics import Record, read_metrics


class RunData(NamedTuple):
    """One run, read from its folder."""

    name: str
    path: Path
    train: list[Record]
    evals: list[Record]
    events: list[Record]
    config: str  # config.toml as it lies there, sources in its comments
    environment: dict[str, Any]

    @property
    def best(self) -> Record | None:
        """The evaluation with the best AP."""
        return max(self.evals, key=lambda r: float(r["AP"]), default=None)

    @property
    def class_ap(self) -> dict[str, float]:
        """AP per class of the best evaluation."""
        for event in self.events:
            if (
                event.get("event") == "class_ap"
                and self.best
                and event["step"] == self.best["step"]
            ):
                return dict(event["AP"])
        return {}

    @property
    def checkpoint(self) -> Path | None:
        """The best checkpoint, else the last."""
        for name in ("best.pt", "last.pt"):
            if (self.path / "checkpoints" / name).is_file():
                return self.path / "checkpoints" / name
        return None


def checkpoint_of(path: Path) -> Path:
    """The checkpoint itself, or the best (else the last) one of a run folder.

    Raises:
        UsageError: A run folder without checkpoints.
    """
    if not path.is_dir():
        return path
    for name in ("best.pt", "last.pt"):
        if (path / "checkpoints" / name).is_file():
            return path / "checkpoints" / name
    raise UsageError(f"{path}: a run folder without checkpoints")


def read_run(path: Path) -> RunData:
    """Read a run folder.

    Raises:
        UsageError: It is none.
        DataError: One of its files is broken.
    """
    if not (path / "metrics.jsonl").is_file():
        raise UsageError(f"{path}: no run folder (it has no metrics.jsonl)")
    records = read_metrics(path / "metrics.jsonl")
    try:
        environment = json.loads((path / "environment.json").read_text(encoding="utf-8"))
        config = (path / "config.toml").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: a run folder with a broken file: {error}") from None
    kinds: dict[str, list[Record]] = {"train": [], "eval": [], "event": []}
    for record in records:
        kinds.setdefault(str(record.get("kind")), []).append(record)
    name = path.resolve().name
    return RunData(name, path, kinds["train"], kinds["eval"], kinds["event"], config, environment)
