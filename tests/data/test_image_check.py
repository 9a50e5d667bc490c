"""Faults 22, 23 and 49: the formats of image files, and what is reported of each."""

import io
import os
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from data.samples import by_pillow, encoded, png, with_exif_last
from PIL import Image

from ssdctl.config import PrepareConfig
from ssdctl.data.image_check import DAMAGED, CheckedImage, check_image
from ssdctl.data.image_decode import decode, read_rgb
from ssdctl.data.image_files import FingerprintColumns, changed_images, file_sizes
from ssdctl.errors import DataError

NOISE = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
RGB = Image.fromarray(NOISE)  # 80 x 60
PACKED, PLAIN = PrepareConfig(), PrepareConfig(pack=False)
VERIFIED = PrepareConfig(pack=False, verify_images=True)
ALL = (PACKED, PLAIN, VERIFIED)


def checked(
    folder: Path, content: bytes, config: PrepareConfig = PLAIN, size: tuple[int, int] = (80, 60)
) -> CheckedImage:
    (folder / "a.jpg").write_bytes(content)
    return check_image(folder / "a.jpg", size, config)


def opened(packed: bytes | None) -> Image.Image:
    return Image.open(io.BytesIO(packed or b""))


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 0.99])
def test_a_cut_image_is_found_by_its_ends(tmp_path: Path, format: str, share: float) -> None:
    complete = encoded(RGB, format)
    for config in ALL:
        result = checked(tmp_path, complete[: int(share * len(complete))], config)
        assert "not a readable image" in (result.problem or "")
        assert not result.image
        assert "0x" not in (result.problem or "")  # no object's address in a report


