"""What `ssdctl evaluate` scores: folds, groups, tiles, splits, limits, thresholds and files of
detections, in any combination.

Detections are drawn from the run and the image instead of computed. What a command scores is told
by hand: each image by the run that did not train on it, and pycocotools' metrics of that.
"""

import contextlib
import csv
import io
import json
import shlex
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import TINY, Result, run_cli
from evaluation.judge import Row, detections, f1_of, matched
from helpers import check_examples, seeds
from hypothesis import strategies as st

import ssdctl
from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.data.shapes import generate
from ssdctl.evaluation.analysis import BackgroundScoring, score
from ssdctl.evaluation.coco_ap import Detections

METRICS = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


class World(NamedTuple):
    """A dataset, and runs on it: `fold-1` ... on folds, `whole` on all training images."""

    folder: Path
    truth: dict[str, dict[str, Any]]  # the annotations of each split
    group: str | None
    tile: int
    trained: dict[str, set[int]]  # the training images of each run
    seeds: dict[str, int]

    def path(self, name: str) -> Path:
        return self.folder / name

    def ids(self, split: str) -> list[int]:
        return [image["id"] for image in self.truth[split]["images"]]


def drawn(truth: dict[str, Any], seed: int, image: int) -> list[Row]:
    """Return what the detector with a seed finds on an image."""
    rng = np.random.default_rng([seed, len(truth["images"]), image])
    categories = [c["id"] for c in truth["categories"]]
    found = []
    for entry in truth["annotations"]:
        if entry["image_id"] == image and rng.random() < 0.9:
            box = np.array(entry["bbox"]) * rng.normal(1, 0.05, 4)
            is_own = rng.random() < 0.8
            category = entry["category_id"] if is_own else int(rng.choice(categories))
            found.append((image, category, box.tolist(), round(float(rng.random()), 1)))
    return found


def seed_of(weights: torch.Tensor) -> int:
    return zlib.crc32(weights.detach().numpy().tobytes())


class Started(ssdctl.Observer):
    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def on_start(self, start: Any) -> None:
        images = (start.train.image_of(int(row))[0] for row in start.train.trainable)
        self._world.trained[self._name] = {int(start.train.image_ids[i]) for i in images}


def make_world(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, group: str | None, tile: int
) -> World:
    generate(shapes := folder / "shapes", num_train=16, num_val=6, seed=0)
    files = {s: shapes / f"annotations/instances_{s}2017.json" for s in ("train", "val")}
    truth = {split: json.loads(file.read_text()) for split, file in files.items()}
    with_objects = {entry["image_id"] for entry in truth["train"]["annotations"]}  # are trained on
    truth["train"]["images"] = [i for i in truth["train"]["images"] if i["id"] in with_objects]
    empty, dropped = (image["id"] for image in truth["val"]["images"][:2])
    others = [a for a in truth["val"]["annotations"] if a["image_id"] not in (empty, dropped)]
    flat = {"id": 999, "image_id": dropped, "category_id": 1, "bbox": [9, 9, 0, 9], "iscrowd": 0}
    others.append({**flat, "area": 0})  # `prepare` drops it
    truth["val"]["annotations"] = others
    for split, file in files.items():
        file.write_text(json.dumps(truth[split]))
    world = World(folder, truth, group, tile, {}, {})

    def detect(detector: Any, split: Any, rows: Any, **_: Any) -> Detections:
        assert (rows < split.num_images).all()
        weights = detector.model.class_heads[0].weight
        name = "train" if split.num_images == len(truth["train"]["images"]) else "val"
        found = [
            f for i in split.image_ids[rows] for f in drawn(truth[name], seed_of(weights), int(i))
        ]
        return detections([f for f in found if f[3] > detector.score_threshold])

    monkeypatch.setattr("ssdctl.evaluation.resample.NUM_DRAWS", 20)  # as fast as the rest
    run = lambda s: score(*s._job)  # noqa: E731
    monkeypatch.setattr(BackgroundScoring, "_run", run)  # not in a process of its own
    # The evaluator first: when it is imported it must not find the drawn detections.
    for module in ("ssdctl.training.evaluator", "ssdctl.evaluation.detect"):
        monkeypatch.setattr(f"{module}.detect", detect)
    for name in [*(f"fold-{n}" for n in range(1, count + 1)), "whole"]:
        fold = {} if name == "whole" else {"fold": f"{name[-1]}/{count}", "group": group}
        config = ssdctl.configure(train=fold, data={"tile": tile} if tile else {})
        common = {**TINY, "steps": 1, "observers": [Started(world, name)]}
        ssdctl.train(shapes, out=folder / name, config=config, **common)
        model = load_checkpoint(folder / name / "checkpoints/best.pt").model
        world.seeds[name] = seed_of(model["class_heads.0.weight"])
    rows = [f for i in world.ids("val") for f in drawn(truth["val"], 1, i)]
    (folder / "rows.json").write_text(json.dumps(detections(rows).to_coco()))
    return world


