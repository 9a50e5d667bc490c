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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from ssdctl._version import __version__
from ssdctl.data import index as index_file
from ssdctl.data.annotations import (
    AUTOMATIC,
    UNLISTED,
    Annotations,
    Conversion,
    Finding,
    root_folder,
)
from ssdctl.data.check import (
    DROPPED_IMAGE,
    NOTED_IMAGE,
    check,
    duplicate_names,
    image_findings,
    refuse_dropped,
)
from ssdctl.data.dataset import (
    find_source,
    label_version,
    labels_changed,
    read_dataset,
)
from ssdctl.data.image_check import (
    Encoding,
    FingerprintColumns,
    PackOptions,
    changed_images,
)
from ssdctl.data.image_check_jobs import Job, Report, check_files, check_images
from ssdctl.data.image_files import is_image, resolve_images
from ssdctl.data.index import (
    Made,
    Metadata,
    fingerprints_of,
    read_made,
    read_metadata,
    read_packing,
)
from ssdctl.data.store import image_folder
from ssdctl.data.store_folder import is_cached_store
from ssdctl.errors import DataError, DiskError
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
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.safe_text import html_table

log = logging.getLogger(__name__)
NO_BOXES = "no boxes (skipped in training)"
NO_BOXES_NOT_TRAINED = "no boxes"  # in a split that is not trained on
REPORT = "report.json"
MAX_REPORT_BYTES = 1 << 28
PARTS_FORMAT = 4  # the files in which an interrupted check continues


class SplitReport(msgspec.Struct, frozen=True):
    split: str
    images: int
    boxes: int
    classes: int
    trainable: int
    findings: list[Finding]
    key: str  # identifies the job that wrote the index
    warnings: list[str] = []  # for the user
    notes: list[str] = []  # how the files were read

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
    conversion: Conversion = AUTOMATIC,
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
        conversion: How to read the annotations.
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
    if not force and (outcome := _unchanged_outcome(root, folder, conversion, options)):
        return outcome  # without the lock: the folder may be read-only
    splits, made = _read(root, conversion)  # before the folder is made: nothing may be wrong
    _make_store_dir(folder)
    with lock(folder / ".lock", f"waiting for another ssdctl that prepares {folder}"):
        if not force and (outcome := _unchanged_outcome(root, folder, conversion, options)):
            return outcome
        remove_stale_temporaries(folder)
        reports = [
            _prepare_split(split, splits, folder, options, run, made, root) for split in made.splits
        ]
        reports = _with_unlisted(reports, root, folder)
        outcome = Outcome(str(root), str(folder), options.pack, False, reports)
        write_bytes(folder / REPORT, msgspec.json.format(msgspec.json.encode(outcome)))
        index_file.remove_unused(folder, made.splits)
    return outcome


def _read(root: Path, conversion: Conversion) -> tuple[dict[str, Annotations], Made]:
    """Read a dataset, and the version of its label files meanwhile."""
    name, read = find_source(root, conversion)
    with ThreadPoolExecutor(1) as pool:  # hashing releases the interpreter lock
        version = pool.submit(label_version, root, name, conversion, content=True)
        splits = read_dataset(root, conversion, read)
        labels = version.result()
    if label_version(root, name, conversion).state != labels.state:
        raise DataError(f"{root}: labels changed while they were read", hint="run it again")
    return splits, Made(name, conversion, labels, list(splits), __version__)


def _make_store_dir(folder: Path) -> None:
    try:
        make_dir(folder)
        with disk_errors(folder, "writing"):
            os.close(no_follow(folder / ".lock", os.O_WRONLY | os.O_CREAT))
    except DiskError as error:
        raise DiskError(
            str(error), hint="choose another folder for the store with --store DIR"
        ) from None


def _read_report(folder: Path) -> Outcome | None:
    try:
        content = read_limited(folder / REPORT, MAX_REPORT_BYTES)
        return msgspec.json.decode(content, type=Outcome)
    except (OSError, *DECODE_ERRORS):
        return None


def _unchanged_outcome(
    root: Path, folder: Path, conversion: Conversion, options: PackOptions
) -> Outcome | None:
    """Return the last outcome if the dataset and the options are unchanged; else None."""
    outcome, made = _read_report(folder), read_made(folder)
    if outcome is None or made is None or made.conversion != conversion:
        return None
    if made.labels.state and labels_changed(root, made.format, conversion, made.labels):
        return None
    keys = {report.split: report.key for report in outcome.splits}
    for split in made.splits:
        metadata = read_metadata(folder, split)
        if metadata is None or metadata.key != keys.get(split):
            return None
        if not _fits(metadata, folder, options):
            return None
        # With a packed store the images may be gone; those that exist must be unchanged.
        images = image_folder(root, metadata)
        if (images.is_dir() or not options.pack) and changed_images(
            images, *index_file.read_fingerprints(folder, split)
        ):
            return None
    return msgspec.structs.replace(outcome, unchanged=True)


def _fits(packing: index_file.Packing, folder: Path, options: PackOptions) -> bool:
    """Return whether the images of a split are stored as the options say, and are there."""
    packed = (packing.packed, packing.shrink, packing.encoding)
    if packed != (options.pack, options.shrink, options.encoding):
        return False
    if options.verify and packing.verified != options.verified:
        return False
    return all((folder / shard.file).is_file() for shard in packing.shards)


