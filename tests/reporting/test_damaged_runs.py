"""Edited, cut or hostile run folders give a page, with what was skipped counted on it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from PIL import Image

from ssdctl.evaluation.coco_ap import COCO_METRICS
from ssdctl.inference.drawing import MAX_LABEL, draw, one_line
from ssdctl.runs.metrics import MetricsFile, read_metrics
from ssdctl.runs.reader import read_run

HOSTILE = ["a\nb", "a\rb", "a\x85b", "a\u2028b", "\x1b[31m", "$\\frac{$", "$x", "\u4e2d\u6587",
           "\U0001f600", "_hidden", "x" * 100_000, "\u202eabc", "\ud800", " ", "", "<b>&"]  # fmt: skip


def record(kind: str, step: int, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": step / 10, **values}


def make_run(folder: Path, *lines: bytes) -> Path:
    """Write a run folder of three steps, then the lines."""
    folder.mkdir()
    rate = {"images_per_second": 20.0, "lr": 0.1}
    records = [record("train", s, loss=3.0 / s, **rate) for s in (1, 2, 3)]
    records.append(record("eval", 3, **dict.fromkeys(COCO_METRICS, 0.25)))
    records.append(record("event", 3, event="class_ap", AP={"ball": 0.25}))
    written = b"".join(json.dumps(r).encode() + b"\n" for r in records)
    (folder / "metrics.jsonl").write_bytes(written + b"".join(line + b"\n" for line in lines))
    (folder / "environment.json").write_text('{"python": "3.11", "packages": {"torch": "2"}}')
    (folder / "config.toml").write_text("[train]\nepochs = 1\n")
    return folder


DAMAGED = [
    *(b"7", b"[1, 2]", b'"text"', b"null", b"true", b"{}"),
    *(b'{"kind": "train"', b'{"kind": "train"}', b'{"kind": 7, "step": 4}'),
    b'{"kind": "train", "step": "4", "epoch": 1}',
    b'{"kind": "train", "step": true, "epoch": 1}',
    b'{"kind": "train", "step": 4, "epoch": null}',
    b'{"kind": "train", "step": 1e400, "epoch": 1}',
    b'{"kind": "eval", "step": 4, "epoch": 1}',
    b'{"kind": "eval", "step": 4, "epoch": 1, "AP": "0.9"}',
    b'{"kind": "eval", "step": 4, "epoch": 1, "AP": NaN}',
    b'{"kind": "event", "step": 4}',
    b'{"kind": "other", "step": "x"}',
    b'{"kind": "event", "step": 4, "event": "\xff\xfe"}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"kind": "train", "step": 4, "epoch": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"kind": "train", "step": 1' + b"0" * 400 + b', "epoch": 1}',
]


def script_data(page: str) -> dict[str, Any]:
    """Return what the page's script reads."""
    (text,) = re.findall(r'id="data">(.*?)</script>', page)
    data: dict[str, Any] = json.loads(text)
    return data


def report(cli: Cli, run: Path) -> str:
    """Return the page of a run."""
    result = cli("report", run)
    assert result.code == 0, result.err
    return (run / "report.html").read_text()


