"""Find the file of a checkpoint that a user names by path, run folder, detector or Hub reference.

checkpoint = locate_checkpoint("hf://org/name")
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, overload

from ssdctl.config import Config
from ssdctl.config.call import LEAVE_OUT
from ssdctl.config.resolve import Override, resolve
from ssdctl.config.settings import Kind, Source
from ssdctl.download.fetch import (
    checksum_path,
    corrupt_path,
    fetch_detector,
    remember_checksum,
    sha256_of,
)
from ssdctl.download.http import MIRROR
from ssdctl.download.hub import WEIGHTS, HubReference, fetch_model, is_reference, parse_reference
from ssdctl.download.pinned_files import DETECTORS, DetectorSource, find_detector
from ssdctl.errors import IntegrityError, SsdctlError, UsageError
from ssdctl.files import disk_errors
from ssdctl.model.pretrained import check_file, weights_named
from ssdctl.runs.folder import RunDir, find_checkpoint, run_dir, tensorflow_checkpoint
from ssdctl.runs.going_back import has_continued_from

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)
KEPT = (
    "train.preset", "train.warmup", "train.lr_decay", "train.decay_epochs", "train.precision",
)  # fmt: skip
Named: TypeAlias = "str | os.PathLike[str] | nn.Module"  # a checkpoint as users give it


@overload
def locate_checkpoint(source: str | os.PathLike[str], *, mirror: str | None = None) -> Path: ...


@overload
def locate_checkpoint(source: Named, *, mirror: str | None = None) -> Path | nn.Module: ...


def locate_checkpoint(source: Named, *, mirror: str | None = None) -> Path | nn.Module:
    """Return the file of a checkpoint; a published detector is fetched if it is not present.

    A network in memory is returned as it is.

    Args:
        source: A checkpoint file, a run folder (its best checkpoint, else its last), a folder that
            `ssdctl push` wrote, a name of `ssdctl models`, or `hf://org/name[@revision]`. A file or
            folder of that name takes precedence over a detector's name.
        mirror: Base URL to fetch a detector from instead.

    Raises:
        UsageError: There is no such file, folder or detector (the hint names the nearest one), or
            no such model on the Hub.
        NetworkError: It cannot be fetched; the hint names the files and their folder.
        IntegrityError: The detector's file is not the published one, or changed after its first
            use, or is not a checkpoint.
    """
    if not isinstance(source, str | os.PathLike):
        if hasattr(source, "state_dict") and not isinstance(source, type):
            return source
        raise UsageError(
            f"a {type(source).__name__} is not a checkpoint",
            hint="give a path, a name, a run, or an ssdctl.SSD300",
        )
    detector = resolve_source(source)
    if isinstance(detector, Path):
        return detector
    if isinstance(detector, HubReference):
        return fetch_model(detector)
    file = fetch_detector(detector, mirror=mirror)
    if detector.trust == "first use":
        trust_first_use(detector.name, file)
    return file


def resolve_source(source: str | os.PathLike[str]) -> Path | HubReference | DetectorSource:
    """Return the file, Hub model or detector that a name refers to, without fetching it."""
    if not (name := os.fspath(source)):
        raise UsageError("the checkpoint's name is empty", hint=LEAVE_OUT)
    if is_reference(name):
        return parse_reference(name)
    path = Path(source)
    if path.is_dir():
        return path / WEIGHTS if is_model_folder(path) else find_checkpoint(path)
    if not path.exists() and (detector := find_detector(name)) is not None:
        return detector
    if path.suffix != ".pt" and (error := tensorflow_checkpoint(path)) is not None:
        raise error
    if path.exists():
        return path
    names = [d.name for d in DETECTORS]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    did_you_mean = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"{name}: no such file, run folder or detector",
        hint=f"{did_you_mean}a run keeps its checkpoints in RUN/checkpoints/; detectors by name: "
        f"{', '.join(names)}; models on the Hugging Face Hub: hf://org/name",
    )


def trust_first_use(name: str, file: Path) -> None:
    """Read a detector's file, for which no checksum is published, and record its SHA-256."""
    from ssdctl.checkpoint.file import load_checkpoint  # torch takes seconds

    try:
        load_checkpoint(file)
    except IntegrityError as error:
        if checksum_path(file).exists():  # it was read before
            raise
        corrupt = corrupt_path(file, file.stat().st_size, sha256_of(file, ""))
        with disk_errors(file, "renaming"):
            file.replace(corrupt)
        raise IntegrityError(
            f"{error}; kept as {corrupt}",
            hint=f"run it again for a new copy, or try {MIRROR}",
        ) from error
    digest = remember_checksum(file)
    log.info("%s: no published checksum; SHA-256 at first use %s", name, digest)


def is_model_folder(path: Path) -> bool:
    """Return whether a folder has the files of `ssdctl push` instead of a run's."""
    return (path / WEIGHTS).is_file() and not RunDir(path).metrics.exists()


def continued_config(config: Config) -> Config | None:
    """Return the settings `KEPT` of the checkpoint that `config` continues from, if any."""
    run, resume = run_dir(config), config.train.resume
    if resume == "never":
        return None
    is_own = resume == "auto" or has_continued_from(run, Path(resume))
    if is_own and not run.resumable():
        return None
    from ssdctl.checkpoint.file import load_resumable  # torch takes seconds
    from ssdctl.checkpoint.folder import CheckpointFolder

    with contextlib.suppress(SsdctlError):  # the run reports it
        newest = CheckpointFolder(run.path, keep=1).newest_intact()[0] if is_own else None
        checkpoint = newest or load_resumable(Path(resume))
        source = Source(Kind.FILE, str(checkpoint.path))
        kept = {path: checkpoint.config.get(path) for path in KEPT}
        overrides = [Override(p, v, source) for p, v in kept.items() if v is not None]
        return resolve(overrides=overrides, environment={}, default_file=False)
    return None


def check_weight_sources(config: Config) -> None:
    """Check the names and files of `--resume`, `--init` and `--backbone-weights`, in that order.

    Only what the run would read is checked: a run that resumes does not need its first weights.

    Raises:
        UsageError: A file does not exist, or there are no weights of that name.
        IntegrityError: A backbone's file does not have the hash that its name begins with.
    """
    resume = config.train.resume
    if resume not in ("auto", "never"):
        if not (Path(resume).is_file() or has_continued_from(run_dir(config), Path(resume))):
            source = config.sources["train.resume"].named("train.resume")
            raise UsageError(
                f"{source} {resume}: no such checkpoint file",
                hint="a run keeps its checkpoints in RUN/checkpoints/ (best.pt, last.pt)",
            )
        return
    if resume == "auto" and any(run_dir(config).checkpoints.glob("*.pt")):
        return
    if config.train.init is not None:
        resolve_source(config.train.init)
    elif name := config.model.weights_name:
        if Path(name).is_file():
            check_file(Path(name))
        else:
            weights_named(name)
