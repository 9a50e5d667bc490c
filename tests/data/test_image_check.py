"""Faults 22 and 23: what image files may be, and what is said of each."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from ssdctl.data.formats.coco import ImageEntry
from ssdctl.data.image_check import (
    Checked,
    Wish,
    changed_images,
    check_image,
    file_sizes,
    header_size,
    is_same_image,
)
from ssdctl.errors import DataError

NOISE = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
RGB = Image.fromarray(NOISE)  # 80 x 60
PACKED, PLAIN, VERIFIED = Wish(pack=True), Wish(pack=False), Wish(pack=False, verify=True)


def encoded(picture: Image.Image, format: str = "JPEG", turn: int = 1, **more: object) -> bytes:
    buffer = io.BytesIO()
    if turn != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        more["exif"] = exif
    picture.save(buffer, format, **more)  # type: ignore[arg-type]
    return buffer.getvalue()


def checked(
    folder: Path, content: bytes, wish: Wish = PLAIN, size: tuple[int, int] = (80, 60)
) -> Checked:
    (folder / "a.jpg").write_bytes(content)
    return check_image(folder / "a.jpg", ImageEntry(1, "a.jpg", *size), wish)


@pytest.mark.parametrize("wish", [PACKED, PLAIN, VERIFIED])
@pytest.mark.parametrize(
    "content",
    [
        encoded(RGB),
        encoded(RGB, progressive=True),
        encoded(RGB.convert("L")),
        encoded(RGB, "PNG"),  # whatever its name says
        encoded(RGB.convert("RGBA"), "PNG"),
        encoded(RGB.convert("P"), "PNG"),
        encoded(RGB.convert("1"), "PNG"),
        encoded(RGB) + b"a camera's notes",
    ],
)
def test_usual_images_pass_as_they_are(tmp_path: Path, wish: Wish, content: bytes) -> None:
    found = checked(tmp_path, content, wish)
    assert (found.problem, found.note) == (None, None)
    assert found.content == (content if wish.pack else None)


@pytest.mark.parametrize("wish", [PACKED, PLAIN, VERIFIED])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 0.99])
def test_a_cut_image_is_found_without_decoding_all(
    tmp_path: Path, wish: Wish, format: str, share: float
) -> None:
    whole = encoded(RGB, format)
    found = checked(tmp_path, whole[: int(share * len(whole))], wish)
    assert "no readable JPEG or PNG" in (found.problem or "")
    assert not found.content
    assert "0x" not in (found.problem or "")  # no object's address in a report


def test_damage_inside_is_found_by_decoding(tmp_path: Path) -> None:
    whole = bytearray(encoded(RGB, "PNG"))
    whole[len(whole) // 2] ^= 255
    assert checked(tmp_path, bytes(whole)).problem is None
    assert "no readable" in (checked(tmp_path, bytes(whole), VERIFIED).problem or "")


@pytest.mark.parametrize("content", [b"", b"<html>", b"\0" * 5000, encoded(RGB, "GIF")])
def test_what_is_no_image(tmp_path: Path, content: bytes) -> None:
    assert "no readable JPEG or PNG" in (checked(tmp_path, content).problem or "")


def test_cmyk_is_packed_as_rgb(tmp_path: Path) -> None:
    smooth = Image.fromarray(NOISE[::20, ::20]).resize((80, 60), Image.Resampling.BICUBIC)
    content = encoded(smooth.convert("CMYK"), quality=95)
    found = checked(tmp_path, content, PACKED)
    assert (found.problem, found.note) == (None, "CMYK, read as RGB")
    with Image.open(io.BytesIO(found.content or b"")) as picture:
        assert (picture.mode, picture.size) == ("RGB", (80, 60))
        difference = np.asarray(picture, np.int16) - np.asarray(smooth)
    assert np.abs(difference).mean() < 5
    assert checked(tmp_path, content, PLAIN).note == "CMYK, read as RGB"


def test_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    deep = Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257)
    assert "more than 8 bits" in (checked(tmp_path, encoded(deep, "PNG")).problem or "")


class TestOrientation:
    """The picture is 80 x 60 as stored; cameras turn it by a note in its EXIF."""

    def test_annotated_as_stored(self, tmp_path: Path) -> None:
        found = checked(tmp_path, encoded(RGB, turn=6), PACKED)
        assert found.problem is None
        assert "EXIF orientation (6) is ignored" in (found.note or "")
        assert found.content == encoded(RGB, turn=6)

    @pytest.mark.parametrize(
        ("turn", "corner"), [(5, (0, 0)), (6, (59, 0)), (7, (59, 79)), (8, (0, 79))]
    )
    def test_annotated_as_shown(self, tmp_path: Path, turn: int, corner: tuple[int, int]) -> None:
        """Packed, it is turned: the bright corner at the stored origin goes where viewers show it."""
        pixels = np.zeros((60, 80, 3), np.uint8)
        pixels[:16, :16] = 255
        content = encoded(Image.fromarray(pixels), turn=turn)
        found = checked(tmp_path, content, PACKED, (60, 80))
        assert "turned upright" in (found.note or "")
        with Image.open(io.BytesIO(found.content or b"")) as picture:
            assert picture.size == (60, 80)
            assert not picture.getexif()
            assert min(picture.getpixel(corner)) > 200  # type: ignore[arg-type, type-var]
        refused = checked(tmp_path, content, PLAIN, (60, 80))
        assert "pack it" in (refused.problem or "")

    def test_turned_and_shrunk(self, tmp_path: Path) -> None:
        large = RGB.resize((800, 600))
        found = checked(tmp_path, encoded(large, turn=6), Wish(True, shrink=300), (600, 800))
        with Image.open(io.BytesIO(found.content or b"")) as picture:
            assert picture.size == (300, 400)

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
    for wish in (PACKED, VERIFIED, Wish(True, shrink=300)):
        found = checked(tmp_path, bomb, wish, (side, side))
        assert "refused by its header" in (found.problem or "")


def _chunk(kind: bytes, data: bytes) -> bytes:
    import zlib

    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_an_image_that_is_gone_or_a_folder(tmp_path: Path) -> None:
    entry = ImageEntry(1, "a.jpg", 80, 60)
    with pytest.raises(DataError, match=r"a\.jpg: cannot be read: No such file"):
        check_image(tmp_path / "a.jpg", entry, PLAIN)
    (tmp_path / "a.jpg").mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        check_image(tmp_path / "a.jpg", entry, PLAIN)
    assert file_sizes(tmp_path, ["a.jpg", "b.jpg", "x" * 300, "a\0b"]) == [None] * 4


def test_versions_of_a_file_are_told_apart(tmp_path: Path) -> None:
    content = encoded(RGB, "PNG")
    mark = checked(tmp_path, content).mark
    path = tmp_path / "a.jpg"
    path.touch()  # a copy has another time
    assert is_same_image(str(path), mark)
    for change in (
        content[:-1],
        content[:100] + b"?" + content[101:],
        content[:-20] + b"?" + content[-19:],
    ):
        path.write_bytes(change)
        assert changed_images(tmp_path, ["a.jpg"], [mark]) == ["a.jpg"]
    path.write_bytes(content[:-1])
    os.utime(path, ns=(mark.modified_ns, mark.modified_ns))
    assert not is_same_image(str(path), mark)
    path.unlink()
    assert not is_same_image(str(path), mark)
