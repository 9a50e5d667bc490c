"""Check a dataset and write the store that training reads.

    outcome = prepare(root, store, PrepareConfig(shrink=400))

Every annotation and every image's header is checked; what cannot be trained on is dropped and
listed in the store's report.json. The indexes are written last, so a killed run leaves the old
store; the next start continues with what is finished (image_check.py).
A second `prepare` of the same folder waits for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl._version import __version__
from ssdctl.config import PrepareConfig
from ssdctl.data import index, is_cached_store, prepare_command
from ssdctl.data.annotations import (
    AUTOMATIC,
    NO_LABELS,
    UNLABELED,
    UNLISTED,
    Annotations,
    Conversion,
    Finding,
    Resolved,
    root_folder,
)
from ssdctl.data.check import (
    NO_BOXES_LEFT,
    NO_OBJECTS,
    Objects,
    check,
    duplicate_names,
)
from ssdctl.data.dataset import (
    find,
    read_and_convert,
    require_same_classes,
    resolve_images,
)
from ssdctl.data.divide import series_warning
from ssdctl.data.duplicates import (
    ImageVersions,
    contradictions,
    copies,
    duplicate_warnings,
    find_duplicates,
)
from ssdctl.data.image_check import (
    CheckedImages,
    ImageCheck,
    check_files,
    check_images,
    verified,
)
from ssdctl.data.image_files import relative_folder
from ssdctl.data.report import (
    Outcome,
    SplitReport,
    count_classes,
    object_sizes,
    refuse_dropped,
    refuse_empty,
    summary_warnings,
)
from ssdctl.data.sources import (
    Sources,
    changes,
    contents_of,
    label_files,
    note_unlisted,
    unlisted_images,
    versions_of,
    write_sources,
)
from ssdctl.data.store import image_folder
from ssdctl.data.stored_images import (
    REPORT,
    config_of,
    fits,
    has_packed_images,
    have_changed,
    known_images,
    lost_images,
    read_report,
    replaces_images,
)
from ssdctl.errors import DataError, DiskError, SsdctlError, UsageError
from ssdctl.files import (
    atomic_write,
    disk_errors,
    lock,
    make_dir,
    no_follow,
    remove_stale_temporaries,
    write_bytes,
)
from ssdctl.runtime.progress import Progress, without_progress

log = logging.getLogger(__name__)
PACKED = PrepareConfig()
CHUNKS_FORMAT = 4  # the files in which an interrupted check continues


def prepare(
    root: Path,
    folder: Path,
    config: PrepareConfig = PACKED,
    conversion: Conversion = AUTOMATIC,
    *,
    force: bool = False,
    is_optional: bool = False,
    keep_images: bool = False,
    progress: Progress = without_progress,
) -> Outcome:
    """Write the store of the dataset in `root` to `folder`, unless it is up to date.

    Args:
        force: Write it again even if nothing changed.
        is_optional: The conversion's --split is not of this call: a dataset that has validation
            images is not divided.
        keep_images: Write only indexes if the store has packed images, whose options replace the
            config's.
        progress: Wraps the iteration over images (`total=`, `label=`, `unit=`).

    Raises:
        DataError: The dataset is invalid; the message says where. Or with `keep_images`, other
            images than the packed ones are needed.
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
    dataset = _read(root, folder, conversion, is_optional=is_optional)
    is_new = not folder.exists()
    _make_store_dir(folder)  # not earlier: nothing may be wrong
    with lock(folder / ".lock", f"waiting for another ssdctl that prepares {folder}"):
        if keep_images:
            stored = config_of(folder) or config
            config = msgspec.structs.replace(stored, allow_dropped=config.allow_dropped)
        if not force and (outcome := _unchanged_outcome(root, folder, config, dataset.conversion)):
            return outcome
        try:
            return _write(_Store(root, folder, config, force, keep_images, progress), dataset)
        except SsdctlError:
            if is_new and [path.name for path in folder.iterdir()] == [".lock"]:
                with contextlib.suppress(OSError):  # NFS keeps a file that is open
                    (folder / ".lock").unlink()
                    folder.rmdir()
            raise


