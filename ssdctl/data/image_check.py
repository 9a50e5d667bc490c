"""Check image files before they are trained on, in chunks: an interrupted `prepare` continues.

    check_image(path, (640, 480), PrepareConfig())

An image's header is checked first, so a pixel bomb is never decoded. Pixels are decoded on request,
if the end of the file looks cut, if the format has no end marker, and to re-encode them.

A chunk is an Arrow file with a row per image: its problem, the fingerprint of its file and, if
packed, its bytes. It is published atomically, and its metadata names the job (images and options).
A later run of the job reuses a chunk if its files are the same. The chunks of a packed store are
its shards; the others are deleted once the index is written.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from ssdctl.config import PrepareConfig
from ssdctl.data import index
from ssdctl.data.annotations import MAX_NAMED, Annotations, Finding
from ssdctl.data.check import DROPPED_IMAGE, NOTED_IMAGE
from ssdctl.data.image_decode import (
    Header,
    ImageError,
    Pixels,
    apply_orientation,
    as_image_error,
    decode,
    encode,
    has_damaged_jpeg_data,
    open_image,
    read_header,
)
from ssdctl.data.image_files import (
    ANNOTATION_FOLDERS,
    SKETCH_BYTES,
    FingerprintColumns,
    changed_images,
    is_uncompressed,
    require_image_folder,
)
from ssdctl.errors import DataError, DiskError
from ssdctl.files import DECODE_ERRORS, atomic_write, free_bytes, msgspec_type, read_errors
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.safe_text import quoted_folder
from ssdctl.runtime.system import map_ahead, thread_pool, usable_cores

log = logging.getLogger(__name__)
# Formats that are packed as they are, and the bytes that a complete file ends with.
JPEG_FORMATS = ("JPEG", "MPO")
END_MARKERS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
PNG_START = b"\x89PNG"
DAMAGED = "damaged, decoded partly"
EXIF = "EXIF orientation"  # in every note on an image that has one
AMBIGUOUS = "its annotated size fits stored and upright pixels"
NO_SIZE = "its size is not annotated"
HEAD_BYTES = 64 * 1024  # contains nearly every header
JPEG_QUALITY = 92  # for images that are made smaller
CHUNK_BYTES = 512 * 1024 * 1024  # image bytes
CHUNK_ROWS = 8192
TASK_IMAGES = 32  # checked by one thread at a time, and a batch of the file
TASK_RAW_IMAGES = 4  # the same, of images that are decoded, which take a hundred times the memory


def verified(config: PrepareConfig) -> index.Verified:
    if not config.verify_images:
        return "no"
    return "damaged kept" if config.keep_damaged else "damaged dropped"


class CheckedImage(NamedTuple):
    """A row of a chunk; the last three are the file's fingerprint."""

    image: bytes | None  # encoded, or its pixels; None if it is not to be packed
    problem: str | None
    note: str | None
    bytes: int
    modified_ns: int
    sketch: int


def check_image(
    path: str | Path,
    size: tuple[int, int],
    config: PrepareConfig,
    upright: bool = False,
    is_sized: bool = True,
) -> CheckedImage:
    """Check an image with its annotated width and height; problems are returned, not raised.

    `upright`: see `decode`. `is_sized`: the size is annotated, not the file's.
    It uses few and large reads: between reads, threads wait for each other.
    """
    with read_errors(path), open(path, "rb", buffering=0) as file:  # noqa: PTH123 - millions of them
        status = os.fstat(file.fileno())
        is_whole = is_uncompressed(str(path))
        read_all = is_whole or config.pack or config.verify_images or status.st_size <= HEAD_BYTES
        content = file.readall() if read_all else file.read(HEAD_BYTES)
        tail = content[-SKETCH_BYTES:]
        if len(content) < status.st_size:
            tail = os.pread(file.fileno(), SKETCH_BYTES, status.st_size - SKETCH_BYTES)
        sketch = zlib.crc32(tail, zlib.crc32(content[:SKETCH_BYTES]))
        sketch = zlib.crc32(content) if is_whole else sketch
        fingerprint = (status.st_size, status.st_mtime_ns, sketch)
        if not read_all:
            # Usually the first and last bytes show that it can be used.
            file.seek(0)
            is_png = content.startswith(PNG_START)  # EXIF data may be behind its pixels
            source = file if is_png else io.BytesIO(content)
            with contextlib.suppress(Exception), open_image(source) as image:
                header = read_header(image)
                note = _note(header, size, upright, is_sized)
                if _has_end(header, tail):
                    return CheckedImage(None, None, note, *fingerprint)
            file.seek(len(content))
            content += file.readall()  # a long header, or a reason to look at the pixels
    try:
        packed, note = _inspect(content, size, config, upright, is_sized)
    except Exception as error:  # Pillow raises errors of many types on broken files
        packed = b"" if config.pack else None
        return CheckedImage(packed, str(as_image_error(error)), None, *fingerprint)
    return CheckedImage(packed, None, note, *fingerprint)


