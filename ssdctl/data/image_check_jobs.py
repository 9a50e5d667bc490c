"""Check the images of a split in parts, so that an interrupted prepare can be continued.

A part is an Arrow file with a row for each image of a range of the annotation file: its problem,
the fingerprint of its file and, if packed, its bytes. It is published atomically, and its metadata
names the job (images and options) that it belongs to. A later run of the same job reuses a
part if every image of it is still the same file. The parts of a packed store are its shards; the
others are deleted once the index is written.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.data.image_check import (
    AMBIGUOUS,
    CheckedImage,
    FileFingerprint,
    FingerprintColumns,
    PackOptions,
    changed_images,
    check_image,
)
from ssdctl.data.store_check import METADATA_KEY, Shard
from ssdctl.files import DECODE_ERRORS, atomic_write
from ssdctl.runtime.map_ahead import map_ahead
from ssdctl.runtime.progress import Progress

PART_BYTES = 512 * 1024 * 1024  # of images
PART_ROWS = 8192
TASK_IMAGES = 32  # checked by one thread at a time, and a batch of the file
TASK_RAW_IMAGES = 4  # the same, of images that are decoded, which take a hundred times the memory
COLUMNS = {
    "image": pa.large_binary(),
    "problem": pa.string(),
    "note": pa.string(),
    "bytes": pa.int64(),
    "modified_ns": pa.int64(),
    "sketch": pa.int64(),
}


class Job(NamedTuple):
    """The checking of one split.

    Attributes:
        split: Its name.
        key: Hex digits that identify the images and the options.
        file_names: The N images, in the order of the annotations.
        sizes: N x 2, their annotated width and height.
        source: Their folder.
        target: The store's folder.
        options: What is done with each image.
        threads: How many images at a time.
    """

    split: str
    key: str
    file_names: list[str]
    sizes: NDArray[np.int64]
    source: Path
    target: Path
    options: PackOptions
    threads: int

    def part_name(self, number: int) -> str:
        kind = "images" if self.options.pack else ".checked"
        return f"{kind}-{self.split}-{self.key[:8]}-{number:05d}.arrow"


class Report(NamedTuple):
    """The result for every image, in order, and the parts that hold it."""

    fingerprints: list[FileFingerprint]
    problems: list[str | None]
    notes: list[str | None]
    parts: list[Shard]

    def warnings(self) -> list[str]:
        """Return warnings for the user."""
        ambiguous = sum(AMBIGUOUS in note for note in self.notes if note)
        if not ambiguous:
            return []
        return [
            f"{ambiguous:,} images have an EXIF orientation, and {AMBIGUOUS}: they are read as "
            "stored. If their boxes were drawn on upright pictures, turn the files themselves"
        ]


class _PartMetadata(msgspec.Struct, frozen=True):
    job: str
    start: int  # row of the annotation file


def check_images(job: Job, progress: Progress | None) -> Report:
    """Check every image of a split, reusing the parts of an earlier run of the job.

    Raises:
        DataError: An image does not exist, or cannot be read.
        DiskError: A part cannot be written.
    """
    report = Report([], [], [], [])
    while len(report.fingerprints) < len(job.file_names) and (part := _reusable_part(job, report)):
        _extend(report, part)
    start = len(report.fingerprints)
    with ThreadPoolExecutor(job.threads, thread_name_prefix="check") as pool:
        batches: Iterator[list[CheckedImage]] = _check_in_threads(pool, job, start)
        if progress is not None:
            batches = _with_progress(batches, progress, len(job.file_names), start, job.split)
        try:
            while len(report.fingerprints) < len(job.file_names):
                _extend(report, _write_part(job, report, batches))
        finally:
            pool.shutdown(cancel_futures=True)
    return report


def _extend(report: Report, more: Report) -> None:
    report.fingerprints.extend(more.fingerprints)
    report.problems.extend(more.problems)
    report.notes.extend(more.notes)
    report.parts.extend(more.parts)


def _reusable_part(job: Job, before: Report) -> Report | None:
    """Return the next part, if an earlier run has written it and its images are the same."""
    name, start = job.part_name(len(before.parts)), len(before.fingerprints)
    try:
        with pa.memory_map(str(job.target / name)) as source:
            opened = pa.ipc.open_file(source)
            table = opened.read_all().select([c for c in COLUMNS if c != "image"])
            raw = (opened.schema.metadata or {}).get(METADATA_KEY, b"{}")
            columns = table.to_pydict()
        if msgspec.json.decode(raw, type=_PartMetadata) != _PartMetadata(job.key, start):
            return None
        if any(table.column(name).null_count for name in FingerprintColumns._fields):
            return None
    except (OSError, KeyError, pa.ArrowException, *DECODE_ERRORS):
        return None
    lists = [columns[name] for name in FingerprintColumns._fields]
    fingerprints = [FileFingerprint(*triple) for triple in zip(*lists, strict=True)]
    recorded = FingerprintColumns(*(np.array(values, np.int64) for values in lists))
    names = job.file_names[start : start + len(fingerprints)]
    if len(names) < len(fingerprints) or changed_images(job.source, names, recorded):
        return None
    shard = Shard(name, len(fingerprints))
    return Report(fingerprints, columns["problem"], columns["note"], [shard])


def _check_in_threads(
    pool: ThreadPoolExecutor, job: Job, start: int
) -> Iterator[list[CheckedImage]]:
    """Check images in order, some tasks ahead."""

    def check(first: int) -> list[CheckedImage]:
        names, sizes = job.file_names[first : first + size], job.sizes[first : first + size]
        return [
            check_image(job.source / name, (width, height), job.options)
            for name, (width, height) in zip(names, sizes.tolist(), strict=True)
        ]

    size = TASK_RAW_IMAGES if job.options.encoding == "raw" else TASK_IMAGES
    firsts = range(start, len(job.file_names), size)
    yield from map_ahead(pool, check, firsts, job.threads + 2)


def _with_progress(
    batches: Iterator[list[CheckedImage]], progress: Progress, total: int, done: int, split: str
) -> Iterator[list[CheckedImage]]:
    """Pass batches through and count their images in a progress display."""
    ahead: deque[list[CheckedImage]] = deque()

    def images() -> Iterator[None]:
        yield from itertools.repeat(None, done)
        for batch in batches:
            ahead.append(batch)
            yield from itertools.repeat(None, len(batch))

    for _ in progress(images(), total=total, label=f"checking {split}", unit="img"):
        if ahead:
            yield ahead.popleft()


def _write_part(job: Job, before: Report, batches: Iterator[list[CheckedImage]]) -> Report:
    """Take batches until a part is full; publish it."""
    number, start = len(before.parts), len(before.fingerprints)
    name = job.part_name(number)
    metadata = {METADATA_KEY: msgspec.json.encode(_PartMetadata(job.key, start))}
    columns = [pa.field(c, t) for c, t in COLUMNS.items() if c != "image" or job.options.pack]
    schema = pa.schema(columns, metadata=metadata)
    part = Report([], [], [], [])
    size = 0
    with atomic_write(job.target / name) as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(_record(batch, schema))
            part.fingerprints.extend(c.fingerprint for c in batch)
            part.problems.extend(c.problem for c in batch)
            part.notes.extend(c.note for c in batch)
            size += sum(len(c.content or b"") for c in batch)
            if size >= PART_BYTES or (not job.options.pack and len(part.fingerprints) >= PART_ROWS):
                break
    part.parts.append(Shard(name, len(part.fingerprints)))
    return part


def _record(batch: list[CheckedImage], schema: Any) -> Any:
    values = {
        "image": [c.content for c in batch],
        "problem": [c.problem for c in batch],
        "note": [c.note for c in batch],
        "bytes": [c.fingerprint.bytes for c in batch],
        "modified_ns": [c.fingerprint.modified_ns for c in batch],
        "sketch": [c.fingerprint.sketch for c in batch],
    }
    arrays = [pa.array(values[field.name], field.type) for field in schema]
    return pa.record_batch(arrays, schema=schema)
