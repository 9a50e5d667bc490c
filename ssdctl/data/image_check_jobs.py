"""Check the images of a split in chunks, so that an interrupted prepare can be continued.

A chunk is an Arrow file with a row per image: its problem, the fingerprint of its file and, if
packed, its bytes. It is published atomically, and its metadata names the job (images and options).
A later run of the job reuses a chunk if its files are the same. The chunks of a packed store are
its shards; the others are deleted once the index is written.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.config import PrepareConfig
from ssdctl.data import index
from ssdctl.data.annotations import MAX_NAMED, Annotations, Finding
from ssdctl.data.check import image_findings
from ssdctl.data.image_check import (
    AMBIGUOUS,
    CheckedImage,
    FingerprintColumns,
    changed_images,
    check_image,
    shrunk_sizes,
)
from ssdctl.data.image_files import require_image_folder
from ssdctl.errors import DataError, DiskError
from ssdctl.files import DECODE_ERRORS, atomic_write, free_bytes
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.system import usable_cores
from ssdctl.runtime.threads import map_ahead

log = logging.getLogger(__name__)
CHUNK_BYTES = 512 * 1024 * 1024  # image bytes
CHUNK_ROWS = 8192
TASK_IMAGES = 32  # checked by one thread at a time, and a batch of the file
TASK_RAW_IMAGES = 4  # the same, of images that are decoded, which take a hundred times the memory


class Job(NamedTuple):
    split: str
    key: str  # hex digits that identify the images and the options
    annotations: Annotations  # of N images, without their objects
    target: Path  # the store's folder
    config: PrepareConfig

    def chunk_name(self, number: int) -> str:
        kind = "images" if self.config.pack else ".checked"
        return f"{kind}-{self.split}-{self.key[:8]}-{number:05d}.arrow"

    @property
    def num_threads(self) -> int:
        return self.config.jobs or usable_cores()

    @property
    def task_images(self) -> int:
        return TASK_RAW_IMAGES if self.config.encoding == "raw" else TASK_IMAGES


class CheckedImages(NamedTuple):
    """The result of checking the N images of a split."""

    is_usable: NDArray[np.bool_]  # N
    fingerprints: FingerprintColumns
    findings: list[Finding]  # images dropped or with a note, in order
    shards: list[index.Shard]  # that have the packed images

    def warnings(self) -> list[str]:
        ambiguous = sum(AMBIGUOUS in finding.detail for finding in self.findings)
        if not ambiguous:
            return []
        return [
            f"{ambiguous:,} images have an EXIF orientation, and {AMBIGUOUS}: they are read as "
            "stored. If their boxes were drawn on upright images, turn the files themselves"
        ]


class _ChunkMetadata(msgspec.Struct, frozen=True):
    job: str
    start: int  # row of the annotation file


def check_files(job: Job, sizes: list[int | None]) -> None:
    """Check that every image exists, of `sizes` in bytes, and that there is enough disk space."""
    images = job.annotations
    require_image_folder(images.folder, job.split, images.origin)
    missing = [n for n, size in zip(images.file_names, sizes, strict=True) if size is None]
    if missing:
        raise DataError(
            f"{images.folder}: {len(missing)} of {len(sizes)} images are missing, "
            f"among them {', '.join(missing[:MAX_NAMED])}",
            hint=f"they are listed in {images.origin}",
        )
    if job.config.pack and job.config.encoding == "raw":
        pixels = shrunk_sizes(images.sizes.astype(np.int32), job.config.shrink)
        num_bytes = int(3 * pixels.astype(np.int64).prod(axis=1).sum())
        log.info(
            "packing %s as decoded pixels: %.2f GB in %s", job.split, num_bytes / 1e9, job.target
        )
    elif job.config.pack and job.config.shrink is None:
        num_bytes = sum(size or 0 for size in sizes)
    else:
        return
    written = job.target.glob(f"images-{job.split}-{job.key[:8]}-*")  # by an earlier run
    needed = num_bytes - sum(path.stat().st_size for path in written)
    free = free_bytes(job.target)
    if needed > free:
        raise DiskError(
            f"packing {job.split} needs {needed / 1e9:,.2f} GB in {job.target}, "
            f"{free / 1e9:,.2f} GB are free",
            hint="choose another folder with --store, smaller images with --shrink 400, or "
            "keep the images where they are with --no-pack",
        )


def check_images(job: Job, progress: Progress) -> CheckedImages:
    """Check every image of a split, reusing the chunks of an earlier run of the job."""
    names, image_ids = job.annotations.file_names, job.annotations.image_ids
    tables: list[Any] = []
    start = 0
    while start < len(names) and (table := _reusable_chunk(job, len(tables), start)) is not None:
        tables.append(table)
        start += table.num_rows
    with ThreadPoolExecutor(job.num_threads, thread_name_prefix="check") as pool:
        done_and_new = itertools.chain(range(start), _check_in_threads(pool, job, start))
        label = f"checking {job.split}"
        shown = progress(done_and_new, total=len(names), label=label, unit="img")
        images = itertools.islice(shown, start, None)
        try:
            while start < len(names):
                tables.append(_write_chunk(job, len(tables), start, images))
                start += tables[-1].num_rows
        finally:
            pool.shutdown(cancel_futures=True)
    shards = [index.Shard(job.chunk_name(number), t.num_rows) for number, t in enumerate(tables)]
    none = pa.schema(index.RESULT_COLUMNS.items()).empty_table()
    table = pa.concat_tables([none, *tables])
    return CheckedImages(
        np.asarray(table.column("problem").is_null()),
        index.fingerprints_of(table),
        image_findings(names, image_ids, table),
        shards if job.config.pack else [],
    )


def _reusable_chunk(job: Job, number: int, start: int) -> Any:
    """Return the chunk that starts at an image, if an earlier run of the job has written it and its
    images are the same; else None."""
    try:
        table = index.read_table(job.target / job.chunk_name(number), index.RESULT_COLUMNS)
        raw = (table.schema.metadata or {}).get(index.METADATA_KEY, b"{}")
        metadata = msgspec.json.decode(raw, type=_ChunkMetadata)
    except (DataError, *DECODE_ERRORS):
        return None
    images = job.annotations
    names = images.file_names[start : start + table.num_rows]
    if metadata != _ChunkMetadata(job.key, start) or len(names) < table.num_rows:
        return None
    return None if changed_images(images.folder, names, index.fingerprints_of(table)) else table


def _check_in_threads(pool: ThreadPoolExecutor, job: Job, start: int) -> Iterator[CheckedImage]:
    def check(first: int) -> list[CheckedImage]:
        names = images.file_names[first : first + size]
        sizes = images.sizes[first : first + size].tolist()
        return [
            check_image(images.folder / name, (width, height), job.config)
            for name, (width, height) in zip(names, sizes, strict=True)
        ]

    images, size = job.annotations, job.task_images
    firsts = range(start, len(images.file_names), size)
    return itertools.chain.from_iterable(map_ahead(pool, check, firsts, job.num_threads + 2))


def _write_chunk(job: Job, number: int, start: int, images: Iterator[CheckedImage]) -> Any:
    """Take images until a chunk is full; publish it, and return its table without the images."""
    columns = (index.SHARD_COLUMNS if job.config.pack else {}) | index.RESULT_COLUMNS
    metadata = {index.METADATA_KEY: msgspec.json.encode(_ChunkMetadata(job.key, start))}
    schema = pa.schema(columns.items(), metadata=metadata)
    results = []
    num_bytes = num_images = 0
    path = job.target / job.chunk_name(number)
    with atomic_write(path) as file, pa.ipc.new_file(file, schema) as writer:
        while batch := list(itertools.islice(images, job.task_images)):
            record = pa.RecordBatch.from_pylist([image._asdict() for image in batch], schema)
            writer.write_batch(record)
            results.append(record.select(list(index.RESULT_COLUMNS)))
            num_images += len(batch)
            num_bytes += sum(len(image.image or b"") for image in batch)
            if num_bytes >= CHUNK_BYTES or (not job.config.pack and num_images >= CHUNK_ROWS):
                break
    return pa.Table.from_batches(results)
