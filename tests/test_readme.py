"""README has the two set-up blocks that CI runs, all commands and all exit codes."""

from __future__ import annotations

import re
from pathlib import Path

from ssdctl.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_quick_start_has_two_self_contained_blocks() -> None:
    start = README.index("## Quick start")
    section = README[start : README.index("\n## ", start + 1)]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.S)
    assert len(blocks) == 2
    assert README.index("```bash") > start
    for block in blocks:
        assert not re.search(r"\b(apt|apt-get|sudo|git clone)\b", block)
    assert "ssdctl demo" in blocks[0]
    assert "pytest" in blocks[1]


def test_every_command_is_in_the_table() -> None:
    for name in COMMANDS:
        assert re.search(rf"^\| `ssdctl {name.replace('_', '-')}( \w+)?` \|", README, re.M), name


def test_exit_codes_are_complete() -> None:
    from ssdctl import errors

    codes = {
        int(c)
        for c in re.findall(r"(?:^|·\s*)(\d+)\s", README[README.index("## Exit codes") :], re.M)
    }
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert {c.exit_code for c in classes} <= codes  # type: ignore[attr-defined]
