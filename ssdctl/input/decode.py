"""From an encoded image to 300 x 300 pixels: decode, cut, resize.

    pixels = decode(content, size)                # all of it, as Pillow decodes it
    pixels = decode(content, size, rows=210)      # at least its first 210 rows
    shrink_exactly(pixels, out)                   # the whole picture, resized as Pillow does it
    shrink_crop(pixels, (20, 10, 320, 210), out)  # a cut, within one level of Pillow

JPEGs are decoded by libjpeg-turbo (simplejpeg) into memory that the thread uses again. Rows below a
crop are not decoded: the height in the JPEG's header is lowered to the crop's bottom, rounded up to
whole blocks, and the decoder ends there. The rows above come out as they would have (tested bit by
bit). What is no plain whole JPEG (PNG, CMYK, 12 bits, no end marker) goes through Pillow, and so
does everything where simplejpeg is not installed. EXIF orientation is ignored, as in pycocotools:
boxes refer to the pixels as they are stored.
"""

from __future__ import annotations

import io
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssdctl.boxes.default_boxes import IMAGE_SIZE

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow decodes, to the same pixels
    simplejpeg = None

Pixels = NDArray[np.uint8]
FORMATS = ("JPEG", "PNG")
PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
START_OF_SCAN, END_OF_IMAGE = 0xDA, b"\xff\xd9"
LARGEST_KEPT_BYTES = 48 << 20  # a thread's memory for larger pictures is given back at once
_own = threading.local()


class Frame(NamedTuple):
    """What a JPEG's frame header says."""

    place: int  # of the height's two bytes
    height: int
    width: int
    block_rows: int  # rows that are coded together, over all channels


def decode(content: Any, size: tuple[int, int], rows: int | None = None) -> Pixels:
    """(H, W, 3) RGB pixels, or at least the first `rows` of them.

    They lie in memory that the thread's next call writes again.

    Args:
        content: The encoded image, any bytes-like object.
        size: Width and height that it must have.
        rows: How many rows, from the top, are needed; None: all.

    Raises:
        ValueError, OSError, SyntaxError: It cannot be decoded, or has another size.
    """
    content = memoryview(content).cast("B")  # Arrow's are of signed bytes
    frame = _plain_frame(content)
    if frame is None or simplejpeg is None:
        return _by_pillow(content, size)
    _require((frame.width, frame.height), size)
    height = frame.height
    if rows is not None:
        # One row more, because interpolated colour looks one row ahead.
        height = min(height, -(-(rows + 1) // frame.block_rows) * frame.block_rows)
        if height < frame.height:
            content = bytearray(content)
            content[frame.place : frame.place + 2] = height.to_bytes(2, "big")
    needed = height * frame.width * 3
    # Not strict, as Pillow is not: a broken code in mid-picture spoils some blocks, and the bytes
    # after a lowered height are no error.
    pixels: Pixels = simplejpeg.decode_jpeg(
        content, buffer=_scratch("decoded", needed), strict=False
    )
    return pixels


def shrink_exactly(pixels: Pixels, out: Pixels) -> None:
    """Resize a whole picture into `out` (300, 300, 3), bit by bit as Pillow does it."""
    small = Image.fromarray(pixels).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
    out[...] = np.asarray(small)


def shrink_crop(pixels: Pixels, box: tuple[int, int, int, int], flip: bool, out: Pixels) -> None:
    """Cut ltrb `box` out, resize it into `out` (300, 300, 3), mirrored where `flip` is set.

    PyTorch's kernel is Pillow's filter in 16-bit integers: at most one level from it.
    """
    left, top, right, bottom = box
    window = pixels[top:bottom, left:right]
    if not window.flags.c_contiguous:
        packed = _scratch("cut", window.size).reshape(window.shape)
        np.copyto(packed, window)
        window = packed
    target = small = _as_images(out)
    if flip:
        small = _as_images(_scratch("small", out.size).reshape(out.shape))
    torch.ops.aten._upsample_bilinear2d_aa.out(
        _as_images(window), list(out.shape[:2]), False, None, None, out=small
    )
    if flip:
        torch.ops.aten.flip.out(small, [3], out=target)


def _as_images(pixels: Pixels) -> torch.Tensor:
    """(H, W, 3) -> a (1, 3, H, W) view, channels last."""
    return torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)


def _plain_frame(content: Any) -> Frame | None:
    """The frame header of a whole JPEG with 8 bits and gray or three colours; None otherwise."""
    if bytes(content[:2]) != b"\xff\xd8" or bytes(content[-2:]) != END_OF_IMAGE:
        return None
    head = bytes(content[: 1 << 16])
    place = 2
    while place + 10 < len(head) and head[place] == 0xFF:
        marker = head[place + 1]
        if marker == START_OF_SCAN:
            break
        if marker in PLAIN_FRAMES:
            return _frame(head, place + 4)
        place += 2 + int.from_bytes(head[place + 2 : place + 4], "big")
    return None


def _frame(head: bytes, place: int) -> Frame | None:
    bits, channels = head[place], head[place + 5]
    height, width = (int.from_bytes(head[i : i + 2], "big") for i in (place + 1, place + 3))
    factors = [head[i] & 15 for i in range(place + 7, place + 6 + 3 * channels, 3) if i < len(head)]
    if bits != 8 or channels not in (1, 3) or not height or not width or not all(factors):
        return None
    return Frame(place + 1, height, width, 8 * max(factors))


def _by_pillow(content: Any, size: tuple[int, int]) -> Pixels:
    with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
        _require(picture.size, size)
        return np.array(picture.convert("RGB"))  # writable, as torch wants it


def _require(found: tuple[int, int], expected: tuple[int, int]) -> None:
    if found != tuple(expected):
        raise ValueError(f"is {found[0]} x {found[1]}, was {expected[0]} x {expected[1]}")


def _scratch(name: str, size: int) -> Pixels:
    """`size` bytes of this thread's own, under a name."""
    known: Pixels | None = getattr(_own, name, None)
    if known is None or known.size < size:
        known = np.empty(size, np.uint8)
        if size <= LARGEST_KEPT_BYTES:
            setattr(_own, name, known)
    return known[:size]
