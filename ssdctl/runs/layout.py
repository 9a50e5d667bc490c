"""File names of a run folder. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from ssdctl.errors import UsageError

RUNS = Path("runs")  # the folder of runs without --out
STEP_NAME = re.compile(r"step-[0-9]+\.pt")


class RunDir:
    """The paths of a run folder; none of them need exist.

    Args:
        path: The run folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"
        self.config = path / "config.toml"  # the settings that explain the result, with sources
        self.environment = path / "environment.json"  # versions, device, command
        self.metrics = path / "metrics.jsonl"  # one record per line
        self.evaluation = path / "evaluation.json"  # the best one
        self.report = path / "report.html"
        self.logs = path / "logs"  # output of the ranks other than the first
        self.nonfinite = path / "nonfinite"  # images of the steps with a NaN or infinite loss
        self.profile = path / "profile"  # traces of --profile
        self.tensorboard = path / "tensorboard"  # event files; wandb makes a folder wandb/
        self.tracker_id = path / "tracker-id"  # of the run, in every tracker
        # A killed run resumes from the last intact one.
        self.checkpoints = path / "checkpoints"
        self.last = self.checkpoints / "last.pt"
        self.best = self.checkpoints / "best.pt"

    def __str__(self) -> str:
        return str(self.path)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def step_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}.pt"

    def step_checkpoints(self) -> list[Path]:
        """Return the checkpoints of steps, the oldest first."""
        files = [p for p in self.checkpoints.glob("step-*.pt") if STEP_NAME.fullmatch(p.name)]
        return sorted(files, key=step_of)

    def all_checkpoints(self) -> list[Path]:
        """Return the checkpoints to evaluate: the best, unless it is a recent one, and those.

        Raises:
            UsageError: The folder has none.
        """
        files = self.step_checkpoints()
        if self.best.is_file() and not any(self.best.samefile(f) for f in files):
            files.insert(0, self.best)
        if not files:
            raise _no_checkpoints(self.path)
        return files

    def is_started(self) -> bool:
        """Return whether the folder has files of a run, other than the lock and the rank logs."""
        others = (self.lock, self.logs)
        return self.path.is_dir() and any(entry not in others for entry in self.path.iterdir())


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a step checkpoint."""
    return int(checkpoint.stem.partition("-")[2])


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a file, else the best (or last) checkpoint of the run folder `path`.

    Raises:
        UsageError: A folder without checkpoints.
    """
    if not path.is_dir():
        return path
    run = RunDir(path)
    for checkpoint in (run.best, run.last):
        if checkpoint.is_file():
            return checkpoint
    raise _no_checkpoints(path)


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders directly below `folder`."""
    return sorted(path for path in folder.glob("*") if RunDir(path).metrics.is_file())


def tensorflow_checkpoint(path: Path) -> UsageError | None:
    """Return the error for a checkpoint of TensorFlow, named by its folder, prefix or file."""
    prefix = re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.name)
    pattern = "*" if path.is_dir() else re.sub(r"([*?[])", r"[\1]", prefix)
    folder = path if path.is_dir() else path.parent
    if not any(folder.glob(f"{pattern}.index")):
        return None
    return UsageError(
        f"{path}: a checkpoint of TensorFlow, which ssdctl cannot read",
        hint="train again, from the backbone's weights (docs/migrating.md)",
    )


def _no_checkpoints(path: Path) -> UsageError:
    if (error := tensorflow_checkpoint(path)) is not None:
        return error
    return UsageError(
        f"{path}: a folder without checkpoints",
        hint="name a run folder (train's --out) or a checkpoint file; training saves at "
        "--save-every, at evaluations and at its end",
    )
