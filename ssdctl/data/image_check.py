"""Check one image file before it is trained on: `check_image(path, (640, 480), PrepareConfig())`.

The header is checked first, so a pixel bomb is never decoded. Pixels are decoded on request, if the
end of the file looks cut, if the format has no end marker, and to re-encode them.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.config import PrepareConfig
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
from ssdctl.errors import DataError
from ssdctl.files import read_errors

# Formats that are packed as they are, and the bytes that a complete file ends with.
JPEG_FORMATS = ("JPEG", "MPO")
END_MARKERS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
DAMAGED = "damaged, decoded partly"
AMBIGUOUS = "its annotated size fits stored and upright pixels"
Encoding = Literal["jpeg", "raw"]
Verified = Literal["no", "damaged dropped", "damaged kept"]  # whether each image was decoded
SKETCH_BYTES = 4096
HEAD_BYTES = 64 * 1024  # contains nearly every header
CHUNK_IMAGES = 512
JPEG_QUALITY = 92  # for images that are made smaller
Packed = bytes  # an encoded image, or its pixels
T = TypeVar("T")
R = TypeVar("R")


def verified(config: PrepareConfig) -> Verified:
    if not config.verify_images:
        return "no"
    return "damaged kept" if config.keep_damaged else "damaged dropped"


class FingerprintColumns(NamedTuple):
    """Identify the versions of N image files."""

    bytes: NDArray[np.int64]  # N
    modified_ns: NDArray[np.int64]  # N
    sketch: NDArray[np.int64]  # N: CRC-32 of the first and last 4 KiB: copies have another time


class CheckedImage(NamedTuple):
    """A row of a chunk, see image_check_jobs.py; the last three are the file's fingerprint."""

    image: Packed | None  # None if it is not to be packed
    problem: str | None
    note: str | None
    bytes: int
    modified_ns: int
    sketch: int


def check_image(path: Path, size: tuple[int, int], config: PrepareConfig) -> CheckedImage:
    """Check an image with its annotated width and height; problems are returned, not raised.

    It uses few and large reads: between reads, threads wait for each other.
    """
    with read_errors(path), path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        read_all = config.pack or config.verify_images or status.st_size <= HEAD_BYTES
        content = file.readall() if read_all else file.read(HEAD_BYTES)
        tail = content[-SKETCH_BYTES:]
        if not read_all:
            tail = os.pread(file.fileno(), SKETCH_BYTES, status.st_size - SKETCH_BYTES)
        sketch = zlib.crc32(tail, zlib.crc32(content[:SKETCH_BYTES]))
        fingerprint = (status.st_size, status.st_mtime_ns, sketch)
        if not read_all:
            # Usually the first and last bytes show that it can be used.
            with contextlib.suppress(Exception), open_image(io.BytesIO(content)) as image:
                header = read_header(image)
                note = _note(header, size)
                if _has_end(header, tail):
                    return CheckedImage(None, None, note, *fingerprint)
            content += file.readall()  # a long header, or a reason to look at the pixels
    try:
        packed, note = _inspect(content, size, config)
    except Exception as error:  # Pillow raises errors of many types on broken files
        packed = b"" if config.pack else None
        return CheckedImage(packed, str(as_image_error(error)), None, *fingerprint)
    return CheckedImage(packed, None, note, *fingerprint)


def _has_end(header: Header, content: bytes) -> bool:
    return header.format in END_MARKERS and content.endswith(END_MARKERS[header.format])


def _inspect(
    content: bytes, size: tuple[int, int], config: PrepareConfig
) -> tuple[bytes | None, str | None]:
    """Return what is packed of an image, and the note on it."""
    packed = content if config.pack else None
    with open_image(io.BytesIO(content)) as image:
        header = read_header(image)
        note = _note(header, size)
        if config.verify_images and _is_decoded_partly(header, content, size):
            if not config.keep_damaged:
                raise ImageError(DAMAGED)
            note = "; ".join(filter(None, (note, DAMAGED)))
        is_raw = config.pack and config.encoding == "raw"
        if config.pack and config.shrink is not None and min(size) > config.shrink:
            small = _shrunk(image, content, size, config.shrink)
            packed = small.tobytes() if is_raw else encode(small, "JPEG", quality=JPEG_QUALITY)
        elif is_raw:
            packed = decode(content, size).tobytes()
        elif config.pack and not _is_packed_unchanged(header):
            packed = encode(decode(content, size), "PNG")
        elif not _has_end(header, content):
            decode(content, size)  # finds damage
    return packed, note


def _is_packed_unchanged(header: Header) -> bool:
    """Return whether the file itself is stored: 8-bit JPEG and PNG, which most readers support."""
    return header.format in END_MARKERS and header.mode != "CMYK" and not header.is_deep


