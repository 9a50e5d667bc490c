"""Random datasets in every format are read, trained on and exported as their generator knows them.

A failure prints the smallest dataset that shows it, its files and the commands; the folder is kept.
"""

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from data.generator.tools import TOOLS
from data.generator.worlds import (
    STRAY,
    Layout,
    Picture,
    Thing,
    Tree,
    World,
    edited,
    with_val,
    worlds,
)
from data.generator.writers import LAYOUTS, WORDS, add_decoys, add_other_files, has_other_categories
from helpers import SEED, check_examples
from hypothesis import note
from PIL import ExifTags, Image

from ssdctl.config import Config, DataConfig, PrepareConfig
from ssdctl.config.resolve import parse_assignments, resolve
from ssdctl.data import store_folder
from ssdctl.data.annotations import AUTOMATIC, Annotations, nfc
from ssdctl.data.dataset import read_dataset, resolve_images
from ssdctl.data.export_dataset import export_dataset
from ssdctl.data.image_files import is_image
from ssdctl.data.open_dataset import annotations_of, open_dataset, prepare_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.report import Outcome
from ssdctl.data.sources import is_prepared
from ssdctl.data.store import Split, open_splits
from ssdctl.data.store_folder import dataset_folders
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import TrainLoader
from ssdctl.runtime.progress import without_progress

COLOR_DISTANCE = 42  # half of that between two colors
ALL = {**LAYOUTS, **TOOLS}
GROWING = {name for name, (layout, _) in LAYOUTS.items() if len(layout.splits) > 1}
Truth = dict[str, dict[str, Picture]]  # by split and by path below the dataset folder
GROUP = r"([^/])[^/]*$"  # the first character of the file's name
Box = tuple[str, float, float, float, float, bool]


def write(world: World, root: Path, *, is_blank: bool = False) -> Tree:
    form = "NFC" if world.layout in TOOLS else world.form
    tree = Tree(root, is_blank=is_blank, form=form)
    ALL[world.layout][1](world, tree)
    add_decoys(world, tree)
    add_other_files(world, tree)
    tree.data, _ = dataset_folders(DataConfig(root=str(tree.data)))
    return tree


def boxes_of(things: Iterable[Thing]) -> list[Box]:
    return sorted((t.name, t.left, t.top, t.width, t.height, t.is_crowd) for t in things)


def present(tree: Tree, world: World, kept: Collection[str] = ()) -> Truth:
    """Return the images that are there, with the objects of the kept classes; none: of all.

    Those to test with validate if there are no others.
    """
    splits: Truth = {}
    for path, picture in tree.images.items():
        if not picture.is_missing:
            splits.setdefault(picture.split, {})[path] = things_of(picture, kept)
    is_unread = world.layout == "voc: lists" and "no empty files" in world.flags
    if is_unread and not any(tree.images[path].things for path in splits.get("test", ())):
        splits.pop("test", None)  # VOC2012's list is public, its XML files are not
    # COCO's files list images that are missing.
    listed = tree.images.values() if world.layout.startswith("coco") else ()
    has_val = "val" in splits or "val" in {picture.split for picture in listed}
    if not has_val and any(p.things for p in splits.get("test", {}).values()):
        splits["val"] = splits.pop("test")
    return splits


def texts(outcome: Outcome) -> str:
    lines = []
    for report in outcome.splits:
        lines += [f"{f.kind}: {f.detail}" for f in report.findings]
        lines += [*report.notes, *report.warnings]
    return "\n".join(lines)


def match(
    found: Iterable[tuple[object, Sequence[float]]],
    expected: Iterable[tuple[object, Sequence[float]]],
    where: str,
    tolerance: float,
) -> list[int]:
    """Return the place of each expected box in those found; rounding may change their order."""
    places, left = list[int](), dict(enumerate(found))
    for name, sides in expected:
        off = {n: np.abs(np.subtract(b, sides)).max() for n, (k, b) in left.items() if k == name}
        assert min(off.values(), default=np.inf) <= tolerance, f"{name} {sides} of {where}: {left}"
        places.append(min(off, key=off.__getitem__))
        del left[places[-1]]
    assert not left, f"boxes of {where}"
    return places


def assert_same_boxes(found: list[Box], expected: list[Box], where: str, layout: Layout) -> None:
    of_box = [[((b[0], b[5] and layout.crowds), b[1:5]) for b in s] for s in (found, expected)]
    match(*of_box, where, layout.tolerance)


