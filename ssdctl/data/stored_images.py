"""What a store has: its report, its options, and the images that `prepare` keeps or would lose.

    known_images(root, folder, config, "train", annotations)   # None: they are checked again

A packed store may have the only copies of images: their files may be gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np

from ssdctl.config import PrepareConfig
from ssdctl.data import index
from ssdctl.data.annotations import SPLITS, Annotations, Resolved, nfc
from ssdctl.data.check import DROPPED_IMAGE, NOTED_IMAGE
from ssdctl.data.image_check import NO_SIZE, CheckedImages, verified
from ssdctl.data.image_files import changed_images, file_sizes, relative_folder
from ssdctl.data.report import Outcome
from ssdctl.data.store import image_folder
from ssdctl.errors import DataError
from ssdctl.files import DECODE_ERRORS, msgspec_type, read_limited

REPORT = "report.json"
MAX_REPORT_BYTES = 1 << 28
PACKED_IMAGES = "images-*.arrow"
_Parts = tuple[str, ...]  # of a path


def read_report(folder: Path) -> Outcome | None:
    """Return what `prepare` reported when it wrote a store; None if it is unknown."""
    try:
        content = read_limited(folder / REPORT, MAX_REPORT_BYTES)
        return msgspec.json.decode(content, type=msgspec_type(Outcome))
    except (OSError, *DECODE_ERRORS):
        return None


def config_of(folder: Path) -> PrepareConfig | None:
    """Return the options with which a store has its images; None if there is no index."""
    first = next((m for s in SPLITS if (m := index.read_metadata(folder, s)) is not None), None)
    if first is None:
        return None
    return PrepareConfig(
        pack=first.packed,
        shrink=first.shrink,
        encoding=first.encoding,
        verify_images=first.verified != "no",
        keep_damaged=first.verified == "damaged kept",
    )


def has_packed_images(folder: Path) -> bool:
    return any(folder.glob(PACKED_IMAGES))


def fits(metadata: index.Metadata, folder: Path, config: PrepareConfig) -> bool:
    """Return whether the images of a split are stored as the options say, and are there."""
    packed = (metadata.packed, metadata.shrink, metadata.encoding)
    if packed != (config.pack, config.shrink, config.encoding):
        return False
    if metadata.verified != verified(config):
        return False
    return all(index.is_complete(folder / shard.file) for shard in metadata.shards)


def have_changed(
    root: Path, folder: Path, metadata: index.Metadata, known: index.IndexedImages
) -> bool:
    """Return whether images changed; those of a packed store may have been deleted."""
    may_be_gone = metadata.packed
    if relative_folder(folder, root) != metadata.images:  # it may be misspelled
        may_be_gone &= {*file_sizes(image_folder(root, metadata), known.names)} == {None}
    return bool(changed_images(folder, known.names, known.fingerprints, may_be_gone=may_be_gone))


def known_images(
    root: Path, folder: Path, config: PrepareConfig, split: str, images: Annotations
) -> CheckedImages | None:
    """Return what the index knows of the same images, so that new labels pack none again."""
    metadata, outcome = index.read_metadata(folder, split), read_report(folder)
    if metadata is None or outcome is None:
        return None
    reports = [r for r in outcome.splits if r.split == split and r.key == metadata.key]
    if not (reports and fits(metadata, folder, config)):
        return None
    try:
        known = index.read_images(folder, split)
    except DataError:
        return None  # damaged
    if known.names != images.file_names or not np.array_equal(known.sizes, images.sizes):
        return None
    if have_changed(root, images.folder, metadata, known):
        return None
    new_ids = dict(zip(known.ids.tolist(), images.image_ids.tolist(), strict=True))
    findings = [
        msgspec.structs.replace(finding, image_id=new_ids.get(finding.image_id, finding.image_id))
        for finding in reports[0].findings
        if finding.kind in (DROPPED_IMAGE, NOTED_IMAGE)
    ]
    checked = CheckedImages(known.is_usable, known.fingerprints, findings, metadata.shards)
    is_same = bool(metadata.upright) == images.upright or not checked.have_orientation
    is_same &= bool(images.unsized) or not any(NO_SIZE in finding.detail for finding in findings)
    return checked if is_same else None


def replaces_images(folder: Path, known: Mapping[str, object]) -> bool:
    """Return whether the images of these splits are not all packed, or those of another one are."""
    gone = _packed_splits(folder) - known.keys()
    return has_packed_images(folder) and (None in known.values() or bool(gone))


def _packed_splits(folder: Path) -> set[str]:
    """Return the splits with packed images; if an index is damaged, those with files of them."""
    made = index.read_made(folder)
    names = (path.name for path in folder.glob(PACKED_IMAGES))
    return {name.split("-")[1] for name in names} if made is None else {*made.splits}


def lost_images(
    root: Path, folder: Path, splits: Mapping[str, Resolved], known: Mapping[str, object]
) -> list[str]:
    """Return packed images whose labels are there, but no file: of splits that are not `known`."""
    missing, ends = dict[_Parts, str](), dict[_Parts, str]()
    for images, num_bytes in splits.values():
        names = zip(images.file_names, num_bytes, strict=True)
        for name in (*(n for n, size in names if size is None), *images.without_image):
            missing[_own_path(name)] = name
            ends.update(dict.fromkeys(_ends(_own_path(name)), name))
    lost: list[str] = []
    for split in SPLITS if has_packed_images(folder) else ():
        path = index.index_path(folder, split)
        if known.get(split) or not path.exists():
            continue
        try:
            metadata, old = index.require_metadata(path), index.read_images(folder, split)
        except DataError:
            is_whole = split in splits and not missing
            lost += [] if is_whole else [f"those of {split}, whose index is damaged"]
            continue
        if metadata.packed:
            sizes = file_sizes(image_folder(root, metadata), old.names)
            rows = zip(old.names, sizes, old.is_usable, strict=True)
            gone = [name for name, size, is_usable in rows if is_usable and size is None]
            for name in gone:
                parts = _own_path(name)
                labels = [missing[end] for end in _ends(parts) if end in missing]
                if label := ends.get(parts, labels[0] if labels else None):
                    lost.append(name if label == name else f"{name} ({label})")
    return lost


def _own_path(name: str) -> _Parts:
    """Return the parts of an image's path, or of its label file's, that both have."""
    path = PurePosixPath(nfc(name))
    return tuple(part for part in (*path.parts[:-1], path.stem) if part not in ("images", "labels"))


def _ends(path: _Parts) -> list[_Parts]:
    return [path[n:] for n in range(len(path))]