class _Dataset(NamedTuple):
    """A dataset as its files describe it."""

    format: str
    conversion: Conversion
    splits: dict[str, Resolved]
    sources: Sources
    divisions: tuple[str, ...]


class _Store(NamedTuple):
    """The store that is written, and how; see `prepare`."""

    root: Path
    folder: Path
    config: PrepareConfig
    force: bool
    keep_images: bool
    progress: Progress


class _PreparedSplit(NamedTuple):
    annotations: Annotations  # without the objects
    objects: Objects
    is_empty: NDArray[np.bool_]
    images: CheckedImages
    usable: ImageVersions  # without those that are dropped
    report: SplitReport


def _read(root: Path, folder: Path, conversion: Conversion, *, is_optional: bool) -> _Dataset:
    """Read a dataset, find its images, and record the versions of its files."""
    name, module = find(root, conversion.source)
    base, files = root_folder(root), label_files(root, name, folder)
    versions, contents = versions_of(base, files), contents_of(base, files)
    splits, conversion, division = read_and_convert(
        root, conversion, module, store=folder, is_optional=is_optional
    )
    require_same_classes(root, splits)
    resolved = resolve_images(splits)
    if label_files(root, name, folder) != files or versions_of(base, files) != versions:
        raise DataError(f"{root}: labels changed while they were read", hint="run it again")
    listed: dict[str, tuple[Path, set[str]]] = {}
    for images, _ in resolved.values():
        images_dir = listed.setdefault(relative_folder(images.folder, root), (images.folder, set()))
        images_dir[1].update(images.file_names)
    num_bytes, modified_ns = np.array(versions, np.int64).reshape(-1, 2).T
    unlisted = unlisted_images(root, listed, folder, name)
    hashes = np.array(contents, np.int64)
    sources = Sources(files, num_bytes, modified_ns, hashes, unlisted, division)
    note_unlisted(root, resolved, unlisted)
    states = () if conversion.split is None else division.states
    return _Dataset(name, conversion, resolved, sources, states)


def _write(store: _Store, dataset: _Dataset) -> Outcome:
    """Check all splits, then write their indexes: if one is refused, the old store remains."""
    folder, splits = store.folder, list(dataset.splits)
    remove_stale_temporaries(folder)
    known = {s: _known(store, s, dataset.splits[s][0]) for s in splits}
    if lost := lost_images(store.root, folder, dataset.splits, known):
        raise DataError(
            f"{folder}: would lose packed images that have labels, but no file any more: "
            f"{len(lost):,}, such as {lost[0]}",
            hint=_hint_of_lost(store),
        )
    replaces = store.keep_images and replaces_images(folder, known)
    if replaces and index.read_made(folder):
        _refuse_to_replace(store)
    prepared: dict[str, _PreparedSplit] = {}
    for split in splits:
        prepared[split] = _prepare_split(store, split, dataset, known[split], prepared)
    if replaces:  # after the checks: their reason is why `prepare` wrote no index
        _refuse_to_replace(store)
    made = index.Made(
        dataset.format,
        dataset.conversion,
        write_sources(folder, dataset.sources),
        splits,
        __version__,
        os.path.realpath(store.root),
        dataset.divisions,
    )
    with contextlib.ExitStack() as published:  # together, as late as possible
        for split in reversed(splits):
            file = published.enter_context(atomic_write(index.index_path(folder, split)))
            _write_index(file, store, made, prepared[split])
    reports = [result.report for result in prepared.values()]
    outcome = Outcome(str(store.root), str(folder), store.config.pack, False, reports)
    write_bytes(folder / REPORT, msgspec.json.format(msgspec.json.encode(outcome)))
    index.remove_unused(folder, splits)
    return outcome


def _known(store: _Store, split: str, images: Annotations) -> CheckedImages | None:
    if store.force:
        return None
    return known_images(store.root, store.folder, store.config, split, images)


