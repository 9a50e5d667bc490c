"""README starts with the two set-up commands that CI runs, stays short, and shows images."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_two_blocks_are_one_command_each() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    assert [block.split() for block in blocks[:2]] == [["scripts/demo"], ["scripts/test"]]


def test_at_most_750_words_come_before_the_tables() -> None:
    before = README[: README.index("\n|")]
    assert len(before.split()) <= 750


def test_images_are_small_and_described() -> None:
    images = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(images) >= 2
    for name in images:
        assert (ROOT / name).stat().st_size <= 300_000, name
    for tag in re.findall(r"<img [^>]*>", README):
        assert re.search(r'alt="[^"]{20,}"', tag)


def test_exit_codes_are_complete() -> None:
    from ssdctl import errors

    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)}
    assert codes == {0, *map(int, errors.ExitCode)}
