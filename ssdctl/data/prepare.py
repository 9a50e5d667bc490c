"""Check a dataset and write the store that training reads.

    outcome = prepare(root, store, pack=True)

Every annotation and every image's header is checked; what cannot be trained on is dropped and
listed in the store's report.json. A split's index is written last, so a killed run leaves the old
store or none; the next start continues with the parts that are finished (image_check_jobs.py).
A second `prepare` of the same folder waits for the first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ssdctl.data import store
from ssdctl.data.dataset import (
    SplitFiles,
    find_splits,
    require_images,
)
from ssdctl.data.formats import coco
from ssdctl.data.formats.coco import MAX_NAMED, Annotations
from ssdctl.data.formats.coco_check import (
    Finding,
    check,
    format_warnings,
)
from ssdctl.data.formats.coco_slices import sha256
from ssdctl.data.formats.file_names import is_image, resolve_images
from ssdctl.data.image_check import Encoding, PackOptions, changed_images
from ssdctl.data.image_check_jobs import Job, check_images
from ssdctl.data.prepare_checks import check_files, image_findings, refuse_dropped
from ssdctl.data.store_folder import is_cached_store
from ssdctl.data.store_writer import remove_unused, write_index
from ssdctl.errors import DiskError
from ssdctl.files import (
    DECODE_ERRORS,
    disk_errors,
    lock,
    make_dir,
    no_follow,
    read_limited,
    remove_stale_temporaries,
    write_bytes,
)
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.html_table import html_table
from ssdctl.runtime.printable import listed
from ssdctl.runtime.progress import Progress

log = logging.getLogger(__name__)
NO_BOXES = "no boxes (skipped in training)"
NO_BOXES_NOT_TRAINED = "no boxes"  # of a split that is not trained on
MAX_REPORT_BYTES = 1 << 28


class SplitReport(msgspec.Struct, frozen=True):
    """The result of checking one split."""

    split: str
    images: int
    boxes: int
    classes: int
    trainable: int
    findings: list[Finding]
    key: str  # of the job that the index belongs to
    warnings: list[str] = []  # for the user
    notes: list[str] = []  # how the files were read

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each kind."""
        return dict(Counter(f.kind for f in self.findings).most_common())


class Outcome(msgspec.Struct, frozen=True):
    """The result of `prepare`."""

    root: str
    store: str
    packed: bool
    unchanged: bool
    splits: list[SplitReport]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: each split, and what was dropped or repaired."""
        rows = [
            (s.split, s.images, s.boxes, s.classes, ", ".join(found) or "none")
            for s in self.splits
            for found in [[f"{count} x {kind}" for kind, count in s.counts().items()]]
        ]
        return html_table(("split", "images", "boxes", "classes", "findings"), rows, self.store)


class _RunOptions(NamedTuple):
    """Options of `prepare` that do not change the store, and where to report."""

    jobs: int
    force: bool
    allow_dropped: bool
    progress: Progress | None


def prepare(
    root: Path,
    folder: Path,
    *,
    pack: bool,
    shrink: int | None = None,
    encoding: Encoding = "jpeg",
    verify_images: bool = False,
    keep_damaged: bool = False,
    jobs: int = 0,
    force: bool = False,
    allow_dropped: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Write the store of the dataset in `root` to `folder`, unless it is up to date.

    Args:
        root: The dataset folder.
        folder: The store's folder.
        pack: Copy the images into the store; else only the index is written.
        shrink: Re-encode packed images whose shorter side is longer than this, in pixels.
        encoding: Pack image files (`jpeg`; shrunk ones become JPEGs), or decoded pixels (`raw`).
        verify_images: Decode every image strictly, not only those that look truncated.
        keep_damaged: Use images that `verify_images` finds damaged but partly decodable.
        jobs: Threads; 0 = one per core.
        force: Write it again even if nothing changed.
        allow_dropped: Accept a split that loses over 5% of its images or boxes, or all to train on.
        progress: Wraps the iteration over images (`total=`, `label=`, `unit=`).

    Raises:
        DataError: The dataset is invalid; the message names the place.
        DiskError: The store cannot be written.
    """
    if is_cached_store(folder):
        log.info(
            "%s cannot be written: its index is in %s (--store DIR to choose another)", root, folder
        )
        if pack:
            log.info("only the index is written there: --store DIR packs the images as well")
            pack = False
    options = PackOptions(pack, shrink, verify_images, encoding, keep_damaged)
    if not pack:
        options = options._replace(shrink=None, encoding="jpeg")
    run = _RunOptions(jobs, force, allow_dropped, progress)
    splits = find_splits(root, folder)
    if not run.force and (outcome := _unchanged_outcome(folder, splits, options)):
        return outcome  # without the lock: the folder may be read-only
    _make_store_dir(folder)
    with lock(folder / ".lock", f"waiting for another ssdctl that prepares {folder}"):
        if not run.force and (outcome := _unchanged_outcome(folder, splits, options)):
            return outcome
        remove_stale_temporaries(folder)
        reports = [_prepare_split(split, splits, folder, options, run) for split in splits]
        reports = _with_unlisted(reports, splits, folder)
        outcome = Outcome(str(root), str(folder), options.pack, False, reports)
        write_bytes(folder / "report.json", msgspec.json.format(msgspec.json.encode(outcome)))
        remove_unused(folder, splits)
    return outcome


