"""Images that tests of the decoder and of the check encode."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image


def encoded(image: Image.Image, kind: str = "JPEG", turn: int = 1, **options: Any) -> bytes:
    """Encode an image; `turn` is its EXIF orientation."""
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow does not write {kind}")
    if turn != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        options["exif"] = exif
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_exif_last(content: bytes, more: bytes = b"") -> bytes:
    """Return a PNG with its EXIF data, and `more` chunks, behind the pixels."""
    if (start := content.find(b"eXIf") - 4) < 0:
        return content
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    return content[:start] + content[end:-12] + content[start:end] + more + content[-12:]


def sample(width: int, height: int, seed: int) -> Image.Image:
    """Blobs and noise, so that neighboring rows and colors differ."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = rng.integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8))


def by_pillow(content: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def png(header: bytes, data: bytes) -> bytes:
    """Return a PNG of any header, which Pillow may not write."""
    parts = (b"IHDR", header), (b"IDAT", data), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