def boxes_by_row(annotations: Annotations) -> list[list[Box]]:
    rows: list[list[Box]] = [[] for _ in annotations.file_names]
    names = ("rows", "labels", "boxes", "is_crowd")
    columns = (getattr(annotations, name).tolist() for name in names)
    for row, label, box, is_crowd in zip(*columns, strict=True):
        rows[row].append((annotations.classes[label - 1].name, *box, is_crowd))
    return [sorted(boxes) for boxes in rows]


def check_index(root: Path, store: Path, truth: Truth, lost: set[str], layout: Layout) -> None:
    """Every image's file, size, split, boxes and classes are those of the truth."""
    read, opened = annotations_of(root, store), open_splits(root, store)
    folder = root.parent if root.is_file() else root
    found: dict[str, set[str]] = {split: set() for split in truth}
    for split, labels in read.items():
        boxes, usable = boxes_by_row(labels), opened[split].usable
        for row, name in enumerate(labels.file_names):
            path = os.path.relpath(labels.folder / name, folder)
            if not usable[row]:
                assert path in lost, f"{split}: {path} is dropped"
                continue
            assert path not in found.get(split, ()), f"{split}: {path} is there twice"
            picture = truth.get(split, {}).get(path)
            assert picture is not None, f"{split}: {path} is not one of its images"
            found[split].add(path)
            size = tuple(labels.sizes[row])
            assert size == (picture.width, picture.height), f"size of {path}"
            assert_same_boxes(boxes[row], boxes_of(picture.things), path, layout)
    for split, pictures in truth.items():
        assert found[split] == set(pictures), f"{split}: not all images are read"


def shows(pixels: np.ndarray, center: tuple[float, float], color: np.ndarray) -> bool:
    x, y = (int(v) for v in center)
    return bool(np.abs(pixels[y, x].astype(int) - color).max() <= COLOR_DISTANCE)


def gray_of(split: Split, row: int) -> int:
    """Return the background of an image, which identifies it."""
    return int(np.rint((split.decode(row)[1, 1].astype(int).mean() - 8) / 16)) * 16 + 8


def check_pixels(split: Split, pictures: Collection[Picture], tolerance: float) -> None:
    """Every image is one of the pictures, as it is annotated, and each object is under its box."""
    by_gray = {picture.gray: picture for picture in pictures}
    found = []
    for row in np.nonzero(split.usable)[0]:
        pixels, gray = split.decode(row), gray_of(split, row)
        picture = by_gray.get(gray)
        assert picture is not None, f"an image with the background {gray}"
        found.append(gray)
        assert pixels.shape == (picture.height, picture.width, 3)
        start, end = split.starts[row : row + 2]
        boxes = split.boxes[start:end] * np.tile(split.sizes[row], 2)
        names = [split.classes[label - 1].name for label in split.labels[start:end]]
        sides = [(t.left, t.top, t.left + t.width, t.top + t.height) for t in picture.things]
        expected = list(zip((t.name for t in picture.things), sides, strict=True))
        read = zip(names, boxes.tolist(), strict=True)
        places = match(read, expected, picture.name, tolerance)
        for place, thing in zip(places, picture.things, strict=True):
            left, top, right, bottom = boxes[place]
            center, color = ((left + right) / 2, (top + bottom) / 2), picture.shade(thing.color)
            assert shows(pixels, center, color), f"{thing} of {picture.name}"
    assert sorted(found) == sorted(by_gray), "not all images are there"