class Expected(NamedTuple):
    """The images that are scored, and what is found there."""

    split: str
    images: list[int]
    found: list[Row]


def expected(world: World, names: list[str], options: dict[str, str]) -> Expected | None:
    """Return what is scored; None if that makes no sense."""
    split, folds = options.get("--split"), [n for n in world.trained if n != "whole"]
    if split == "test" or (len(names) > 1 and (sorted(names) != folds or split)):
        return None
    images, found, name_of_split = list[int](), list[Row](), "val"
    for name in names:
        is_held = name in folds and split is None
        name_of_split = "train" if is_held else split or "val"
        own = [i for i in world.ids(name_of_split) if not is_held or i not in world.trained[name]]
        truth = world.truth[name_of_split]
        if "--annotated-only" in options:
            own = [i for i in own if any(a["image_id"] == i for a in truth["annotations"])]
        own = own[: int(options.get("--limit", 999))]
        is_file = name == "rows.json"
        low = float(options.get("--score-threshold", 0 if is_file else 0.05))
        low -= 1e-9 * is_file  # a file keeps detections with exactly this score
        seen = (
            (world.truth["val"], 1, world.ids("val"))
            if is_file
            else (truth, world.seeds[name], own)
        )
        found += [f for i in seen[2] for f in drawn(*seen[:2], i) if f[3] > low]
        images += own
    return Expected(name_of_split, images, found)


def check_scores(world: World, of: Expected, result: dict[str, Any]) -> None:
    """Compare an evaluation with pycocotools', and the thresholds with the best F1."""
    kept = [f for f in of.found if f[0] in of.images]
    scoring = matched(world.truth[of.split], detections(kept), np.array(of.images))
    with contextlib.redirect_stdout(io.StringIO()):
        scoring.accumulate()
        scoring.summarize()
    assert (result["images"], result["detections"]) == (len(of.images), len(kept))
    assert [result[m] for m in METRICS] == pytest.approx(scoring.stats.tolist(), abs=1e-9)
    for entry in result["per_class"]:
        f1 = f1_of(scoring, entry["category_id"])
        if f1(0) is not None:
            best = max(f1(score - 1e-6) for score in np.linspace(0, 1, 11))
            assert entry["best_f1"] == pytest.approx(best, abs=1e-4)
            assert f1(entry["best_score"]) == best


VALUES = {
    "--split": ["train", "val", "test"],
    "--limit": ["1", "3", "99"],
    "--score-threshold": ["0.3", "0.7"],
    "--annotated-only": [""],
    "--tile": ["0", "200"],
    "--tile-overlap": ["0.3"],
    "--verify": [""],
    "--nms-iou": ["0.4"],
    "--workers": ["1"],
    "--detections": ["found.json", "."],
    "--suspects": ["suspects.csv", "."],
    "--report": ["page"],
    "--all": [""],
    "--fail-if-worse": [""],
    "--against": ["fold-2", "whole", "fold-1", "rows.json"],
}
Line = tuple[list[str], dict[str, str]]


@st.composite
def lines(draw: Any, world: World) -> Line:
    folds = [n for n in world.trained if n != "whole"]
    some = st.lists(st.sampled_from([*world.trained, "rows.json"]), min_size=1, max_size=2)
    names = draw(st.permutations(folds) | st.just(folds) | some)
    pool = draw(st.sampled_from([[*VALUES][:5], [*VALUES]]))
    chosen = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True))
    return names, {option: draw(st.sampled_from(VALUES[option])) for option in chosen}


def run(world: World, line: Line, out: Path) -> tuple[Result, str]:
    names, options = line
    words = ["evaluate", *(str(world.path(name)) for name in names), "--json"]
    words += ["--device", "cpu"] * (
        {*names, options.get("--against", "rows.json")} != {"rows.json"}
    )
    for option, value in options.items():
        value = str(world.path(value)) if option == "--against" else value
        value = str(out / value) if "." in value and option[2:] in "detections suspects" else value
        words += [option, str(out / value) if option == "--report" else value][: 1 + bool(value)]
    if "rows.json" in (*names, options.get("--against")):
        words += ["--data", str(world.path("shapes"))]
    return run_cli(*words), f"ssdctl {shlex.join(words)}"


