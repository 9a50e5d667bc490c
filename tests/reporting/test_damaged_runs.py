"""Edited, cut or hostile run folders: a broken file is refused by name, strange text is drawn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from PIL import Image

from ssdctl.data.drawing import MAX_LABEL, draw, one_line
from ssdctl.evaluation.coco_ap import COCO_METRICS
from ssdctl.runs.metrics import MetricsFile
from ssdctl.runs.run import Run

HOSTILE = ["a\nb", "a\rb", "a\x85b", "a\u2028b", "\x1b[31m", "$\\frac{$", "$x", "\u4e2d\u6587",
           "\U0001f600", "_hidden", "x" * 100_000, "\u202eabc", "\ud800", " ", "", "<b>&"]  # fmt: skip


ENVIRONMENT = (
    b'{"python": "3.11", "platform": "Linux", "device": "cpu", "world_size": 1, '
    b'"packages": {"torch": "2"}, "command": ["ssdctl"], "sources": {"train.epochs": "--epochs"}}'
)


def record(kind: str, step: int, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": step / 10, **values}


def make_run(folder: Path, *lines: bytes) -> Path:
    """Write a run folder of three steps, then the lines."""
    folder.mkdir(parents=True)
    rate = {"images_per_second": 20.0, "lr": 0.1}
    records = [record("train", s, loss=3.0 / s, **rate) for s in (1, 2, 3)]
    records.append(record("eval", 3, **dict.fromkeys(COCO_METRICS, 0.25)))
    records.append(record("event", 3, event="class_ap", AP={"ball": 0.25}))
    written = b"".join(json.dumps(r).encode() + b"\n" for r in records)
    (folder / "metrics.jsonl").write_bytes(written + b"".join(line + b"\n" for line in lines))
    (folder / "environment.json").write_bytes(ENVIRONMENT)
    (folder / "config.toml").write_text("[train]\nepochs = 1\n")
    return folder


DAMAGED = [  # more: fuzz/targets.py
    *(b"7", b"null", b"{}", b'{"kind": "train"', b'{"kind": 7, "step": 4, "epoch": 1}'),
    b'{"kind": "train", "step": -1, "epoch": 1, "loss": 1, "images_per_second": 1}',
    b'{"kind": "eval", "step": 4, "epoch": 1, "AP": NaN, "AP50": 0.9, "AP75": 0.9}',
    b'{"kind": "event", "step": 4, "epoch": 1, "event": "class_ap", "AP": {"ball": "x"}}',
    b'{"kind": "event", "step": 4, "epoch": 1, "event": "\xff\xfe"}',
    b'{"kind": "train", "step": 4, "epoch": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


def script_data(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'id="data">(.*?)</script>', page)
    return json.loads(text)


def report(cli: Cli, run: Path) -> str:
    cli("report", run).expect(0)
    return (run / "report.html").read_text()


def refuse(cli: Cli, run: Path, *named: str) -> None:
    """Check that the report of a run is refused as bad data, with these words."""
    result = cli("report", run).expect(3)
    assert all(word in result.err for word in named), result.err
    assert "`" not in result.err
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_refused_by_name_and_dropped_by_a_resume(
    line: bytes, tmp_path: Path, cli: Cli
) -> None:
    run = make_run(tmp_path / "run", line)
    refuse(cli, run, "metrics.jsonl", "line 6", "delete the line")
    metrics = MetricsFile(run / "metrics.jsonl", start_step=3)  # as a resume does
    assert [r["step"] for r in metrics.past_records] == [1, 2, 3, 3, 3]
    assert "0.250" in report(cli, run)


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run", b'{"kind": "train"')
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert "0.250" in report(cli, run)
    MetricsFile(path, start_step=3).write(record("event", 3, event="x"))  # after a kill
    assert [r["kind"] for r in Run(run).metrics[-2:]] == ["event", "event"]


def test_a_name_that_is_not_utf8_leaves_the_metrics_readable(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run")
    bad_image = record("event", 4, event="bad_image", file="caf\udce9.jpg")
    MetricsFile(run / "metrics.jsonl", start_step=3).write(bad_image)
    assert "caf?.jpg" in report(cli, run)


def test_another_environment_is_refused(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run")
    strange = (b'{"packages": {"torch": {"a": 1}}}', ENVIRONMENT.replace(b'["ssdctl"]', b"3"))
    for content in (b"", b"[]", b"7", b"null", b"{", b"\xff", b"[" * 100_000, *strange):
        (run / "environment.json").write_bytes(content)
        refuse(cli, run, "environment.json", "the next start")
    (run / "environment.json").unlink()
    refuse(cli, run, "environment.json")


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
    result = cli("evaluate", results, "--data", data, "--report", folder, "--json").expect(0)
    assert json.loads(result.out)["AP"] == pytest.approx(1)
    return data


def test_class_names_cannot_end_a_script(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    hostile = ["</script><b>", "<!--<script>", "&lt;", "\u2028", "a\\"]
    evaluated(tmp_path / "run", shapes, cli, hostile)
    page = (tmp_path / "run/report.html").read_text()
    assert page.count("</script>") == 2
    (text,) = re.findall(r'id="data">(.*?)</script>', page)
    assert not set("<>&") & set(text)
    (data,) = json.loads(text)["runs"]
    assert sorted(data["classes"]) == sorted(one_line(name) for name in hostile)
