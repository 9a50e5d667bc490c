"""Decode images to (H, W, 3) uint8 RGB: the one decoder of every command and the Python API.

Transparency is dropped; of an animation the first frame is taken; 16 bits per channel become 8 by
taking the high byte. A dataset's image is read as stored if that gives the annotated size, else
turned upright by its EXIF orientation if that gives it; where boxes are known to fit upright
images, turning comes first.

Plain JPEGs are decoded by libjpeg-turbo (simplejpeg) into memory that the thread reuses, the others
by Pillow. Rows below a crop are not decoded: the height in the header is lowered to the crop's
bottom, rounded up to whole blocks; the rows above are unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import struct
import threading
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from ssdctl.data.default_boxes import IMAGE_SIZE
from ssdctl.errors import DataError, UsageError
from ssdctl.files import unreadable

try:
    import simplejpeg
except ImportError:  # no wheel for this platform: Pillow decodes to the same pixels
    simplejpeg = None

Pixels = NDArray[np.uint8]
# Sources of `read_rgb`: a path, encoded bytes, a file object, a PIL image, an array or a tensor.
ImageLike = Any
MAX_PIXELS = 100_000_000  # larger images are refused as decompression bombs
MAX_FILE_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20
PNG_HEADER_BYTES = 33  # signature and IHDR
METADATA_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # of a PNG
MAX_METADATA_BYTES = 1 << 20
COMMON_FORMATS = ("JPEG", "PNG")  # MPO is opened as a JPEG
# Not EPS, which runs Ghostscript, nor formats that need another program or hold no pixels.
OTHER_FORMATS = (
    "WEBP", "BMP", "DIB", "TIFF", "GIF", "AVIF", "JPEG2000", "PPM", "TGA", "PCX", "SGI", "ICO",
    "QOI", "DDS", "PSD",
)  # fmt: skip
ANIMATED_FORMATS = ("GIF", "WEBP", "AVIF", "PNG", "TIFF")
NEW_SUBFILE_TYPE, REDUCED_OR_MASK = 254, 0b101  # TIFF's tag of pages that are no other image
PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
START_OF_SCAN, END_OF_IMAGE = 0xDA, b"\xff\xd9"
MAX_REUSED_BYTES = 48 << 20  # memory for larger images is not kept by the thread
_thread = threading.local()


class ImageError(ValueError):
    """The content is not an image that can be decoded, or has another size than expected."""


class Header(NamedTuple):
    """What an image's header states."""

    format: str
    mode: str  # Pillow's
    stored_size: tuple[int, int]  # width and height of the stored pixels
    orientation: int  # EXIF, 1 to 8; 1 = upright as stored

    @property
    def upright_size(self) -> tuple[int, int]:
        width, height = self.stored_size
        return (height, width) if self.orientation >= 5 else (width, height)

    @property
    def is_deep(self) -> bool:
        """Whether it has more than 8 bits per channel in a mode that shows it."""
        return self.mode.startswith("I") or self.mode == "F"

    def orientation_for(self, size: tuple[int, int] | None, upright: bool = False) -> int:
        """Return the orientation to apply to get the annotated `size`, or upright pixels; 1 = none.

        `upright` decides if stored and upright pixels have that size.

        Raises:
            ImageError: Neither the stored nor the upright pixels have that size.
        """
        if size is None or (upright and self.upright_size == tuple(size)):
            return self.orientation
        if self.stored_size == tuple(size):
            return 1
        if self.upright_size == tuple(size):
            return self.orientation
        stored, declared = (" x ".join(map(str, sides)) for sides in (self.stored_size, size))
        raise ImageError(f"another size than annotated ({stored}, not {declared})")


def read_header(image: Image.Image) -> Header:
    """Read the header of an opened image whose pixels are not loaded yet."""
    width, height = image.size
    if not width or not height:
        raise ImageError(f"no pixels ({width} x {height})")
    _refuse_too_large(width, height)
    orientation = _orientation(image)
    if image.format == "TIFF" and orientation >= 5:
        width, height = height, width  # Pillow states the upright size of a TIFF
    return Header(image.format or "", image.mode, (width, height), orientation)


