"""Check one image file before it is trained on: `check_image(path, (640, 480), PackOptions(True))`.

The header is checked first, so a pixel bomb is never decoded. Pixels are decoded on request, if the
end of the file looks cut, if the format has no end marker, and to re-encode them.
"""

from __future__ import annotations

import io
import os
import stat
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.data.image_decode import (
    Header,
    apply_orientation,
    as_image_error,
    decode,
    encode_png,
    has_damaged_jpeg_data,
    open_image,
    read_header,
)
from ssdctl.errors import DataError
from ssdctl.files import unreadable

# Formats that are packed as they are, and the bytes that a complete file ends with.
JPEG_FORMATS = ("JPEG", "MPO")
END_MARKERS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
# Part of the note on an image whose annotated size fits stored and upright pixels.
DAMAGED = "damaged, decoded partly"
AMBIGUOUS = "its annotated size fits stored and upright pixels"
Encoding = Literal["jpeg", "raw"]
Verified = Literal["no", "damaged dropped", "damaged kept"]  # whether each image was decoded
SKETCH_BYTES = 4096
HEAD_BYTES = 64 * 1024  # contains nearly every header
CHUNK_IMAGES = 512
JPEG_QUALITY = 92  # for images that are made smaller
T = TypeVar("T")
R = TypeVar("R")


class PackOptions(NamedTuple):
    pack: bool  # return its bytes
    shrink: int | None = None  # re-encode it if its shorter side is longer, in pixels
    verify: bool = False  # decode all of it, strictly
    encoding: Encoding = "jpeg"  # raw: return decoded pixels
    keep_damaged: bool = False  # use what can be decoded of a file that `verify` finds damaged

    @property
    def verified(self) -> Verified:
        if not self.verify:
            return "no"
        return "damaged kept" if self.keep_damaged else "damaged dropped"


class FileFingerprint(msgspec.Struct, frozen=True):
    """Identifies one version of an image file."""

    bytes: int
    modified_ns: int
    sketch: int  # CRC-32 of its first and last 4 KiB: for copies, which have another time


class FingerprintColumns(NamedTuple):
    """The fingerprints of N image files, as arrays."""

    bytes: NDArray[np.int64]  # N
    modified_ns: NDArray[np.int64]  # N
    sketch: NDArray[np.int64]  # N

    def row(self, number: int) -> FileFingerprint:
        return FileFingerprint(*(int(column[number]) for column in self))


class CheckedImage(NamedTuple):
    fingerprint: FileFingerprint
    content: bytes | None  # its bytes if they are to be packed
    problem: str | None
    note: str | None


def check_image(path: Path, size: tuple[int, int], options: PackOptions) -> CheckedImage:
    """Check an image with its annotated width and height; problems are returned, not raised."""
    try:
        return _check(path, size, options)
    except OSError as error:
        raise unreadable(path, error) from None


def _check(path: Path, size: tuple[int, int], options: PackOptions) -> CheckedImage:
    """Check an image with few and large reads: between reads, threads wait for each other."""
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        read_all = options.pack or options.verify or status.st_size <= HEAD_BYTES
        content = file.readall() if read_all else file.read(HEAD_BYTES)
        tail = content[-SKETCH_BYTES:]
        if not read_all:
            tail = os.pread(file.fileno(), SKETCH_BYTES, status.st_size - SKETCH_BYTES)
        sketch = zlib.crc32(tail, zlib.crc32(content[:SKETCH_BYTES]))
        fingerprint = FileFingerprint(status.st_size, status.st_mtime_ns, sketch)
        if not read_all:
            result = _inspect_head(content, tail, size)
            if result is not None:
                return CheckedImage(fingerprint, None, None, result.note)
            content += file.readall()  # a long header, or a reason to look at the pixels
    result = _inspect(content, size, options)
    packed: bytes | None = None
    if options.pack:
        packed = b"" if result.problem is not None else result.content or content
    return CheckedImage(fingerprint, packed, result.problem, result.note)


class _Inspection(NamedTuple):
    problem: str | None = None
    note: str | None = None
    content: bytes | None = None  # re-encoded


def _inspect_head(head: bytes, tail: bytes, size: tuple[int, int]) -> _Inspection | None:
    """Check an image by its first and last bytes; None if they do not suffice."""
    try:
        with open_image(io.BytesIO(head)) as image:
            header = read_header(image)
            header.orientation_for(size)
    except Exception:  # decided by all of the file
        return None
    if header.format not in END_MARKERS or not tail.endswith(END_MARKERS[header.format]):
        return None
    return _Inspection(note=_note(header, size))


def _inspect(content: bytes, size: tuple[int, int], options: PackOptions) -> _Inspection:
    """Check an image by all of its bytes, and re-encode it if it is not packed as it is."""
    shorter = options.shrink if options.pack else None
    try:
        with open_image(io.BytesIO(content)) as image:
            header = read_header(image)
            header.orientation_for(size)
            note = _note(header, size)
            if options.verify and _is_decoded_partly(header, content, size):
                if not options.keep_damaged:
                    return _Inspection(problem=DAMAGED)
                note = "; ".join(filter(None, (note, DAMAGED)))
            is_raw = options.pack and options.encoding == "raw"
            if shorter is not None and min(size) > shorter:
                small = _shrunk(image, content, size, shorter)
                packed = small.tobytes() if is_raw else _as_jpeg(small)
                return _Inspection(note=note, content=packed)
            if is_raw:
                return _Inspection(note=note, content=decode(content, size).tobytes())
            if options.pack and not _is_packed_unchanged(header):
                return _Inspection(note=note, content=encode_png(decode(content, size)))
            if not content.endswith(END_MARKERS.get(header.format, b"-")):
                _decode_all(image, content, size)
            return _Inspection(note=note)
    except Exception as error:  # Pillow raises errors of many types on broken files
        return _Inspection(problem=str(as_image_error(error)))


