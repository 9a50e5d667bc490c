"""Checks of `prepare` on a whole split: missing images, disk space, and how much is dropped."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_NAMED, Finding
from ssdctl.data.check import DROPPED_BOXES
from ssdctl.data.image_check_jobs import Job, Report
from ssdctl.data.store import shrunk_sizes
from ssdctl.errors import DataError, DiskError
from ssdctl.files import free_bytes

log = logging.getLogger(__name__)
DROPPED_IMAGE = "image dropped"
NOTED_IMAGE = "image with a note"
MAX_DROPPED = 0.05  # of the images or boxes of a split


def check_files(job: Job, origin: Path, sizes: list[int | None]) -> None:
    """Check that every image exists and that there is enough disk space.

    Args:
        job: The checking of a split.
        origin: The file or folder of its labels.
        sizes: Those of the image files in bytes, None for a file that does not exist.

    Raises:
        DataError, DiskError: Images are missing; too little space.
    """
    names = job.file_names
    if not job.source.is_dir():
        raise DataError(
            f"{job.source}: no such image folder (split {job.split})",
            hint=f"the images of {origin.name} belong there, or a link to them",
        )
    missing = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if missing:
        raise DataError(
            f"{job.source}: {len(missing)} of {len(names)} images are missing, "
            f"among them {', '.join(missing[:MAX_NAMED])}",
            hint=f"they are listed in {origin}",
        )
    if job.options.pack and job.options.encoding == "raw":
        num_bytes = _raw_bytes(job)
        log.info(
            "packing %s as decoded pixels: %.2f GB in %s", job.split, num_bytes / 1e9, job.target
        )
        _require_space(job, num_bytes)
    elif job.options.pack and job.options.shrink is None:
        _require_space(job, sum(size or 0 for size in sizes))


def _raw_bytes(job: Job) -> int:
    """Return how many bytes the decoded pixels of a split take."""
    pixels = shrunk_sizes(job.sizes.astype(np.int32), job.options.shrink)
    return int(3 * pixels.astype(np.int64).prod(axis=1).sum())


def _require_space(job: Job, num_bytes: int) -> None:
    """Check that a split's images fit on the disk, except parts that an earlier run has written.

    Raises:
        DiskError: They do not.
    """
    parts = job.target.glob(f"images-{job.split}-{job.key[:8]}-*")
    needed = num_bytes - sum(part.stat().st_size for part in parts)
    free = free_bytes(job.target)
    if needed > free:
        raise DiskError(
            f"packing {job.split} needs {needed / 1e9:,.2f} GB in {job.target}, "
            f"{free / 1e9:,.2f} GB are free",
            hint="choose another folder with --store, smaller images with --shrink 400, or "
            "keep the images where they are with --no-pack",
        )


def image_findings(
    names: Sequence[str], image_ids: NDArray[np.int64], report: Report
) -> list[Finding]:
    findings = []
    for row, (problem, note) in enumerate(zip(report.problems, report.notes, strict=True)):
        if problem or note:
            kind = DROPPED_IMAGE if problem else NOTED_IMAGE
            detail = f"{names[row]}: {problem or note}"
            findings.append(Finding(kind, int(image_ids[row]), None, detail))
    return findings


def refuse_dropped(
    split: str, origin: Path, findings: list[Finding], *, boxes: int, images: int, trainable: int
) -> None:
    """Refuse a split that loses too many of its boxes or images, with the reasons counted.

    Raises:
        DataError: It does.
    """
    kinds = Counter(f.kind for f in findings if f.kind in DROPPED_BOXES)
    reasons = Counter(_reason(f.detail) for f in findings if f.kind == DROPPED_IMAGE)
    dropped_images, dropped_boxes = sum(reasons.values()), sum(kinds.values())
    is_empty = split == "train" and not trainable
    if (
        dropped_images <= MAX_DROPPED * images
        and dropped_boxes <= MAX_DROPPED * boxes
        and not is_empty
    ):
        return
    prefix = "nothing is left to train on: " if is_empty else ""
    counts = ", ".join(f"{n:,} x {reason}" for reason, n in (*reasons.items(), *kinds.items()))
    counts = counts or "no training image has a box to learn from"
    raise DataError(
        f"{origin} ({split}): {prefix}{dropped_images:,} of {images:,} images and "
        f"{dropped_boxes:,} of {boxes:,} boxes are dropped: {counts}",
        hint=_example(findings) + f"over {MAX_DROPPED:.0%} is not accepted: fix the files, or "
        "accept the loss with ssdctl prepare --allow-dropped",
    )


def _reason(detail: str) -> str:
    """Return why an image was dropped, without its name and numbers."""
    reason = detail.partition(": ")[2] or detail
    return re.sub(r"\d+", "N", reason.partition(" (")[0])


def _example(findings: list[Finding]) -> str:
    dropped = (f for f in findings if f.kind == DROPPED_IMAGE or f.kind in DROPPED_BOXES)
    first = next(dropped, None)
    return "" if first is None else f"for example image {first.image_id}, {first.detail}; "
