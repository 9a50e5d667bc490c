"""Check a dataset and write the store that training reads.

    outcome = prepare(root, store, pack=True)

Every annotation and every image's header is looked at; what cannot be trained on is dropped, and
all of it is listed in the store's report.json. The index is written last, so a killed run leaves
nothing that looks prepared, and a second `prepare` of the same folder waits for the first.
"""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from ssdctl.data import coco, store
from ssdctl.data.coco import Boxes, Finding, ImageEntry
from ssdctl.data.dataset import SplitFiles, find_splits
from ssdctl.errors import DataError
from ssdctl.files import atomic_write, lock, make_dir, write_bytes

Progress = Callable[..., Iterable[Any]]
FORMATS = ("JPEG", "PNG")
CHUNK_IMAGES = 256  # read, checked and packed at a time
SHARD_BYTES = 1 << 30
MOST_PIXELS = 100_000_000  # a larger picture is taken for a bomb


class SplitReport(msgspec.Struct, frozen=True):
    """What prepare found in one split."""

    split: str
    images: int
    boxes: int
    classes: int
    trainable: int
    findings: list[Finding]

    def counts(self) -> dict[str, int]:
        """How often each kind of finding occurred."""
        return dict(Counter(f.kind for f in self.findings).most_common())


class Outcome(msgspec.Struct, frozen=True):
    """What `prepare` did."""

    root: str
    store: str
    packed: bool
    unchanged: bool
    splits: list[SplitReport]


class _Checked(NamedTuple):
    """One image after its check: its bytes where they are to be packed, or what is wrong."""

    content: bytes | None
    problem: str | None


