"""Check one image file before it is trained on.

    checked = check_image(path, entry, Wish(pack=True))
    checked.problem     # None, or why it cannot be used
    checked.note        # None, or what a user should know of it although it is used

The header is judged first, so a pixel bomb is never decoded. Pixels are decoded where the user
asks for it, where the file's end looks cut, and where they must be encoded anew.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from PIL import ExifTags, Image, ImageOps

from ssdctl.data.formats.coco import ImageEntry
from ssdctl.errors import DataError

FORMATS = ("JPEG", "PNG")
MOST_PIXELS = 100_000_000  # a larger picture is taken for a bomb
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # what a whole file ends with
SKETCH_BYTES = 4096
HEAD_BYTES = 64 * 1024  # holds nearly every header
CHUNK_IMAGES = 512
T = TypeVar("T")
R = TypeVar("R")
QUALITY = 92  # of images that are encoded anew


class Wish(NamedTuple):
    """What is to be done with each image."""

    pack: bool  # return its bytes
    shrink: int | None = None  # encode it anew where its shorter side is above this, in pixels
    verify: bool = False  # decode all of it


class FileFingerprint(msgspec.Struct, frozen=True):
    """What tells one version of an image file from another."""

    bytes: int
    modified_ns: int
    sketch: int  # CRC-32 of its first and last 4 KiB: for copies, which have another time


class Checked(NamedTuple):
    """One image after its check."""

    mark: FileFingerprint
    content: bytes | None  # its bytes where they are to be packed
    problem: str | None
    note: str | None


def check_image(path: Path, entry: ImageEntry, wish: Wish) -> Checked:
    """Look at an image as `wish` has it; what is wrong with it is told, not raised.

    Raises:
        DataError: The file is gone, or may not be read.
    """
    try:
        return _checked(path, entry, wish)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _checked(path: Path, entry: ImageEntry, wish: Wish) -> Checked:
    """Few reads, each a large one: between them, threads wait for each other."""
    with path.open("rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        is_whole = wish.pack or wish.verify or found.st_size <= HEAD_BYTES
        content = file.readall() if is_whole else file.read(HEAD_BYTES)
        tail = content[-SKETCH_BYTES:]
        if not is_whole:
            tail = os.pread(file.fileno(), SKETCH_BYTES, found.st_size - SKETCH_BYTES)
        sketch = zlib.crc32(tail, zlib.crc32(content[:SKETCH_BYTES]))
        mark = FileFingerprint(found.st_size, found.st_mtime_ns, sketch)
        if not is_whole:
            judged = _judged(content, tail, entry, wish, may_decode=False)
            if judged.problem is None:
                return Checked(mark, None, None, judged.note)
            content += file.readall()  # a long header, or a reason to look closer
    judged = _judged(content, tail, entry, wish)
    packed: bytes | None = None
    if wish.pack:
        packed = b"" if judged.problem is not None else judged.content or content
    return Checked(mark, packed, judged.problem, judged.note)


class _Judged(NamedTuple):
    problem: str | None = None
    note: str | None = None
    is_turned: bool = False  # must be turned upright
    is_other: bool = False  # must become plain RGB
    content: bytes | None = None  # encoded anew


def _judged(
    content: bytes, tail: bytes, entry: ImageEntry, wish: Wish, *, may_decode: bool = True
) -> _Judged:
    """What there is to say of an image; without `may_decode`, of the start of one."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            judged = _judge_header(picture, entry, wish)
            if judged.problem is not None:
                return judged
            is_cut = not tail.endswith(ENDS[picture.format or ""])
            if not may_decode:
                return judged._replace(problem="cut" if is_cut else None)
            return _decoded(picture, judged, wish, wish.verify or is_cut)
    except Image.DecompressionBombError as error:
        return _Judged(problem=f"refused by its header: {error}")
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error) as error:
        return _Judged(problem=f"no readable JPEG or PNG ({_plain(error)})")