def check_batches(split: Split, pictures: Collection[Picture], augment: str) -> None:
    """Under each box of a batch is the color of an object of its class."""
    seed = sum(picture.width for picture in pictures)
    config = LoaderConfig(seed, 4, 1, max(split.most_boxes, 1), augment)
    by_gray = {picture.gray: picture for picture in pictures}
    for batch in TrainLoader(split, config).batches(0, 1 + len(split.trainable) // 4):
        parts = batch.images.numpy(), batch.boxes.numpy(), batch.labels.tolist(), batch.rows
        for pixels, boxes, labels, row in zip(*parts, strict=True):
            picture = by_gray[gray_of(split, int(row))]
            colors = [(t.name, picture.shade(t.color)) for t in picture.things]
            for box, label in zip(boxes * 300, labels, strict=True):
                if label and min(box[2:] - box[:2]) > 8:
                    center = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
                    name = split.classes[label - 1].name
                    under = [n for n, color in colors if shows(pixels, center, color)]
                    assert name in under, f"{name} of {picture.name}, by {augment}: {under}"


def check_export(
    root: Path, store: Path, target: str, truth: Truth, layout: Layout, *, says_empty: bool
) -> None:
    """A dataset that is exported, and read again, has the same images and boxes."""
    out, again = store.with_name(f"to-{target}"), store.with_name(f"store-{target}")
    export_dataset(open_splits(root, store), out, target)
    for file in filter(is_image, out.rglob("*.*")):
        with Image.open(file) as image:
            assert image.getexif().get(ExifTags.Base.Orientation, 1) == 1, "not every reader turns"
    prepare(out, again, PrepareConfig(pack=False))
    keeps_crowds = layout.crowds and target in ("coco", "voc")
    if not says_empty:  # an image to train on without boxes may show objects
        labeled = {path: p for path, p in truth["train"].items() if p.things}
        truth = {**truth, "train": labeled}
    read = open_splits(out, again)
    assert set(read) == set(truth)
    for split, opened in read.items():
        check_pixels(opened, truth[split].values(), layout.tolerance)
        index = annotations_of(out, again)[split]
        things = [thing for picture in truth[split].values() for thing in picture.things]
        found = sorted(box[5] for row in boxes_by_row(index) for box in row)
        expected = [t.is_crowd for t in things] if keeps_crowds else [False] * len(things)
        assert found == sorted(expected), f"crowds of {split}"


def check_edit(world: World, tree: Tree, store: Path) -> None:
    """After an edit, training deletes no packed image, and `prepare` reads what is there now."""
    after = edited(world)
    layout = ALL[world.layout][0]
    is_possible = layout.empties or world.edit != "add an empty image"
    if after is None or not is_possible:
        return
    note(f"then {world.edit}, train, and prepare again")
    new = rewrite(after, tree)
    for file in new.files if world.edit == "touch" else ():
        file.touch()
    assert is_prepared(tree.data, store) == (world.edit == "touch")
    packed, truth = set(store.glob("images-*")), present(new, after)
    with contextlib.suppress(SsdctlError):
        open_dataset(tree.data, store)
        assert world.edit not in ("add an image", "remove an image") or not packed
        check_index(tree.data, store, truth, lost_of(new), layout)
    assert packed <= set(store.glob("images-*")), "training deleted packed images"
    config = PrepareConfig(pack=world.packed, allow_dropped=True)
    # Labels that never had an image may be taken for those of an image of their name.
    is_odd = world.edit == "remove an image" and any(p.is_missing for p in world.pictures)
    prepare(tree.data, store, config, force=is_odd)
    check_index(tree.data, store, truth, lost_of(new), layout)
    for split, opened in open_splits(tree.data, store).items():
        check_pixels(opened, truth[split].values(), layout.tolerance)


def check_summary(outcome: Outcome, truth: Truth) -> None:
    """What is counted for each split: boxes of each class, images that an earlier split has."""
    seen: dict[int, str] = {}
    for report in outcome.splits:
        pictures = truth.get(report.split, {}).values()
        names = Counter(thing.name for picture in pictures for thing in picture.things)
        assert {c.name: c.boxes for c in report.per_class if c.boxes} == names
        warned = " ".join(report.warnings)
        absent = [c.name for c in report.per_class if c.name not in names]
        assert (f"without a box: {', '.join(absent[:3])}" in warned) == bool(absent)
        shared = Counter(seen[p.gray] for p in pictures if p.gray in seen)
        assert {d.split: d.images for d in report.duplicates} == shared, "images in two splits"
        seen |= {picture.gray: report.split for picture in pictures}


def things_of(picture: Picture, kept: Collection[str]) -> Picture:
    """Return an image with only the objects of the classes that are kept; none: all."""
    things = tuple(t for t in picture.things if not kept or t.name in kept)
    return picture._replace(things=things)


def check_options(world: World, tree: Tree, cache: Path) -> None:
    """--split, --group and --classes do what they say, and are remembered after an edit."""
    images = [p for part in present(tree, world).values() for p in part.values()]
    names = sorted({t.name for p in images if p.split == "train" for t in p.things})
    kept = names[: 1 + len(names) // 2] if "classes" in world.options else []
    is_whole, is_tool = len(world.splits) == 1, world.layout in TOOLS
    is_grouped = is_whole and "group" in world.options
    usual = {"prepare.pack": "false", "prepare.allow_dropped": "true", "data.root": str(tree.data)}
    if kept:
        has_comma = any("," in name for name in kept)
        usual["prepare.classes"] = json.dumps(kept) if has_comma else ",".join(kept)
    chosen = usual | ({"prepare.split": "0.5"} if is_whole else {})
    chosen |= {"prepare.group": GROUP} if is_grouped else {}
    if not kept and not is_whole:
        return
    note(f"or with {chosen}, then {sorted(world.options)}")
    config = config_of(chosen)
    store = dataset_folders(config.data)[1]
    settings = [chosen]
    if kept and is_whole:  # those of the first call are remembered
        settings = [usual, {k: v for k, v in chosen.items() if k != "prepare.classes"}]
    try:
        for some in settings:
            prepare_dataset(config_of(some), force=False, progress=without_progress)
    except SsdctlError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        groups = {re.search(GROUP, p.name)[1] for p in images}
        reasons = {
            "nothing to train on": not all(things_of(p, kept).things for p in images),
            "cannot be divided": len(images) < 2,
            "are in the group": is_grouped and len(groups) < 2,
        }
        assert any(is_true and text in problem for text, is_true in reasons.items()), problem
        return
    before = check_divided(world, tree, store, kept, is_grouped)
    edit = "add an image" if is_whole else "move a box"
    after = world if is_tool else edited(world._replace(edit=edit))
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if "read-only" in world.options:
            patch.setattr(store_folder, "is_writable", lambda path: cache in (path, *path.parents))
            patch.setenv("XDG_CACHE_HOME", str(cache))
        assert dataset_folders(config.data)[1] == store, "its own store, as long as it fits"
        new = tree if is_tool else rewrite(after, tree)
        for file in new.files:
            file.touch()
        root, used = dataset_folders(config.data)
        open_dataset(root, used)
        assert is_tool or ("read-only" in world.options) == (cache in used.parents)
        parts = check_divided(after, new, used, kept, is_grouped)
        assert used != store or before.items() <= parts.items(), "images are in another part"
    if is_whole and not is_tool and "later val" in world.options and world.layout in GROWING:
        after = with_val(after)
        new = rewrite(after, new)
        prepare_dataset(config_of(usual), force=False, progress=without_progress)
        truth = present(new, after, kept)
        check_index(tree.data, store, truth, lost_of(new), ALL[world.layout][0])
    shutil.rmtree(store)


def check_divided(
    world: World, tree: Tree, store: Path, kept: Collection[str], is_grouped: bool
) -> dict[str, str]:
    """Every image is in one part, groups are whole, and only the kept classes are left.

    Return the part of each image.
    """
    truth = present(tree, world, kept)
    if len(world.splits) == 1:
        (whole,) = truth.values()
        folder = tree.data.parent if tree.data.is_file() else tree.data
        for split, labels in annotations_of(tree.data, store).items():
            paths = [os.path.relpath(labels.folder / n, folder) for n in labels.file_names]
            truth[split] = {path: whole[path] for path in paths if path in whole}
        assert set(truth) == {"train", "val"}
        assert sorted([*truth["train"], *truth["val"]]) == sorted(whole)
        if is_grouped:
            first, second = ({re.search(GROUP, p)[1] for p in part} for part in truth.values())
            assert not first & second, "a group is in both parts"
    check_index(tree.data, store, truth, lost_of(tree), ALL[world.layout][0])
    names = {c.name for c in open_splits(tree.data, store)["train"].classes}
    assert not kept or names == set(kept)
    return {path: split for split, part in truth.items() for path in part}


def lost_of(tree: Tree) -> set[str]:
    return {path for path, picture in tree.images.items() if picture.is_missing}


def config_of(values: Mapping[str, str]) -> Config:
    texts = (f"{key}={value}" for key, value in values.items())
    return resolve(overrides=parse_assignments(texts), environment={}, default_file=False)


def rewrite(world: World, tree: Tree) -> Tree:
    new = write(world, tree.root)
    for file in tree.files - new.files:
        file.unlink(missing_ok=True)
    return new


def check_files(world: World, folder: Path) -> None:
    """Every label file's boxes go to the image file that it means."""
    tree = write(world, folder / world.root, is_blank=True)
    listing = "\n  ".join(sorted(str(p.relative_to(folder)) for p in tree.files))
    note(f"{world.layout} {sorted(world.flags)} in {folder}:\n  {listing}")
    root = tree.data.parent if tree.data.is_file() else tree.data
    try:
        found = resolve_images(read_dataset(tree.data, AUTOMATIC))
    except DataError as error:
        check_refusal(world, f"{error} {error.hint or ''}")
        return
    assert not is_ambiguous(world), "an image was guessed"
    classes = [c.name for c in next(iter(found.values()))[0].classes]
    assert ALL[world.layout][0].classes != "all" or classes == list(world.classes)
    read = {}
    for split, (labels, num_bytes) in found.items():
        boxes = [sorted(box[0] for box in row) for row in boxes_by_row(labels)]
        paths = (os.path.relpath(labels.folder / name, root) for name in labels.file_names)
        rows = zip(paths, boxes, num_bytes, strict=True)
        if images := {path: names for path, names, size in rows if size is not None}:
            read[split] = images
    assert read == {
        split: {path: sorted(t.name for t in p.things) for path, p in part.items()}
        for split, part in present(tree, world).items()
    }


def is_ambiguous(world: World) -> bool:
    """Return whether nothing tells which of two images an annotation means."""
    decoys = {*world.decoys} - {STRAY}
    is_named = not decoys or "no folder" not in world.flags or world.small_decoys
    return world.layout == "voc: odd" and not is_named


def check_world(world: World, folder: Path) -> None:
    """Write a dataset, prepare it, draw batches, export it, edit it: all as the truth says."""
    layout = ALL[world.layout][0]
    tree = write(world, folder / world.root)
    listing = "\n  ".join(sorted(str(p.relative_to(folder)) for p in tree.files))
    command = ["ssdctl", "prepare", "--data", str(tree.data), "--allow-dropped"]
    note(f"{world.layout} {sorted(world.flags)} in {folder}:\n  {listing}\n{shlex.join(command)}")
    store = folder / "store"
    try:
        config = PrepareConfig(pack=world.packed, allow_dropped=True)
        outcome = prepare(tree.data, store, config, AUTOMATIC)
    except DataError as error:
        check_refusal(world, f"{error} {error.hint or ''}")
        return
    check_outcome(world, tree, store, outcome)
    splits, truth = open_splits(tree.data, store), present(tree, world)
    for split, pictures in truth.items():
        check_pixels(splits[split], pictures.values(), layout.tolerance)
    for augment in ("none", ("ssd-zoom", "zoom,flip,crop")[len(world.pictures) % 2]):
        check_batches(splits["train"], truth["train"].values(), augment)
    target = ("coco", "yolo", "voc")[len(world.pictures) % 3]
    note(f"ssdctl dataset export {shlex.quote(str(tree.data))} --to {target} --out out")
    says_empty = not world.layout.startswith(("openimages", "kitti"))
    if world.layout.startswith("yolo"):
        says_empty = "no empty files" not in world.flags
    check_export(tree.data, store, target, truth, layout, says_empty=says_empty)
    if world.layout not in TOOLS:
        check_other_places(world, tree, store)
    check_options(world, tree, folder / "cache")
    if world.layout not in TOOLS:
        for file in filter(Path.is_file, tree.root.rglob("*.*")):
            file.unlink()
        check_edit(world, write(world, tree.root), store)
        check_lost_file(world, tree, folder / "again")


def check_other_places(world: World, tree: Tree, store: Path) -> None:
    """A copy of the dataset may use its store, also if it is moved and edited; others may not."""
    copied, moved = (tree.root.with_name(name) for name in ("copied", "moved"))
    data = tree.data.relative_to(tree.root)
    note(f"or of a copy, then moved and edited, with its store, and another one with it: {data}")
    shutil.copytree(tree.root, copied, copy_function=shutil.copy)
    for split in open_dataset(copied / data, store).values():
        assert world.packed or split.location(0).startswith(f"{copied}{os.sep}")
    shutil.copytree(store, tree.root.with_name("of copied"))
    tree.root.rename(moved)
    if world.packed:
        assert open_dataset(tree.data, store), "the store has all images"
    for file in tree.files:
        if file.suffix in (".txt", ".xml"):
            with (moved / file.relative_to(tree.root)).open("a") as label_file:
                label_file.write("\n")
    with contextlib.suppress(DataError):  # of packed images
        open_dataset(moved / data, tree.root.with_name("of copied"))
    moved.rename(tree.root)
    first = next(p for p in world.pictures if p.things and not p.is_missing)
    alone = (first._replace(split="train", folder="", stem="other"),)
    plain = world._replace(layout="yolo: folders", flags=frozenset(), pictures=alone, decoys=())
    other = write(plain, tree.root.with_name("other"))
    with pytest.raises(UsageError, match="is the store of"):
        open_dataset(other.data, store)


def check_lost_file(world: World, tree: Tree, store: Path) -> None:
    """The packed copy of an image whose file is lost is kept, even if other labels change."""

    def packed() -> list[int]:
        splits = open_splits(tree.data, store).values()
        return sorted(gray_of(s, int(row)) for s in splits for row in np.nonzero(s.usable)[0])

    config, world = PrepareConfig(allow_dropped=True), world._replace(decoys=())
    prepare(rewrite(world, tree).data, store, config)
    before, new = packed(), rewrite(edited(world._replace(edit="move a box")) or world, tree)
    lost = [path for path, picture in new.images.items() if picture.things][-1]
    (tree.root / lost).unlink(missing_ok=True)
    note(f"then {lost} is lost, a box moved, and the dataset prepared again")
    with contextlib.suppress(SsdctlError):
        prepare(tree.data, store, config)
    assert packed() == before
    layout = "voc: lists" if world.layout.startswith("yolo") else "yolo: folders"
    for file in filter(Path.is_file, tree.root.rglob("*.*")):
        file.unlink()
    first = next(p for p in world.pictures if p.things and not p.is_missing)
    alone = (first._replace(split="train", folder=""),)
    other = write(world._replace(layout=layout, flags=frozenset(), pictures=alone), tree.root)
    note(f"then replaced by {layout}")
    with contextlib.suppress(SsdctlError):
        assert not prepare(other.data, store, config).unchanged, "the old format is read"


def check_outcome(world: World, tree: Tree, store: Path, outcome: Outcome) -> None:
    """The index has what is there; what is missing, or in two splits, is reported."""
    assert not is_ambiguous(world), "an image was guessed"
    assert not has_other_categories(world), "splits have other categories"
    layout = ALL[world.layout][0]
    lost, truth = lost_of(tree), present(tree, world)
    check_index(tree.data, store, truth, lost, layout)
    if any(tree.images[path].things for path in lost):
        check_report(world, texts(outcome))
    check_summary(outcome, truth)
    if layout.views == "stored":  # no size tells so
        is_turned = any(p.turn != 1 for pictures in truth.values() for p in pictures.values())
        assert ("size is not annotated" in texts(outcome)) == is_turned
    if not lost:
        used = {thing.name for picture in world.pictures for thing in picture.things}
        names = [c.name for c in open_splits(tree.data, store)["train"].classes]
        if layout.classes == "all":
            assert names == list(world.classes)
        else:
            assert sorted(names) == sorted(used)


def check_refusal(world: World, text: str) -> None:
    if has_other_categories(world) and "different categories" in text:
        return
    if is_ambiguous(world):
        assert any(name in text for name in world.decoys), text
    elif not ("fit several files" in text and any(p.is_missing for p in world.pictures)):
        check_report(world, text)


def check_report(world: World, text: str) -> None:
    """A message names a missing image, or its folder or split."""
    lost = [picture for picture in world.pictures if picture.is_missing]
    assert lost, text
    names = {n for p in lost for n in (p.stem, p.split, p.folder, WORDS[p.split])} - {""}
    assert any(name in nfc(unquote(text)) for name in names), f"names no missing image: {text}"


def run(
    layout: str,
    folder: Path,
    count: int,
    number: int | None,
    check_one: Callable[[World, Path], None] = check_world,
) -> None:
    """Check `count` datasets; without a seed always the same."""

    def check(world: World) -> None:
        shutil.rmtree(folder / "case", ignore_errors=True)
        check_one(world, folder / "case")

    check_examples(check, count, number, world=worlds({layout: ALL[layout][0]}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_datasets(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "ssdctl")
    run(layout, tmp_path, 2, None)
    run(layout, tmp_path, 10, None, check_files)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_random_datasets(layout: str, tmp_path: Path) -> None:
    run(layout, tmp_path, 2_000 // len(LAYOUTS) + 1, SEED)
    run(layout, tmp_path, 500, SEED, check_files)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of these programs
@pytest.mark.parametrize("layout", TOOLS)
def test_random_datasets_of_other_programs(layout: str, tmp_path: Path) -> None:
    pytest.importorskip(layout.partition(":")[0])
    run(layout, tmp_path, 20, SEED)
