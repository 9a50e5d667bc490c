"""The report in a real browser."""

import html
import importlib.resources
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import run_cli
from PIL import Image
from reporting.test_damaged_runs import make_run

from ssdctl.runs.metrics import MetricsFile

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
    *("--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=5000"),
]
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

# A page around the report that measures it: a headless window is never narrower than 500 pixels.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="page" src="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<script>
document.getElementById("page").onload = async event => {{
  const page = event.target.contentDocument, window_ = event.target.contentWindow;
  document.title = JSON.stringify(await (async () => {{ {script} }})());
}};
</script>"""
MEASURE = """
const broken = [...page.images].filter(i => !i.naturalWidth).length;
return [page.documentElement.scrollWidth, page.images.length, broken];
"""
STEP_VALUES = ("loss_box", "loss_class", "lr", "images_per_second", "grad_norm", "data_wait")
USE = """
const result = {};
const all = selector => [...page.querySelectorAll(selector)];
const key = (node, name) => node.dispatchEvent(new window_.KeyboardEvent("keydown", {key: name}));

const slider = page.querySelector(".controls input");
const threshold = value => {
  slider.value = value;
  slider.dispatchEvent(new window_.Event("input"));
};
const lines = selector => all(`figure .edge${selector}`).length;
result.boxes = ["0.3", "0.05", "0.9", "1"].map(value => {
  threshold(value);
  return [page.querySelector(".controls output").textContent, lines(".hit"), lines(".wrong"), lines(".missed")];
});
result.caption = page.querySelector(".counts").textContent;

// Labels do not cover each other.
threshold("0.05");
result.overlaps = all("figure svg").map(svg => {
  const tags = [...svg.querySelectorAll(".tag")].map(tag => tag.getBBox());
  return tags.filter((a, i) => tags.some((b, k) => k < i && a.x < b.x + b.width - 0.01 &&
    b.x < a.x + a.width - 0.01 && a.y < b.y + b.height - 0.01 && b.y < a.y + a.height - 0.01)).length;
});

threshold("0.9");
const zoom = page.getElementById("zoom"), title = () => zoom.querySelector("p").textContent;
page.querySelector("figure button").click();
const opened = [zoom.open, title()];
key(zoom, "ArrowRight");
const second = title();
key(zoom, "ArrowLeft"); key(zoom, "ArrowLeft");
result.zoom = [...opened, second, title(), zoom.querySelectorAll(".pane rect.edge").length];
zoom.querySelector("[data-close]").click();
result.closed = !zoom.open;

const names = () => all(".classes tbody tr").map(row => row.cells[0].textContent);
const sort = title => {
  const button = all(".classes th button").find(b => b.textContent === title);
  button.click();
  return button.closest("th").ariaSort;
};
result.byClass = [sort("class"), names(), sort("class"), names()];

const chart = all("[data-chart]").find(c => c.textContent.includes("Loss")), tip = chart.querySelector(".tip");
result.hidden = tip.hidden;
chart.dispatchEvent(new window_.Event("focus"));
const last = tip.textContent;
key(chart, "Home");
result.tips = [last, tip.textContent, page.querySelectorAll(".guide circle").length];

const color = () => window_.getComputedStyle(page.body).backgroundColor;
const before = color();
page.getElementById("theme").click();
result.colors = [before, color(), page.documentElement.dataset.theme];
return result;
"""


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def in_frame(page: Path, profile: Path, script: str, width: int = 1280) -> Any:
    """Return what a script returns that runs around the page."""
    frame = page.with_name(f"frame{width}.html")
    frame.write_text(FRAME.format(page=page.name, width=width, script=script))
    done = browse(frame, profile, "--window-size=1400,1000", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stderr
    return json.loads(html.unescape(title[1]))


def scores_of(truth: list[Any]) -> list[float]:
    return [0.1 + 0.88 * n / len(truth) for n in range(len(truth))]


@pytest.fixture(scope="module")
def page(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a run: every object is detected with another score, and some twice."""
    folder = tmp_path_factory.mktemp("browser") / "run"
    truth = json.loads((shapes / "annotations/instances_val2017.json").read_text())["annotations"]
    keys = ("image_id", "category_id", "bbox")
    detections = [
        {k: a[k] for k in keys} | {"score": score}
        for a, score in zip(truth, scores_of(truth), strict=True)
    ]
    results = folder.parent / "d.json"
    results.write_text(json.dumps(detections + [d | {"score": 0.08} for d in detections[:5]]))
    metrics = MetricsFile(make_run(folder) / "metrics.jsonl", start_step=0)
    for step in range(1, 300):
        values = dict.fromkeys(STEP_VALUES, 0.5) | {"loss": 3 / step, "memory_bytes": 1}
        metrics.write({"kind": "train", "step": step, "epoch": step / 10, **values})
    run_cli("evaluate", results, "--data", shapes, "--report", folder.parent / "page")
    shutil.copy(folder.parent / "page/evaluation.json", folder)
    assert run_cli("report", folder).code == 0
    return folder / "report.html"


