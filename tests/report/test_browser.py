"""The report in a real browser: no script error, no network request, nothing cut off at
1280 and 400 pixels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import run_cli
from PIL import Image

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
]
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

# A page around the report that measures it: a headless window is never narrower than 500 pixels.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="page" src="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<script>
document.getElementById("page").onload = event => {{
  const page = event.target.contentDocument;
  const broken = [...page.images].filter(i => !i.naturalWidth).length;
  document.title = [page.documentElement.scrollWidth, page.images.length, broken].join(" ");
}};
</script>"""


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def page(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("browser") / "report.html"
    result = run_cli("report", tiny_run, "--out", target)
    assert result.code == 0, result.err
    return target


def test_no_error_and_no_request(page: Path, tmp_path: Path) -> None:
    done = browse(page, tmp_path / "profile", "--window-size=1280,1600", "--screenshot=page.png")
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    with Image.open("page.png") as picture:
        assert picture.size == (1280, 1600)
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 500  # it shows something
    # The same watch sees what it should: a request that the page forbids itself.
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png">'))
    done = browse(bad, tmp_path / "profile", "--screenshot=bad.png")
    assert re.search(r"CONSOLE.*Content Security Policy", done.stderr), done.stderr


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_cut_off(page: Path, tmp_path: Path, width: int) -> None:
    frame = page.with_name(f"frame{width}.html")
    frame.write_text(FRAME.format(page=page.name, width=width))
    done = browse(frame, tmp_path / "profile", "--window-size=1400,1000", "--dump-dom")
    title = re.search(r"<title>(\d+) (\d+) (\d+)</title>", done.stdout)
    assert title is not None, done.stderr
    scroll_width, images, broken = map(int, title.groups())
    assert scroll_width <= width
    assert (images, broken) == (18, 0)
