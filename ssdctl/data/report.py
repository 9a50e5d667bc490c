"""What `prepare` reports about a dataset, and which datasets it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from ssdctl.data.annotations import Finding
from ssdctl.data.check import DROPPED_BOXES, DROPPED_IMAGE, WITHOUT_OBJECTS
from ssdctl.data.duplicates import Duplicates
from ssdctl.data.summary import ClassCount, ObjectSizes
from ssdctl.errors import DataError
from ssdctl.runtime.safe_text import counted, html_table

MAX_DROPPED = 0.05  # share of the images or boxes in a split


class SplitReport(msgspec.Struct, frozen=True):
    split: str
    images: int  # including dropped images
    boxes: int  # to train on, in usable images
    classes: int
    trainable: int  # images with a box to train on
    background: int  # images without objects
    findings: list[Finding]
    key: str  # identifies the job that wrote the index
    per_class: list[ClassCount]
    object_sizes: ObjectSizes
    duplicates: list[Duplicates]  # images that another split has, too
    warnings: list[str] = []  # for the user
    notes: list[str] = []  # how the files were read

    @property
    def usable(self) -> int:
        return self.images - sum(f.kind == DROPPED_IMAGE for f in self.findings)

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each kind."""
        return dict(Counter(f.kind for f in self.findings).most_common())


class Outcome(msgspec.Struct, frozen=True):
    root: str
    store: str
    packed: bool
    unchanged: bool
    splits: list[SplitReport]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: each split, and what was dropped or repaired."""
        rows = []
        for s in self.splits:
            found = ", ".join(f"{count} x {kind}" for kind, count in s.counts().items())
            rows.append((s.split, s.usable, s.boxes, s.classes, found or "none"))
        return html_table(("split", "images", "boxes", "classes", "findings"), rows, self.store)


def refuse_empty(report: SplitReport, origin: Path) -> None:
    """Refuse a training split without a usable image that has a box, with the reasons counted."""
    if report.split != "train" or report.trainable:
        return
    reasons = [f"{count:,} x {kind}" for kind, count in _dropped(report).items()]
    reasons += [
        f"{counted(n, 'image')} with {k}"
        for k, n in report.counts().items()
        if k in WITHOUT_OBJECTS
    ]
    example = next((f for f in report.findings if f.kind not in WITHOUT_OBJECTS), None)
    hints = [f"for example image {example.image_id}, {example.detail}"] if example else []
    raise DataError(
        f"{origin} (train): nothing to train on, none of {counted(report.images, 'image')} is "
        f"usable and has a box: {', '.join(reasons)}",
        hint="; ".join([*hints, *report.notes]) or "label objects in some of the images",
    )


def refuse_dropped(report: SplitReport, origin: Path, num_boxes: int) -> None:
    """Refuse a split that loses too many of its images or boxes, with the reasons counted."""
    reasons = _dropped(report)
    num_images = sum(f.kind == DROPPED_IMAGE for f in report.findings)
    dropped_boxes = reasons.total() - num_images
    if num_images <= MAX_DROPPED * report.images and dropped_boxes <= MAX_DROPPED * num_boxes:
        return
    example = next(f for f in report.findings if f.kind in (DROPPED_IMAGE, *DROPPED_BOXES))
    raise DataError(
        f"{origin} ({report.split}): {num_images:,} of {report.images:,} images and "
        f"{dropped_boxes:,} of {num_boxes:,} boxes are dropped: "
        f"{', '.join(f'{count:,} x {reason}' for reason, count in reasons.items())}",
        hint=f"for example image {example.image_id}, {example.detail}; over {MAX_DROPPED:.0%} is "
        "not accepted: fix the files, or accept the loss with ssdctl prepare --allow-dropped",
    )


def _dropped(report: SplitReport) -> Counter[str]:
    """Return the reasons for which images, then boxes, were dropped, with their numbers."""
    images = Counter(_reason(f.detail) for f in report.findings if f.kind == DROPPED_IMAGE)
    return images + Counter(f.kind for f in report.findings if f.kind in DROPPED_BOXES)


def _reason(detail: str) -> str:
    """Return why an image was dropped, without its name and what is particular to it."""
    return (detail.partition(": ")[2] or detail).partition(" (")[0]