def test_damage_inside_is_found_by_decoding(tmp_path: Path) -> None:
    damaged = bytearray(encoded(RGB, "PNG"))
    damaged[len(damaged) // 2] ^= 255
    assert checked(tmp_path, bytes(damaged)).problem is None
    assert "not a readable" in (checked(tmp_path, bytes(damaged), VERIFIED).problem or "")


@pytest.mark.parametrize("more", [{}, {"progressive": True}, {"keep_rgb": True}, {"mode": "CMYK"}])
@pytest.mark.parametrize("change", ["deleted", "zeroed"])
def test_strict_decoding_finds_damage(tmp_path: Path, change: str, more: dict[str, object]) -> None:
    complete = encoded(RGB.convert(more.pop("mode", "RGB")), **more)  # type: ignore[arg-type]
    middle = len(complete) // 2
    end = middle + 300
    damaged = complete[:middle] + bytes(300 * (change == "zeroed")) + complete[end:]
    assert checked(tmp_path, complete, VERIFIED).problem is None
    for options in ({"pack": False}, {}, {"shrink": 30}):
        config = PrepareConfig(verify_images=True, **options)
        assert checked(tmp_path, damaged, config).problem == DAMAGED
        kept = checked(tmp_path, damaged, msgspec.structs.replace(config, keep_damaged=True))
        assert kept.problem is None
        assert DAMAGED in (kept.note or "")
        assert bool(kept.image) == config.pack
    assert checked(tmp_path, damaged, PLAIN).problem is None
    assert decode(damaged, (80, 60)).shape == (60, 80, 3)  # training decodes what it can


LOSSY = ("GIF", "AVIF", "JPEG2000")


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("WEBP", {"lossless": True}),
        ("TIFF", {"compression": "tiff_lzw"}),
        *((f, {}) for f in ("BMP", "TIFF", "PPM", "TGA", "PCX", "SGI", *LOSSY)),
    ],
)
def test_other_formats_are_packed(tmp_path: Path, format: str, options: dict[str, object]) -> None:
    content = encoded(RGB, format, **options)
    expected = by_pillow(content)
    assert np.array_equal(expected, NOISE) or format in LOSSY
    assert np.array_equal(read_rgb(content), expected)
    assert np.array_equal(decode(content, (80, 60)), expected)
    packed = checked(tmp_path, content, PACKED)
    assert packed.problem is None
    with opened(packed.image) as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image.convert("RGB")), expected)
    for config in (PLAIN, VERIFIED):  # trained on from the file itself
        assert checked(tmp_path, content, config)[:2] == (None, None)
        if format in ("WEBP", "AVIF", "JPEG2000"):
            for end in (b"", b"-"):
                assert checked(tmp_path, content[: len(content) // 2] + end, config).problem


@pytest.mark.parametrize("config", [*ALL, PrepareConfig(shrink=30)])
@pytest.mark.parametrize("size", [(80, 60), (1600, 1200)])
def test_multi_image_jpegs(tmp_path: Path, config: PrepareConfig, size: tuple[int, int]) -> None:
    content = encoded(RGB.resize(size), "MPO", save_all=True, append_images=[RGB])
    with opened(content) as image:
        assert image.format == "MPO"
    result = checked(tmp_path, content, config, size)
    assert (result.problem, result.note) == (None, None)
    assert config != PACKED or result.image == content
    cut = checked(tmp_path, content[: len(content) // 3], config, size)
    assert "not a readable image" in (cut.problem or "")


# The image is 80 x 60 as stored; cameras turn it by an entry in its EXIF data.


def test_turned_and_shrunk(tmp_path: Path) -> None:
    large = RGB.resize((800, 600))
    result = checked(tmp_path, encoded(large, turn=6), PrepareConfig(shrink=300), (600, 800))
    with opened(result.image) as image:
        assert image.size == (300, 400)


def test_exif_data_behind_the_pixels_of_a_large_png(tmp_path: Path) -> None:
    text = b"tEXtnote\0" + bytes(150_000)
    more = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    content = with_exif_last(encoded(RGB.resize((400, 300)), "PNG", 6), more)
    for config in ALL:
        result = checked(tmp_path, content, config, (300, 400))
        assert result.problem is None
        assert "upright" in str(result.note)
    damaged = content[:9000] + bytes(9) + content[9009:]
    assert checked(tmp_path, damaged, VERIFIED, (300, 400)).problem


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_001, 20_000, 65_000])
def test_a_pixel_bomb_is_never_decoded(tmp_path: Path, side: int) -> None:
    bomb = png(struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), b"")
    for config in (PACKED, VERIFIED, PrepareConfig(shrink=300)):
        result = checked(tmp_path, bomb, config, (side, side))
        assert "over 100,000,000 pixels" in (result.problem or "")


def test_a_missing_image_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jpg: .*No such file"):
        check_image(tmp_path / "a.jpg", (80, 60), PLAIN)
    (tmp_path / "a.jpg").mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        check_image(tmp_path / "a.jpg", (80, 60), PLAIN)
    assert file_sizes(tmp_path, ["a.jpg", "b.jpg", "x" * 300, "a\0b"]) == [None] * 4


def test_changed_images_are_listed(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(9)]
    content = encoded(RGB, "PNG")
    fingerprints = []
    for name in names:
        (tmp_path / name).write_bytes(content)
        fingerprints.append(check_image(tmp_path / name, (80, 60), PLAIN)[3:])
    columns = FingerprintColumns(*np.array(fingerprints).T)
    assert changed_images(tmp_path, names, columns) == []
    (tmp_path / names[1]).touch()  # a copy has another time
    (tmp_path / names[2]).write_bytes(content[:-1])
    (tmp_path / names[3]).write_bytes(content[:100] + b"?" + content[101:])
    (tmp_path / names[4]).write_bytes(content[:-20] + b"?" + content[-19:])
    (tmp_path / names[5]).write_bytes(content[:-1])
    os.utime(tmp_path / names[5], ns=(fingerprints[5][1], fingerprints[5][1]))
    (tmp_path / names[6]).unlink()
    names[7] = "7\0.png"  # in a damaged index
    assert changed_images(tmp_path, names, columns) == names[2:8]
    assert changed_images(tmp_path, [], FingerprintColumns(*np.zeros((3, 0)))) == []
