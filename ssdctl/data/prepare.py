"""Check a dataset and write the store that training reads.

    outcome = prepare(root, store, PrepareConfig(shrink=400))

Every annotation and every image's header is checked; what cannot be trained on is dropped and
listed in the store's report.json. A split's index is written last, so a killed run leaves the old
store or none; the next start continues with what is finished (image_check.py).
A second `prepare` of the same folder waits for the first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl._version import __version__
from ssdctl.config import PrepareConfig
from ssdctl.data import index
from ssdctl.data.annotations import (
    AUTOMATIC,
    NO_LABELS,
    UNLABELED,
    UNLISTED,
    Annotations,
    Conversion,
    Finding,
    root_folder,
)
from ssdctl.data.check import (
    DROPPED_IMAGE,
    NO_BOXES_LEFT,
    NO_OBJECTS,
    NOTED_IMAGE,
    check,
    duplicate_names,
)
from ssdctl.data.dataset import (
    find,
    label_version,
    labels_changed,
    read_dataset,
    require_same_classes,
)
from ssdctl.data.duplicates import ImageVersions, duplicate_warnings, find_duplicates
from ssdctl.data.find_images import Resolved, resolve_images
from ssdctl.data.image_check import CheckedImages, ImageCheck, check_files, check_images, verified
from ssdctl.data.image_files import FingerprintColumns, changed_images, is_image
from ssdctl.data.report import Outcome, SplitReport, refuse_dropped, refuse_empty
from ssdctl.data.store import image_folder
from ssdctl.data.store_folder import is_cached_store
from ssdctl.data.summary import count_classes, object_sizes, summary_warnings
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
from ssdctl.runtime.progress import Progress, without_progress

log = logging.getLogger(__name__)
REPORT = "report.json"
MAX_REPORT_BYTES = 1 << 28
PACKED = PrepareConfig()
CHUNKS_FORMAT = 4  # the files in which an interrupted check continues


def prepare(
    root: Path,
    folder: Path,
    config: PrepareConfig = PACKED,
    conversion: Conversion = AUTOMATIC,
    *,
    force: bool = False,
    progress: Progress = without_progress,
) -> Outcome:
    """Write the store of the dataset in `root` to `folder`, unless it is up to date.

    `force` writes it again even if nothing changed. `progress` wraps the iteration over images
    (`total=`, `label=`, `unit=`).

    Raises:
        DataError: The dataset is invalid; the message says where.
        DiskError: The store cannot be written.
    """
    if is_cached_store(folder):
        log.info(
            "%s cannot be written: its index is in %s (--store DIR to choose another)", root, folder
        )
        if config.pack:
            log.info("only the index is written there: --store DIR packs the images as well")
            config = msgspec.structs.replace(config, pack=False)
    if not config.pack:
        config = msgspec.structs.replace(config, shrink=None, encoding="jpeg")
    if not force and (outcome := _unchanged_outcome(root, folder, config, conversion)):
        return outcome  # without the lock: the folder may be read-only
    resolved, made = _read(root, conversion)  # before the folder is made: nothing may be wrong
    _make_store_dir(folder)
    with lock(folder / ".lock", f"waiting for another ssdctl that prepares {folder}"):
        if not force and (outcome := _unchanged_outcome(root, folder, config, conversion)):
            return outcome
        remove_stale_temporaries(folder)
        images: dict[str, ImageVersions] = {}
        reports = [
            _prepare_split(split, resolved, root, folder, config, made, images, force, progress)
            for split in made.splits
        ]
        outcome = Outcome(str(root), str(folder), config.pack, False, reports)
        write_bytes(folder / REPORT, msgspec.json.format(msgspec.json.encode(outcome)))
        index.remove_unused(folder, made.splits)
    return outcome


def _read(root: Path, conversion: Conversion) -> tuple[dict[str, Resolved], index.Made]:
    """Read a dataset, and the version of its label files; find its images."""
    name, module = find(root, conversion.source)
    labels = label_version(root, name, content=True)
    splits = read_dataset(root, conversion, module)
    if label_version(root, name).state != labels.state:
        raise DataError(f"{root}: labels changed while they were read", hint="run it again")
    require_same_classes(root, splits)
    made = index.Made(name, conversion, labels, list(splits), __version__)
    resolved = resolve_images(splits)
    _note_unlisted(resolved)
    return resolved, made


def _make_store_dir(folder: Path) -> None:
    try:
        make_dir(folder)
        with disk_errors(folder, "writing"):
            os.close(no_follow(folder / ".lock", os.O_WRONLY | os.O_CREAT))
    except DiskError as error:
        raise DiskError(str(error), hint="choose another folder with --store DIR") from None


def _read_report(folder: Path) -> Outcome | None:
    try:
        content = read_limited(folder / REPORT, MAX_REPORT_BYTES)
        return msgspec.json.decode(content, type=Outcome)
    except (OSError, *DECODE_ERRORS):
        return None


def _unchanged_outcome(
    root: Path, folder: Path, config: PrepareConfig, conversion: Conversion
) -> Outcome | None:
    """Return the last outcome if the dataset and the options are unchanged; else None."""
    outcome, made = _read_report(folder), index.read_made(folder)
    if outcome is None or made is None or made.conversion != conversion:
        return None
    if labels_changed(root, made):
        return None
    keys = {report.split: report.key for report in outcome.splits}
    for split in made.splits:
        metadata = index.read_metadata(folder, split)
        if metadata is None or metadata.key != keys.get(split):
            return None
        if not _fits(metadata, folder, config):
            return None
        # With a packed store the images may be gone; those that exist must be unchanged.
        images_dir = image_folder(root, metadata)
        if images_dir.is_dir() or not config.pack:
            images = index.read_images(folder, split)
            if changed_images(images_dir, images.names, images.fingerprints):
                return None
    # The folder may have been moved or copied since.
    return msgspec.structs.replace(outcome, root=str(root), store=str(folder), unchanged=True)


def _fits(packing: index.Metadata, folder: Path, config: PrepareConfig) -> bool:
    """Return whether the images of a split are stored as the options say, and are there."""
    packed = (packing.packed, packing.shrink, packing.encoding)
    if packed != (config.pack, config.shrink, config.encoding):
        return False
    if config.verify_images and packing.verified != verified(config):
        return False
    return all((folder / shard.file).is_file() for shard in packing.shards)


def _prepare_split(
    split: str,
    resolved: dict[str, Resolved],
    root: Path,
    folder: Path,
    config: PrepareConfig,
    made: index.Made,
    earlier: dict[str, ImageVersions],
    force: bool,
    progress: Progress,
) -> SplitReport:
    """Check a split, which is taken from `resolved` to free its memory, and write its index.

    Its images are compared with those of `earlier` splits and added to them.
    """
    annotations, num_bytes = resolved.pop(split)
    objects, is_empty, findings, warnings = check(annotations)
    if split == made.splits[0]:  # all splits have the same classes
        warnings = warnings + duplicate_names(annotations.classes)
    num_boxes = len(annotations.ids) + sum(f.kind == UNLISTED for f in annotations.findings)
    # The objects are hundreds of MB that are not needed any more.
    annotations = annotations.with_objects(np.zeros(len(annotations.ids), np.bool_))
    names = annotations.file_names
    key = _chunks_key(annotations, config, force)
    job = ImageCheck(split, key, annotations, folder, config)
    images = None if force else _known_images(job, num_bytes)
    if images is None:
        check_files(job, num_bytes)
        old = index.read_metadata(folder, split)
        if old is not None and job.chunk_name(0) in [shard.file for shard in old.shards]:
            index.index_path(folder, split).unlink()  # its shards are about to change
        images = check_images(job, progress)
    versions = ImageVersions(annotations.folder, names, images.fingerprints)
    duplicates = find_duplicates(versions, earlier)
    earlier[split] = versions
    counts = objects.num_trained()
    background = images.is_usable & is_empty
    left_out = images.is_usable & ~is_empty & (counts == 0)
    findings += images.findings
    findings += _without_boxes(split, annotations, background, left_out, findings)
    per_class = count_classes(annotations.classes, objects, images.is_usable)
    sizes = object_sizes(objects)
    report = SplitReport(
        split=split,
        images=len(names),
        boxes=int(counts[images.is_usable].sum()),
        classes=len(annotations.classes),
        trainable=int((images.is_usable & (counts > 0)).sum()),
        background=int(background.sum()),
        findings=findings,
        key=hashlib.sha256(f"{key}{time.time_ns()}".encode()).hexdigest(),
        per_class=per_class,
        object_sizes=sizes,
        duplicates=duplicates,
        warnings=[
            *warnings,
            *images.warnings(),
            *duplicate_warnings(split, len(names), duplicates),
            *summary_warnings(split, int(images.is_usable.sum()), per_class, sizes),
        ],
        notes=[*annotations.notes],
    )
    refuse_empty(report, annotations.origin)
    if not config.allow_dropped:
        refuse_dropped(report, annotations.origin, num_boxes)
    metadata = index.Metadata(
        format=5,
        packed=config.pack,
        shards=images.shards,
        shrink=config.shrink,
        encoding=config.encoding,
        verified=verified(config),
        key=report.key,
        upright=(annotations.upright and images.have_orientation) or msgspec.UNSET,
        classes=annotations.classes,
        images=_relative(annotations.folder, root),
        origin=str(annotations.origin),
        made=made,
        duplicates=duplicates,
    )
    path = index.index_path(folder, split)
    usable, fingerprints = images.is_usable, images.fingerprints
    index.write_index(path, annotations, objects, usable, is_empty, fingerprints, metadata)
    return report


def _without_boxes(
    split: str,
    annotations: Annotations,
    is_empty: NDArray[np.bool_],
    is_left_out: NDArray[np.bool_],
    findings: list[Finding],
) -> list[Finding]:
    """Return a finding for each image that is empty, or has no box left to train on."""
    ids, names = annotations.image_ids.tolist(), annotations.file_names
    result = [Finding(NO_OBJECTS, ids[r], None, names[r]) for r in np.flatnonzero(is_empty)]
    if split == "train":
        named = {f.image_id for f in findings if f.kind in (NO_LABELS, UNLABELED)}
        rows = [r for r in np.flatnonzero(is_left_out) if ids[r] not in named]
        result += [Finding(NO_BOXES_LEFT, ids[r], None, names[r]) for r in rows]
    return result


def _chunks_key(annotations: Annotations, config: PrepareConfig, force: bool) -> str:
    """Return hex digits that identify what a chunk depends on; with `force` no earlier one is."""
    identity = [
        CHUNKS_FORMAT,
        hashlib.sha256(os.fsencode("\0".join(annotations.file_names))).hexdigest(),
        hashlib.sha256(annotations.sizes.tobytes()).hexdigest(),
        config.shrink,
        verified(config),
        time.time_ns() if force else 0,
        config.encoding,
    ]
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()


def _relative(path: Path, root: Path) -> str:
    """Return a path relative to the dataset folder if it is below it, else absolute."""
    path, base = path.absolute(), root_folder(root).absolute()
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def _known_images(job: ImageCheck, num_bytes: list[int | None]) -> CheckedImages | None:
    """Return what the split's index knows of the same images.

    So changed labels do not pack images again. Packed images may
    have been deleted; those that exist must be unchanged.
    """
    packing, outcome = index.read_metadata(job.target, job.split), _read_report(job.target)
    if packing is None or outcome is None or not _fits(packing, job.target, job.config):
        return None
    reports = [r for r in outcome.splits if r.split == job.split and r.key == packing.key]
    if not reports or packing.verified != verified(job.config):
        return None
    try:
        known = index.read_images(job.target, job.split)
    except DataError:
        return None  # damaged
    images = job.annotations
    if known.names != images.file_names or not np.array_equal(known.sizes, images.sizes):
        return None
    there = [row for row, size in enumerate(num_bytes) if size is not None or not packing.packed]
    recorded = FingerprintColumns(*(column[there] for column in known.fingerprints))
    if changed_images(images.folder, [known.names[row] for row in there], recorded):
        return None
    new_ids = dict(zip(known.ids.tolist(), images.image_ids.tolist(), strict=True))
    findings = [
        msgspec.structs.replace(finding, image_id=new_ids.get(finding.image_id, finding.image_id))
        for finding in reports[0].findings
        if finding.kind in (DROPPED_IMAGE, NOTED_IMAGE)
    ]
    checked = CheckedImages(known.is_usable, known.fingerprints, findings, packing.shards)
    is_same = bool(packing.upright) == images.upright or not checked.have_orientation
    return checked if is_same else None


def _note_unlisted(resolved: dict[str, Resolved]) -> None:
    """Note image files that no split lists, in the first split of each folder with listed ones."""
    listed: dict[str, tuple[str, set[str]]] = {}  # a split and file names by folder
    for split, (images, num_bytes) in resolved.items():
        for name, size in zip(images.file_names, num_bytes, strict=True):
            if size is not None:
                folder, slash, file = name.rpartition("/")  # without a slash, `file` is `name`
                folder = f"{images.folder}{slash}{folder}"
                listed.setdefault(folder, (split, set()))[1].add(file)
    unlisted: dict[str, list[Path]] = {}  # by split
    for folder, (split, names) in listed.items():
        others = (p for p in Path(folder).iterdir() if p.name not in names and is_image(p))
        unlisted.setdefault(split, []).extend(sorted(others))
    for split, paths in unlisted.items():
        if paths:
            images, num_bytes = resolved[split]
            note = f"image files not in the dataset, left out: {len(paths):,}, such as {paths[0]}"
            resolved[split] = images._replace(notes=[*images.notes, note]), num_bytes
