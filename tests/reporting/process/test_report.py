"""The report page is self-contained and shows the run folder."""

import base64
import hashlib
import html
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Cli, run_cli
from data.formats.exports import write_world
from data.generator.worlds import Picture, Thing
from reporting.test_damaged_runs import evaluated, report, script_data

import ssdctl
from ssdctl.errors import UsageError
from ssdctl.evaluation.analysis import best_threshold
from ssdctl.reporting.page import write_evaluation_report
from ssdctl.runs.evaluation import read_evaluation
from ssdctl.runs.run import Run


def section(page: str, start: str, end: str) -> str:
    return page[page.index(start) : page.index(end, page.index(start))]


@pytest.fixture(scope="module")
def page(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = shutil.copytree(tiny_run, tmp_path_factory.mktemp("report") / "tiny")
    return report(run_cli, run)


def report_of_two(cli: Cli, *runs: Path) -> str:
    for _ in range(2):
        cli("report", *runs).expect(0)
    return (runs[0] / "comparison.html").read_text()


def test_page_needs_nothing_else_and_runs_only_its_own_script(page: str) -> None:
    sources = re.findall(r'(?:src|href|xlink:href)="([^"]*)"', page)
    assert sources
    assert all(s.startswith(("data:", "#")) for s in sources)
    assert "@import" not in page
    assert len(page) < 1_500_000
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy[1]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1].replace("&#39;", "'")


def test_page_shows_the_run(page: str, tiny_run: Path) -> None:
    assert page.count("<figure>") == page.count("data:image/jpeg") == 9  # the validation images
    places = [page.index(f'id="{name}"') for name in ("samples", "classes", "errors", "metrics")]
    assert places == sorted(places)
    header = html.unescape(section(page, "<h1>", 'id="samples"'))
    ap = max(record["AP"] for record in Run(tiny_run).evals)
    for shown in ("SSD300, tiny", "fp32", "train, 9 val", f"<b>{ap:.3f}</b>"):
        assert shown in header


