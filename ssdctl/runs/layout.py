"""File names of a run folder, and its default place. Torch-free.

RUN/config.toml          the settings that explain the result, with their sources
RUN/environment.json     versions, device, command
RUN/metrics.jsonl        one record per line
RUN/evaluation.json      the best evaluation
RUN/report.html          the report
RUN/logs/rank-1.log      output of the ranks other than the first
RUN/nonfinite/           images of the steps with a NaN or infinite loss
RUN/profile/             traces of --profile
RUN/tensorboard/         event files of --tensorboard
RUN/wandb/               files of --tracker wandb
RUN/tracker-id           the id of the run in every tracker
RUN/checkpoints/step-00001000.pt    newest ones: a killed run resumes from the last intact one
RUN/checkpoints/last.pt             the newest
RUN/checkpoints/best.pt             the one with the best AP
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from ssdctl.config.sections.train import TrainConfig

RUNS = Path("runs")  # the folder of runs without --out
STEP_NAME = re.compile(r"step-[0-9]+\.pt")


@dataclass(frozen=True)
class RunDir:
    """The paths of a run folder; none of them need exist.

    Args:
        path: The run folder.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def tracker_id(self) -> Path:
        return self.path / "tracker-id"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def nonfinite(self) -> Path:
        return self.path / "nonfinite"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def last(self) -> Path:
        return self.checkpoints / "last.pt"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.pt"

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


def run_dir(config: TrainConfig) -> RunDir:
    """Return the run folder of a training config: `--out`, else `runs/PRESET`."""
    return RunDir(Path(config.out) if config.out else RUNS / config.preset)


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


def _no_checkpoints(path: Path) -> UsageError:
    return UsageError(
        f"{path}: a folder without checkpoints",
        hint="name a run folder (train's --out) or a checkpoint file; training saves at "
        "--save-every, at evaluations and at its end",
    )
