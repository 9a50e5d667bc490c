"""Find the checkpoint file that a user names: a file, a run folder, or a published detector."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ssdctl.download.detectors import (
    DETECTORS,
    fetch_detector,
    find_detector,
    nearest_detector,
    remember_checksum,
)
from ssdctl.errors import UsageError
from ssdctl.runs.layout import find_checkpoint

log = logging.getLogger(__name__)


def locate_checkpoint(source: str | os.PathLike[str], *, mirror: str | None = None) -> Path:
    """Return the file of a checkpoint; a published detector is fetched if it is not present.

    Args:
        source: A checkpoint file, a run folder (its best checkpoint, else its last), or a name of
            `ssdctl models`. A file or folder of that name takes precedence.
        mirror: Base URL to fetch from instead.

    Raises:
        UsageError: There is no such file, folder or detector; the hint names the nearest one.
        NetworkError: The detector cannot be fetched; the hint names the file and its folder.
        IntegrityError: The detector's file is not the published one, or changed after its first
            use, or is not a checkpoint.
    """
    path = Path(source)
    if path.exists():
        return find_checkpoint(path)
    name = os.fspath(source)
    detector = find_detector(name)
    if detector is None:
        near = nearest_detector(name)
        names = ", ".join(d.name for d in DETECTORS)
        raise UsageError(
            f"{name}: no such file, run folder or detector",
            hint=(f"did you mean {near!r}? " if near else "")
            + f"a run keeps its checkpoints in RUN/checkpoints/; detectors by name: {names}",
        )
    file = fetch_detector(name, mirror=mirror)
    if detector.trust == "first use":
        _check_contents(file)
        digest = remember_checksum(file)
        log.info("%s: no published checksum; SHA-256 at first use %s", name, digest)
    return file


def _check_contents(file: Path) -> None:
    """Raise IntegrityError unless the file is a checkpoint whose weights fit its network."""
    from ssdctl.checkpoint.reader import load_network, read_checkpoint  # torch takes seconds

    load_network(read_checkpoint(file))