def test_the_copied_command_works_in_the_folder_of_the_page(
    run: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no home folder, and its relative and absolute paths mean what they did."""
    home, work, photos = (tmp_path / name for name in ("o'home", "o'home/work", "o'home/my photos"))
    weights = Path(tempfile.gettempdir()) / "a.pt"  # not near the page
    monkeypatch.setenv("HOME", str(home))
    placed = work / "runs/a"
    placed.parent.mkdir(parents=True)
    run.rename(placed)
    words = ["train", "--data", str(photos), "--out", "runs/a", "--init", str(weights)]
    content = json.loads((placed / "environment.json").read_text())
    content |= {"folder": str(work), "command": ["/opt/bin/ssdctl", *words]}
    (placed / "environment.json").write_text(json.dumps(content))
    page = html.unescape(report(cli, placed))
    assert str(home) not in page
    (command,) = re.findall(r'class="command"><code tabindex="0">(.*?)</code>', page)
    program = tmp_path / "bin/ssdctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\npwd\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, cwd=placed, env=path, capture_output=True, text=True, check=True)
    folder, *arguments = done.stdout.splitlines()
    assert folder == str(work)
    assert (work / arguments[2]).resolve() == photos
    assert (arguments[4], arguments[6]) == ("runs/a", str(weights))
    for own in ({"command": ["python", "-c", "x"]}, {"world_size": 2}):  # cannot be repeated
        (placed / "environment.json").write_text(json.dumps(content | own))
        assert 'class="command"' not in report(cli, placed)


def test_the_curves(page: str, tiny_run: Path) -> None:
    """Those of training have the same x; training and validation loss share a chart."""
    all_charts = script_data(page)["charts"]
    charts = [chart for chart in all_charts if chart["x"] == "step"]
    assert [line["name"] for line in charts[0]["lines"]] == ["training", "validation"]
    assert len({tuple(chart["scale"][:2]) for chart in charts}) == 1
    assert all(any(len(line["x"]) > 1 for line in chart["lines"]) for chart in charts)
    evaluation = Run(tiny_run).evaluation
    best = best_threshold(evaluation)
    (f1,) = [chart for chart in all_charts if chart["x"] == "score threshold"]
    assert max(f1["lines"][-1]["y"]) == pytest.approx(best[1], abs=1e-4)
    assert f"best: {best[0]:.2f}" in page


def test_runs_side_by_side(tiny_run: Path, run: Path, cli: Cli) -> None:
    page = report_of_two(cli, tiny_run, run)
    assert '<th class="number">tiny</th><th class="number">run</th>' in page
    assert page.count("<figure>") == 18
    lines = script_data(page)["charts"][-1]["lines"]
    assert [line["name"] for line in lines] == ["tiny", "run"]
    assert 'id="settings"' not in page
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("momentum = 0.9", "momentum = 0.8"))
    metrics = (run / "metrics.jsonl").read_text()
    metrics = re.sub('"val_labels": "[^"]*"', '"val_labels": "of others"', metrics)
    (run / "metrics.jsonl").write_text(metrics)
    page = report_of_two(cli, tiny_run, run)
    settings = section(page, 'id="settings"', 'id="samples"')
    assert '<td>train.momentum</td><td class="wide">0.9</td><td class="wide">0.8</td>' in settings
    assert settings.count("<td>train.") == 1
    assert '<td class="wide">of others</td>' in settings
    assert len(page) < 1_500_000


def test_what_is_no_run_is_refused(tiny_run: Path, cli: Cli) -> None:
    named = {tiny_run.parent: str(tiny_run), tiny_run / "checkpoints/best.pt": "best.pt"}
    for path, subject in named.items():
        cli("report", path).expect(2, subject)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("a.html", lambda run, _: ssdctl.report(run, out="a.html")),
        ("a.html", lambda run, _: ssdctl.Run(run).report("a.html")),
        ("out/report.html", lambda run, data: ssdctl.evaluate(run, data, report="out")),
        ("out/evaluation.json", lambda run, data: ssdctl.evaluate(run, data, report="out")),
        ("a.onnx", lambda run, _: ssdctl.export(run, "a.onnx")),
        ("a.xml", lambda run, _: ssdctl.export(run, "a.xml", format="openvino")),
        ("a.txt", lambda run, _: ssdctl.export(run, "a.txt", format="safetensors")),
        ("a.pt", lambda run, _: ssdctl.export(run, "a.pt", format="mlperf")),
        ("a.pt", lambda run, _: ssdctl.SSD300.from_checkpoint(run).save("a.pt")),
    ],
)
def test_files_that_are_not_earlier_results_are_kept(
    tiny_run: Path, shapes: Path, name: str, call: Callable[[Path, Path], object]
) -> None:
    Path("out").mkdir()
    saved = io.BytesIO()
    torch.save({"embeddings": torch.ones(2)}, saved)
    graphs = (b"\x08\x08\x12\x04mine", b'<?xml version="1.0"?><net/>')
    for mine in (
        b"mine, not of ssdctl",
        saved.getvalue(),
        *graphs,
        bytes(8) + b'{"__metadata__":{}}',
        (tiny_run / "checkpoints/last.pt").read_bytes(),  # with the run that continues from it
    ):
        Path(name).write_bytes(mine)
        with pytest.raises(UsageError, match=name):
            call(tiny_run, shapes)
        assert Path(name).read_bytes() == mine


def test_run_without_checkpoint_or_evaluation(run: Path, tmp_path: Path, cli: Cli) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "evaluation.json").unlink()
    (run / "metrics.jsonl").write_text("")
    page = report(cli, run.rename(tmp_path / "<b>bold"))
    assert "None: " in page
    assert "<b>bold" not in page


def test_report_of_an_evaluation_without_a_run(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """From a file of detections: neither torch nor a run is needed, and the images are found."""
    evaluated(tmp_path / "out", shapes, cli)
    page = Path("out/report.html").read_text()
    assert page.count("<figure>") == 9
    assert report(cli, Path("out")) == page  # again, from evaluation.json
    assert "ssdctl predict" not in cli("report", "out").err  # it has no checkpoint
    options = ("--data", "data", "--split", "train", "--annotated-only", "--report", "out")
    Path("none.json").write_text("[]")
    assert cli("evaluate", "none.json", *options).code == 0
    assert re.search(r"<dd>data, \d+ train</dd>", Path("out/report.html").read_text())
    about = json.loads(Path("out/evaluation.json").read_text())["about"]
    assert (about["data"], about["store"]) == (
        str(tmp_path / "data"),
        str(tmp_path / "data/prepared"),
    )


def test_an_evaluation_that_is_not_the_best_of_training_has_its_own_ap(
    page: str, run: Path, shapes: Path, cli: Cli
) -> None:
    assert "other-evaluation" not in page
    evaluated(run.parent / "page", shapes, cli)  # all detections are right
    shutil.copy(run.parent / "page/evaluation.json", run)
    other = section(report(cli, run), '"other-evaluation"', "</p>")
    assert all(text in other for text in ("1.000", "d.json", "(val)"))


def test_an_evaluation_that_is_broken_or_of_another_dataset(run: Path, cli: Cli) -> None:
    path = run / "evaluation.json"
    text = path.read_text()
    path.write_text(text.replace(json.loads(text)["about"]["data"], "/nowhere"))
    assert "/nowhere" in report(cli, run)
    path.write_text('{"about": 1}')
    cli("report", run).expect(3, path.name)


def test_boxes_on_images_of_a_shrunk_store(tmp_path: Path, cli: Cli) -> None:
    """Boxes are in pixels of the original image, the store has half of them."""
    data, thing = tmp_path / "data", Thing("box", 200, 160, 400, 320, False, (0, 0, 0))
    picture = Picture("val", "", "a", ".jpg", 800, 640, 1, True, "RGB", 8, (thing,))
    write_world(data, "coco: 2017", ("box",), [picture])
    box = {"image_id": 7, "category_id": 1, "bbox": [200, 160, 400, 320], "score": 0.5}
    Path("d.json").write_text(json.dumps([box]))
    cli("prepare", "--data", data, "--shrink", 320, "--allow-dropped").expect(0)
    cli("evaluate", "d.json", "--data", data, "--report", "out").expect(0)
    (image,) = script_data(Path("out/report.html").read_text())["runs"][0]["images"]
    assert image["truth"] == [[0, 100, 80, 300, 240, 0]]  # 400 pixels wide in the page
    assert image["detections"] == [[0, 100, 80, 300, 240, 0.5]]
    (file,) = data.glob("val2017/*")
    file.write_bytes(file.read_bytes() + b"another")  # under the same name
    cli("prepare", "--data", data, "--shrink", 320, "--allow-dropped").expect(0)
    page = write_evaluation_report(read_evaluation(Path("out/evaluation.json")), Path("out"))
    assert script_data(page.read_text())["runs"][0]["images"] == []