@pytest.mark.slow(in_ci=True)
def test_no_error_and_no_request(page: Path, tmp_path: Path) -> None:
    done = browse(page, tmp_path / "profile", "--window-size=1280,1600", "--screenshot=page.png")
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    with Image.open("page.png") as image_file:
        assert image_file.size == (1280, 1600)
        assert len(image_file.convert("RGB").getcolors(1 << 24) or []) > 500  # it shows something
    # The same watch sees what it should: a request and a script that the page forbids itself.
    bad = tmp_path / "bad.html"
    extra = '<img src="http://127.0.0.1:9/x.png"><script>document.title = "x"</script>'
    bad.write_text(page.read_text().replace("</body>", extra))
    done = browse(bad, tmp_path / "profile", "--screenshot=bad.png")
    assert len(re.findall(r"CONSOLE.*Content Security Policy", done.stderr)) == 2, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off(page: Path, tmp_path: Path, width: int) -> None:
    scroll_width, images, broken = in_frame(page, tmp_path / "profile", MEASURE, width)
    assert scroll_width <= width
    assert (images, broken) == (11, 2)  # those of the dialog are empty until it opens


@pytest.mark.slow(in_ci=True)
def test_what_the_page_offers(page: Path, tmp_path: Path, shapes: Path) -> None:
    """The slider changes the boxes, tables are sorted, keys move through images and charts."""
    result = in_frame(page, tmp_path / "profile", USE)
    truth = json.loads((shapes / "annotations/instances_val2017.json").read_text())["annotations"]
    scores = scores_of(truth)
    middle, low, high, nothing = result["boxes"]
    assert (middle[0], low[0]) == ("0.30", "0.05")
    shown = [sum(s >= t for s in scores) for t in (0.3, 0.05, 0.9)]
    assert [middle[1], low[1], high[1]] == shown
    assert [middle[2], low[2], high[2]] == [0, 5, 0]  # detected twice
    assert [m[3] for m in (middle, low, high, nothing)] == [len(truth) - n for n in (*shown, 0)]
    assert "0 predictions" in result["caption"]
    assert result["overlaps"] == [0] * 9

    is_open, *titles, boxes = result["zoom"]
    assert (is_open, result["closed"]) == (True, True)
    assert all(f"({n} of 9)" in title for n, title in zip((1, 2, 9), titles, strict=True))
    assert boxes >= 1
    ascending, names, descending, reverse = result["byClass"]
    assert (ascending, names) == ("ascending", sorted(names))
    assert (descending, reverse) == ("descending", names[::-1])
    assert result["hidden"] is True
    last, first, points = result["tips"]
    assert "step 299" in last
    assert re.search(r"step 1(?!\d).*training 3(?!\d)", first)
    assert points == 1
    light, dark, theme = result["colors"]
    assert light != dark
    assert theme == "dark"


CHECK = """
const tag = page.createElement("script"), found = [];
tag.textContent = AXE;
page.head.append(tag);
for (const theme of ["light", "dark"]) {
  page.documentElement.dataset.theme = theme;
  const {violations} = await window_.axe.run(page);
  const serious = violations.filter(v => ["serious", "critical"].includes(v.impact));
  found.push(...serious.map(v => [theme, v.id, v.nodes[0].html]));
}
return [found, window_.axe.version];
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_serious(page: Path, tmp_path: Path, width: int) -> None:
    """Contrast, names and the keyboard, in light and dark. The page's own policy forbids axe."""
    axe = importlib.resources.files(pytest.importorskip("axe_core_python")) / "axe.min.js"
    code = json.dumps(axe.read_text(encoding="utf-8")).replace("</", "<\\/")
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    copy = page.with_name("open.html")
    copy.write_text(policy.sub("", page.read_text()))
    found, version = in_frame(copy, tmp_path / "profile", f"const AXE = {code};" + CHECK, width)
    assert (found, version[:2]) == ([], "4.")