def _refuse_too_large(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(f"over {MAX_PIXELS:,} pixels ({width} x {height} by its header)")


def open_image(file: Path | IO[bytes]) -> Image.Image:
    """Open an image of any supported format; its pixels are not decoded yet.

    Raises:
        Exception: Pillow raises errors of many types for files that are not images.
    """
    try:
        return Image.open(file, formats=COMMON_FORMATS)
    except UnidentifiedImageError:
        Image.init()
        return Image.open(file, formats=[name for name in OTHER_FORMATS if name in Image.OPEN])


def has_more_frames(file: Path | IO[bytes]) -> bool:
    """Return whether an image has frames or pages behind the first, the only one that is read."""
    with contextlib.suppress(Exception), open_image(file) as image:
        if image.format in ANIMATED_FORMATS:
            image.seek(1)  # raises if there is none
            kind = getattr(image, "tag_v2", {}).get(NEW_SUBFILE_TYPE, 0)
            return not kind & REDUCED_OR_MASK
    return False


def decode(
    content: Any,
    size: tuple[int, int] | None = None,
    rows: int | None = None,
    upright: bool = False,
) -> Pixels:
    """Decode an image to (H, W, 3) RGB pixels, or at least to its first `rows` rows.

    The result may be in memory that the thread's next call overwrites.

    Args:
        content: The encoded image, any bytes-like object.
        size: Width and height that a dataset's annotations declare; None: upright.
        rows: How many rows, from the top, are needed; None: all.
        upright: Whether to turn an image of that size by its EXIF orientation.

    Raises:
        ImageError: It cannot be decoded, or has another size.
    """
    content = memoryview(content).cast("B")  # Arrow's buffers have signed bytes
    try:
        frame = _plain_frame(content)
        if frame is None or simplejpeg is None:
            return _decode_by_pillow(content, size, upright)
        if not upright and size is not None and (frame.width, frame.height) == tuple(size):
            return _decode_plain(content, frame, rows)
        with open_image(io.BytesIO(content)) as image:
            orientation = read_header(image).orientation_for(size, upright)
        pixels = _decode_plain(content, frame, rows if orientation == 1 else None)
        return apply_orientation(pixels, orientation)
    except Exception as error:  # Pillow's decoders raise errors of many types on broken files
        raise as_image_error(error) from None


def raw_pixels(content: Any, size: tuple[int, int]) -> Pixels:
    """Return decoded pixels, stored row by row, as a (H, W, 3) view of `content`."""
    pixels = np.frombuffer(content, np.uint8)
    width, height = size
    if pixels.size != 3 * width * height:
        raise ImageError(
            f"has {pixels.size:,} bytes, {width} x {height} pixels take {3 * width * height:,}"
        )
    return pixels.reshape(height, width, 3)


def encode(pixels: Pixels, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, image_format, **options)
    return buffer.getvalue()


def read_rgb(image: ImageLike) -> Pixels:
    """Convert a user's image to (H, W, 3) RGB pixels, upright.

    An image is a path, encoded bytes, a binary file object, a PIL image, or pixels as a numpy
    array (H, W), (H, W, 1 or 3 or 4) of uint8, uint16, or floating point from 0 to 1, or as a
    tensor, which may also be (1 or 3 or 4, H, W).

    Raises:
        DataError: It cannot be read or decoded.
        UsageError: It is not an image, or pixels of an unsupported shape or type.
    """
    if isinstance(image, Image.Image):
        return _rgb_of_image(image)
    if isinstance(image, np.ndarray):
        return _rgb_of_array(image)
    if hasattr(image, "cpu"):
        return _rgb_of_tensor(image)
    name, content = _read_content(image)
    try:
        return decode(content).copy()
    except ImageError as error:
        raise DataError(f"{name}: {error}") from None


def _read_content(image: ImageLike) -> tuple[str, bytes]:
    """Read the encoded image and the name that messages give it."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return "image", bytes(image)
    is_path = isinstance(image, (str, os.PathLike))
    if not is_path and not hasattr(image, "read"):
        raise UsageError(
            f"an image of type {type(image).__name__}",
            hint="give a path, bytes, a file opened in binary mode, a PIL image, an array or a "
            "tensor",
        )
    name = os.fspath(image) if is_path else getattr(image, "name", None)
    name = name if isinstance(name, str) else "image"  # an upload's is None or a number
    try:
        with Path(name).open("rb") if is_path else contextlib.nullcontext(image) as file:
            with contextlib.suppress(AttributeError, OSError):  # a pipe
                file.seek(0)  # as Pillow does
            content = more = file.read(CHUNK_BYTES)  # to read N bytes, N are allocated first
            while more and isinstance(content, bytes) and len(content) <= MAX_FILE_BYTES:
                more = file.read(max(CHUNK_BYTES, len(content)))
                content += more
    except (UnicodeDecodeError, TypeError):
        content = None
    except (OSError, ValueError) as error:  # also a closed file, or one opened for writing
        raise unreadable(name, error) from None
    if not isinstance(content, bytes):
        if inspect.iscoroutine(content):
            content.close()
        raise UsageError(
            f"{name}: the file object does not return bytes",
            hint="open it in binary mode; of an upload, give its bytes",
        )
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{name}: larger than {MAX_FILE_BYTES >> 20} MiB")
    return name, content


def _rgb_of_image(image: Image.Image) -> Pixels:
    name = str(getattr(image, "filename", "") or "image")
    if getattr(image, "tile", ()) and getattr(image, "fp", name) is None:
        raise UsageError(f"{name}: a PIL image that is closed", hint="give its path, or load it")
    try:
        read_header(image)
        image.load()  # Pillow turns a TIFF upright when it loads it
        return apply_orientation(_to_rgb(image), _orientation(image))
    except Exception as error:
        raise DataError(f"{name}: {as_image_error(error)}") from None


def _rgb_of_array(pixels: NDArray[Any]) -> Pixels:
    given = f"pixels of shape {pixels.shape} and type {pixels.dtype}"
    if np.issubdtype(pixels.dtype, np.floating) and pixels.size:
        if not (pixels.min() >= 0 and pixels.max() <= 1):  # NaN fails it, too
            raise UsageError(
                "floating-point pixels outside 0 to 1", hint="scale them, or give uint8"
            )
        pixels = np.rint(pixels * 255).astype(np.uint8)
    pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    is_supported = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))
    if not is_supported or not pixels.size or pixels.dtype not in (np.uint8, np.uint16):
        hint = "expected (height, width, 3) uint8, RGB"
        if pixels.ndim == 4:
            hint = "give several images as a list: predict(list(images))"
        raise UsageError(given, hint=hint)
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        pixels = np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(pixels[..., :3])


def _rgb_of_tensor(tensor: Any) -> Pixels:
    try:
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()  # numpy has no bfloat16
        pixels = np.asarray(tensor)
    except (TypeError, RuntimeError) as error:  # sparse, or on the device `meta`
        raise UsageError(f"a tensor without pixels: {error}") from None
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    return _rgb_of_array(pixels)


def resized(image: Image.Image, part: tuple[int, int, int, int] | None = None) -> Pixels:
    """Resize an image, or a part of it, as evaluation does: antialiased bilinear, in uint8.

    Args:
        image: In RGB.
        part: Left, top, right, bottom in pixels.
    """
    if part not in (None, (0, 0, *image.size)):
        image = image.crop(part)
    return np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))


def apply_orientation(pixels: Pixels, orientation: int) -> Pixels:
    """Turn stored (H, W, 3) pixels upright by an EXIF orientation (1 to 8)."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _orientation(image: Image.Image) -> int:
    metadata = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
    try:
        if image.format == "PNG" and metadata.isdisjoint(image.info):
            exif = _exif_behind_pixels(getattr(image, "fp", None))
        else:
            exif = image.getexif()
        orientation = int(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken metadata: the pixels may be intact
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def _exif_behind_pixels(file: IO[bytes] | None) -> Image.Exif:
    """Return the EXIF data behind the pixels of a PNG, where ImageMagick writes it.

    Pillow would decode all pixels to look for it.
    """
    if file is None:  # the pixels are loaded, and what is behind them
        return Image.Exif()
    position = file.tell()
    file.seek(0)
    header, late, is_behind = file.read(PNG_HEADER_BYTES), b"", False
    while len(start := file.read(8)) == 8:
        size, kind = int.from_bytes(start[:4], "big"), start[4:]
        is_behind |= kind == b"IDAT"
        if is_behind and kind in METADATA_CHUNKS and size <= MAX_METADATA_BYTES:
            late += start + file.read(size + 4)
        else:
            file.seek(size + 4, os.SEEK_CUR)
    file.seek(position)
    if not late:
        return Image.Exif()
    with Image.open(io.BytesIO(header + late + b"\0\0\0\0IDAT"), formats=["PNG"]) as image:
        return Image.Image.getexif(image)  # a PNG's own would decode its pixels


def _decode_by_pillow(content: Any, size: tuple[int, int] | None, upright: bool) -> Pixels:
    with open_image(io.BytesIO(content)) as image:
        header = read_header(image)
        orientation = header.orientation_for(size, upright)
        pixels = _to_rgb(image)
    if header.format != "TIFF":
        return apply_orientation(pixels, orientation)
    if orientation == 1:  # Pillow has turned it upright: turn it back
        inverse = {6: 8, 8: 6}.get(header.orientation, header.orientation)
        pixels = apply_orientation(pixels, inverse)
    return pixels


def _to_rgb(image: Image.Image) -> Pixels:
    """Convert an image as it is stored to writable (H, W, 3) RGB pixels."""
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        bits = 16
        if image.format == "TIFF":
            bits = min(int(getattr(image, "tag_v2", {}).get(258, (16,))[0]), 16)
        gray = (np.asarray(image) >> (bits - 8)).clip(0, 255).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if mode in ("I", "F"):
        raise ImageError("32-bit image with unknown value range: convert it to 8 bits")
    if mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns of the direct conversion
    return np.array(image.convert("RGB"))


class _Frame(NamedTuple):
    offset: int  # where the height's two bytes are
    height: int
    width: int
    block_rows: int  # rows that are coded together, over all channels


def plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height of what `decode` gives to libjpeg-turbo; None for other images."""
    frame = _plain_frame(content)
    return None if frame is None else (frame.width, frame.height)


def _plain_frame(content: Any) -> _Frame | None:
    """Return the frame header of a complete 8-bit JPEG, gray or of three colors; else None."""
    if bytes(content[:2]) != b"\xff\xd8" or bytes(content[-2:]) != END_OF_IMAGE:
        return None
    head = bytes(content[: 1 << 16])
    offset = 2
    while offset + 10 < len(head) and head[offset] == 0xFF:
        marker = head[offset + 1]
        if marker == START_OF_SCAN:
            break
        if marker in PLAIN_FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", head, offset + 4)
            factors = [value & 15 for value in head[offset + 11 : offset + 10 + 3 * channels : 3]]
            if bits != 8 or channels not in (1, 3) or not height or not width or not all(factors):
                return None
            return _Frame(offset + 5, height, width, 8 * max(factors))
        offset += 2 + int.from_bytes(head[offset + 2 : offset + 4], "big")
    return None


def _decode_plain(content: Any, frame: _Frame, rows: int | None) -> Pixels:
    _refuse_too_large(frame.width, frame.height)
    height = frame.height
    if rows is not None:
        # One more row, because interpolated color depends on the next row.
        height = min(height, -(-(rows + 1) // frame.block_rows) * frame.block_rows)
        if height < frame.height:
            content = bytearray(content)
            content[frame.offset : frame.offset + 2] = height.to_bytes(2, "big")
    buffer = thread_buffer("decoded", height * frame.width * 3)
    # Not strict, as Pillow is not: a broken code inside the image spoils some blocks, and the
    # bytes after a lowered height are not an error.
    pixels: Pixels = simplejpeg.decode_jpeg(content, buffer=buffer, strict=False)
    return pixels


def has_damaged_jpeg_data(content: bytes, *, is_cmyk: bool) -> bool:
    """Return whether a JPEG's coded data is broken although decoders may tolerate it.

    Every byte is read, at an eighth of the size. Wrong bits that are valid codes are not found, and
    nothing is without simplejpeg.
    """
    if simplejpeg is None:
        return False
    eighth = {"min_height": 1, "min_width": 1, "min_factor": 8}
    try:
        simplejpeg.decode_jpeg(content, "CMYK" if is_cmyk else "GRAY", strict=True, **eighth)
    except ValueError:
        return True
    return False


def thread_buffer(name: str, size: int) -> Pixels:
    """Return `size` bytes of memory that belongs to this thread, reused under its name."""
    buffer: Pixels | None = getattr(_thread, name, None)
    if buffer is None or buffer.size < size:
        buffer = np.empty(size, np.uint8)
        if size <= MAX_REUSED_BYTES:
            setattr(_thread, name, buffer)
    return buffer[:size]


def as_image_error(error: Exception) -> ImageError:
    """Convert any error of a decoder, without the address of an object in its text."""
    if isinstance(error, MemoryError):  # of this process: the image may be right
        raise error
    if isinstance(error, ImageError):
        return error
    if isinstance(error, Image.DecompressionBombError):
        return ImageError(f"over {MAX_PIXELS:,} pixels ({error})")
    reason = str(error).partition(" <_io")[0] or type(error).__name__
    return ImageError(f"not a readable image ({reason})")
