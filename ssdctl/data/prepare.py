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
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from ssdctl.data import store
from ssdctl.data.convert import convert_if_needed, read_unconverted
from ssdctl.data.dataset import (
    NotConvertedError,
    SplitFiles,
    find_splits,
    require_images,
    require_split,
)
from ssdctl.data.formats import coco
from ssdctl.data.formats.coco import MAX_NAMED, Annotations
from ssdctl.data.formats.coco_check import (
    DROPPED_BOXES,
    Boxes,
    Finding,
    check,
    format_warnings,
)
from ssdctl.data.formats.coco_json import ImageEntry
from ssdctl.data.formats.coco_slices import sha256
from ssdctl.data.formats.file_names import resolve_images
from ssdctl.data.image_check import PackOptions, changed_images
from ssdctl.data.image_check_jobs import Job, Report, check_images
from ssdctl.data.store import is_prepared
from ssdctl.data.store_folder import is_cached_store
from ssdctl.errors import DataError, DiskError
from ssdctl.files import (
    DECODE_ERRORS,
    atomic_write,
    disk_errors,
    free_bytes,
    is_plain_name,
    lock,
    make_dir,
    no_follow,
    remove_stale_temporaries,
    write_bytes,
)
from ssdctl.runtime.progress import Progress

log = logging.getLogger(__name__)
NO_BOXES = "image without boxes, not trained on"
NO_BOXES_NOT_TRAINED = "image without boxes"  # of a split that is not trained on
DROPPED_IMAGE = "image dropped"
MAX_DROPPED = 0.05  # of the images or boxes of a split


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
    verify_images: bool = False,
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
        verify_images: Decode every image, not only those that look truncated.
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
    options = PackOptions(pack, shrink if pack else None, verify_images)
    run = _RunOptions(jobs, force, allow_dropped, progress)
    splits = find_splits(root, folder)
    if not run.force and (outcome := _unchanged_outcome(folder, splits, options)):
        return outcome  # without the lock: the folder may be read-only
    _make_store_dir(folder)
    with lock(folder / ".lock", f"waiting for another ssdctl that prepares {folder}"):
        if not run.force and (outcome := _unchanged_outcome(folder, splits, options)):
            return outcome
        remove_stale_temporaries(folder)
        reports = [_prepare_split(split, splits[split], folder, options, run) for split in splits]
        outcome = Outcome(str(root), str(folder), options.pack, False, reports)
        write_bytes(folder / "report.json", msgspec.json.format(msgspec.json.encode(outcome)))
        _remove_unused(folder, splits)
    return outcome


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
        outcome = msgspec.json.decode((folder / "report.json").read_bytes(), type=Outcome)
    except (OSError, *DECODE_ERRORS):
        return None
    keys = {report.split: report.key for report in outcome.splits}
    for split, files in splits.items():
        metadata = store.read_metadata(folder, split)
        if metadata is None or metadata.key != keys.get(split):
            return None
        if (metadata.packed, metadata.shrink) != (options.pack, options.shrink):
            return None
        if options.verify and not metadata.verified:
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
    split: str, files: SplitFiles, folder: Path, options: PackOptions, run: _RunOptions
) -> SplitReport:
    require_images(split, files)
    annotations, fingerprint = _read(files.annotations)
    sizes, notes = resolve_images(annotations.images, files.images)
    notes += _notes_on_classes(annotations)
    boxes, findings = check(annotations, files.annotations)
    warnings = format_warnings(annotations, boxes, findings)
    num_boxes = len(annotations.annotations.id)
    classes = coco.class_names(annotations)
    images = annotations.images
    del annotations  # hundreds of MB that are not needed any more

    # What a part depends on. With `force` no earlier part is valid.
    identity = [
        store.FORMAT,
        fingerprint.sha256,
        options.shrink,
        options.verify,
        time.time_ns() * run.force,
    ]
    key = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()
    threads = run.jobs or len(os.sched_getaffinity(0))
    job = Job(split, key, images, files.images, folder, options, threads)
    _check_files(job, files, sizes)
    index = store.index_path(folder, split)
    metadata = store.read_metadata(folder, split)
    if metadata is not None and metadata.key == key:
        index.unlink()  # its parts are about to change
    report = check_images(job, run.progress)
    findings.extend(_findings(images, report))
    usable = np.array([problem is None for problem in report.problems], np.bool_)
    counts = np.diff(boxes.starts)
    for row in np.nonzero(usable & (counts == 0))[0]:
        image = images[row]
        kind = NO_BOXES if split == "train" else NO_BOXES_NOT_TRAINED
        findings.append(Finding(kind, image.id, None, image.file_name))

    trainable = int((usable & (counts > 0)).sum())
    if not run.allow_dropped:
        _refuse_dropped(split, files, num_boxes, trainable, len(images), findings)
    shards = report.parts if options.pack else []
    metadata = store.Metadata(
        store.FORMAT,
        classes,
        fingerprint,
        key,
        options.pack,
        shards,
        options.shrink,
        options.verify,
    )
    _write_index(index, images, boxes, report, metadata)
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


