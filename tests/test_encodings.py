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
UTF16 = ("utf-16-le", "utf-16-be")
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


NESTED = f"a = {'[' * DEEP}{']' * DEEP}"


@pytest.mark.parametrize(
    ("reader", "content", "kind"),
    [
        *((read_toml, f"\ufeff{TOML}".encode(code), UsageError) for code in UTF16),
        *((read_manifest, f"\ufeff{TOML}".encode(code), UsageError) for code in UTF16),
        *((read, f"\ufeff{JSON}".encode(code), DataError) for code in UTF16),
        (read_toml, NESTED.encode(), UsageError),
        (read_manifest, NESTED.encode(), UsageError),
        (read, b'{"images": [], "x": ' + b"[" * DEEP + b"]" * DEEP + b"}", DataError),
        (read, b"[" * DEEP, DataError),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_utf16_and_deep_nesting_are_one_error(
    reader: Callable[[Path], object], content: bytes, kind: type[SsdctlError], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(kind) as caught:
        reader(path)
    assert str(path) in str(caught.value)
    if b"\0" in content:
        assert "UTF-16" in str(caught.value)
        assert "UTF-8" in str(caught.value)
