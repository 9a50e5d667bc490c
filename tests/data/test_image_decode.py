"""Every entrance of the decoder gives the same pixels: Pillow's, bit for bit."""

import contextlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.samples import by_pillow, encoded, png, sample, with_exif_last
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from ssdctl.data import image_decode as module
from ssdctl.data.image_decode import ImageError, apply_orientation, decode, read_rgb
from ssdctl.errors import DataError, UsageError

SAMPLE = sample(60, 40, 3)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_down_to_the_bottom_of_a_crop_equal_pillows(data: st.DataObject) -> None:
    width, height = (data.draw(st.integers(2, 200)) for _ in range(2))
    options = {"quality": data.draw(st.integers(30, 98)), "progressive": data.draw(st.booleans())}
    if restart := data.draw(st.integers(0, 5)):
        options["restart_marker_blocks"] = restart
    image = sample(width, height, seed=width * height)
    if data.draw(st.booleans()):
        image = image.convert("L")
    else:
        options["subsampling"] = data.draw(st.integers(0, 2))
    content = encoded(image, **options)
    expected = by_pillow(content)
    assert np.array_equal(decode(content, (width, height)), expected)
    rows = data.draw(st.integers(1, height))
    part = decode(content, (width, height), rows)
    assert len(part) >= rows
    assert np.array_equal(part[:rows], expected[:rows])


def test_rows_below_the_crop_are_not_decoded() -> None:
    content = encoded(sample(320, 320, 0))
    assert len(decode(content, (320, 320), rows=100)) <= 128
    # Color is interpolated over the edge of a block.
    assert np.array_equal(decode(content, (320, 320), rows=96)[:96], by_pillow(content)[:96])


@pytest.mark.parametrize(
    "content",
    [
        *(encoded(image, "PNG") for image in (SAMPLE, *map(SAMPLE.convert, ("L", "P", "RGBA")))),
        encoded(SAMPLE.convert("CMYK")),
        encoded(SAMPLE) + b"trailing bytes",
        encoded(SAMPLE, turn=6),  # which the size of the annotation excludes
    ],
)
def test_other_than_plain_jpegs_are_decoded_as_by_pillow(content: bytes) -> None:
    for given_ in (content, memoryview(content), memoryview(content).cast("b")):
        assert np.array_equal(decode(given_, (60, 40), rows=10)[:10], by_pillow(content)[:10])
        assert np.array_equal(decode(given_, (60, 40)), by_pillow(content))


def test_without_simplejpeg_the_pixels_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(sample(90, 70, 1))
    expected = decode(content, (90, 70)).copy()
    monkeypatch.setattr(module, "simplejpeg", None)
    assert np.array_equal(decode(content, (90, 70), rows=20), expected)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xc0\x00\x11\x08", b"<html>"),
        encoded(SAMPLE, "EPS"),  # Pillow gives EPS files to Ghostscript
        encoded(Image.fromarray(np.zeros((40, 60), np.float32)), "TIFF"),  # of no known range
    ],
)
def test_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(ImageError):
        decode(content, (60, 40))