def _has_end(header: Header, content: bytes) -> bool:
    return header.format in END_MARKERS and content.endswith(END_MARKERS[header.format])


def _inspect(
    content: bytes, size: tuple[int, int], config: PrepareConfig, upright: bool, is_sized: bool
) -> tuple[bytes | None, str | None]:
    """Return what is packed of an image, and the note on it."""
    packed = content if config.pack else None
    with open_image(io.BytesIO(content)) as image:
        header = read_header(image)
        note = _note(header, size, upright, is_sized)
        if config.verify_images and _is_decoded_partly(header, content, size):
            if not config.keep_damaged:
                raise ImageError(DAMAGED)
            note = "; ".join(filter(None, (note, DAMAGED)))
        is_raw = config.pack and config.encoding == "raw"
        # 8-bit JPEG and PNG, which most readers support, are stored as they are.
        is_common = header.format in END_MARKERS and header.mode != "CMYK" and not header.is_deep
        if config.pack and config.shrink is not None and min(size) > config.shrink:
            small = _shrunk(image, content, size, config.shrink, upright)
            packed = small.tobytes() if is_raw else encode(small, "JPEG", quality=JPEG_QUALITY)
        elif is_raw:
            packed = decode(content, size, upright=upright).tobytes()
        elif config.pack and not is_common:
            packed = encode(decode(content, size, upright=upright), "PNG")
        elif not _has_end(header, content):
            decode(content, size)  # finds damage
    return packed, note


def _note(header: Header, size: tuple[int, int], upright: bool, is_sized: bool) -> str | None:
    notes = []
    if header.mode == "CMYK":
        notes.append("CMYK, read as RGB")
    if header.is_deep:
        notes.append("16 bits per channel, read as 8")
    if header.orientation_for(size, upright) != 1:
        notes.append(f"turned upright by its {EXIF} ({header.orientation})")
    elif header.orientation != 1 and not is_sized:
        notes.append(f"{NO_SIZE}, {EXIF} {header.orientation}: read as stored")
    elif header.orientation != 1 and header.stored_size == header.upright_size:
        notes.append(f"{AMBIGUOUS}, {EXIF} {header.orientation}: read as stored")
    elif header.orientation != 1:
        notes.append(
            f"{EXIF} {header.orientation} ignored: the annotated size matches the stored pixels"
        )
    return "; ".join(notes) or None


def _is_decoded_partly(header: Header, content: bytes, size: tuple[int, int]) -> bool:
    """Decode all of a file; return whether it is a damaged JPEG, which training decodes in part."""
    is_jpeg = header.format in JPEG_FORMATS
    if is_jpeg and not has_damaged_jpeg_data(content, is_cmyk=header.mode == "CMYK"):
        return False
    decode(content, size)
    return is_jpeg


def _shrunk(
    image: Image.Image, content: bytes, size: tuple[int, int], shorter: int, upright: bool
) -> Pixels:
    """Return the pixels, upright, with a shorter side of `shorter` pixels."""
    scale = shorter / min(size)
    small_size = (round(size[0] * scale), round(size[1] * scale))
    if image.format in JPEG_FORMATS:  # a large JPEG need not be decoded at its full size
        orientation = read_header(image).orientation_for(size, upright)
        stored_size = small_size[::-1] if orientation >= 5 else small_size
        image.draft("RGB", (2 * stored_size[0], 2 * stored_size[1]))
        small = image.convert("RGB").resize(stored_size, Image.Resampling.BILINEAR)
        return apply_orientation(np.asarray(small), orientation)
    large = Image.fromarray(decode(content, size, upright=upright))
    return np.asarray(large.resize(small_size, Image.Resampling.BILINEAR))


class ImageCheck(NamedTuple):
    split: str
    key: str  # hex digits that identify the images and the options
    annotations: Annotations  # the N images, without their objects
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

    @property
    def have_orientation(self) -> bool:
        return any(EXIF in finding.detail for finding in self.findings)

    def warnings(self) -> list[str]:
        reasons = {
            AMBIGUOUS: ("whose annotated size fits stored and upright pixels", "turn the files"),
            NO_SIZE: (
                "without annotated size",
                "give width and height of these, or turn the files",
            ),
        }
        counts = {text: sum(text in f.detail for f in self.findings) for text in reasons}
        return [
            f"images with an EXIF orientation {what}, read as stored: {counts[text]:,}. If boxes "
            f"were drawn on upright images, {remedy}"
            for text, (what, remedy) in reasons.items()
            if counts[text]
        ]


class _ChunkMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    job: str
    start: int  # row of the annotation file
    upright: bool = False


