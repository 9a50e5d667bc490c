"""The work of prepare in parts, so that a killed one goes on where it was.

A part is an Arrow file with a row for each image of a stretch of the annotation file: what is
wrong with it, what tells the file from another version and, packed, its bytes. It is published
whole, and its metadata names the job (annotations and wishes) that it belongs to. A later start of
the same job takes a part over where every image of it is still the same file. The parts of a packed
store stay as its shards; the others go once the index is written.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from ssdctl.data.formats.coco import ImageEntry
from ssdctl.data.image_check import Checked, FileFingerprint, Wish, changed_images, check_image
from ssdctl.data.store import METADATA_KEY, Shard
from ssdctl.files import atomic_write
from ssdctl.runtime.map_ahead import map_ahead

PART_BYTES = 512 * 1024 * 1024  # of images
PART_ROWS = 8192
TASK_IMAGES = 32  # checked by one thread at a time, and a batch of the file
COLUMNS = {
    "image": pa.large_binary(),
    "problem": pa.string(),
    "note": pa.string(),
    "bytes": pa.int64(),
    "modified_ns": pa.int64(),
    "sketch": pa.int64(),
}

Progress = Callable[..., Iterable[Any]]


class Job(NamedTuple):
    """What the parts of a split belong to.

    Attributes:
        split: Its name.
        key: Hex digits that stand for the annotations and the wish.
        images: The images, in the annotation file's order.
        source: Their folder.
        target: The store's folder.
        wish: What is done with each image.
        threads: How many at a time.
    """

    split: str
    key: str
    images: list[ImageEntry]
    source: Path
    target: Path
    wish: Wish
    threads: int

    def part_name(self, number: int) -> str:
        kind = "images" if self.wish.pack else ".checked"
        return f"{kind}-{self.split}-{self.key[:8]}-{number:05d}.arrow"


class Report(NamedTuple):
    """What is known of every image, in order, and the parts that say it."""

    marks: list[FileFingerprint]
    problems: list[str | None]
    notes: list[str | None]
    parts: list[Shard]


class _PartMetadata(msgspec.Struct, frozen=True):
    job: str
    start: int  # row of the annotation file


def check_images(job: Job, progress: Progress | None) -> Report:
    """Check every image of a split, taking over what an earlier start of the job has done.

    Raises:
        DataError: An image is gone, or may not be read.
        DiskError: A part cannot be written.
    """
    report = Report([], [], [], [])
    while len(report.marks) < len(job.images) and (known := _inherited(job, report)):
        _extend(report, known)
    start = len(report.marks)
    with ThreadPoolExecutor(job.threads, thread_name_prefix="check") as pool:
        batches: Iterator[list[Checked]] = _checked(pool, job, start)
        if progress is not None:
            batches = _shown(batches, progress, len(job.images), start, job.split)
        try:
            while len(report.marks) < len(job.images):
                _extend(report, _write_part(job, report, batches))
        finally:
            pool.shutdown(cancel_futures=True)
    return report


def _extend(report: Report, more: Report) -> None:
    report.marks.extend(more.marks)
    report.problems.extend(more.problems)
    report.notes.extend(more.notes)
    report.parts.extend(more.parts)


def _inherited(job: Job, before: Report) -> Report | None:
    """The next part, where an earlier start left it and its images are the same."""
    name, start = job.part_name(len(before.parts)), len(before.marks)
    try:
        with pa.memory_map(str(job.target / name)) as source:
            opened = pa.ipc.open_file(source)
            table = opened.read_all().select([c for c in COLUMNS if c != "image"])
            raw = (opened.schema.metadata or {}).get(METADATA_KEY, b"{}")
            columns = table.to_pydict()
        if msgspec.json.decode(raw, type=_PartMetadata) != _PartMetadata(job.key, start):
            return None
    except (OSError, KeyError, pa.ArrowInvalid, msgspec.DecodeError):
        return None
    triples = zip(columns["bytes"], columns["modified_ns"], columns["sketch"], strict=True)
    marks = [FileFingerprint(*triple) for triple in triples]
    names = [image.file_name for image in job.images[start : start + len(marks)]]
    if len(names) < len(marks) or changed_images(job.source, names, marks):
        return None
    return Report(marks, columns["problem"], columns["note"], [Shard(name, len(marks))])


def _checked(pool: ThreadPoolExecutor, job: Job, start: int) -> Iterator[list[Checked]]:
    """Check images in order, some tasks ahead of the one that is waited for."""

    def check(first: int) -> list[Checked]:
        return [
            check_image(job.source / image.file_name, image, job.wish)
            for image in job.images[first : first + TASK_IMAGES]
        ]

    # Pillow warns of large pictures, which are refused here by their size, and of odd metadata.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        firsts = range(start, len(job.images), TASK_IMAGES)
        yield from map_ahead(pool, check, firsts, job.threads + 2)


def _shown(
    batches: Iterator[list[Checked]], progress: Progress, total: int, done: int, split: str
) -> Iterator[list[Checked]]:
    """Pass batches through, counted image by image by a display."""
    ahead: deque[list[Checked]] = deque()

    def images() -> Iterator[None]:
        yield from itertools.repeat(None, done)
        for batch in batches:
            ahead.append(batch)
            yield from itertools.repeat(None, len(batch))

    for _ in progress(images(), total=total, label=f"checking {split}", unit="img"):
        if ahead:
            yield ahead.popleft()


def _write_part(job: Job, before: Report, batches: Iterator[list[Checked]]) -> Report:
    """Take batches until a part is full; publish it."""
    number, start = len(before.parts), len(before.marks)
    name = job.part_name(number)
    metadata = {METADATA_KEY: msgspec.json.encode(_PartMetadata(job.key, start))}
    columns = [pa.field(c, t) for c, t in COLUMNS.items() if c != "image" or job.wish.pack]
    schema = pa.schema(columns, metadata=metadata)
    part = Report([], [], [], [])
    size = 0
    with atomic_write(job.target / name) as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(_record(batch, schema))
            part.marks.extend(c.mark for c in batch)
            part.problems.extend(c.problem for c in batch)
            part.notes.extend(c.note for c in batch)
            size += sum(len(c.content or b"") for c in batch)
            if size >= PART_BYTES or (not job.wish.pack and len(part.marks) >= PART_ROWS):
                break
    part.parts.append(Shard(name, len(part.marks)))
    return part


def _record(batch: list[Checked], schema: Any) -> Any:
    values = {
        "image": [c.content for c in batch],
        "problem": [c.problem for c in batch],
        "note": [c.note for c in batch],
        "bytes": [c.mark.bytes for c in batch],
        "modified_ns": [c.mark.modified_ns for c in batch],
        "sketch": [c.mark.sketch for c in batch],
    }
    arrays = [pa.array(values[field.name], field.type) for field in schema]
    return pa.record_batch(arrays, schema=schema)
