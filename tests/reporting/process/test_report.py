"""The report page is self-contained and shows the run folder."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import Result
from PIL import Image

from ssdctl.evaluation.analysis import best_threshold, diagnosis
from ssdctl.runs.reader import read_run

Cli = Callable[..., Result]
VOID = {"meta", "link", "img", "br", "input", "hr", "rect", "line", "circle", "polyline"}


class Balanced(HTMLParser):
    """Fails on tags that are closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def read_data(page: str) -> dict[str, Any]:
    """Return what the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    data: dict[str, Any] = json.loads(text)
    return data


def section(page: str, start: str, end: str) -> str:
    """Return the part of a page between two texts."""
    return page[page.index(start) : page.index(end, page.index(start))]


@pytest.fixture(scope="module")
def page(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    from conftest import run_cli

    target = tmp_path_factory.mktemp("report") / "report.html"
    result = run_cli("report", tiny_run, "--out", target)
    assert result.code == 0, result.err
    return target.read_text()


def test_page_needs_nothing_else(page: str) -> None:
    Balanced().feed(page)
    sources = re.findall(r'(?:src|href|xlink:href)="([^"]*)"', page)
    assert sources
    assert all(s.startswith(("data:", "#")) for s in sources)
    assert "@import" not in page
    assert len(page) < 1_500_000


def test_only_the_pages_own_script_may_run(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1].replace("&#39;", "'")


def test_page_shows_the_run(page: str, tiny_run: Path) -> None:
    assert page.count("<figure>") == 9  # the validation images
    assert page.count("data:image/jpeg") == 9
    data = read_data(page)
    (run,) = data["runs"]
    assert len(run["images"]) == 9
    assert sum(map(len, run["confusion"])) == 36  # five classes and the background
    places = [page.index(f'id="{name}"') for name in ("samples", "classes", "errors", "metrics")]
    assert places == sorted(places)
    assert len(re.findall(r'<tr class="pick" data-class="\d"', page)) == 5
    assert page.count('data-kind="') == 6  # TIDE's types of error


def test_the_header_names_the_run(page: str, tiny_run: Path) -> None:
    started = read_run(tiny_run).started
    header = section(page, "<h1>", 'id="samples"')
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", header))
    assert facts["Network"] == "SSD300, tiny"
    assert facts["Classes"].startswith("5: ")
    assert facts["Data"] == f"shapes, {started['train_images']} train, 9 val"
    assert facts["Date"] == started["time"][:16].replace("T", " ")
    assert "bf16" in facts["Device"] or "fp32" in facts["Device"]
    assert "steps" in facts["Length"]
    assert f"<b>{max(r['AP'] for r in read_run(tiny_run).evals):.3f}</b>" in header
    assert diagnosis(read_run(tiny_run).evaluation) in html.unescape(header)  # type: ignore[arg-type]
    words = read_run(tiny_run).environment["command"]
    assert shlex.join(words[1:]) in html.unescape(header)


def test_the_configuration_shows_what_differs(page: str, tiny_run: Path) -> None:
    settings = read_run(tiny_run).chosen_settings
    assert 0 < len(settings) < len(read_run(tiny_run).settings)
    assert not any(source.startswith(("default", "preset")) for _, _, source in settings)
    assert ("model.backbone", '"tiny"', "--backbone") in settings
    part = section(page, 'id="run"', "All settings")
    assert re.findall(r"<tr><td>(\w+\.\w+)</td>", part) == [name for name, _, _ in settings]


def test_training_and_validation_loss_share_a_chart(page: str) -> None:
    """All charts of training have the same x; none has lines of one point only."""
    charts = [chart for chart in read_data(page)["charts"] if chart["x"] == "step"]
    assert [line["name"] for line in charts[0]["lines"]] == ["training", "validation"]
    assert len({tuple(chart["scale"][:2]) for chart in charts}) == 1
    assert all(any(len(line["x"]) > 1 for line in chart["lines"]) for chart in charts)


def test_f1_and_its_best_threshold(page: str, tiny_run: Path) -> None:
    evaluation = read_run(tiny_run).evaluation
    assert evaluation is not None
    best = best_threshold(evaluation)
    assert best is not None
    (chart,) = [c for c in read_data(page)["charts"] if c["x"] == "score threshold"]
    mean = chart["lines"][-1]
    assert max(mean["y"]) == pytest.approx(best[1], abs=1e-4)
    assert f"best: {best[0]:.2f}" in page


def test_runs_side_by_side(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_run, other)
    result = cli("report", tiny_run, other, "--out", "both.html")
    assert result.code == 0, result.err
    page = Path("both.html").read_text()
    assert '<th class="number">tiny</th><th class="number">other</th>' in page
    assert page.count("<figure>") == 18
    assert [line["name"] for line in read_data(page)["charts"][-1]["lines"]] == ["tiny", "other"]
    assert "Settings that differ" not in page
    text = (other / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace("momentum = 0.9", "momentum = 0.8"))
    assert cli("report", tiny_run, other, "--out", "both.html").code == 0
    page = Path("both.html").read_text()
    row = '<td>train.momentum</td><td class="wide">0.9</td><td class="wide">0.8</td>'
    assert row in page
    assert section(page, 'id="settings"', 'id="samples"').count("<td>train.") == 1
    assert page.index(row) < page.index('id="samples"')
    assert len(page) < 1_500_000


def test_runs_with_equal_names_are_shown_by_their_paths(
    tiny_run: Path, tmp_path: Path, cli: Cli
) -> None:
    other = tmp_path / "later" / tiny_run.name
    shutil.copytree(tiny_run, other)
    assert cli("report", tiny_run, other, "--out", "both.html").code == 0
    page = Path("both.html").read_text()
    first = f"{tiny_run.parent.name}/{tiny_run.name}"
    assert f'<th class="number">{first}</th><th class="number">later/{other.name}</th>' in page


def test_a_run_that_is_named_twice_is_shown_twice(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    result = cli("report", tiny_run, tiny_run, "--out", tmp_path / "both.html")
    assert result.code == 0, result.err
    assert len(read_data((tmp_path / "both.html").read_text())["runs"]) == 2


def test_a_folder_of_runs_names_them(tiny_run: Path, cli: Cli) -> None:
    result = cli("report", tiny_run.parent)
    assert result.code == 2
    assert str(tiny_run) in result.err
    result = cli("report", tiny_run / "checkpoints/best.pt")
    assert (result.code, "not a run folder" in result.err) == (2, True)


def test_names_are_escaped(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "<b>bold"
    shutil.copytree(tiny_run, run)
    assert cli("report", run).code == 0
    assert "<b>bold" not in (run / "report.html").read_text()


def test_run_without_checkpoint_or_evaluation(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    shutil.rmtree(run / "checkpoints")
    (run / "evaluation.json").unlink()
    (run / "metrics.jsonl").write_text("")
    result = cli("report", run)
    assert result.code == 0, result.err
    assert "not evaluated yet" in (run / "report.html").read_text()


def test_report_of_an_evaluation_without_a_run(
    tiny_run: Path, shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    """From a file of detections: neither torch nor a run is needed, and the images are found."""
    truth = json.loads((shapes / "annotations/instances_val2017.json").read_text())["annotations"]
    keys = ("image_id", "category_id", "bbox")
    Path("d.json").write_text(json.dumps([{k: a[k] for k in keys} | {"score": 0.9} for a in truth]))
    result = cli("evaluate", "d.json", "--data", shapes, "--report", "out", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["AP"] == pytest.approx(1)
    page = Path("out/report.html").read_text()
    assert page.count("<figure>") == 9
    Path("out/report.html").unlink()
    assert cli("report", "out").code == 0  # again, from evaluation.json
    assert Path("out/report.html").read_text() == page


def test_evaluation_of_a_checkpoint_updates_the_runs_report(
    tiny_run: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    result = cli("evaluate", run, "--device", "cpu", "--limit", 4, "--report", run)
    assert result.code == 0, result.err
    page = (run / "report.html").read_text()
    assert page.count("<figure>") == 4
    assert "Box and class loss" in page


@pytest.mark.parametrize("words", ["{}", '{"about": 1}', "no JSON"])
def test_a_broken_evaluation_is_named(tiny_run: Path, tmp_path: Path, cli: Cli, words: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "evaluation.json").write_text(words)
    result = cli("report", run)
    assert result.code == 3
    assert "evaluation.json" in result.err


def test_missing_dataset(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    text = (run / "evaluation.json").read_text()
    about = json.loads(text)["about"]
    (run / "evaluation.json").write_text(text.replace(about["data"], "/nowhere"))
    assert cli("report", run).code == 0
    assert "/nowhere" in (run / "report.html").read_text()


def test_boxes_on_images_of_a_shrunk_store(tmp_path: Path, cli: Cli) -> None:
    """Boxes are in pixels of the original image, the store has half of them."""
    data = tmp_path / "data"
    (data / "val2017").mkdir(parents=True)
    (data / "annotations").mkdir()
    Image.new("RGB", (800, 640), "grey").save(data / "val2017/a.jpg")
    box = {"image_id": 1, "category_id": 1, "bbox": [200, 160, 400, 320]}
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 800, "height": 640}],
        "annotations": [box | {"id": 1, "area": 128000, "iscrowd": 0}],
        "categories": [{"id": 1, "name": "box"}],
    }
    (data / "annotations/instances_val2017.json").write_text(json.dumps(content))
    Path("d.json").write_text(json.dumps([box | {"score": 0.5}]))
    result = cli("prepare", "--data", data, "--shrink", 320, "--allow-dropped")
    assert result.code == 0, result.err
    result = cli("evaluate", "d.json", "--data", data, "--report", "out")
    assert result.code == 0, result.err
    (image,) = read_data(Path("out/report.html").read_text())["runs"][0]["images"]
    assert image["truth"] == [[0, 100, 80, 300, 240, 0]]  # 400 pixels wide in the page
    assert image["detections"] == [[0, 100, 80, 300, 240, 0.5]]
