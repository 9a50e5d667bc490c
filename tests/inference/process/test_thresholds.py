"""The score of each class's best F1: found by an evaluation, kept by files, used by predictions."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, TINY_RUN, Cli

import ssdctl
import ssdctl.checkpoint.folder
from ssdctl.checkpoint.exported import read_onnx
from ssdctl.checkpoint.file import load_checkpoint, save_checkpoint
from ssdctl.errors import DiskError
from ssdctl.runs.folder import RunDir

LOW = 0.02


@pytest.fixture(scope="module")
def thresholds(checkpoint: Path, image_file: Path) -> list[float | None]:
    """Return the median score of the detections of each class; None for the last class."""
    found = ssdctl.load(checkpoint, device="cpu", score=LOW).predict(image_file)
    count = len(load_checkpoint(checkpoint).classes)
    scores = [found.scores[found.labels == label] for label in range(1, count)]
    return [*(float(np.median(s)) if len(s) else 0.5 for s in scores), None]


@pytest.fixture(scope="module")
def with_thresholds(
    checkpoint: Path, thresholds: list[float | None], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("thresholds") / "model.pt"
    save_checkpoint(path, dataclasses.replace(load_checkpoint(checkpoint), thresholds=thresholds))
    return path


def test_predictions_use_the_thresholds_of_the_checkpoint(
    with_thresholds: Path, thresholds: list[float | None], image_file: Path, cli: Cli
) -> None:
    every = ssdctl.load(with_thresholds, device="cpu", score=LOW).predict(image_file)
    least = np.array([0, *(0.3 if t is None else t for t in thresholds)])
    expected = every.scores[every.scores > least[every.labels]]
    assert 0 < len(expected) < len(every)
    for score in (None, "best"):
        found = ssdctl.load(with_thresholds, device="cpu", score=score).predict(image_file)
        # Borderline overlaps depend on the last digits, and these on the number of candidates.
        assert len(found) == pytest.approx(len(expected), abs=2)
        assert (found.scores > least[found.labels] - 1e-4).all()  # they are rounded
    result = cli("predict", with_thresholds, image_file, "--device", "cpu", "--json")
    result.expect(0, "each class's best F1")
    (image,) = json.loads(result.out)
    assert [d["score"] for d in image["detections"]] == pytest.approx(found.scores, abs=1e-3)
    result = cli("predict", with_thresholds, image_file, "--device", "cpu", "--score", 0.9)
    assert "best F1" not in result.err


def test_in_tiles_a_class_is_detected_as_with_its_own_threshold(
    with_thresholds: Path, thresholds: list[float | None], shapes: Path
) -> None:
    """A box below its threshold replaces none: complete boxes come before cut ones."""
    images = sorted(shapes.glob("val*/*.jpg"))
    best = ssdctl.load(with_thresholds, device="cpu", tile=100).predict(images)
    for label, threshold in enumerate(thresholds, 1):
        if threshold is None:
            continue
        detector = ssdctl.load(with_thresholds, device="cpu", tile=100, score=threshold)
        for found, expected in zip(best, detector.predict(images), strict=True):
            actual = found.boxes[found.labels == label]
            np.testing.assert_allclose(actual, expected.boxes[expected.labels == label], atol=0.01)


def test_best_without_thresholds_is_refused(
    checkpoint: Path, image_file: Path, cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "plain.pt"
    save_checkpoint(path, dataclasses.replace(load_checkpoint(checkpoint), thresholds=()))
    cli("predict", path, image_file, "--score", "best", "--device", "cpu").expect(2, "--score 0.3")
    assert cli("predict", path, image_file, "--device", "cpu").code == 0
    assert cli("predict", path, image_file, "--score", "worst").code == 2


def test_each_checkpoint_has_those_of_its_own_evaluation(
    shapes: Path, cli: Cli, tmp_path: Path
) -> None:
    """The score comes after the checkpoint is saved; a copy elsewhere has it, too."""
    options = (*TINY_RUN.split(), "--eval-every", "2st", "--save-every", "1st", "--keep", 9)
    cli("train", "--data", shapes, "--out", "run", "--steps", 5, *options).expect(0)
    found = []
    for step in range(1, 6):
        copy = shutil.copy(RunDir(Path("run")).step_checkpoint(step), tmp_path / "copy.pt")
        read = load_checkpoint(copy)
        if step in (2, 4, 5):
            evaluation = ssdctl.evaluate(copy, device="cpu", progress=False)
            found.append(evaluation.thresholds(read.classes))
        assert list(read.thresholds) == (found[-1] if found else [])
    assert found[0] != found[1] != found[2]
    assert any(found[0])


def test_an_evaluation_whose_thresholds_are_not_saved_is_made_again(
    shapes: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise DiskError(f"{path}: no space")

    command = ("train", "--data", shapes, "--out", "run", "--steps", 3, *TINY_RUN.split())
    with monkeypatch.context() as patch:
        patch.setattr(ssdctl.checkpoint.folder, "load_resumable", fail)
        cli(*command).expect(6, "no space")
    assert not ssdctl.Run("run").evals
    cli(*command).expect(0)
    assert any(load_checkpoint(RunDir(Path("run")).last).thresholds)
    with ssdctl.Trainer(shapes, out="own", steps=2, **TINY) as trainer:
        for step in trainer:
            expected = trainer.evaluate().thresholds(trainer.model.classes)
            saved = load_checkpoint(RunDir(Path("own")).step_checkpoint(step.step))
            assert list(saved.thresholds) == expected


def test_exported_files_have_the_thresholds(
    with_thresholds: Path, thresholds: list[float | None], image_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    file = tmp_path / "model.onnx"
    ssdctl.export(with_thresholds, file, progress=False)
    assert list(read_onnx(file).thresholds) == thresholds
    expected = ssdctl.load(with_thresholds, device="cpu").predict(image_file)
    found = ssdctl.load(file, device="cpu").predict(image_file)
    assert len(found) == pytest.approx(len(expected), abs=2)