def test_damaged_metrics_are_skipped_and_counted(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run", *DAMAGED)
    page = report(cli, run)
    assert f"{len(DAMAGED)} lines" in page
    assert "0.250" in page
    metrics = MetricsFile(run / "metrics.jsonl", start_step=3)  # as a resume does
    assert [(r["step"], r["AP"]) for r in metrics.past_records if r["kind"] == "eval"] == [
        (3, 0.25)
    ]
    records, skipped = read_metrics(run / "metrics.jsonl")  # written again without them
    assert (len(records), skipped) == (5, 0)
    for number, line in enumerate(DAMAGED):
        records, skipped = read_metrics(make_run(tmp_path / str(number), line) / "metrics.jsonl")
        assert (len(records), skipped) == (5, 1), line


def test_strange_records_are_drawn(tmp_path: Path, cli: Cli) -> None:
    lines = [
        b'{"kind": "train", "step": 4, "epoch": 1, "loss": "low", "images_per_second": null}',
        b'{"kind": "eval", "step": 4, "epoch": 1, "AP": 0.9, "AP50": {}}',
        b'{"kind": "event", "step": 4, "event": "class_ap", "AP": [1]}',
        b'{"kind": "event", "step": 4, "event": "class_ap", "AP": {"ball": "x"}}',
        b'{"kind": "event", "step": 4, "event": "x", "facts": [{"a": null}]}',
        *[b'{"kind": "train", "step": 3, "epoch": 0, "loss": 1}'] * 3,  # steps do not grow
    ]
    assert report(cli, make_run(tmp_path / "run", *lines))


def test_the_duration_is_unknown_after_a_crash(tmp_path: Path) -> None:
    ended = [
        b'{"kind": "event", "step": 1, "event": "%b", "total_s": 7}' % n
        for n in (b"started", b"finished")
    ]
    run = make_run(tmp_path / "run", *ended)
    assert read_run(run).duration_s == 7
    assert read_run(make_run(tmp_path / "crashed", ended[0], *ended)).duration_s is None


def test_an_environment_of_another_type(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run")
    for content in (b"", b"[]", b"7", b"null", b"{", b"\xff", b"[" * 100_000):
        (run / "environment.json").write_bytes(content)
        data = read_run(run)
        assert data.environment == {}
        assert "environment.json" in data.problems[0]
    assert "environment.json" in report(cli, run)
    strange = {"packages": {"torch": {"a": 1}}, "command": 3, "device": None, "x": [[], {}]}
    (run / "environment.json").write_text(json.dumps(strange))
    assert report(cli, run)
    (run / "environment.json").write_text('{"packages": [1]}')
    assert read_run(run).environment == {}


def test_curves_have_two_points_that_exist(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run", b'{"kind": "train", "step": 4, "epoch": 1, "loss": -1}')
    loss, *_ = script_data(report(cli, run))["charts"]
    assert loss["lines"][0]["y"] == [3, 1.5, 1]
    first = (run / "metrics.jsonl").read_bytes().splitlines()[0]
    (run / "metrics.jsonl").write_bytes(first + b"\n")
    assert script_data(report(cli, run))["charts"] == []


def test_an_edited_evaluation_is_drawn(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """Curves of other lengths than those of an evaluation."""
    folder = tmp_path / "run"
    evaluated(folder, shapes, cli)
    content = json.loads((folder / "evaluation.json").read_text())
    first, second, third, *_ = content["per_class"]
    first["scores"] = first["scores"][:3]
    second["precision"] = [0.5]
    third["precision"], third["scores"] = [], []
    content["curves"] = {"0.50": [1], "x": []}
    (folder / "evaluation.json").write_text(json.dumps(content))
    assert report(cli, folder)


def test_any_class_name_is_drawn() -> None:
    for name in HOSTILE:
        label = one_line(name)
        assert len(label) <= MAX_LABEL
        assert label == label.splitlines()[0] if label else name == ""
        assert "\x1b" not in label
        assert draw(Image.new("RGB", (60, 40)), [(5, 5, 30, 30)], [1], [name]).size == (60, 40)


def evaluated(folder: Path, shapes: Path, cli: Cli, names: list[str] | None = None) -> Path:
    """Copy a dataset and write an evaluation of perfect detections on it into `folder`."""
    data = folder.parent / "data"
    (data / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        (data / split).symlink_to(shapes / split)
        content = json.loads((shapes / f"annotations/instances_{split}.json").read_text())
        for entry, name in zip(content["categories"], names or [], strict=False):
            entry["name"] = name
        (data / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    keys = ("image_id", "category_id", "bbox")
    detections = [{k: a[k] for k in keys} | {"score": 0.9} for a in content["annotations"]]
    results = folder.parent / "d.json"
    results.write_text(json.dumps(detections))
    result = cli("evaluate", results, "--data", data, "--report", folder, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["AP"] == pytest.approx(1)
    return data


def test_names_of_classes_and_runs(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    names = ["a\nb", "$\\frac{$", "\u4e2d\u6587", "\x1b[31mred", "x" * 5000]
    folder = tmp_path / "$\\alpha$ \u4e2d"
    evaluated(folder, shapes, cli, names)
    other = make_run(tmp_path / "_$x_\u4e2d")
    result = cli("report", folder, other, "--out", tmp_path / "both.html")
    assert result.code == 0, result.err
    assert (tmp_path / "both.html").read_text().count("<figure>") == 9


def test_class_names_cannot_end_a_script(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    hostile = ["</script><b>", "<!--<script>", "&lt;", "\u2028", "a\\"]
    evaluated(tmp_path / "run", shapes, cli, hostile)
    page = (tmp_path / "run/report.html").read_text()
    assert page.count("</script>") == 2
    (text,) = re.findall(r'id="data">(.*?)</script>', page)
    assert not set("<>&") & set(text)
    (data,) = json.loads(text)["runs"]
    assert sorted(data["classes"]) == sorted(one_line(name) for name in hostile)


def test_an_image_that_is_no_longer_in_the_dataset(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """The dataset was prepared again without it; the other samples are shown."""
    folder = tmp_path / "run"
    data = evaluated(folder, shapes, cli)
    path = data / "annotations/instances_val2017.json"
    content = json.loads(path.read_text())
    removed = content["images"].pop(0)["id"]
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != removed]
    path.write_text(json.dumps(content))
    result = cli("prepare", "--data", data, "--no-pack")
    assert result.code == 0, result.err
    assert report(cli, folder).count("<figure>") == 8
    path.unlink()
    shutil.rmtree(data / "prepared")  # now there is no such split
    assert "None:" in report(cli, folder)
