"""Detection over a split: every image once, for all batch sizes and numbers of ranks; bad outputs
are named. Classes are matched by name: a new export may renumber and reorder them. The validation loss
does not depend on the batches either."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY_RUN, Cli
from helpers import run_ranks, start_script
from PIL import Image
from tiny_network import Tiny

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.data.annotations import ClassName, match_classes
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.device import open_device
from ssdctl.device.cpu import Cpu
from ssdctl.evaluation import detect
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.evaluation.detect import ValidationLoss
from ssdctl.inference.detector import Detector, DetectorConfig
from ssdctl.input.batch import Batch
from ssdctl.input.open import random_batch
from ssdctl.model.backbones import find_backbone
from ssdctl.model.ssd300 import load_network
from ssdctl.runs.evaluation import read_evaluation

LOW = ("--score-threshold", "0.01")


@pytest.fixture(scope="module")
def split(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Split:
    store = tmp_path_factory.mktemp("store")
    return open_dataset(shapes, store)["val"]


def detected(
    checkpoint: Path, split: Split, rows: list[int], batch_size: int, **more: Any
) -> Detections:
    device = open_device("cpu")
    model = device.place(load_network(load_checkpoint(checkpoint)))
    detector = Detector(model, device, DetectorConfig(score_threshold=0.02))
    images = np.array(rows, np.int64)
    result = detect.detect(detector, split, images, batch_size=batch_size, threads=2, **more)
    assert model.training  # its mode is restored
    assert result is not None
    return result


def table(found: Detections) -> np.ndarray:
    return np.column_stack([found.image_ids, found.boxes, found.scores, found.category_ids])


def test_batches_are_alike(checkpoint: Path, split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = detected(checkpoint, split, list(range(9)), 9)
    assert len(at_once.scores)
    monkeypatch.setattr(detect, "FEW_CORES", 0)  # use the decoding thread
    parts = detected(checkpoint, split, list(range(9)), 4)  # the last batch holds one image
    assert np.array_equal(table(parts), table(at_once))
    shares = [detected(checkpoint, split, list(range(9))[rank::2], 4) for rank in (0, 1)]
    rows = np.concatenate([table(s) for s in shares])
    assert np.array_equal(rows[np.argsort(rows[:, 0], kind="stable")], table(at_once))


def test_category_ids_are_chosen_or_left_out(checkpoint: Path, split: Split) -> None:
    ids = {c.id: place - 1 for place, c in enumerate(split.classes)}  # -1, 0, 1 ...
    found = detected(checkpoint, split, [0, 1], 2)
    new = np.array([ids[n] for n in found.category_ids.tolist()])
    chosen = detected(checkpoint, split, [0, 1], 2, category_ids=np.array([*ids.values()]))
    assert {-1, 0} < set(new.tolist())
    assert chosen.category_ids.tolist() == new[new >= 0].tolist()
    assert np.array_equal(chosen.boxes, found.boxes[new >= 0])


def test_nothing_to_look_at(checkpoint: Path, split: Split) -> None:
    assert table(detected(checkpoint, split, [], 4)).shape == (0, 7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_weights_exit_7(cli: Cli, checkpoint: Path, value: float) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    payload["model"]["class_heads.2.bias"][0] = value
    torch.save(payload, "bad.pt")
    Image.new("RGB", (40, 30)).save("x.png")
    for command in (["evaluate", "bad.pt", "--device", "cpu"], ["predict", "bad.pt", "x.png"]):
        result = cli(*command).expect(7, "NaN or infinite")
        assert result.out == ""


# Rank R evaluates the R-th run that the first argument names.
EVALUATE = """
import os, sys
from ssdctl.cli.main import main
main(["evaluate", sys.argv[1].split()[int(os.environ["RANK"])], *sys.argv[2:]])
"""


def test_a_run_that_another_rank_sees_later(cli: Cli, tiny_run: Path) -> None:
    """Ranks list the checkpoints of a training that goes on at different moments."""
    for name in ("run", "later"):
        shutil.copytree(tiny_run, name, symlinks=True)
    (newest, *_) = Path("later/checkpoints").glob("step-*.pt")
    shutil.copy(newest, newest.with_name("step-00009999.pt"))
    options = ("--all", *LOW, "--device", "cpu", "--json")
    one = cli("evaluate", "run", *options)
    ranks = run_ranks(2, EVALUATE, "run later", *options, start=start_script)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert ranks[0].out == one.out


def exported_again(shapes: Path, root: Path, *, reverse: bool) -> dict[int, int]:
    """Copy a dataset with other category ids; return the new ids by the old ones."""
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    new: dict[int, int] = {}
    for path in root.glob("annotations/*.json"):
        content: dict[str, Any] = json.loads(path.read_text())
        new = {c["id"]: 1000 - 10 * c["id"] for c in content["categories"]}
        for category in content["categories"]:
            category["id"] = new[category["id"]]
        for entry in content["annotations"]:
            entry["category_id"] = new[entry["category_id"]]
        if reverse:
            content["categories"].reverse()
        path.write_text(json.dumps(content))
    return new


def test_classes_match_by_name(cli: Cli, checkpoint: Path, shapes: Path, tmp_path: Path) -> None:
    root = tmp_path / "again"
    new = exported_again(shapes, root, reverse=True)
    options = ("--device", "cpu", "--score-threshold", "0.01", "--json", "--verify")
    before = cli("evaluate", checkpoint, "--data", shapes, *options, "--detections", "before.json")
    after = cli("evaluate", checkpoint, "--data", root, *options, "--detections", "after.json")
    assert after.code == 0, after.err
    expected, actual = json.loads(before.out), json.loads(after.out)
    assert actual["AP"] == pytest.approx(expected["AP"], abs=1e-12)
    objects = {c["name"]: c["objects"] for c in expected["per_class"]}
    assert {c["name"]: c["objects"] for c in actual["per_class"]} == objects
    rows = [json.loads(Path(name).read_text()) for name in ("before.json", "after.json")]
    assert len(rows[0]) > 0
    percent = [{**row, "score": 100 * row["score"]} for row in rows[0]]
    Path("percent.json").write_text(json.dumps(percent))
    command = ("evaluate", "percent.json", "--data", shapes, "--suspects", "suspects.csv")
    cli(*command).expect(2, "percent.json", "0 to 1")
    for row in rows[0]:
        row["category_id"] = new[row["category_id"]]
    assert rows[0] == rows[1]

    labels = next(root.glob("annotations/*.json"))
    cli("evaluate", checkpoint, "--data", root, "--detections", labels).expect(2, "in the dataset")
    Path("mine.json").write_bytes(labels.read_bytes())
    Path("mine.csv").write_text("rank,name\n")
    Path("mine.html").write_text("<!doctype html><title>mine</title>")
    for option, file in (("--detections", "mine.json"), ("--suspects", "mine.csv")):
        cli("evaluate", checkpoint, "--data", root, option, file).expect(2, "earlier result")
    both = ("--detections", "new", "--suspects", "./new")
    cli("evaluate", checkpoint, "--data", root, *both).expect(2, "both")
    assert cli("report", "--out", "mine.html").code == 2
    for path in root.glob("annotations/*.json"):
        path.write_text(path.read_text().replace('"star"', '"comet"'))
    refused = cli("evaluate", checkpoint, "--data", root, *options).expect(5)
    message = " ".join(refused.err.split())
    assert "missing: star; not in the checkpoint: comet" in message
    assert "brick" not in message
    for path in root.glob("annotations/*.json"):  # without comets
        truth = json.loads(path.read_text())
        comet = next(c for c in truth["categories"] if c["name"] == "comet")
        truth["categories"].remove(comet)
        truth["annotations"] = [a for a in truth["annotations"] if a["category_id"] != comet["id"]]
        path.write_text(json.dumps(truth))
    command = ("evaluate", checkpoint, "--data", root, *options)
    cli(*command, "--detections", "four.json").expect(0, "lacks classes", "star")
    assert comet["id"] not in {d["category_id"] for d in json.loads(Path("four.json").read_text())}


def test_classes_of_one_name_keep_their_order() -> None:
    known, listed = (
        [ClassName(n, name) for n, name in enumerate(names)] for names in ("aba", "baa")
    )
    assert match_classes(known, listed) == [1, 0, 2]
    assert match_classes(known, listed[:2]) == [1, 0, -1]


def test_renumbered_classes_resume(cli: Cli, tiny_run: Path, shapes: Path, tmp_path: Path) -> None:
    exported_again(shapes, tmp_path / "again", reverse=False)
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    train = ("train", "--out", run, *TINY_RUN.split())
    cli(*train, "--data", tmp_path / "again", "--steps", 4).expect(0, "category ids differ")
    exported_again(shapes, tmp_path / "reversed", reverse=True)
    cli(*train, "--data", tmp_path / "reversed", "--steps", 5).expect(5, "another order", "--init")


def test_the_next_command_keeps_the_options(cli: Cli, checkpoint: Path) -> None:
    options = "--split train --limit 2 --tile 0 --score-threshold 0.3 --set evaluate.device=cpu"
    more = ("--set", "evaluate.precision=auto")  # has no option
    shown = cli("evaluate", checkpoint, *options.split(), *more).expect(0)
    words = shlex.split(shown.err.splitlines()[-1])
    assert "--device" in words
    assert "--tile" in words
    cli(*words[words.index("evaluate") :]).expect(0)
    written = read_evaluation(Path("evaluation/evaluation.json"))
    assert written is not None
    about = written.about
    assert (about.split, about.images, about.score_threshold) == ("train", 2, 0.3)


SIZES = ([7], [3, 4], [1] * 7)


def losses(batch: Batch, sizes: list[int], padding: int, backbone: str) -> dict[str, float]:
    """Return the loss of the batch's images in batches of these sizes, filled up with padding."""
    torch.manual_seed(0)
    model: Any = Tiny(has_norm=False)
    model.constants = find_backbone(backbone).CONSTANTS
    loss, start = ValidationLoss(model, Cpu()), 0
    for size in sizes:
        part = Batch(*(field[start : start + size] for field in batch))
        start += size
        filled = torch.cat([part.images, part.images.new_zeros(padding, 300, 300, 3)])
        with torch.no_grad():
            output = model(filled.permute(0, 3, 1, 2).float() / 255)
        loss.add(part, output)
    loss.set_means([loss.sums()])
    return loss.means


@pytest.mark.parametrize("backbone", ["tiny", "vgg16"])
def test_batches_and_padding_do_not_matter(backbone: str) -> None:
    batch = random_batch(7, 4, max_boxes=9)
    labels = batch.labels.clone()
    for number in range(7):  # images with 0 to 5 objects
        labels[number, max(number - 1, 0) :] = 0
    batch = batch._replace(labels=labels, rows=np.arange(7))
    expected = losses(batch, [7], 0, backbone)
    assert expected["loss"] == pytest.approx(expected["loss_box"] + expected["loss_class"])
    for sizes in SIZES:
        for padding in (0, 2):
            assert losses(batch, sizes, padding, backbone) == pytest.approx(expected, rel=1e-5)
