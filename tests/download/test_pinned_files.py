"""What is pinned, and what a manifest may contain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ssdctl.download.pinned_files import COCO2017, PinnedFile, read_manifest
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.model.pretrained import all_weights, weights_named

HASH = "ab" * 32
ENTRY = f'[[file]]\nname = "a.zip"\nurl = "https://x.org/a.zip"\nbytes = 7\nsha256 = "{HASH}"\n'


def manifest(folder: Path, text: str) -> list[PinnedFile]:
    path = folder / "manifest.toml"
    path.write_text(text)
    return read_manifest(path)


def test_coco_is_pinned_completely() -> None:
    assert set(COCO2017) == {"train", "val", "annotations"}
    for file in COCO2017.values():
        assert re.fullmatch("[0-9a-f]{64}", file.sha256)
        assert file.bytes
        assert file.unpack
        assert file.url.startswith("https://")
        assert file.url.endswith("/" + file.name)


def test_weights_pin_the_hash_in_their_names() -> None:
    for weights in all_weights():
        assert re.fullmatch("[0-9a-f]{8}|[0-9a-f]{64}", weights.file.sha256)
        assert weights.file.sha256.startswith(weights.name.rpartition("-")[2])
    names = [name for w in all_weights() for name in {w.name, w.alias}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("resnet34-imagenet-v1", "resnet34-b627a593"),
        ("resnet50-imagenet-v1", "resnet50-0676ba61"),
        ("resnet50-imagenet-v2", "resnet50-11ad3fa6"),
        ("resnet34-333f7ec4", "resnet34-333f7ec4"),
        ("resnet50-19c8e357.pth", "resnet50-19c8e357"),
    ],
)
def test_weights_have_several_names(name: str, stem: str) -> None:
    assert weights_named(name).name == stem


def test_a_mirror_is_tried_flat_and_in_the_hosts_layout() -> None:
    assert COCO2017["val"].urls("http://m.org/coco/") == [
        "http://m.org/coco/val2017.zip",
        "http://m.org/coco/zips/val2017.zip",
        "http://m.org/coco/images.cocodataset.org/zips/val2017.zip",
    ]


@pytest.mark.parametrize("mirror", ["file:///tmp", "/tmp", "m.org", "http://", "ftp://m.org"])
def test_a_mirror_is_http(mirror: str) -> None:
    with pytest.raises(UsageError, match="--mirror"):
        COCO2017["val"].urls(mirror)


def test_a_manifest_is_read(tmp_path: Path) -> None:
    assert manifest(tmp_path, ENTRY + "unpack = true\n") == [
        PinnedFile("a.zip", "https://x.org/a.zip", HASH, 7, unpack=True)
    ]
    other = ENTRY.replace(HASH, HASH.upper()).replace("a.zip", "a.tar", 1)  # not to be unpacked
    assert manifest(tmp_path, other)[0][:3] == ("a.tar", "https://x.org/a.zip", HASH)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("bytes = 7\n", "", "bytes"),
        ("bytes = 7", "bytes = 0", "bytes"),
        ("bytes = 7", 'bytes = "7"', "bytes"),
        (HASH, HASH[:8], "sha256"),
        (f'sha256 = "{HASH}"\n', "", "sha256"),
        ("https:", "file:", "http"),
        ("bytes = 7", "bytes = 7\nmd5 = 1", "md5"),
        (ENTRY, "", "file"),
        (ENTRY, "file = []", "file"),
        (ENTRY, ENTRY + ENTRY, "a.zip"),
        (ENTRY, "[[file", "TOML"),
        ('"a.zip"', '"."', "name"),
        ('a.zip"\nurl', 'a.tar"\nunpack = true\nurl', r"'a\.tar'"),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        manifest(tmp_path, ENTRY.replace(old, new))
    with pytest.raises(UsageError, match="none"):
        read_manifest(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a\\\\b", "a\\u0000b", ""])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(IntegrityError):
        manifest(tmp_path, ENTRY.replace("a.zip", name, 1))
