"""Checks of `prepare` on a whole split: missing images, disk space, and how much is dropped."""

from __future__ import annotations

import logging
import re
from collections import Counter

import numpy as np

from ssdctl.data.dataset import SplitFiles
from ssdctl.data.formats.coco import MAX_NAMED
from ssdctl.data.formats.coco_check import DROPPED_BOXES, Finding
from ssdctl.data.formats._coco_json import ImageEntry, column
from ssdctl.data.image_check_jobs import Job, Report
from ssdctl.data.store import shrunk_sizes
from ssdctl.errors import DataError, DiskError
from ssdctl.files import free_bytes

log = logging.getLogger(__name__)
DROPPED_IMAGE = "image dropped"
MAX_DROPPED = 0.05  # of the images or boxes of a split


def check_files(job: Job, files: SplitFiles, sizes: list[int | None]) -> None:
    """Check that every image exists and that there is enough disk space."""
    names = [image.file_name for image in job.images]
    missing = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if missing:
        raise DataError(
            f"{files.images}: {len(missing)} of {len(names)} images are missing, "
            f"among them {', '.join(missing[:MAX_NAMED])}",
            hint=f"they are listed in {files.annotations}",
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
    sizes = [column(job.images, name) for name in ("width", "height")]
    pixels = shrunk_sizes(np.stack(sizes, axis=1).astype(np.int32), job.options.shrink)
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


def image_findings(images: list[ImageEntry], report: Report) -> list[Finding]:
    findings = []
    for image, problem, note in zip(images, report.problems, report.notes, strict=True):
        if problem:
            detail = f"{image.file_name}: {problem}"
            findings.append(Finding(DROPPED_IMAGE, image.id, None, detail))
        elif note:
            findings.append(
                Finding("image with a note", image.id, None, f"{image.file_name}: {note}")
            )
    return findings


def refuse_dropped(
    split: str,
    files: SplitFiles,
    num_boxes: int,
    trainable: int,
    num_images: int,
    findings: list[Finding],
) -> None:
    """Refuse a split that loses too much, with the reasons counted."""
    kinds = Counter(f.kind for f in findings if f.kind in DROPPED_BOXES)
    reasons = Counter(_reason(f.detail) for f in findings if f.kind == DROPPED_IMAGE)
    dropped_images, dropped_boxes = sum(reasons.values()), sum(kinds.values())
    is_empty = split == "train" and not trainable
    if (
        dropped_images <= MAX_DROPPED * num_images
        and dropped_boxes <= MAX_DROPPED * num_boxes
        and not is_empty
    ):
        return
    prefix = "nothing is left to train on: " if is_empty else ""
    counts = ", ".join(f"{n:,} x {reason}" for reason, n in (*reasons.items(), *kinds.items()))
    counts = counts or "no training image has a box to learn from"
    raise DataError(
        f"{files.annotations} ({split}): {prefix}{dropped_images:,} of {num_images:,} images and "
        f"{dropped_boxes:,} of {num_boxes:,} boxes are dropped: {counts}",
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
