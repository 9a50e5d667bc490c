"""Check that the first weights of a run exist, without fetching or loading them. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from ssdctl.config import Config
from ssdctl.download.fetch import sha256_of
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.inference.model_source import resolve_source
from ssdctl.model.pretrained import weights_named, weights_of
from ssdctl.runs.default_folder import run_dir

HASHED_NAME = re.compile(r"-([0-9a-f]{8})\.pth$")  # as PyTorch names its files


def check_weight_sources(config: Config) -> None:
    """Check the names and files of `--resume`, `--init` and `--backbone-weights`, in that order.

    Only what the run would read is checked: a run that resumes does not need its first weights.

    Raises:
        UsageError: A file does not exist, or there are no weights of that name.
        IntegrityError: A backbone's file does not have the hash of which its name has digits.
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
    if name is None:
        return
    if not Path(name).is_file():
        weights_named(name)
    elif named := HASHED_NAME.search(name):
        digest = sha256_of(Path(name), "")
        if not digest.startswith(named[1]):
            raise IntegrityError(
                f"{name}: its SHA-256 begins with {digest[: len(named[1])]}, not with {named[1]} "
                "as its name says",
                hint="copy or download it again; rename it if you changed it on purpose",
            )