def _note(header: Header, size: tuple[int, int]) -> str | None:
    notes = []
    if header.mode == "CMYK":
        notes.append("CMYK, read as RGB")
    if header.is_deep:
        notes.append("16 bits per channel, read as 8")
    if header.orientation_for(size) != 1:
        notes.append(f"turned upright by its EXIF orientation ({header.orientation})")
    elif header.orientation != 1 and header.stored_size == header.upright_size:
        notes.append(f"{AMBIGUOUS}, EXIF orientation {header.orientation}: read as stored")
    elif header.orientation != 1:
        notes.append(f"its EXIF orientation ({header.orientation}) is ignored, by its size")
    return "; ".join(notes) or None


def _is_decoded_partly(header: Header, content: bytes, size: tuple[int, int]) -> bool:
    """Decode all of a file; return whether it is a damaged JPEG, which training decodes in part."""
    is_jpeg = header.format in JPEG_FORMATS
    if is_jpeg and not has_damaged_jpeg_data(content, is_cmyk=header.mode == "CMYK"):
        return False
    decode(content, size)
    return is_jpeg


def _shrunk(image: Image.Image, content: bytes, size: tuple[int, int], shorter: int) -> Pixels:
    """Return the pixels, upright, with a shorter side of `shorter` pixels."""
    scale = shorter / min(size)
    small_size = (round(size[0] * scale), round(size[1] * scale))
    if image.format in JPEG_FORMATS:  # a large JPEG need not be decoded at its full size
        orientation = read_header(image).orientation_for(size)
        stored_size = small_size[::-1] if orientation >= 5 else small_size
        image.draft("RGB", (2 * stored_size[0], 2 * stored_size[1]))
        small = image.convert("RGB").resize(stored_size, Image.Resampling.BILINEAR)
        return apply_orientation(np.asarray(small), orientation)
    large = Image.fromarray(decode(content, size))
    return np.asarray(large.resize(small_size, Image.Resampling.BILINEAR))


def header_size(path: Path, *, upright: bool = False) -> tuple[int, int]:
    """Return width and height by the header; `upright`: as it is shown, by its orientation."""
    try:
        with open_image(path) as image:
            header = read_header(image)
    except Exception as error:
        raise DataError(f"{path}: {as_image_error(error)}") from None
    return header.upright_size if upright else header.stored_size


def size_or_none(path: Path, *, upright: bool = False) -> tuple[int, int]:
    """Like `header_size`, but 0 x 0 for a file that is dropped, with the reason, when checked."""
    try:
        return header_size(path, upright=upright)
    except DataError:
        return 0, 0


def changed_images(
    folder: Path, names: Sequence[str], fingerprints: FingerprintColumns
) -> list[str]:
    """Return the files that are missing or changed; those whose time differs are opened."""
    base = str(folder)

    def is_same(image: tuple[str, int, int, int]) -> bool:
        name, num_bytes, modified_ns, sketch = image
        path = f"{base}/{name}"
        try:
            status = os.stat(path)  # noqa: PTH116 - millions of them
            if status.st_size != num_bytes:
                return False
            return status.st_mtime_ns == modified_ns or _sketch(path, num_bytes) == sketch
        except (OSError, ValueError):  # a name with a null byte
            return False

    images = list(zip(names, *(column.tolist() for column in fingerprints), strict=True))
    same = _in_threads(is_same, images)
    return [name for name, found in zip(names, same, strict=True) if not found]


def _sketch(path: str, num_bytes: int) -> int:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
        head = file.read(SKETCH_BYTES)
        tail = os.pread(file.fileno(), SKETCH_BYTES, max(num_bytes - SKETCH_BYTES, 0))
    return zlib.crc32(tail, zlib.crc32(head))


def file_sizes(folder: Path, names: list[str]) -> list[int | None]:
    """Return the size of each file in bytes; None if it does not exist."""
    base = str(folder)

    def size(name: str) -> int | None:
        try:
            status = os.stat(f"{base}/{name}")  # noqa: PTH116 - a hundred thousand of them
        except (OSError, ValueError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    return _in_threads(size, names)


def _in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply `work` to each item, in order; in threads, because a network file system serves many
    requests at a time."""

    def process(start: int) -> list[R]:
        return [work(item) for item in items[start : start + CHUNK_IMAGES]]

    with ThreadPoolExecutor(16) as pool:
        return [r for chunk in pool.map(process, range(0, len(items), CHUNK_IMAGES)) for r in chunk]


def shrunk_sizes(sizes: NDArray[np.int32], shorter: int | None) -> NDArray[np.int32]:
    """Return (N, 2) image sizes after shrinking to a shorter side of at most `shorter` pixels."""
    if shorter is None:
        return sizes
    scale = np.minimum(1.0, shorter / sizes.min(axis=1, keepdims=True))
    return np.rint(sizes * scale).astype(np.int32)