def require_image_files(images: Annotations, split: str, sizes: list[int | None]) -> None:
    """Check that every image of a split exists: `sizes` in bytes are None for one that does not."""
    require_image_folder(images.folder, split, images.origin)
    missing = [n for n, size in zip(images.file_names, sizes, strict=True) if size is None]
    if missing:
        hint = f"copy them there, or remove them from {images.origin}"
        folder = images.folder if images.folder.name else images.folder.absolute()
        if len(missing) == len(sizes) and folder.name in ANNOTATION_FOLDERS:
            above = quoted_folder(folder.parent)
            hint = f"did you mean the folder above, --data {above}? Otherwise {hint}"
        raise DataError(
            f"{images.folder}: {len(missing)} of {len(sizes)} images are missing, "
            f"among them {', '.join(missing[:MAX_NAMED])}",
            hint=hint,
        )


def check_files(job: ImageCheck, sizes: list[int | None]) -> None:
    """Check that every image exists (`require_image_files`), and that the disk has enough space."""
    images = job.annotations
    require_image_files(images, job.split, sizes)
    if job.config.pack and job.config.encoding == "raw":
        pixels = index.shrunk_sizes(images.sizes.astype(np.int32), job.config.shrink)
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


def check_images(job: ImageCheck, progress: Progress) -> CheckedImages:
    """Check every image of a split, reusing the chunks of an earlier run of the job."""
    names, image_ids = job.annotations.file_names, job.annotations.image_ids
    tables: list[Any] = []
    start = 0
    while start < len(names) and (table := _reusable_chunk(job, len(tables), start)) is not None:
        tables.append(table)
        start += table.num_rows
    with thread_pool(job.num_threads, "check") as pool:
        done_and_new = itertools.chain(range(start), _check_in_threads(pool, job, start))
        label = f"checking {job.split}"
        shown = progress(done_and_new, total=len(names), label=label, unit="img")
        images = itertools.islice(shown, start, None)
        while start < len(names):
            tables.append(_write_chunk(job, len(tables), start, images))
            start += tables[-1].num_rows
    shards = [index.Shard(job.chunk_name(number), t.num_rows) for number, t in enumerate(tables)]
    none = pa.schema(index.RESULT_COLUMNS.items()).empty_table()
    table = pa.concat_tables([none, *tables])
    findings = []
    columns = (table.column(name).to_pylist() for name in ("problem", "note"))
    for image_id, name, problem, note in zip(image_ids.tolist(), names, *columns, strict=True):
        if problem or note:
            kind = DROPPED_IMAGE if problem else NOTED_IMAGE
            findings.append(Finding(kind, image_id, None, f"{name}: {problem or note}"))
    return CheckedImages(
        np.asarray(table.column("problem").is_null()),
        index.fingerprints_of(table),
        findings,
        shards if job.config.pack else [],
    )


def _reusable_chunk(job: ImageCheck, number: int, start: int) -> Any:
    """Return the chunk that starts at an image, if an earlier run of the job has written it and its
    images are the same; else None."""
    try:
        table = index.read_table(job.target / job.chunk_name(number), index.RESULT_COLUMNS)
        raw = (table.schema.metadata or {}).get(index.METADATA_KEY, b"{}")
        metadata = msgspec.json.decode(raw, type=msgspec_type(_ChunkMetadata))
    except (DataError, *DECODE_ERRORS):
        return None
    images = job.annotations
    names = images.file_names[start : start + table.num_rows]
    if metadata != _ChunkMetadata(job.key, start, images.upright) or len(names) < table.num_rows:
        return None
    return None if changed_images(images.folder, names, index.fingerprints_of(table)) else table


def _check_in_threads(
    pool: ThreadPoolExecutor, job: ImageCheck, start: int
) -> Iterator[CheckedImage]:
    def check(first: int) -> list[CheckedImage]:
        names = images.file_names[first : first + size]
        sizes = images.sizes[first : first + size].tolist()
        return [
            check_image(
                *(f"{folder}/{name}", (width, height), job.config),
                *(images.upright, name not in images.unsized),
            )
            for name, (width, height) in zip(names, sizes, strict=True)
        ]

    images, folder, size = job.annotations, str(job.annotations.folder), job.task_images
    firsts = range(start, len(images.file_names), size)
    return itertools.chain.from_iterable(map_ahead(pool, check, firsts, job.num_threads + 2))


def _write_chunk(job: ImageCheck, number: int, start: int, images: Iterator[CheckedImage]) -> Any:
    """Take images until a chunk is full; publish it, and return its table without the images."""
    columns = (index.SHARD_COLUMNS if job.config.pack else {}) | index.RESULT_COLUMNS
    about = _ChunkMetadata(job.key, start, job.annotations.upright)
    metadata = {index.METADATA_KEY: msgspec.json.encode(about)}
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
