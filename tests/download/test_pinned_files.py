"""What is pinned, what a manifest may contain, and the cache of backbone weights."""

import re
from pathlib import Path

import pytest

from ssdctl.download.pinned_files import PinnedFile, read_manifest
from ssdctl.errors import UsageError
from ssdctl.model.pretrained import all_weights, weights_named

HASH = "ab" * 32
ENTRY = f'[[file]]\nname = "a.zip"\nurl = "https://x.org/a.zip"\nbytes = 7\nsha256 = "{HASH}"\n'


def manifest(folder: Path, text: str) -> list[PinnedFile]:
    path = folder / "manifest.toml"
    path.write_text(text)
    return read_manifest(path)


def test_weights_have_unique_names_and_pin_the_hash_in_them() -> None:
    for weights in all_weights()[0]:
        assert re.fullmatch("[0-9a-f]{8}|[0-9a-f]{64}", weights.file.sha256)
        assert weights.file.sha256.startswith(weights.name.rpartition("-")[2])
    names = [name for w in all_weights()[0] for name in {w.name, w.alias}]
    assert len(names) == len(set(names))
    assert weights_named("resnet34-imagenet-v1").name == "resnet34-b627a593"
    assert weights_named("resnet50-19c8e357.pth").name == "resnet50-19c8e357"


def test_a_manifest_is_read(tmp_path: Path) -> None:
    assert manifest(tmp_path, ENTRY.replace('"a.zip', '"./a.zip') + "unpack = true\n") == [
        PinnedFile("a.zip", "https://x.org/a.zip", HASH, 7, unpack=True)
    ]
    other = ENTRY.replace(HASH, HASH.upper()).replace("a.zip", "a.tar", 1)  # not to be unpacked
    assert manifest(tmp_path, other)[0][:3] == ("a.tar", "https://x.org/a.zip", HASH)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("bytes = 7", "bytes = 0", "bytes"),
        (HASH, HASH[:8], "sha256"),
        ("https:", "file:", "http"),
        ("bytes = 7", "bytes = 7\nmd5 = 1", "md5"),
        (ENTRY, ENTRY + ENTRY, "a.zip"),
        (ENTRY, "[[file", "TOML"),
        ('"a.zip"', '"."', "name"),
        (ENTRY, ENTRY.replace('"a.zip"', '"a.zip.lock"') + ENTRY, "'a.zip.lock'"),
        ('"a.zip"', '".b.ssdctl-part"', "'.b.ssdctl-part'"),
        ('a.zip"\nurl', 'a.tar"\nunpack = true\nurl', r"'a\.tar'"),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        manifest(tmp_path, ENTRY.replace(old, new))
    with pytest.raises(UsageError, match="none"):
        read_manifest(tmp_path / "none.toml")