def _refuse_dropped(
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


def _read(path: Path) -> tuple[Annotations, store.Fingerprint]:
    """Return an annotation file and its fingerprint, from the same bytes."""
    stat = path.stat()
    content = coco.read_content(path)
    with ThreadPoolExecutor(1) as pool:  # hashing releases the interpreter lock
        digest = pool.submit(sha256, content)
        annotations = coco.parse(content, path)
        return annotations, store.Fingerprint(len(content), stat.st_mtime_ns, digest.result())


def _check_files(job: Job, files: SplitFiles, sizes: list[int | None]) -> None:
    """Check that every image exists and that there is enough disk space."""
    names = [image.file_name for image in job.images]
    missing = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if missing:
        raise DataError(
            f"{files.images}: {len(missing)} of {len(names)} images are missing, "
            f"among them {', '.join(missing[:MAX_NAMED])}",
            hint=f"they are listed in {files.annotations}",
        )
    if job.options.pack and job.options.shrink is None:
        written = sum(
            p.stat().st_size for p in job.target.glob(f"images-{job.split}-{job.key[:8]}-*")
        )
        needed = sum(size or 0 for size in sizes) - written
        free = free_bytes(job.target)
        if needed > free:
            raise DiskError(
                f"packing {job.split} needs {needed / 1e9:,.2f} GB in {job.target}, "
                f"{free / 1e9:,.2f} GB are free",
                hint="choose another folder with --store, smaller images with --shrink 400, or "
                "keep the images where they are with --no-pack",
            )


def _findings(images: list[ImageEntry], report: Report) -> list[Finding]:
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


def _remove_unused(folder: Path, splits: dict[str, SplitFiles]) -> None:
    """Delete what no index names: parts of other jobs, splits that no longer exist."""
    used = {f"index-{split}.arrow" for split in splits}
    for split in splits:
        metadata = store.read_metadata(folder, split)
        used |= {shard.file for shard in metadata.shards} if metadata else set()
    for pattern in ("index-*.arrow", "images-*.arrow", ".checked-*.arrow"):
        for path in folder.glob(pattern):
            if path.name not in used:
                path.unlink(missing_ok=True)


def _write_index(
    path: Path,
    images: list[ImageEntry],
    boxes: Boxes,
    report: Report,
    metadata: store.Metadata,
) -> None:
    offsets = pa.array(boxes.starts, pa.int32())
    ltrb, fractions = (
        pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 4)
        for values in (boxes.ltrb, boxes.fractions)
    )
    columns: dict[str, Any] = {
        "image_id": pa.array([i.id for i in images], pa.int64()),
        "file_name": pa.array([i.file_name for i in images], pa.string()),
        "width": pa.array([i.width for i in images], pa.int32()),
        "height": pa.array([i.height for i in images], pa.int32()),
        "usable": pa.array([problem is None for problem in report.problems], pa.bool_()),
        "boxes": pa.ListArray.from_arrays(offsets, ltrb),
        "fractions": pa.ListArray.from_arrays(offsets, fractions),
        "labels": pa.ListArray.from_arrays(offsets, pa.array(boxes.labels, pa.int32())),
        "is_crowd": pa.ListArray.from_arrays(offsets, pa.array(boxes.is_crowd)),
        "bytes": pa.array([m.bytes for m in report.fingerprints], pa.int64()),
        "modified_ns": pa.array([m.modified_ns for m in report.fingerprints], pa.int64()),
        "sketch": pa.array([m.sketch for m in report.fingerprints], pa.int64()),
    }
    table = pa.table(columns, metadata={store.METADATA_KEY: msgspec.json.encode(metadata)})
    with atomic_write(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def open_dataset(
    root: Path,
    folder: Path,
    *,
    progress: Progress | None = None,
    check_images: bool = True,
) -> dict[str, store.Split]:
    """Return the dataset's splits, ready to read; one that was never prepared is indexed first.

    Args:
        root: The dataset folder.
        folder: The store's.
        progress: See `ssdctl.data.image_check_jobs`.
        check_images: Check whether the images of a store that is not packed are unchanged.

    Raises:
        DataError: See `prepare`; or an image is missing or changed since.
    """
    convert_if_needed(root, folder)
    splits = find_splits(root, folder)
    if not is_prepared(root, folder):
        log.info("%s is not prepared yet: checking it, as `ssdctl prepare --no-pack` does", root)
        outcome = prepare(root, folder, pack=False, progress=progress)
        for report in outcome.splits:
            for kind, count in report.counts().items():
                log.info("  %s: %d x %s", report.split, count, kind)
            for warning in (*report.notes, *report.warnings):
                log.info("  %s: %s", report.split, warning)
        return {split: store.open_split(folder, split, files) for split, files in splits.items()}
    if is_cached_store(folder):
        log.info("%s cannot be written: its index is in %s", root, folder)
    if check_images:
        for split, files in splits.items():
            _refuse_changed(folder, split, files)
    return {split: store.open_split(folder, split, files) for split, files in splits.items()}


def _refuse_changed(folder: Path, split: str, files: SplitFiles) -> None:
    metadata = store.read_metadata(folder, split)
    if metadata is None or metadata.packed:
        return
    require_images(split, files)
    changed = changed_images(files.images, *store.read_fingerprints(folder, split))
    if changed:
        raise DataError(
            f"{files.images}: {len(changed)} images are missing or changed since {folder} was "
            f"prepared: {', '.join(changed[:MAX_NAMED])}",
            hint="put them back, or run ssdctl prepare again with the same options",
        )


def count_trainable(root: Path, folder: Path) -> tuple[int, int]:
    """Return how many images and classes a run would train on; nothing is written.

    Raises:
        DataError: The annotations are invalid, or there is no training split.
    """
    try:
        files = require_split(find_splits(root, folder), "train", root)
        if is_prepared(root, folder):
            split = store.open_split(folder, "train", files)
            return len(split.trainable), len(split.classes)
        content = coco.read_content(files.annotations)
    except NotConvertedError:
        files, content = require_split(read_unconverted(root), "train", root)
    annotations = coco.parse(content, files.annotations)
    resolve_images([i for i in annotations.images if not is_plain_name(i.file_name)], files.images)
    boxes, _ = check(annotations, files.annotations)
    return int((np.diff(boxes.starts) > 0).sum()), len(annotations.categories)
