"""Decoding equals Pillow's bit by bit; a resized crop is within one level of Pillow's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from ssdctl.input import decode as module
from ssdctl.input.decode import decode, shrink_crop, shrink_exactly

Pixels = NDArray[np.uint8]


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Blobs and noise, so that neighbouring rows and colours differ."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = rng.integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def by_pillow(content: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(2, 200),
    height=st.integers(2, 200),
    quality=st.integers(30, 98),
    subsampling=st.integers(0, 2),
    progressive=st.booleans(),
    restart=st.integers(0, 5),
    is_gray=st.booleans(),
    data=st.data(),
)
def test_rows_down_to_a_crops_bottom_are_pillows(
    width: int,
    height: int,
    quality: int,
    subsampling: int,
    progressive: bool,
    restart: int,
    is_gray: bool,
    data: st.DataObject,
) -> None:
    image = picture(width, height, seed=width * height)
    options: dict[str, Any] = {"quality": quality, "progressive": progressive}
    if restart:
        options["restart_marker_blocks"] = restart
    if is_gray:
        image = image.convert("L")
    else:
        options["subsampling"] = subsampling
    content = encoded(image, **options)
    expected = by_pillow(content)
    assert np.array_equal(decode(content, (width, height)), expected)
    rows = data.draw(st.integers(1, height))
    part = decode(content, (width, height), rows)
    assert len(part) >= rows
    assert np.array_equal(part[:rows], expected[:rows])


def test_rows_below_the_crop_are_left_out() -> None:
    content = encoded(picture(320, 320, 0))
    assert len(decode(content, (320, 320), rows=100)) <= 128


@pytest.mark.parametrize("kind", ["png", "gray png", "palette", "alpha", "cmyk", "no end", "exif"])
def test_what_is_no_plain_jpeg_is_read_as_pillow_reads_it(kind: str) -> None:
    image = picture(60, 40, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned, which is ignored, as pycocotools does
    content = {
        "png": lambda: encoded(image, "PNG"),
        "gray png": lambda: encoded(image.convert("L"), "PNG"),
        "palette": lambda: encoded(image.quantize(16), "PNG"),
        "alpha": lambda: encoded(image.convert("RGBA"), "PNG"),
        "cmyk": lambda: encoded(image.convert("CMYK")),
        "no end": lambda: encoded(image) + b"trailing bytes",
        "exif": lambda: encoded(image, exif=exif),
    }[kind]()
    for given_ in (content, memoryview(content), memoryview(content).cast("b")):
        assert np.array_equal(decode(given_, (60, 40), rows=10)[:10], by_pillow(content)[:10])
        assert np.array_equal(decode(given_, (60, 40)), by_pillow(content))


def test_without_simplejpeg_the_pixels_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(picture(90, 70, 1))
    expected = decode(content, (90, 70)).copy()
    monkeypatch.setattr(module, "simplejpeg", None)
    assert np.array_equal(decode(content, (90, 70), rows=20), expected)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xc0\x00\x11\x08", b"<html>"]
)
def test_what_is_no_image_is_refused(content: bytes) -> None:
    with pytest.raises((OSError, ValueError, SyntaxError)):
        decode(content, (60, 40))


def test_a_cut_file_and_another_size_are_refused() -> None:
    content = encoded(picture(300, 200, 2))
    with pytest.raises(OSError, match="truncated"):
        decode(content[: len(content) // 2], (300, 200), rows=10)
    with pytest.raises(ValueError, match="is 300 x 200, was 200 x 300"):
        decode(content, (200, 300))


@settings(max_examples=60, deadline=None)
@given(
    box=st.tuples(
        st.integers(0, 299), st.integers(0, 199), st.integers(1, 300), st.integers(1, 200)
    ),
    flip=st.booleans(),
)
def test_a_crop_is_within_one_level_of_pillows(box: tuple[int, int, int, int], flip: bool) -> None:
    left, top = min(box[0], box[2] - 1), min(box[1], box[3] - 1)
    window = (left, top, max(box[2], left + 1), max(box[3], top + 1))
    pixels = decode(encoded(picture(300, 200, 5), "PNG"), (300, 200))
    out = np.zeros((300, 300, 3), np.uint8)
    shrink_crop(pixels, window, flip, out)
    cut = Image.fromarray(pixels).crop(window)
    expected = np.asarray(cut.resize((300, 300), Image.Resampling.BILINEAR)).astype(int)
    error = np.abs(out[:, ::-1] - expected if flip else out - expected)
    assert error.max() <= 1
    assert error.mean() < 0.1


def test_a_whole_picture_is_exactly_pillows() -> None:
    image = picture(333, 222, 7)
    out = np.zeros((300, 300, 3), np.uint8)
    shrink_exactly(np.asarray(image), out)
    assert np.array_equal(out, np.asarray(image.resize((300, 300), Image.Resampling.BILINEAR)))