def _is_packed_unchanged(header: Header) -> bool:
    """Return whether the file itself is stored: 8-bit JPEG and PNG, which most readers support."""
    return header.format in END_MARKERS and header.mode != "CMYK" and not header.is_deep


def _note(header: Header, size: tuple[int, int]) -> str | None:
    notes = []
    if header.mode == "CMYK":
        notes.append("CMYK, read as RGB")
    if header.is_deep:
        notes.append("16 bits per channel, read as 8")
    if header.fits_both(size):
        notes.append(f"{AMBIGUOUS}, EXIF orientation {header.orientation}: read as stored")
    elif header.orientation_for(size) != 1:
        notes.append(f"turned upright by its EXIF orientation ({header.orientation})")
    elif header.orientation != 1:
        notes.append(f"its EXIF orientation ({header.orientation}) is ignored, by its size")
    return "; ".join(notes) or None


def _is_decoded_partly(header: Header, content: bytes, size: tuple[int, int]) -> bool:
    """Decode all of a file; return whether it is a damaged JPEG, which training decodes in part."""
    if header.format in JPEG_FORMATS:
        if not has_damaged_jpeg_data(content, is_cmyk=header.mode == "CMYK"):
            return False
        decode(content, size)
        return True
    decode(content, size)
    return False


def _decode_all(image: Image.Image, content: bytes, size: tuple[int, int]) -> None:
    """Decode every byte of the file, to find damage."""
    if image.format in JPEG_FORMATS:
        # An eighth of the size: every byte of the file is read all the same.
        image.draft("L", (image.width // 8, image.height // 8))
        image.load()
    else:
        decode(content, size)


def _shrunk(image: Image.Image, content: bytes, size: tuple[int, int], shorter: int) -> Image.Image:
    """Return the image, upright, with a shorter side of `shorter` pixels."""
    scale = shorter / min(size)
    small_size = (round(size[0] * scale), round(size[1] * scale))
    if image.format in JPEG_FORMATS:  # a large JPEG need not be decoded at its full size
        orientation = read_header(image).orientation_for(size)
        stored_size = small_size[::-1] if orientation >= 5 else small_size
        image.draft("RGB", (2 * stored_size[0], 2 * stored_size[1]))
        small = image.convert("RGB").resize(stored_size, Image.Resampling.BILINEAR)
        return Image.fromarray(apply_orientation(np.asarray(small), orientation))
    return Image.fromarray(decode(content, size)).resize(small_size, Image.Resampling.BILINEAR)


def _as_jpeg(small: Image.Image) -> bytes:
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


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


def is_same_image(path: str, fingerprint: FileFingerprint) -> bool:
    """Return whether the file still has this fingerprint; open it only if its time differs."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a hundred thousand of them
        if status.st_size != fingerprint.bytes:
            return False
        if status.st_mtime_ns == fingerprint.modified_ns:
            return True
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
            head = file.read(SKETCH_BYTES)
            start = max(status.st_size - SKETCH_BYTES, 0)
            tail = os.pread(file.fileno(), SKETCH_BYTES, start)
            return zlib.crc32(tail, zlib.crc32(head)) == fingerprint.sketch
    except (OSError, ValueError):  # a name with a null byte
        return False


def changed_images(
    folder: Path, names: Sequence[str], fingerprints: FingerprintColumns
) -> list[str]:
    base = str(folder)

    def status(name: str) -> tuple[int, int]:
        try:
            status = os.stat(f"{base}/{name}")  # noqa: PTH116 - millions of them
        except (OSError, ValueError):
            return -1, -1
        return status.st_size, status.st_mtime_ns

    current = np.array(_in_threads(status, names), np.int64).reshape(-1, 2)
    recorded = np.stack([fingerprints.bytes, fingerprints.modified_ns], axis=1)
    differ = np.nonzero((current != recorded).any(axis=1))[0].tolist()
    same = _in_threads(
        lambda row: is_same_image(f"{base}/{names[row]}", fingerprints.row(row)), differ
    )
    return [names[row] for row, is_same in zip(differ, same, strict=True) if not is_same]


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
        return [r for part in pool.map(process, range(0, len(items), CHUNK_IMAGES)) for r in part]


def shrunk_sizes(sizes: NDArray[np.int32], shorter: int | None) -> NDArray[np.int32]:
    """Return (N, 2) image sizes after shrinking to a shorter side of at most `shorter` pixels."""
    if shorter is None:
        return sizes
    scale = np.minimum(1.0, shorter / sizes.min(axis=1, keepdims=True))
    return np.rint(sizes * scale).astype(np.int32)