def test_a_cut_file_and_another_size_are_refused() -> None:
    content = encoded(sample(300, 200, 2))
    with pytest.raises(ImageError, match="truncated"):
        decode(content[: len(content) // 2], (300, 200), rows=10)
    with pytest.raises(ImageError, match=r"300 x 200.*201 x 300"):
        decode(content, (201, 300))


OPTIONS: dict[str, dict[str, Any]] = {
    "WEBP": {"lossless": True},
    "MPO": {"save_all": True, "append_images": [sample(30, 20, 4)]},
}


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "PNG, EXIF last", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_of_all_entrances(kind: str, orientation: int, tmp_path: Path) -> None:
    """A path, bytes, a file and a PIL image are upright; the declared size selects in datasets."""
    stored = sample(60, 40, 4)
    content = encoded(stored, kind.partition(",")[0], orientation, **OPTIONS.get(kind, {}))
    content = with_exif_last(content) if "last" in kind else content
    # The reference is Pillow's own function; Pillow turns a TIFF by itself.
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert upright.shape[:2] == ((60, 40) if orientation >= 5 else (40, 60))
    assert np.array_equal(decode(content), upright)
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with path.open("rb") as file, Image.open(path) as image:
        for given_ in (path, str(path), content, io.BytesIO(content), file, image):
            assert np.array_equal(read_rgb(given_), upright)
    # In a dataset:
    as_stored = decode(content, (60, 40))
    assert np.array_equal(apply_orientation(as_stored, orientation), upright)
    if kind.startswith(("PNG", "WEBP", "TIFF")):
        assert np.array_equal(as_stored, np.asarray(stored))
    if orientation >= 5:
        assert np.array_equal(decode(content, (40, 60), rows=7)[:7], upright[:7])
    else:
        with pytest.raises(ImageError, match=r"60 x 40.*40 x 60"):
            decode(content, (40, 60))


def test_arrays_and_tensors_are_the_same_image() -> None:
    pixels = np.asarray(sample(30, 20, 5))
    tensor = torch.from_numpy(pixels.copy())
    alpha = np.concatenate([pixels, np.full_like(pixels[..., :1], 7)], axis=2)
    first = tensor.permute(2, 0, 1)
    floating = first.float() / 255, first.double().div(255).requires_grad_(), pixels / 255
    deep = pixels.astype(np.uint16) * 257
    for given_ in (pixels, alpha, deep, deep.astype(">u2"), tensor, first, *floating):
        assert np.array_equal(read_rgb(given_), pixels)
    rounded = read_rgb((tensor.float() / 255).bfloat16()).astype(int)  # 8 bits of precision
    assert np.abs(rounded - pixels).max() <= 1
    gray = pixels[..., 0]
    for given_ in (gray, gray[..., None], torch.from_numpy(gray.copy())[None]):
        assert np.array_equal(read_rgb(given_), np.repeat(gray[..., None], 3, axis=2))


@pytest.mark.parametrize(
    ("given_", "subject"),
    [
        (np.full((5, 5, 3), 255.0), "0 to 1"),
        (np.zeros((5, 5, 3), np.int64), "int64"),
        (np.zeros((5, 5, 2), np.uint8), "(5, 5, 2)"),
        (np.zeros((0, 5, 3), np.uint8), "(0, 5, 3)"),
        (torch.full((3, 5, 5), 255.0), "0 to 1"),
        (torch.full((3, 5, 5), float("nan")), "0 to 1"),
        (7, "int"),
        (io.StringIO("x"), "binary"),
    ],
)
def test_other_objects_are_a_usage_error(given_: object, subject: str) -> None:
    with pytest.raises(UsageError) as error:
        read_rgb(given_)
    assert subject in f"{error.value} {error.value.hint}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 3)).save(path)
    with path.open("rb") as file:
        for _ in range(2):  # from its beginning
            assert read_rgb(file).shape == (3, 4, 3)
    with Image.open(path) as image:
        pass
    with pytest.raises(UsageError, match=r"a\.png.*closed"):
        read_rgb(image)
    with path.open() as text, pytest.raises(UsageError, match="bytes"):
        read_rgb(text)
    with pytest.raises(DataError, match=r"a\.png.*closed"):
        read_rgb(text)
    with (tmp_path / "b.png").open("wb") as written, pytest.raises(DataError, match=r"b\.png"):
        read_rgb(written)
    (tmp_path / "x.png").write_bytes(b"no image")
    for given_ in (tmp_path / "x.png", tmp_path / "none.png", tmp_path):
        with pytest.raises(DataError, match=str(given_)):
            read_rgb(given_)
    with pytest.raises(DataError):
        read_rgb(encoded(SAMPLE)[:200])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG2000", "PPM", "RGB"])
def test_16_bits_become_8_by_the_high_byte(kind: str) -> None:
    values = (np.arange(40 * 60, dtype=np.uint32) * 27).astype(np.uint16).reshape(40, 60)
    colors = np.repeat(values[..., None], 3, axis=2)
    if kind == "RGB":  # Pillow does not write it: a PNG by hand
        colors = np.stack([values, values[::-1], values[:, ::-1]], axis=2)
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colors)
        content = png(struct.pack(">IIBBBBB", 60, 40, 16, 2, 0, 0, 0), zlib.compress(rows))
    else:
        options = {"irreversible": False} if kind == "JPEG2000" else {}
        content = encoded(Image.fromarray(values), kind, **options)
        gray = read_rgb(Image.fromarray(values))
        assert np.array_equal(gray, (colors >> 8).astype(np.uint8))
    assert np.array_equal(decode(content, (60, 40)), (colors >> 8).astype(np.uint8))
    assert np.array_equal(read_rgb(content), (colors >> 8).astype(np.uint8))


def test_a_palette_with_transparency_keeps_its_colors() -> None:
    image = SAMPLE.quantize(16)
    content = encoded(image, "PNG", transparency=bytes(range(16)))
    with Image.open(io.BytesIO(content)) as opened:
        expected = np.asarray(image.convert("RGB"))
        assert np.array_equal(decode(content, (60, 40)), expected)
        assert np.array_equal(read_rgb(opened), expected)
        assert opened.mode == "P"  # the caller's image is unchanged


def test_a_pixel_bomb_is_refused_by_its_header() -> None:
    content = bytearray(encoded(SAMPLE))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 30_000, 30_000)
    for size in (None, (30_000, 30_000)):
        with pytest.raises(ImageError, match="over 100,000,000 pixels"):
            decode(bytes(content), size)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "MPO"]))
def test_damaged_files_raise_only_image_errors(data: st.DataObject, kind: str) -> None:
    content = bytearray(encoded(sample(16, 12, 1), kind, 6, **OPTIONS.get(kind, {})))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    for size in (None, (16, 12), (12, 16)):
        with contextlib.suppress(ImageError):
            assert decode(bytes(content), size).shape[2] == 3
