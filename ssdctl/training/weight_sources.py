"""Check that the first weights of a run exist, without fetching or reading them. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ssdctl.config import Config
from ssdctl.errors import UsageError
from ssdctl.inference.model_source import resolve_source
from ssdctl.model.pretrained import weights_named, weights_of
from ssdctl.runs.default_folder import run_dir


def check_weight_sources(config: Config) -> None:
    """Check the names and files of `--resume`, `--init` and `--backbone-weights`, in that order.

    Only what the run would read is checked: a run that resumes does not need its first weights.

    Raises:
        UsageError: A file does not exist, or there are no weights of that name.
    """
    resume = config.train.resume
    if resume not in ("auto", "never"):
        if not Path(resume).is_file():
            raise UsageError(
                f"--resume {resume}: no such checkpoint file",
                hint="a run keeps its checkpoints in RUN/checkpoints/ (best.pt, last.pt)",
            )
        return
    if resume == "auto" and any(run_dir(config).checkpoints.glob("*.pt")):
        return
    if config.train.init is not None:
        resolve_source(config.train.init)
        return
    name = weights_of(config.model)
    if name is not None and not Path(name).is_file():
        weights_named(name)
