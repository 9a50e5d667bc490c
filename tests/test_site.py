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


def test_outputs_of_the_notebook_are_shown() -> None:
    nbformat = pytest.importorskip("nbformat")
    pixel = "iVBORw0KGgo="
    v4 = nbformat.v4
    outputs = [
        v4.new_output("stream", name="stderr", text="50%\r"),
        v4.new_output("stream", text="AP 0.5\n"),
        v4.new_output("display_data", data={"image/png": pixel, "text/plain": "<Figure>"}),
    ]
    cells = [v4.new_markdown_cell("# Title"), v4.new_code_cell("run()", outputs=outputs)]
    text, images = hook("site_notebook").rendered(v4.new_notebook(cells=cells))
    assert text.startswith("# Title\n")
    assert "```python\nrun()\n```" in text
    assert "AP 0.5" in text
    assert "50%" not in text
    assert "<Figure>" not in text
    (name,) = images
    assert f"(images/{name})" in text


def test_an_image_for_light_and_dark_follows_the_switch_of_the_site() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="project.md"))
    markdown = (
        '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="docs/images/a-dark.png">\n'
        '  <img alt="A" src="docs/images/a-light.png" width="800">\n</picture>\n'
        "[Data](docs/data.md#formats) [Docs](docs/README.md) [Paper](https://example.org) [License](LICENSE)"
    )
    text = hook("site_pages").on_page_markdown(
        markdown, page=page, config={"repo_url": "https://example.org/r"}
    )
    assert '<img alt="A" src="../images/a-light.png#only-light" width="800">' in text
    assert '<img alt="A" src="../images/a-dark.png#only-dark" width="800">' in text
    assert "[Data](data.md#formats) [Docs](README.md) [Paper](https://example.org)" in text
    assert "[License](https://example.org/r/blob/main/LICENSE)" in text
