"""Faults 22, 23 and 49: the formats of image files, and what is reported of each."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from ssdctl.data.image_check import (
    AMBIGUOUS,
    DAMAGED,
    CheckedImage,
    FingerprintColumns,
    PackOptions,
    changed_images,
    check_image,
    file_sizes,
    header_size,
    is_same_image,
)
from ssdctl.data.image_decode import decode
from ssdctl.errors import DataError

NOISE = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
RGB = Image.fromarray(NOISE)  # 80 x 60
PACKED, PLAIN, VERIFIED = (
    PackOptions(pack=True),
    PackOptions(pack=False),
    PackOptions(pack=False, verify=True),
)


def encoded(image: Image.Image, format: str = "JPEG", turn: int = 1, **more: object) -> bytes:
    buffer = io.BytesIO()
    if turn != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        more["exif"] = exif
    image.save(buffer, format, **more)  # type: ignore[arg-type]
    return buffer.getvalue()


def checked(
    folder: Path, content: bytes, options: PackOptions = PLAIN, size: tuple[int, int] = (80, 60)
) -> CheckedImage:
    (folder / "a.jpg").write_bytes(content)
    return check_image(folder / "a.jpg", size, options)


@pytest.mark.parametrize("options", [PACKED, PLAIN, VERIFIED])
@pytest.mark.parametrize(
    "content",
    [
        encoded(RGB),
        encoded(RGB, progressive=True),
        encoded(RGB.convert("L")),
        encoded(RGB, "PNG"),  # whatever its suffix is
        encoded(RGB.convert("RGBA"), "PNG"),
        encoded(RGB.convert("P"), "PNG"),
        encoded(RGB.convert("1"), "PNG"),
        encoded(RGB) + b"a camera's notes",
    ],
)
def test_usual_images_pass_as_they_are(
    tmp_path: Path, options: PackOptions, content: bytes
) -> None:
    result = checked(tmp_path, content, options)
    assert (result.problem, result.note) == (None, None)
    assert result.content == (content if options.pack else None)


@pytest.mark.parametrize("options", [PACKED, PLAIN, VERIFIED])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 0.99])
def test_a_cut_image_is_found_without_decoding_all(
    tmp_path: Path, options: PackOptions, format: str, share: float
) -> None:
    complete = encoded(RGB, format)
    result = checked(tmp_path, complete[: int(share * len(complete))], options)
    assert "not a readable image" in (result.problem or "")
    assert not result.content
    assert "0x" not in (result.problem or "")  # no object's address in a report


def test_damage_inside_is_found_by_decoding(tmp_path: Path) -> None:
    complete = bytearray(encoded(RGB, "PNG"))
    complete[len(complete) // 2] ^= 255
    assert checked(tmp_path, bytes(complete)).problem is None
    assert "not a readable" in (checked(tmp_path, bytes(complete), VERIFIED).problem or "")


@pytest.mark.parametrize("more", [{}, {"progressive": True}, {"keep_rgb": True}, {"mode": "CMYK"}])
@pytest.mark.parametrize("change", ["deleted", "zeroed"])
def test_a_damaged_jpeg_is_found_by_strict_decoding(
    tmp_path: Path, change: str, more: dict[str, object]
) -> None:
    complete = encoded(RGB.convert(more.pop("mode", "RGB")), **more)  # type: ignore[arg-type]
    middle = len(complete) // 2
    end = middle + 300
    damaged = complete[:middle] + bytes(300 * (change == "zeroed")) + complete[end:]
    assert checked(tmp_path, complete, VERIFIED).problem is None
    for options in (
        VERIFIED,
        PACKED._replace(verify=True),
        PACKED._replace(verify=True, shrink=30),
    ):
        assert checked(tmp_path, damaged, options).problem == DAMAGED
        kept = checked(tmp_path, damaged, options._replace(keep_damaged=True))
        assert kept.problem is None
        assert DAMAGED in (kept.note or "")
        assert bool(kept.content) == options.pack
    assert checked(tmp_path, damaged, PLAIN).problem is None
    assert decode(damaged, (80, 60)).shape == (60, 80, 3)  # training decodes what it can


@pytest.mark.parametrize("content", [b"", b"<html>", b"\0" * 5000, encoded(RGB, "EPS")])
def test_other_content_is_a_problem(tmp_path: Path, content: bytes) -> None:
    assert "not a readable image" in (checked(tmp_path, content).problem or "")


def test_cmyk_is_packed_as_rgb(tmp_path: Path) -> None:
    smooth = Image.fromarray(NOISE[::20, ::20]).resize((80, 60), Image.Resampling.BICUBIC)
    content = encoded(smooth.convert("CMYK"), quality=95)
    result = checked(tmp_path, content, PACKED)
    assert (result.problem, result.note) == (None, "CMYK, read as RGB")
    with Image.open(io.BytesIO(result.content or b"")) as image:
        assert (image.mode, image.size) == ("RGB", (80, 60))
        difference = np.asarray(image, np.int16) - np.asarray(smooth)
    assert np.abs(difference).mean() < 5
    assert checked(tmp_path, content, PLAIN).note == "CMYK, read as RGB"


@pytest.mark.parametrize(
    ("format", "more"),
    [
        ("WEBP", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("GIF", {}),
        ("AVIF", {}),
        ("JPEG2000", {}),
        ("16-bit PNG", {}),
    ],
)
def test_other_formats_are_packed_without_loss(
    tmp_path: Path, format: str, more: dict[str, object]
) -> None:
    Image.init()
    if format == "16-bit PNG":
        deep = NOISE[..., 0].astype(np.uint16) * 256 + 7
        content = encoded(Image.fromarray(deep), "PNG")
        expected = np.repeat(NOISE[..., :1], 3, axis=2)
    elif format not in Image.SAVE:
        pytest.skip(f"this Pillow does not write {format}")
    else:
        content = encoded(RGB, format, **more)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    packed = checked(tmp_path, content, PACKED)
    assert packed.problem is None
    with Image.open(io.BytesIO(packed.content or b"")) as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image.convert("RGB")), expected)
    for options in (PLAIN, VERIFIED):  # trained on from the file itself
        actual = checked(tmp_path, content, options)
        assert (actual.problem, actual.content) == (None, None)
        assert np.array_equal(decode(content, (80, 60)), expected)
        if format not in ("BMP", "16-bit PNG", "TIFF", "GIF"):
            assert checked(tmp_path, content[: len(content) // 2], options).problem


@pytest.mark.parametrize("options", [PACKED, PLAIN, VERIFIED, PackOptions(True, shrink=30)])
@pytest.mark.parametrize("size", [(80, 60), (1600, 1200)])
def test_multi_image_jpegs_of_cameras(
    tmp_path: Path, options: PackOptions, size: tuple[int, int]
) -> None:
    large = RGB.resize(size)
    content = encoded(large, "MPO", save_all=True, append_images=[RGB])
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "MPO"
    result = checked(tmp_path, content, options, size)
    assert (result.problem, result.note) == (None, None)
    if options == PACKED:
        assert result.content == content
    cut = checked(tmp_path, content[: len(content) // 3], options, size)
    assert "not a readable image" in (cut.problem or "")


class TestOrientation:
    """The image is 80 x 60 as stored; cameras turn it by an entry in its EXIF data."""

    @pytest.mark.parametrize("options", [PACKED, PLAIN, VERIFIED])
    def test_annotated_as_stored(self, tmp_path: Path, options: PackOptions) -> None:
        content = encoded(RGB, turn=6)
        result = checked(tmp_path, content, options)
        assert result.problem is None
        assert "EXIF orientation (6) is ignored" in (result.note or "")
        assert result.content == (content if options.pack else None)

    @pytest.mark.parametrize("options", [PACKED, PLAIN, VERIFIED])
    @pytest.mark.parametrize("turn", [5, 6, 7, 8])
    def test_annotated_as_shown(self, tmp_path: Path, options: PackOptions, turn: int) -> None:
        content = encoded(RGB, turn=turn)
        actual = checked(tmp_path, content, options, (60, 80))
        assert actual.problem is None
        assert f"turned upright by its EXIF orientation ({turn})" in (actual.note or "")
        with Image.open(io.BytesIO(content)) as image:
            expected = np.asarray(ImageOps.exif_transpose(image))
        packed = actual.content if options.pack else content
        assert np.array_equal(decode(packed, (60, 80)), expected)

    @pytest.mark.parametrize(("turn", "width"), [(2, 80), (3, 80), (4, 80), (6, 60), (8, 60)])
    def test_a_size_that_fits_both(self, tmp_path: Path, turn: int, width: int) -> None:
        image = RGB.crop((0, 0, width, 60))
        content = encoded(image, "PNG", turn=turn)
        result = checked(tmp_path, content, PACKED, (width, 60))
        assert result.problem is None
        assert AMBIGUOUS in (result.note or "")
        assert np.array_equal(decode(result.content, (width, 60)), np.asarray(image))

    def test_turned_and_shrunk(self, tmp_path: Path) -> None:
        large = RGB.resize((800, 600))
        result = checked(
            tmp_path, encoded(large, turn=6), PackOptions(True, shrink=300), (600, 800)
        )
        with Image.open(io.BytesIO(result.content or b"")) as image:
            assert image.size == (300, 400)

    def test_header_sizes(self, tmp_path: Path) -> None:
        (tmp_path / "a.jpg").write_bytes(encoded(RGB, turn=8))
        assert header_size(tmp_path / "a.jpg") == (80, 60)
        assert header_size(tmp_path / "a.jpg", upright=True) == (60, 80)


def test_another_size_than_annotated(tmp_path: Path) -> None:
    assert "is 80 x 60" in (checked(tmp_path, encoded(RGB), size=(60, 80)).problem or "")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_001, 20_000, 65_000])
def test_a_pixel_bomb_is_never_decoded(tmp_path: Path, side: int) -> None:
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"") + _chunk(b"IEND", b"")
    )
    for options in (PACKED, VERIFIED, PackOptions(True, shrink=300)):
        result = checked(tmp_path, bomb, options, (side, side))
        assert "refused by its header" in (result.problem or "")


def _chunk(kind: bytes, data: bytes) -> bytes:
    import zlib

    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_missing_image_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jpg: .*No such file"):
        check_image(tmp_path / "a.jpg", (80, 60), PLAIN)
    (tmp_path / "a.jpg").mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        check_image(tmp_path / "a.jpg", (80, 60), PLAIN)
    assert file_sizes(tmp_path, ["a.jpg", "b.jpg", "x" * 300, "a\0b"]) == [None] * 4


def test_versions_of_a_file_are_distinguished(tmp_path: Path) -> None:
    content = encoded(RGB, "PNG")
    fingerprint = checked(tmp_path, content).fingerprint
    path = tmp_path / "a.jpg"
    path.touch()  # a copy has another time
    assert is_same_image(str(path), fingerprint)
    for change in (
        content[:-1],
        content[:100] + b"?" + content[101:],
        content[:-20] + b"?" + content[-19:],
    ):
        path.write_bytes(change)
        assert not is_same_image(str(path), fingerprint)
    path.write_bytes(content[:-1])
    os.utime(path, ns=(fingerprint.modified_ns, fingerprint.modified_ns))
    assert not is_same_image(str(path), fingerprint)
    path.unlink()
    assert not is_same_image(str(path), fingerprint)


def test_changed_images_are_listed(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(5)]
    fingerprints = []
    for name in names:
        (tmp_path / name).write_bytes(encoded(RGB, "PNG"))
        fingerprints.append(check_image(tmp_path / name, (80, 60), PLAIN).fingerprint)
    columns = FingerprintColumns(
        *(np.array([getattr(f, c) for f in fingerprints]) for c in FingerprintColumns._fields)
    )
    assert changed_images(tmp_path, names, columns) == []
    (tmp_path / "1.png").write_bytes(encoded(RGB, "PNG")[:-1])
    (tmp_path / "2.png").touch()  # a copy has another time
    (tmp_path / "4.png").unlink()
    names[0] = "0\0.png"  # in a damaged index
    assert changed_images(tmp_path, names, columns) == [names[0], "1.png", "4.png"]
    none = FingerprintColumns(*np.zeros((3, 0)))
    assert changed_images(tmp_path, [], none) == []
