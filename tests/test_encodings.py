"""Text files with a byte order mark are read; UTF-16 and absurd nesting are one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ssdctl.config.resolve import read_toml
from ssdctl.data.formats.coco import read
from ssdctl.download.pinned_files import read_manifest
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.files import read_text

DEEP = 100_000
TOML = "[train]\nlr = 0.5\n"
JSON = '{"images": [], "annotations": [], "categories": []}'


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("\ufeff" + TOML, encoding="utf-8")
    assert [o.value for o in read_toml(path)] == [0.5]
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(path, 100) == "a\nb\nc\n"
    path.write_text("\ufeff" + JSON, encoding="utf-8")
    assert not read(path)["train"].file_names


@pytest.mark.parametrize(
    ("reader", "text", "kind"),
    [(read_toml, TOML, UsageError), (read_manifest, TOML, UsageError), (read, JSON, DataError)],
)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_named(
    reader: Callable[[Path], object],
    text: str,
    kind: type[SsdctlError],
    encoding: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.write_text("\ufeff" + text, encoding=encoding)
    with pytest.raises(kind, match="UTF-16") as caught:
        reader(path)
    assert str(path) in str(caught.value)
    assert "UTF-8" in str(caught.value)


@pytest.mark.parametrize(
    ("reader", "text", "kind"),
    [
        (read_toml, f"a = {'[' * DEEP}{']' * DEEP}", UsageError),
        (read_manifest, f"a = {'[' * DEEP}{']' * DEEP}", UsageError),
        (read, '{"images": [], "x": ' + "[" * DEEP + "]" * DEEP + "}", DataError),
        (read, "[" * DEEP, DataError),
    ],
)
def test_deep_nesting_is_one_error(
    reader: Callable[[Path], object], text: str, kind: type[SsdctlError], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(kind) as caught:
        reader(path)
    assert str(path) in str(caught.value)