def _verified(options: PackOptions) -> store.Verified:
    if not options.verify:
        return "no"
    return "damaged kept" if options.keep_damaged else "damaged dropped"


def _make_store_dir(folder: Path) -> None:
    try:
        make_dir(folder)
        with disk_errors(folder, "writing"):
            os.close(no_follow(folder / ".lock", os.O_WRONLY | os.O_CREAT))
    except DiskError as error:
        raise DiskError(
            str(error), hint="choose another folder for the store with --store DIR"
        ) from None


def _unchanged_outcome(
    folder: Path, splits: dict[str, SplitFiles], options: PackOptions
) -> Outcome | None:
    """Return the last outcome if the dataset and the options are unchanged; else None."""
    try:
        outcome = msgspec.json.decode(
            read_limited(folder / "report.json", MAX_REPORT_BYTES), type=Outcome
        )
    except (OSError, *DECODE_ERRORS):
        return None
    keys = {report.split: report.key for report in outcome.splits}
    for split, files in splits.items():
        metadata = store.read_metadata(folder, split)
        if metadata is None or metadata.key != keys.get(split):
            return None
        packed = (metadata.packed, metadata.shrink, metadata.encoding)
        if packed != (options.pack, options.shrink, options.encoding):
            return None
        if options.verify and metadata.verified != _verified(options):
            return None
        if not store.is_same(metadata.fingerprint, files.annotations):
            return None
        if not all((folder / shard.file).is_file() for shard in metadata.shards):
            return None
        if not options.pack:
            require_images(split, files)
        # With a packed store the images may be gone; those that exist must be unchanged.
        if files.images.is_dir() and changed_images(
            files.images, *store.read_fingerprints(folder, split)
        ):
            return None
    return msgspec.structs.replace(outcome, unchanged=True)