def _make_store_dir(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if not all(name == ".lock" or name.endswith(".tmp") for name in names) and not any(
        index.is_store_file(name) for name in names
    ):
        raise UsageError(
            f"{folder}: has other files than those of a store, such as {min(names)}",
            hint="give an empty folder, or a new one: --store DIR",
        )
    try:
        make_dir(folder)
        with disk_errors(folder, "writing"):
            os.close(no_follow(folder / ".lock", os.O_WRONLY | os.O_CREAT))
    except DiskError as error:
        raise DiskError(str(error), hint="choose another folder with --store DIR") from None


def _unchanged_outcome(
    root: Path, folder: Path, config: PrepareConfig, conversion: Conversion
) -> Outcome | None:
    """Return the last outcome if the dataset and the options are unchanged; else None."""
    outcome, made = read_report(folder), index.read_made(folder)
    if outcome is None or made is None or made.conversion != conversion:
        return None
    if changes(root, folder, made):
        return None
    keys = {report.split: report.key for report in outcome.splits}
    for split in made.splits:
        metadata = index.read_metadata(folder, split)
        if metadata is None or metadata.key != keys.get(split):
            return None
        if not fits(metadata, folder, config):
            return None
        known = index.read_images(folder, split)
        if have_changed(root, image_folder(root, metadata), metadata, known):
            return None
    # The folder may have been moved or copied since.
    return msgspec.structs.replace(outcome, root=str(root), store=str(folder), unchanged=True)


def _hint_of_lost(store: _Store) -> str:
    """Return how to keep packed images that have no file any more."""
    hint, packed = "put the files back, or remove their labels", config_of(store.folder)
    if packed is None or packed == store.config:
        return hint
    command = prepare_command(store.root, store.folder, *_image_options(packed))
    return f"{hint}; with the store's own options they stay: {command}"


def require_packed(root: Path, folder: Path, splits: Mapping[str, Resolved]) -> None:
    """Refuse other images than a store's packed ones, if it has any, as with `keep_images`."""
    if not has_packed_images(folder):
        return
    config = config_of(folder) or PACKED
    store = _Store(root, folder, config, force=False, keep_images=True, progress=without_progress)
    known = {s: _known(store, s, found) for s, (found, _) in splits.items()}
    if replaces_images(folder, known):
        _refuse_to_replace(store)


def _refuse_to_replace(store: _Store) -> NoReturn:
    root, folder, config = store.root, store.folder, store.config
    made = index.read_made(folder)
    problem = "its packed images are not those of the dataset any more"
    if made is None:
        problem = "its packed images have no index: prepare was interrupted or refused"
    command = prepare_command(root, folder, *_image_options(config))
    raise DataError(f"{folder}: {problem}", hint=f"only prepare replaces them: {command}")


def _image_options(config: PrepareConfig) -> list[str]:
    checks = ["--verify-images"] * config.verify_images + ["--keep-damaged"] * config.keep_damaged
    return [*index.packing_options(config), *checks]


def _prepare_split(
    store: _Store,
    split: str,
    dataset: _Dataset,
    known: CheckedImages | None,
    earlier: Mapping[str, _PreparedSplit],
) -> _PreparedSplit:
    """Check the labels and images of a split; `known` images are not checked again."""
    annotations, num_bytes = dataset.splits.pop(split)  # frees its objects at the end
    objects, is_empty, findings, warnings = check(annotations)
    warnings = [*warnings, *_name_warnings(split, annotations, dataset.conversion, earlier)]
    num_boxes = len(annotations.ids) + sum(f.kind == UNLISTED for f in annotations.findings)
    # The objects are hundreds of MB that are not needed any more.
    annotations = annotations.with_objects(np.zeros(len(annotations.ids), np.bool_))
    images = known or _check_images(store, split, annotations, num_bytes)
    versions = ImageVersions(annotations.folder, annotations.file_names, images.fingerprints)
    counts, is_usable = objects.num_trained(), images.is_usable
    usable = versions.only(is_usable)
    duplicates = find_duplicates(usable, {s: p.usable for s, p in earlier.items()})
    background, left_out = is_usable & is_empty, is_usable & ~is_empty & (counts == 0)
    findings += images.findings
    findings += _without_boxes(split, annotations, background, left_out, findings)
    per_class, sizes = count_classes(annotations.classes, objects, is_usable), object_sizes(objects)
    report = SplitReport(
        split=split,
        images=len(counts),
        boxes=int(counts[is_usable].sum()),
        classes=len(annotations.classes),
        trainable=int((is_usable & (counts > 0)).sum()),
        background=int(background.sum()),
        findings=findings,
        key=hashlib.sha256(f"{split}{annotations.folder}{time.time_ns()}".encode()).hexdigest(),
        per_class=per_class,
        object_sizes=sizes,
        duplicates=duplicates,
        warnings=[
            *warnings,
            *images.warnings(),
            *duplicate_warnings(split, len(usable.names), duplicates),
            *contradictions(versions, objects, background | (is_usable & (counts > 0))),
            *copies(versions, annotations.sizes, objects, is_usable & (counts > 0)),
            *summary_warnings(split, int(is_usable.sum()), int(background.sum()), per_class, sizes),
        ],
        notes=[note.encode(errors="backslashreplace").decode() for note in annotations.notes],
    )
    refuse_empty(report, annotations.origin)
    if not store.config.allow_dropped:
        options = [*_image_options(store.config), *filter(None, [str(dataset.conversion)])]
        command = prepare_command(store.root, store.folder, *options, "--allow-dropped")
        refuse_dropped(report, annotations.origin, num_boxes, command)
    return _PreparedSplit(annotations, objects, is_empty, images, usable, report)


def _name_warnings(
    split: str,
    annotations: Annotations,
    conversion: Conversion,
    earlier: Mapping[str, _PreparedSplit],
) -> list[str]:
    """Return warnings about names of classes, and about series of images in two splits."""
    # All splits have the same classes.
    warnings = [] if earlier else duplicate_names(annotations.classes)
    if split == "val" and conversion.split and not conversion.group:
        names = [c.name for c in annotations.classes]
        train_names = earlier["train"].annotations.file_names
        warnings = warnings + series_warning(train_names, annotations.file_names, names)
    return warnings


def _check_images(
    store: _Store, split: str, annotations: Annotations, num_bytes: list[int | None]
) -> CheckedImages:
    folder, key = store.folder, _chunks_key(annotations, store.config, store.force)
    job = ImageCheck(split, key, annotations, folder, store.config)
    old = index.read_metadata(folder, split)
    if old is not None and job.chunk_name(0) in [shard.file for shard in old.shards]:
        # The old shards stay until the new index is written.
        job = job._replace(key=hashlib.sha256(f"{key}{old.key}".encode()).hexdigest())
    check_files(job, num_bytes)
    return check_images(job, store.progress)


def _write_index(
    file: IO[bytes], store: _Store, made: index.Made, prepared: _PreparedSplit
) -> None:
    annotations, objects, is_empty, images, _, report = prepared
    metadata = index.Metadata(
        format=5,
        packed=store.config.pack,
        shards=images.shards,
        shrink=store.config.shrink,
        encoding=store.config.encoding,
        verified=verified(store.config),
        key=report.key,
        upright=(annotations.upright and images.have_orientation) or msgspec.UNSET,
        classes=annotations.classes,
        images=relative_folder(annotations.folder, store.root),
        origin=str(annotations.origin.absolute()),
        made=made,
        duplicates=report.duplicates,
    )
    usable, fingerprints = images.is_usable, images.fingerprints
    index.write_index(file, annotations, objects, usable, is_empty, fingerprints, metadata)


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
    """Return a hash of everything a chunk depends on; unique if `force`."""
    identity = [
        CHUNKS_FORMAT,
        _hash(annotations.file_names),
        hashlib.sha256(annotations.sizes.tobytes()).hexdigest(),
        config.shrink,
        verified(config),
        time.time_ns() if force else 0,
        config.encoding,
        *([_hash(sorted(annotations.unsized))] if annotations.unsized else ()),
    ]
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()


def _hash(names: Iterable[str]) -> str:
    return hashlib.sha256(os.fsencode("\0".join(names))).hexdigest()