def _prepare_split(
    split: str,
    splits: dict[str, Annotations],
    folder: Path,
    options: PackOptions,
    run: _RunOptions,
    made: Made,
    root: Path,
) -> SplitReport:
    """Check a split, which is taken from `splits` to free its memory, and write its index."""
    annotations, num_bytes = resolve_images(splits.pop(split))
    names, image_ids, sizes = annotations.file_names, annotations.image_ids, annotations.sizes
    objects, findings, warnings = check(annotations)
    if split == made.splits[0]:  # all splits have the same classes
        warnings = warnings + duplicate_names(annotations.classes)
    num_boxes = len(annotations.ids) + sum(f.kind == UNLISTED for f in annotations.findings)
    origin, classes, notes = annotations.origin, annotations.classes, [*annotations.notes]
    source = annotations.folder
    del annotations  # hundreds of MB that are not needed any more

    # What a part depends on. With `force` no earlier part is valid.
    identity = [
        PARTS_FORMAT,
        hashlib.sha256(os.fsencode("\0".join(names))).hexdigest(),
        hashlib.sha256(sizes.tobytes()).hexdigest(),
        options.shrink,
        options.verified,
        time.time_ns() * run.force,
        options.encoding,
    ]
    key = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()
    job = Job(split, key, names, sizes, source, folder, options, run.jobs or usable_cores())
    images = None if run.force else _known_images(job, num_bytes)
    if images is None:
        check_files(job, origin, num_bytes)
        index_file.remove_if_it_has(folder, split, job.part_name(0))
        images = check_images(job, run.progress)
    findings += image_findings(names, image_ids, images.table)
    is_usable = images.is_usable
    counts = objects.num_trained()
    for row in np.nonzero(is_usable & (counts == 0))[0]:
        kind = NO_BOXES if split == "train" else NO_BOXES_NOT_TRAINED
        findings.append(Finding(kind, int(image_ids[row]), None, names[row]))
    trainable = int((is_usable & (counts > 0)).sum())
    if not run.allow_dropped:
        refuse_dropped(
            split,
            origin,
            boxes=num_boxes,
            images=len(names),
            trainable=trainable,
            findings=findings,
        )
    metadata = Metadata(
        format=index_file.FORMAT,
        packed=options.pack,
        shards=images.parts if options.pack else [],
        shrink=options.shrink,
        encoding=options.encoding,
        verified=options.verified,
        key=hashlib.sha256(f"{key}{time.time_ns()}".encode()).hexdigest(),
        classes=classes,
        images=_relative(source, root),
        origin=str(origin),
        made=made,
    )
    path = index_file.index_path(folder, split)
    index_file.write_index(
        path, names, image_ids, sizes, objects, is_usable, fingerprints_of(images.table), metadata
    )
    return SplitReport(
        split=split,
        images=len(names),
        boxes=int(counts.sum()),
        classes=len(classes),
        trainable=trainable,
        findings=findings,
        key=metadata.key,
        warnings=warnings + images.warnings(),
        notes=notes,
    )


def _relative(path: Path, root: Path) -> str:
    """Return a path relative to the dataset folder if it is below it, else absolute."""
    path, base = path.absolute(), root_folder(root).absolute()
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def _known_images(job: Job, num_bytes: list[int | None]) -> Report | None:
    """Return what the split's index, of this or an earlier version, knows of the same images.

    So neither changed labels nor a new version of the index pack images again. Packed images may
    have been deleted; those that exist must be unchanged.
    """
    packing, outcome = read_packing(job.target, job.split), _read_report(job.target)
    if packing is None or outcome is None or not _fits(packing, job.target, job.options):
        return None
    if packing.verified != job.options.verified:
        return None
    path = index_file.index_path(job.target, job.split)
    try:
        names, sizes, is_usable = index_file.read_images(path)
        fingerprints = index_file.read_fingerprints(job.target, job.split)[1]
    except DataError:
        return None  # damaged
    if names != job.file_names or not np.array_equal(sizes, job.sizes):
        return None
    there = [row for row, size in enumerate(num_bytes) if size is not None or not packing.packed]
    recorded = FingerprintColumns(*(column[there] for column in fingerprints))
    if changed_images(job.source, [names[row] for row in there], recorded):
        return None
    report = next((r for r in outcome.splits if r.split == job.split), None)
    details: dict[str, dict[str, str]] = {DROPPED_IMAGE: {}, NOTED_IMAGE: {}}
    for finding in report.findings if report else ():
        if finding.kind in details:
            name, _, text = finding.detail.partition(": ")
            details[finding.kind][name] = text
    problems = [
        None if usable else details[DROPPED_IMAGE].get(name, "cannot be used")
        for name, usable in zip(names, is_usable.tolist(), strict=True)
    ]
    columns: dict[str, Any] = fingerprints._asdict()
    columns["problem"] = pa.array(problems, pa.string())
    columns["note"] = pa.array([details[NOTED_IMAGE].get(name) for name in names], pa.string())
    return Report(pa.table(columns), packing.shards)


def _with_unlisted(reports: list[SplitReport], root: Path, folder: Path) -> list[SplitReport]:
    """Add a note on image files that no split lists, for each image folder."""
    by_folder: dict[Path, list[str]] = {}
    for report in reports:
        metadata = read_metadata(folder, report.split)
        if metadata is not None and (images := image_folder(root, metadata)).is_dir():
            by_folder.setdefault(images, []).append(report.split)
    notes: dict[str, str] = {}  # by the first split of a folder
    for images, names in by_folder.items():
        known = {n for s in names for n in index_file.read_fingerprints(folder, s)[0]}
        with os.scandir(images) as entries:
            names_there = {entry.name for entry in entries}
        if unlisted := sorted(n for n in names_there - known if is_image(Path(n))):
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
