"""Write MLPerf log lines (`:::MLLOG {...}`), for tools that read submissions. Torch-free."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ssdctl.config import TrainConfig
from ssdctl.files import disk_errors, no_follow
from ssdctl.train.schedule import TrainSchedule

BENCHMARK = "ssd"


class MLLog:
    """Appends MLPerf log lines to a file.

    Args:
        path: The file; its folder is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path, "writing"):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.point("cache_clear", True)
        self.start("init")

    def point(self, key: str, value: Any, **metadata: Any) -> None:
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, what: str, **metadata: Any) -> None:
        self._write("INTERVAL_START", f"{what}_start", None, metadata)

    def stop(self, what: str, **metadata: Any) -> None:
        self._write("INTERVAL_END", f"{what}_stop", None, metadata)

    def run(self, config: TrainConfig, plan: TrainSchedule, val_images: int) -> None:
        """Log the run's settings after its setup, then its start."""
        facts = {
            "submission_benchmark": BENCHMARK,
            "submission_division": "open",
            "submission_org": "ssdctl",
            "submission_platform": config.device,
            "submission_status": "research",
            "seed": config.seed,
            "global_batch_size": plan.global_batch_size,
            "train_samples": plan.images,
            "eval_samples": val_images,
            "opt_name": config.optimizer,
            "opt_base_learning_rate": plan.peak_lr,
            "opt_weight_decay": config.weight_decay,
            "opt_learning_rate_warmup_steps": plan.warmup_steps,
            "opt_learning_rate_decay_boundary_steps": list(plan.decay_steps),
            "gradient_accumulation_steps": config.accumulate,
        }
        for key, value in facts.items():
            self.point(key, value)
        self.stop("init")
        self.start("run")

    def _write(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        line = {
            "namespace": "",
            "time_ms": int(time.time() * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"file": "ssdctl/train/mllog.py", "lineno": 1, **metadata},
        }
        with (
            disk_errors(self._path, "writing"),
            open(self._path, "a", encoding="utf-8", opener=no_follow) as file,
        ):
            file.write(f":::MLLOG {json.dumps(line)}\n")
