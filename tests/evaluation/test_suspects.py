"""Labels that look wrong: what is damaged in a set is at the top of the list."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from conftest import Cli
from evaluation.test_resample import drawn_split

from ssdctl.data.annotations import Annotations
from ssdctl.data.coco_json import document_of
from ssdctl.evaluation.suspects import find_suspects


def damaged(truth: Annotations, count: int) -> tuple[Annotations, dict[tuple[int, float], str]]:
    """Change the classes of some objects, remove others; return the place of each damage."""
    chosen = np.random.default_rng(0).choice(len(truth.boxes), 2 * count, replace=False)
    labels, is_kept = truth.labels.copy(), np.ones(len(truth.boxes), np.bool_)
    labels[chosen[:count]] = 3 - labels[chosen[:count]]
    is_kept[chosen[count:]] = False
    kinds = {
        (int(truth.rows[row]), float(truth.boxes[row, 0])): "class" if n < count else "no box"
        for n, row in enumerate(chosen)
    }
    return truth._replace(labels=labels).with_objects(is_kept), kinds


def test_damaged_labels_come_first() -> None:
    truth, found = drawn_split(3, 200)
    wrong, kinds = damaged(truth, 30)
    for detections in (found[1:], found):  # one checkpoint, and two
        suspects = find_suspects(wrong, wrong.image_ids, detections)
        assert [s.suspicion for s in suspects] == sorted(
            (s.suspicion for s in suspects), reverse=True
        )
        hits = dict.fromkeys(("class", "no box"), 0)
        for s in suspects[:60]:
            near = [
                k
                for (image, left), k in kinds.items()
                if image == s.image_id and abs(left - s.box[0]) < 20
            ]
            hits[s.kind if s.kind in near else "class"] += bool(near)
        assert sum(hits.values()) >= 30
        assert min(hits.values()) >= 10
    undamaged = find_suspects(truth, truth.image_ids, found)
    assert undamaged[20].suspicion < suspects[20].suspicion


def test_an_object_that_no_checkpoint_finds_is_named() -> None:
    truth, found = drawn_split(4, 30)
    lost = int(np.argmax(truth.areas))
    image, box = int(truth.rows[lost]), truth.boxes[lost]
    parts = []
    for detections in found:
        far = np.abs(detections.boxes - box).max(axis=1) > 100
        kept = (detections.image_ids != image) | far
        parts.append(type(detections)(*(column[kept] for column in detections)))
    named = [s for s in find_suspects(truth, truth.image_ids, parts) if s.kind == "not found"]
    assert (image, round(float(box[0]), 1)) in {(s.image_id, s.box[0]) for s in named}
    assert all(s.label and not s.detected for s in named)
    is_lost = np.arange(len(truth.boxes)) == lost
    crowd, without = truth._replace(is_crowd=is_lost), truth.with_objects(~is_lost)
    one, other = (find_suspects(labels, truth.image_ids, parts) for labels in (crowd, without))
    assert one == other  # a crowd that is not found says nothing about the objects


def test_suspects_are_written_as_csv(tmp_path: Path, cli: Cli) -> None:
    truth, (_, good) = drawn_split(5)
    wrong, _ = damaged(truth, 8)
    (tmp_path / "truth.json").write_text(json.dumps(document_of(wrong)))
    (tmp_path / "good.json").write_text(json.dumps(good.to_coco()))
    file = tmp_path / "suspects.csv"
    result = cli("evaluate", tmp_path / "good.json", "--data", tmp_path / "truth.json",
                 "--suspects", file, "--report", tmp_path / "page")  # fmt: skip
    assert result.code == 0, result.err
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["rank"] for row in rows] == [str(n) for n in range(1, len(rows) + 1)]
    assert {row["kind"] for row in rows} <= {"class", "not found", "no box"}
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "Labels that may be wrong" in page
    assert rows[0]["file"] in page