def _judge_header(picture: Image.Image, entry: ImageEntry, wish: Wish) -> _Judged:
    """What the header says."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        return _Judged(
            f"refused by its header: {width} x {height} pixels are over the bound of {MOST_PIXELS}"
        )
    if picture.mode.startswith("I") or picture.mode == "F":
        return _Judged("has more than 8 bits a pixel: convert it to 8 bits")
    is_cmyk = picture.mode == "CMYK"
    note = "CMYK, read as RGB" if is_cmyk else None
    turn = _orientation(picture)
    annotated = (entry.width, entry.height)
    if (width, height) == annotated:
        if turn != 1:
            note = f"its EXIF orientation ({turn}) is ignored: the boxes must fit the stored pixels"
        return _Judged(note=note, is_other=is_cmyk)
    if turn in (5, 6, 7, 8) and (height, width) == annotated:
        if wish.pack:
            note = f"turned upright by its EXIF orientation ({turn})"
            return _Judged(note=note, is_turned=True, is_other=is_cmyk)
        return _Judged(
            f"is annotated as it is shown, turned by its EXIF orientation ({turn}): pack it "
            "(without --no-pack), or turn the file itself"
        )
    return _Judged(f"is {width} x {height}, its annotation says {entry.width} x {entry.height}")


def _decoded(picture: Image.Image, judged: _Judged, wish: Wish, must_decode: bool) -> _Judged:
    """Decode what must be decoded; encode anew what must not stay as it is."""
    is_large = wish.shrink is not None and min(picture.size) > wish.shrink
    if wish.pack and (judged.is_turned or judged.is_other or is_large):
        return judged._replace(content=_encoded(picture, judged, wish.shrink))
    if must_decode:
        if picture.format == "JPEG":
            # An eighth of the size: every byte of the file is read all the same.
            picture.draft("L", (picture.width // 8, picture.height // 8))
        picture.load()
    return judged


def _encoded(picture: Image.Image, judged: _Judged, shorter: int | None) -> bytes:
    """The picture as an RGB JPEG, upright and small as wished."""
    size = picture.size
    if shorter is not None and min(size) > shorter:
        scale = shorter / min(size)
        size = (round(size[0] * scale), round(size[1] * scale))
        picture.draft("RGB", (2 * size[0], 2 * size[1]))  # a large JPEG need not be decoded whole
    turn = _orientation(picture) if judged.is_turned else 1
    small = picture.convert("RGB")
    if small.size != size:
        small = small.resize(size, Image.Resampling.BILINEAR)
    if turn != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        small.info["exif"] = exif.tobytes()
        small = ImageOps.exif_transpose(small)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY, exif=b"")
    return buffer.getvalue()


def header_size(path: Path, *, upright: bool = False) -> tuple[int, int]:
    """Width and height by the file's header; `upright` as it is shown, by its EXIF orientation.

    Raises:
        DataError: It is no JPEG or PNG.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as picture:
                width, height = picture.size
                is_turned = upright and _orientation(picture) in (5, 6, 7, 8)
                return (height, width) if is_turned else (width, height)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: no readable JPEG or PNG ({_plain(error)})") from None


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation; 1 = as stored."""
    if "exif" not in picture.info:
        return 1
    return int(picture.getexif().get(ExifTags.Base.Orientation, 1))


def is_same_image(path: str, known: FileFingerprint) -> bool:
    """Whether the file is still the one with this mark; opened only where its time differs."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a hundred thousand of them
        if found.st_size != known.bytes:
            return False
        if found.st_mtime_ns == known.modified_ns:
            return True
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
            head = file.read(SKETCH_BYTES)
            start = max(found.st_size - SKETCH_BYTES, 0)
            tail = os.pread(file.fileno(), SKETCH_BYTES, start)
            return zlib.crc32(tail, zlib.crc32(head)) == known.sketch
    except OSError:
        return False


def changed_images(folder: Path, names: list[str], marks: list[FileFingerprint]) -> list[str]:
    """The names of images that are absent or another file than the marks say."""
    base = str(folder)
    pairs = list(zip(names, marks, strict=True))
    same = _in_threads(lambda pair: is_same_image(f"{base}/{pair[0]}", pair[1]), pairs)
    return [name for name, is_same in zip(names, same, strict=True) if not is_same]


def file_sizes(folder: Path, names: list[str]) -> list[int | None]:
    """The size of each file in bytes; None where there is none."""
    base = str(folder)

    def size(name: str) -> int | None:
        try:
            found = os.stat(f"{base}/{name}")  # noqa: PTH116 - a hundred thousand of them
        except (OSError, ValueError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    return _in_threads(size, names)


def _in_threads(work: Callable[[T], R], items: list[T]) -> list[R]:
    """`work` of each item, in order. In threads, because a network file system answers many
    questions at a time."""

    def some(start: int) -> list[R]:
        return [work(item) for item in items[start : start + CHUNK_IMAGES]]

    with ThreadPoolExecutor(16) as pool:
        return [r for part in pool.map(some, range(0, len(items), CHUNK_IMAGES)) for r in part]


def _plain(error: BaseException) -> str:
    """Without the address of an object in memory."""
    return str(error).partition(" <_io")[0]