def check_line(world: World, line: Line, out: Path) -> None:
    names, options = line
    result, where = run(world, line, out)
    others = {"--all", "--detections", "--report", "--suspects"} & {*options}
    of, other = expected(world, names, options), options.get("--against")
    detectors = {*names, other} - {"rows.json", None}
    is_refused = (
        of is None
        or "." in (options.get("--detections"), options.get("--suspects"))
        or (other and (others or len(names) > 1))
        or ("--fail-if-worse" in options and not other)
        or ("--all" in options and (len(names) > 1 or names == ["rows.json"]))
        or ("--detections" in options and names == ["rows.json"])  # a run here has one checkpoint
        or (not detectors and {"--tile", "--tile-overlap", "--nms-iou", "--workers"} & {*options})
        or (
            "--tile-overlap" in options and detectors and not int(options.get("--tile", world.tile))
        )
    )
    against = expected(world, [other], options) if other else None
    if (
        against is not None
        and of is not None
        and (against.split, against.images) != (of.split, of.images)
    ):
        is_refused = True
    if is_refused:
        assert result.code in ((2, 3) if options.get("--split") == "test" else (2,)), (
            f"{where}: {result}"
        )
        typed = [*options, *(str(world.path(n)) for n in names), "--fold", "split test"]
        assert any(word in result.err for word in typed), f"{where}: {result.err}"
        return
    assert result.code in (0, 10), f"{where}: {result.code} {result.err}"
    shown = json.loads(result.out)
    if against is not None:
        check_scores(world, of, shown["a"])
        check_scores(world, against, shown["b"])
        difference = shown["difference"]["AP"]["estimate"]
        assert difference == pytest.approx(shown["b"]["AP"] - shown["a"]["AP"], abs=1e-4), where
        assert result.code == 10 * (shown["better"] == "b" and "--fail-if-worse" in options)
        return
    for evaluation in shown.get("checkpoints", [shown]):
        check_scores(world, of, evaluation)
    if "--detections" in options:
        rows = json.loads((out / "found.json").read_text())
        found = [(r["image_id"], r["category_id"], r["bbox"], r["score"]) for r in rows]
        assert sorted(found) == sorted(of.found), where
    if "--report" in options:
        written = json.loads((out / "page/evaluation.json").read_text())
        assert written["metrics"] == {m: shown.get(m, written["metrics"][m]) for m in METRICS}
        header = (out / "page/report.html").read_text(encoding="utf-8").split("Evaluated")[1][:400]
        assert len(names) == 1 or all(f"{name}/" in header for name in names)
    if "--suspects" in options:
        with (out / "suspects.csv").open() as file:
            suspects = list(csv.DictReader(file))
        assert {int(row["image_id"]) for row in suspects} <= {*of.images}, where
        if suspects and "--report" in options:
            page = (out / "page/report.html").read_text(encoding="utf-8")
            assert "Labels that may be wrong" in page
            assert suspects[0]["file"] in page


def check_world(world: World) -> None:
    """Each image is held out once, groups stay together, and thresholds are those of best F1."""
    folds = [n for n in world.trained if n != "whole"]
    held = {n: {*world.ids("train")} - world.trained[n] for n in folds}
    assert sorted(i for ids in held.values() for i in ids) == world.ids("train")
    if world.group is not None:
        ends = [{i % 10 for i in ids} for ids in held.values()]
        assert sum(map(len, ends)) == len(set().union(*ends))
    together = json.loads(run(world, (folds, {}), world.folder)[0].out)
    alone = {name: json.loads(run(world, ([name], {}), world.folder)[0].out) for name in folds}
    for fact in ("step", "epoch", "precision", "score_threshold"):
        values = {shown[fact] for shown in alone.values()}
        assert together.get(fact) == (values.pop() if len(values) == 1 else None), fact
    for name, shown in alone.items():
        run_folder = ssdctl.Run(world.path(name))
        assert shown["AP"] == run_folder.best_metrics["AP"]
        saved = json.loads(json.dumps(run_folder.evaluation.as_json()))
        assert shown == {"checkpoint": shown["checkpoint"], **saved}
        found = {c["name"]: c["best_score"] for c in shown["per_class"] if c["best_f1"] > 0}
        best = load_checkpoint(world.path(name) / "checkpoints/best.pt")
        assert best.thresholds == [found.get(c.name) for c in best.classes]


def check_lines(world: World, out: Path, number: int | None, count: int) -> None:
    def check(line: Line) -> None:
        check_line(world, line, out)

    check_examples(check, count, number, shrinks=number is not None, line=lines(world))


def test_what_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch, 2, r"(\d)\.jpg", 160)
    check_world(world)
    kinds = ["fold-1"], ["fold-1", "fold-2"], ["rows.json"], ["whole"]
    for n, names in enumerate(kinds):  # each option by itself, then several
        for option, values in VALUES.items():
            check_line(world, (names, {option: values[n % len(values)]}), tmp_path)
    check_lines(world, tmp_path, None, 15)


@pytest.mark.slow
def test_what_is_scored_in_many_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in seeds():
        count, group = 2 + number % 2, (None, r"(\d)\.jpg")[number // 2 % 2]
        tile = (0, 160)[number // 4 % 2]
        world = make_world(tmp_path / str(number), monkeypatch, count, group, tile)
        check_world(world)
        check_lines(world, tmp_path, number, 100)
