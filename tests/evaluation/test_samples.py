"""The samples of the report are the images that hotcoco finds worst, crowds ignored as it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ssdctl.evaluation.coco_ap import Detections, run_scoring
from ssdctl.evaluation.ground_truth import read_ground_truth
from ssdctl.evaluation.samples import NUM_SAMPLES, choose_samples
from ssdctl.evaluation.synthetic import make_split
from ssdctl.runs.evaluation import SHOWN_SCORE


def test_the_worst_images_are_hotcocos(tmp_path: Path) -> None:
    path = tmp_path / "annotations.json"
    detections = make_split(path, num_images=300, num_boxes=2500, num_detections=20_000)
    truth = read_ground_truth(path)
    assert truth.boxes.is_crowd.any()
    is_shown = detections.scores >= SHOWN_SCORE
    shown = Detections(*(column[is_shown] for column in detections))
    scoring = run_scoring(truth, shown)
    summary = scoring.engine.image_diagnostics(iou_thr=0.5)["img_summary"]

    def badness(image_id: int) -> tuple[float, int, int]:
        entry = summary[image_id]
        errors = entry["fp"] + entry["fn"]
        return 2 * entry["tp"] / (2 * entry["tp"] + errors) if errors else 1.0, -errors, image_id

    worst = sorted(map(int, scoring.image_ids), key=badness)[:NUM_SAMPLES]
    samples = choose_samples(truth, scoring.image_ids, detections)
    assert [s.image_id for s in samples if s.is_worst] == worst
    others = [s.image_id for s in samples if not s.is_worst]
    assert len(set(others) - set(worst)) == NUM_SAMPLES
    again = choose_samples(truth, scoring.image_ids, detections)
    assert [s.image_id for s in again] == [s.image_id for s in samples]


def test_a_choice_among_some_images(tmp_path: Path) -> None:
    path = tmp_path / "annotations.json"
    detections = make_split(path, num_images=300, num_boxes=2500, num_detections=20_000)
    some = np.arange(0, 300, 20)
    samples = choose_samples(read_ground_truth(path), some, detections)
    assert sorted(s.image_id for s in samples) == some.tolist()
