"""The documentation site: pages that are generated when it is built."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssdctl.cli.main import click_root
from ssdctl.config.settings import all_settings

SCRIPTS = Path(__file__).parents[1] / "scripts"


def hook(name: str) -> Any:
    pytest.importorskip("mkdocs")
    pytest.importorskip("nbclient")
    return SimpleNamespace(**runpy.run_path(str(SCRIPTS / f"{name}.py")))


def test_the_reference_has_every_command_and_option() -> None:
    text = hook("site_reference").commands_page()

    def look_for(path: str, command: Any) -> None:
        for name, child in getattr(command, "commands", {}).items():
            look_for(f"{path} {name}", child)
        if not getattr(command, "commands", {}):
            assert f"## {path}\n" in text
            assert command.params
            for parameter in command.params:
                assert parameter.opts[0] in text or parameter.metavar in text, (path, parameter)

    look_for("ssdctl", click_root())


def test_the_reference_has_every_setting_and_its_default() -> None:
    text = hook("site_reference").settings_page()
    for setting in all_settings().values():
        assert f"| `{setting.name}` |" in text
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.M))
    assert rows["tile_overlap"] == f"`{all_settings()['data.tile_overlap'].default}`"
    assert rows["epochs"] == "`65` (preset)"
