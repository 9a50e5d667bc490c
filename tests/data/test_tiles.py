"""Tiles against pixels: each object is painted in its own color and counted in the tile."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import TINY_RUN, Cli
from data.formats.exports import write_world
from data.generator.worlds import Picture, Thing
from helpers import assert_same_state, last
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ssdctl
from ssdctl.config import PrepareConfig
from ssdctl.config.fields import Tiling
from ssdctl.data.open_dataset import count_images
from ssdctl.data.prepare import prepare
from ssdctl.data.shapes import generate
from ssdctl.data.store import Split, open_splits
from ssdctl.data.tiles import IGNORED, tiled, tiling_of
from ssdctl.errors import UsageError

NAMES = tuple(f"class {n}" for n in range(6))
Box = tuple[int, int, int, int]  # left, top, right, bottom


class Painted(NamedTuple):
    """An image and its objects, none on another; object n has the color (n + 1, 200, 0)."""

    size: tuple[int, int]
    objects: list[Box]


@st.composite
def images(draw: st.DrawFn) -> Painted:
    """Objects are in cells of a grid, so that each pixel has at most one."""
    width, height = draw(st.integers(30, 260)), draw(st.integers(30, 260))
    cell = draw(st.sampled_from([15, 40, 90]))
    cells = [(x, y) for x in range(0, width - 2, cell) for y in range(0, height - 2, cell)]
    chosen = draw(st.lists(st.sampled_from(cells), max_size=6, unique=True))
    objects = []
    for x, y in chosen:
        right, bottom = min(x + cell, width), min(y + cell, height)
        left, top = draw(st.integers(x, right - 1)), draw(st.integers(y, bottom - 1))
        objects.append(
            (left, top, draw(st.integers(left + 1, right)), draw(st.integers(top + 1, bottom)))
        )
    return Painted((width, height), objects)


def write(root: Path, painted: list[Painted]) -> None:
    pictures = []
    for number, (size, objects) in enumerate(painted):
        things = tuple(
            Thing(NAMES[n], left, top, right - left, bottom - top, False, (n + 1, 200, 0))
            for n, (left, top, right, bottom) in enumerate(objects)
        )
        name = ("train", "", str(number), ".png")
        pictures.append(Picture(*name, *size, 1, True, "RGB", 0, things))
    write_world(root, "coco: 2017", NAMES, pictures)


def check_tile(split: Split, row: int, painted: Painted) -> None:
    pixels = split.decode(row).copy()
    height, width = pixels.shape[:2]
    assert [width, height] == split.sizes[row].tolist()
    span = slice(split.starts[row], split.starts[row + 1])
    boxes = np.rint(split.boxes[span] * ([width, height] * 2)).astype(int).tolist()
    found = dict(zip(map(tuple, boxes), split.labels[span].tolist(), strict=True))
    expected = {}
    for n, (left, top, right, bottom) in enumerate(painted.objects):
        places = np.argwhere((pixels[..., 0] == n + 1) & (pixels[..., 1] == 200))
        if len(places):
            (y, x), (end_y, end_x) = places.min(0).tolist(), (places.max(0) + 1).tolist()
            is_learned = 2 * len(places) >= (right - left) * (bottom - top)
            expected[x, y, end_x, end_y] = n + 1 if is_learned else IGNORED
    assert found == expected
    assert (row in split.trainable) == any(label > 0 for label in expected.values())
    assert (row in split.background) == (not expected)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    painted=st.lists(images(), min_size=1, max_size=3).filter(lambda p: any(i.objects for i in p)),
    tiling=st.builds(Tiling, st.integers(32, 120), st.sampled_from([0.0, 0.2, 0.5])),
    encoding=st.sampled_from(["jpeg", "raw"]),
)
def test_tiles_show_what_their_boxes_say(
    painted: list[Painted], tiling: Tiling, encoding: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("tiles") / "data"
    write(root, painted)
    counted = count_images(root, root / "prepared", tiling)
    prepare(root, root / "prepared", PrepareConfig(encoding=encoding))  # type: ignore[arg-type]
    split = open_splits(root, root / "prepared")["train"]
    whole, split = split, tiled(split, tiling)
    assert split.num_images == len(painted)
    for row in range(split.num_images, len(split.image_ids)):
        image, _ = split.image_of(row)
        assert split.image_ids[row] == whole.image_ids[image]
        check_tile(split, row, painted[image])
    covered = [np.zeros(size[::-1], np.bool_) for size, _ in painted]
    for image, (left, top, right, bottom) in zip(*split.tiles, strict=True):
        covered[image][top:bottom, left:right] = True
    for part, ((width, height), _) in zip(covered, painted, strict=True):
        assert part.all() or max(width, height) <= tiling.size
    assert counted[:2] == (len(split.trainable), len(split.background))
    for image in range(len(painted)):
        learned = sum(
            split.image_of(row)[0] == image for row in split.trainable if row >= len(painted)
        )
        views = max(learned // 4, 1) if image in whole.trainable else 0
        assert list(split.trainable).count(image) == views


def test_a_run_in_tiles_is_evaluated_and_used_in_tiles(
    cli: Cli, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without another word: `evaluate` and `predict` find the same, and the run resumes exactly."""
    run, whole, shapes = tmp_path / "run", tmp_path / "whole", tmp_path / "shapes"
    generate(shapes, num_train=8, num_val=3, seed=0)
    options = f"--tile 128 --tile-overlap 0.3 --steps 4 --seed 1 {TINY_RUN}"
    train = ["train", "--data", shapes, *options.split()]
    assert cli(*train, "--out", whole).code == 0
    assert cli(*train, "--out", run, "--steps", 2).code == 0
    assert cli(*train, "--out", run, "--tile", 160).code == 2
    tuned = ("train", "--data", shapes, "--init", run, "--steps", 1, "--bs", 2)
    assert json.loads(cli(*tuned, "--dry-run", "--json").out)["images"] > 8
    cli(*tuned, "--tile-overlap", 0.1, "--out", tmp_path / "tuned").expect(0, "tiles of 128 pixels")
    assert last(tmp_path / "tuned").tiling == Tiling(128, 0.1)
    assert json.loads(cli(*tuned, "--tile", 0, "--dry-run", "--json").out)["images"] == 8
    written = (
        "launch",
        "--cpus",
        2,
        *tuned[1:],
        "--epochs",
        1,
        "--warmup",
        "9ep",
        "--write",
        "a.sh",
    )
    cli(*written).expect(2, "a warm-up of 9ep")
    assert cli(*train, "--out", run).code == 0
    trained = last(run)
    for chosen, expected in (
        ({}, Tiling(128, 0.3)),
        ({"tile_overlap": 0.1}, Tiling(128, 0.1)),
        ({"tile": 160}, Tiling(160, 0.3)),
        ({"tile": 0}, None),
    ):
        assert tiling_of(ssdctl.configure(data=chosen), trained.tiling) == expected
    for command in ("prepare", "train", "launch --dry-run"):
        assert cli(*command.split(), "--data", shapes, "--tile-overlap", 0.1).code == 2
    chosen = ("--tile", 128, "--tile-overlap", 0.3)
    cli("prepare", "--data", shapes, *chosen).expect(0, " ".join(map(str, chosen)))
    with pytest.raises(UsageError, match="there are no tiles"):
        tiling_of(ssdctl.configure(data={"tile": 0, "tile_overlap": 0.1}), trained.tiling)
    assert_same_state(trained, last(whole))
    file = tmp_path / "found.json"
    cli("evaluate", run, "--score-threshold", 0.01, "--detections", file, "--json").expect(0)
    evaluated = sorted(
        (f["image_id"], f["category_id"], f["score"]) for f in json.loads(file.read_text())
    )
    options = ("--score", 0.01, "--set", "evaluate.nms_iou=0", "--json")
    predicted = json.loads(cli("predict", run, shapes / "val2017", *options).out)
    ids = {Path(image["image"]).name: n for n, image in enumerate(predicted, 1)}
    detected = sorted(
        (ids[Path(image["image"]).name], box["category_id"], box["score"])
        for image in predicted
        for box in image["detections"]
    )
    assert len(detected) == len(evaluated) > 0
    assert [d[:2] for d in detected] == [e[:2] for e in evaluated]
    assert [d[2] for d in detected] == pytest.approx([e[2] for e in evaluated], abs=1e-4)