def _prepare_split(
    split: str,
    splits: dict[str, SplitFiles],
    folder: Path,
    options: PackOptions,
    run: _RunOptions,
) -> SplitReport:
    files = splits[split]
    require_images(split, files)
    other_splits = [other.annotations for name, other in splits.items() if name != split]
    annotations, fingerprint = _read(files.annotations, other_splits)
    sizes, notes = resolve_images(annotations.images, files.images)
    notes += _notes_on_classes(annotations)
    boxes, findings = check(annotations, files.annotations)
    findings += [
        Finding("image listed twice, merged with the first entry", i.id, None, i.file_name)
        for i in annotations.merged
    ]
    warnings = format_warnings(annotations, boxes, findings)
    if split == next(iter(splits)):  # all splits have the same classes
        warnings += _duplicate_names(annotations)
    num_boxes = len(annotations.annotations.id)
    classes = coco.class_names(annotations)
    images = annotations.images
    del annotations  # hundreds of MB that are not needed any more

    # What a part depends on. With `force` no earlier part is valid.
    identity = [
        store.FORMAT,
        fingerprint.sha256,
        options.shrink,
        _verified(options),
        time.time_ns() * run.force,
        *([options.encoding] if options.encoding != "jpeg" else []),
    ]
    key = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()
    threads = run.jobs or usable_cores()
    job = Job(split, key, images, files.images, folder, options, threads)
    check_files(job, files, sizes)
    index = store.index_path(folder, split)
    metadata = store.read_metadata(folder, split)
    if metadata is not None and metadata.key == key:
        index.unlink()  # its parts are about to change
    report = check_images(job, run.progress)
    findings.extend(image_findings(images, report))
    usable = np.array([problem is None for problem in report.problems], np.bool_)
    counts = np.diff(boxes.starts)
    for row in np.nonzero(usable & (counts == 0))[0]:
        image = images[row]
        kind = NO_BOXES if split == "train" else NO_BOXES_NOT_TRAINED
        findings.append(Finding(kind, image.id, None, image.file_name))

    trainable = int((usable & (counts > 0)).sum())
    if not run.allow_dropped:
        refuse_dropped(split, files, num_boxes, trainable, len(images), findings)
    shards = report.parts if options.pack else []
    metadata = store.Metadata(
        store.FORMAT,
        classes,
        fingerprint,
        key,
        options.pack,
        shards,
        options.shrink,
        options.encoding,
        _verified(options),
    )
    write_index(index, images, boxes, report, metadata)
    return SplitReport(
        split=split,
        images=len(images),
        boxes=len(boxes.labels),
        classes=len(classes),
        trainable=trainable,
        findings=findings,
        key=key,
        warnings=warnings + report.warnings(),
        notes=notes,
    )


def _notes_on_classes(annotations: Annotations) -> list[str]:
    if not annotations.supercategories:
        return []
    names = ", ".join(f"{c.name} (id {c.id})" for c in annotations.supercategories)
    return [f"category {names} is the supercategory of others and has no boxes: not a class"]


def _duplicate_names(annotations: Annotations) -> list[str]:
    counts = Counter(c.name for c in annotations.categories)
    same = [c for c in annotations.categories if counts[c.name] > 1]
    if not same:
        return []
    named = listed([f"{c.name} (id {c.id})" for c in same], MAX_NAMED)
    return [
        f"categories have the same name and are trained as different classes: {named}. Give each "
        "its own name, or one of their ids to all annotations"
    ]


def _with_unlisted(
    reports: list[SplitReport], splits: dict[str, SplitFiles], folder: Path
) -> list[SplitReport]:
    """Add a note on image files that no split lists, for each image folder."""
    by_folder: dict[Path, list[str]] = {}
    for split, files in splits.items():
        by_folder.setdefault(files.images, []).append(split)
    notes: dict[str, str] = {}  # of the first split of a folder
    for images, names in by_folder.items():
        listed_names = {n for split in names for n in store.read_fingerprints(folder, split)[0]}
        with os.scandir(images) as entries:
            names_there = {entry.name for entry in entries}
        if unlisted := sorted(n for n in names_there - listed_names if is_image(Path(n))):
            notes[names[0]] = (
                f"{len(unlisted):,} images of {images} are not listed in the annotations and are "
                f"left out, among them {unlisted[0]}"
            )
    return [
        msgspec.structs.replace(report, notes=[*report.notes, notes[report.split]])
        if report.split in notes
        else report
        for report in reports
    ]


def _read(path: Path, other_splits: Sequence[Path]) -> tuple[Annotations, store.Fingerprint]:
    """Return an annotation file and its fingerprint, from the same bytes."""
    stat = path.stat()
    content = coco.read_content(path)
    with ThreadPoolExecutor(1) as pool:  # hashing releases the interpreter lock
        digest = pool.submit(sha256, content)
        annotations = coco.parse(content, path, other_splits)
        return annotations, store.Fingerprint(len(content), stat.st_mtime_ns, digest.result())