def prepare(
    root: Path,
    folder: Path,
    *,
    pack: bool,
    shrink: int | None = None,
    jobs: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Write the store of the dataset in `root` to `folder`, unless it is there and still true.

    Args:
        root: The dataset folder.
        folder: The store's folder.
        pack: Copy the images into the store; else the index alone is written.
        shrink: Re-encode packed images whose shorter side is longer than this, in pixels.
        jobs: Threads; 0 = one per core.
        force: Write it anew in any case.
        progress: Wraps the iteration over images (`total=`, `label=`, `unit=`).

    Raises:
        DataError: The dataset cannot be trusted; the message names the place.
        DiskError: The store cannot be written.
    """
    splits = find_splits(root)
    make_dir(folder)
    with lock(folder / ".lock"):
        if not force and (known := _still_true(folder, splits, pack, shrink)):
            return known
        reports = []
        for split, files in splits.items():
            reports.append(_prepare_split(split, files, folder, pack, shrink, jobs, progress))
        outcome = Outcome(str(root), str(folder), pack, False, reports)
        write_bytes(folder / "report.json", msgspec.json.format(msgspec.json.encode(outcome)))
    return outcome


def is_prepared(root: Path, folder: Path) -> bool:
    """Whether the store holds every split of the dataset as it is now."""
    return all(
        (known := store.read_metadata(folder, split)) is not None
        and store.is_same(known.fingerprint, files.annotations)
        for split, files in find_splits(root).items()
    )


def _still_true(
    folder: Path, splits: dict[str, SplitFiles], pack: bool, shrink: int | None
) -> Outcome | None:
    """The last outcome, where it still describes the dataset and the wish."""
    for split, files in splits.items():
        known = store.read_metadata(folder, split)
        if known is None or bool(known.shards) != pack or known.shrink != shrink:
            return None
        if not store.is_same(known.fingerprint, files.annotations):
            return None
    try:
        outcome = msgspec.json.decode((folder / "report.json").read_bytes(), type=Outcome)
    except (OSError, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(outcome, unchanged=True)


def _prepare_split(
    split: str,
    files: SplitFiles,
    folder: Path,
    pack: bool,
    shrink: int | None,
    jobs: int,
    progress: Progress | None,
) -> SplitReport:
    mark = store.fingerprint(files.annotations)
    annotations = coco.read(files.annotations)
    boxes, findings = coco.check(annotations, files.annotations)
    _refuse_missing(annotations.images, files)

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        checked = _check_images(pool, files.images, annotations.images, pack, shrink)
        if progress is not None:
            total = len(annotations.images)
            checked = iter(progress(checked, total=total, label=f"checking {split}", unit="img"))
        problems, shards = _consume(checked, split, folder, pack)
    for image, problem in zip(annotations.images, problems, strict=True):
        if problem:
            findings.append(
                Finding("image dropped", image.id, None, f"{image.file_name}: {problem}")
            )
    usable = np.array([problem is None for problem in problems], np.bool_)
    counts = np.diff(boxes.starts)
    for row in np.nonzero(usable & (counts == 0))[0]:
        image = annotations.images[row]
        findings.append(
            Finding("image without boxes, not trained on", image.id, None, image.file_name)
        )

    classes = coco.class_names(annotations)
    metadata = store.Metadata(store.FORMAT, classes, mark, shards, shrink)
    _write_index(store.index_path(folder, split), annotations.images, boxes, usable, metadata)
    trainable = int((usable & (counts > 0)).sum())
    return SplitReport(
        split, len(annotations.images), len(boxes.labels), len(classes), trainable, findings
    )


def _refuse_missing(images: list[ImageEntry], files: SplitFiles) -> None:
    """Half an unpacked archive is no dataset: say so before an hour of checking."""
    missing = [i.file_name for i in images if not (files.images / i.file_name).is_file()]
    if missing:
        raise DataError(
            f"{files.images}: {len(missing)} of {len(images)} images are missing, "
            f"among them {', '.join(missing[: coco.SHOWN])}",
            hint=f"they are listed in {files.annotations}",
        )


def _check_images(
    pool: ThreadPoolExecutor,
    folder: Path,
    images: list[ImageEntry],
    keep: bool,
    shrink: int | None,
) -> Iterator[_Checked]:
    """Check images in order, a chunk at a time so that memory stays bounded."""

    def check(image: ImageEntry) -> _Checked:
        return _check_image(folder / image.file_name, image, keep, shrink)

    for start in range(0, len(images), CHUNK_IMAGES):
        yield from pool.map(check, images[start : start + CHUNK_IMAGES])


def _check_image(path: Path, image: ImageEntry, keep: bool, shrink: int | None) -> _Checked:
    """Look at an image's header; the pixels are decoded only to shrink them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of what is refused here by its size
            if not keep:
                with Image.open(path, formats=FORMATS) as picture:
                    return _Checked(None, _problem(picture, image))
            content = path.read_bytes()
            with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
                problem = _problem(picture, image)
                if problem is None and shrink and min(picture.size) > shrink:
                    content = _shrunk(picture, shrink)
            return _Checked(content if problem is None else b"", problem)
    except Image.DecompressionBombError as error:
        return _Checked(b"" if keep else None, f"refused by its header: {error}")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        return _Checked(b"" if keep else None, f"no readable JPEG or PNG ({error})")


def _problem(picture: Image.Image, image: ImageEntry) -> str | None:
    width, height = picture.size
    if width * height > MOST_PIXELS:
        return f"{width} x {height} pixels are over the bound of {MOST_PIXELS}"
    if (width, height) != (image.width, image.height):
        return f"is {width} x {height}, its annotation says {image.width} x {image.height}"
    return None


def _shrunk(picture: Image.Image, shorter: int) -> bytes:
    scale = shorter / min(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    buffer = io.BytesIO()
    small = picture.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    small.save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def _consume(
    checked: Iterator[_Checked], split: str, folder: Path, pack: bool
) -> tuple[list[str | None], list[store.Shard]]:
    """Collect what is wrong with each image and, with `pack`, write the shards."""
    problems: list[str | None] = []
    shards: list[store.Shard] = []
    if not pack:
        return [c.problem for c in checked], shards
    waiting: list[_Checked] = []
    size = 0
    for item in checked:
        problems.append(item.problem)
        waiting.append(item)
        size += len(item.content or b"")
        if size >= SHARD_BYTES:
            shards.append(_write_shard(waiting, split, folder, len(shards)))
            waiting, size = [], 0
    if waiting or not shards:
        shards.append(_write_shard(waiting, split, folder, len(shards)))
    return problems, shards


def _write_shard(items: list[_Checked], split: str, folder: Path, number: int) -> store.Shard:
    name = f"images-{split}-{number:05d}.arrow"
    schema = pa.schema([pa.field("image", pa.large_binary())])
    with atomic_write(folder / name) as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, len(items), CHUNK_IMAGES):
            chunk = [item.content for item in items[start : start + CHUNK_IMAGES]]
            writer.write_batch(pa.record_batch([pa.array(chunk, pa.large_binary())], schema=schema))
    return store.Shard(name, len(items))


def _write_index(
    path: Path,
    images: list[ImageEntry],
    boxes: Boxes,
    usable: np.ndarray[Any, np.dtype[np.bool_]],
    metadata: store.Metadata,
) -> None:
    offsets = pa.array(boxes.starts, pa.int32())
    quads = pa.FixedSizeListArray.from_arrays(pa.array(boxes.ltrb.reshape(-1), pa.float32()), 4)
    table = pa.table(
        {
            "image_id": pa.array([i.id for i in images], pa.int64()),
            "file_name": pa.array([i.file_name for i in images], pa.string()),
            "width": pa.array([i.width for i in images], pa.int32()),
            "height": pa.array([i.height for i in images], pa.int32()),
            "usable": pa.array(usable),
            "boxes": pa.ListArray.from_arrays(offsets, quads),
            "labels": pa.ListArray.from_arrays(offsets, pa.array(boxes.labels, pa.int32())),
            "is_crowd": pa.ListArray.from_arrays(offsets, pa.array(boxes.is_crowd)),
        },
        metadata={store.METADATA_KEY: msgspec.json.encode(metadata)},
    )
    with atomic_write(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def open_dataset(
    root: Path,
    folder: Path,
    *,
    say: Callable[[str], None],
    progress: Progress | None = None,
) -> dict[str, store.Split]:
    """The dataset's splits, ready to read; a dataset that was never prepared is indexed first.

    Raises:
        DataError: See `prepare`.
    """
    splits = find_splits(root)
    if not is_prepared(root, folder):
        say(f"{root} is not prepared yet: checking it, as `ssdctl prepare --no-pack` does")
        outcome = prepare(root, folder, pack=False, progress=progress)
        for report in outcome.splits:
            for kind, count in report.counts().items():
                say(f"  {report.split}: {count} x {kind}")
    return {split: store.open_split(folder, split, files) for split, files in splits.items()}


def count_trainable(root: Path, folder: Path) -> int:
    """How many images a run would train on; nothing is written.

    Raises:
        DataError: The annotations cannot be trusted, or there is no training split.
    """
    splits = find_splits(root)
    if "train" not in splits:
        raise DataError(f"{root}: has no training split")
    if is_prepared(root, folder):
        return len(store.open_split(folder, "train", splits["train"]).trainable)
    files = splits["train"]
    boxes, _ = coco.check(coco.read(files.annotations), files.annotations)
    return int((np.diff(boxes.starts) > 0).sum())
