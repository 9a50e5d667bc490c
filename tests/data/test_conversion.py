"""Datasets are divided and reduced to some classes."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Literal
from unicodedata import normalize

import pytest
from conftest import TINY_RUN, Cli
from data.formats import exports
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssdctl.config import PrepareConfig
from ssdctl.data.annotations import Annotations, Conversion, LabeledBox, LabeledImage, from_images
from ssdctl.data.dataset import read_dataset
from ssdctl.data.divide import Division, divided, next_division, series_warning
from ssdctl.data.index import read_images, read_made, require_metadata
from ssdctl.data.open_dataset import count_images, open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.errors import DataError, UsageError

INDEX_ONLY = PrepareConfig(pack=False)


@pytest.fixture
def undivided(dataset: Path) -> Path:
    shutil.rmtree(dataset / "val2017")
    (dataset / "annotations/instances_val2017.json").unlink()
    return dataset


def names_of(root: Path, conversion: Conversion) -> dict[str, list[str]]:
    return {s: a.file_names for s, a in read_dataset(root, conversion).items()}


def test_the_index_remembers_how_the_dataset_was_read(
    undivided: Path, tmp_path: Path, cli: Cli
) -> None:
    store = tmp_path / "store"
    conversion = Conversion("coco", 0.75, ("ball", "star"))
    prepare(undivided, store, INDEX_ONLY, conversion)
    assert prepare(undivided, store, INDEX_ONLY, conversion).unchanged
    assert not prepare(undivided, store, INDEX_ONLY, Conversion(split=0.5)).unchanged
    prepare(undivided, store, INDEX_ONLY, conversion)
    path = undivided / "annotations/instances_train2017.json"
    path.write_text(path.read_text().replace('"star"', '"bull"'))
    for read in (open_dataset, count_images):  # it is read again, with the same options
        with pytest.raises(DataError, match=r"'star'.*remembered"):
            read(undivided, store)
    cli("prepare", "--data", undivided, "--store", store).expect(3, "--store")
    assert cli("prepare", "--data", undivided, "--store", store, "--classes", "star").code == 2
    path.write_text(path.read_text().replace('"bull"', '"star"'))
    splits = open_dataset(undivided, store)
    assert [c.name for c in splits["val"].classes] == ["ball", "star"]
    index = store / "index-val.arrow"
    old, held = index.read_bytes(), read_images(store, "val").names
    path.write_text(f"{path.read_text()} ")
    open_dataset(undivided, store)
    index.write_bytes(old)  # as if it were killed after the first index
    splits = open_dataset(undivided, store)
    assert [c.name for c in splits["val"].classes] == ["ball", "star"]
    assert read_images(store, "val").names == held


def test_the_table_of_a_file(undivided: Path, shapes: Path, tmp_path: Path, cli: Cli) -> None:
    Path("ssdctl.toml").write_text('[prepare]\nsplit = 0.75\nclasses = ["ball"]\n')
    train = ("train", "--data", undivided, "--fp32", *TINY_RUN.split())
    assert "14 training images, 6 for validation; 1 class: ball" in cli(*train, "--dry-run").out
    cli(*train).expect(0)
    made = require_metadata(undivided / "prepared/index-val.arrow").made
    assert made.conversion == Conversion(split=0.75, classes=("ball",))
    divided_already = ("prepare", "--data", shapes, "--store", tmp_path / "store", "--no-pack")
    cli(*divided_already).expect(0, "--split 0.75 is not used")
    cli(*divided_already, "--group", "x").expect(2, "validation images already")
    Path("ssdctl.toml").write_text('[prepare]\nclasses = ["star", "bull"]\n')
    cli(*divided_already).expect(2, "ssdctl.toml:2: prepare.classes")


def test_a_group_replaces_the_remembered_one_of_a_split(undivided: Path, cli: Cli) -> None:
    prepare = ("prepare", "--data", undivided, "--no-pack")
    cli(*prepare, "--group", r"\d\.").expect(2, "--split")
    for options in (("--split", 0.75), ("--group", r"\d\.")):
        cli(*prepare, *options).expect(0)
    path = undivided / "annotations/instances_train2017.json"
    with exports.edited(path) as document:
        document["images"] = [i for i in document["images"] if i["file_name"].endswith("1.jpg")]
        ids = {entry["id"] for entry in document["images"]}
        document["annotations"] = [a for a in document["annotations"] if a["image_id"] in ids]
    cli(*prepare).expect(3, "remembered")
    cli(*prepare, "--group", r"\d\d\.").expect(0)
    shutil.copy(path, path.with_name("instances_val2017.json"))
    cli(*prepare, "--group", r"\d\.").expect(2, "validation images")


def test_a_remembered_format_can_be_forgotten(tmp_path: Path, cli: Cli) -> None:
    root = exports.voc_lists(tmp_path / "data")
    prepare = ("prepare", "--data", root, "--no-pack")
    for _ in range(2):
        assert "the last time" not in cli(*prepare, "--from", "voc").expect(0).err
    for folder in ("Annotations", "JPEGImages", "ImageSets"):
        shutil.rmtree(root / folder)
    label = {"classes.txt": "x", "images/a.png": None, "labels/a.txt": "0 .5 .5 .2 .2"}
    exports.tree(root, label)
    for command in (prepare, ("train", "--data", root, "--dry-run")):
        cli(*command).expect(3, "--from voc is remembered", "--from auto")
    cli(*prepare, "--from", "auto").expect(0)
    cli(*prepare).expect(0)


def test_a_dataset_toml_of_the_users_own(undivided: Path) -> None:
    own = '[train]\nimages = "train2017"\nannotations = "annotations/instances_train2017.json"\n'
    (undivided / "dataset.toml").write_text(own)
    with pytest.raises(UsageError, match=r"dataset\.toml exists"):
        read_dataset(undivided, Conversion("voc"))
    names = names_of(undivided, Conversion(split=0.75, classes=("ball",)))
    assert (len(names["train"]), len(names["val"])) == (18, 6)
    assert (undivided / "dataset.toml").read_text() == own


@given(
    st.lists(st.text("abc/é", min_size=1), min_size=2, max_size=30, unique=True),
    st.floats(0.01, 0.99),
)
def test_any_division(names: list[str], share: float) -> None:
    """Every image and box occurs once; both sides have some."""
    whole, before = annotations_of(names), names[: max(2, len(names) // 2)]
    first = divided(annotations_of(before), share)
    known = {name: part is first[0] for part in first for name in part.file_names}
    train, val = divided(whole, share, last=Division(sides=known))
    assert {*first[0].file_names} <= {*train.file_names}  # more images move none
    assert {*first[1].file_names} <= {*val.file_names}
    train, val = divided(whole, share)
    assert sorted(train.file_names + val.file_names) == sorted(names)
    for part in (train, val):
        assert part.file_names
        assert [part.file_names[row] for row in part.rows] == part.file_names
        assert set(part.image_ids) == {whole.image_ids[names.index(n)] for n in part.file_names}


VIDEOS = ["u{}/clip.jpg", "v{}/clip.jpg"]
# One new image comes for two, and then these under other names.
OTHER = {5: "x-{}.jpg"}
CLIPS = [
    {1: VIDEOS[0], 2: VIDEOS[0], **OTHER},
    {3: VIDEOS[1], **OTHER},
    {3: VIDEOS[1], 1: VIDEOS[1], 2: VIDEOS[1], **OTHER},
]


@settings(max_examples=250)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.integers(0, 5),
                st.sampled_from(["a/{}é.jpg", "b/{}é.jpg", "x-{}.jpg", "a/y-{}.jpg", *VIDEOS]),
                min_size=2,
            ),
            st.builds(range, st.integers(10, 15), st.integers(15, 25)),
            st.sampled_from(["NFC", "NFD"]),
            st.sampled_from([True, True, False]),
            st.sampled_from([[0], [1], [0, 1]]),
        ),
        max_size=6,
    )
)
@example([(images, range(15, 25), "NFC", True, [0]) for images in CLIPS])
def test_a_state_is_forgotten_if_an_image_that_trained_may_validate(
    steps: list[tuple[dict[int, str], range, Literal["NFC", "NFD"], bool, list[int]]],
) -> None:
    """Images come, go, come again and are renamed; the options may change.

    Two stores of the dataset see all steps, or some of them. There are also frames with equal base
    names in folders that are not renamed: as many validate as the share says, or as did before.
    """
    divisions, trained = [Division(), Division()], dict[str, set[int]]()
    every = [(*step, store) for *step, stores in steps for store in stores]
    for images, scenes, form, is_same, store in every:
        division = divisions[store]
        named = {**images, **dict.fromkeys(scenes, "scene{}/frame.jpg")}
        names = {normalize(form, name.format(image)): image for image, name in named.items()}
        last = division if is_same else Division()
        train, val = divided(annotations_of([*names]), 0.6, last=last)
        now = {n: part is train for part in (train, val) for n in part.file_names}
        now = {normalize("NFC", name): is_train for name, is_train in now.items()}
        held, before = ({n for n, s in sides.items() if not s} for sides in (now, last.sides))
        is_usual = len(held) <= max(1, len(names) - round(0.6 * len(names)))
        assert is_usual or len(held - before) <= len(before - now.keys())
        before, (division, num_moved) = division, next_division(division, now)
        divisions[store] = division
        assert num_moved == 0 or len(division.states) == 1
        known = before.sides.keys() - before.gone
        if is_same and len({before.sides[n] for n in now.keys() & known}) == 2:
            is_certain = now.keys() <= known or known <= now.keys()  # none came, or none left
            assert not (is_certain and num_moved)
        gone, new = known - now.keys(), now.keys() - known
        if gone and len(new) > len(gone):  # names do not tell which image is under a new name
            divisions, trained = [Division(), Division()], {}
            continue
        trained.setdefault(division.states[0], {*()}).update(names[n] for n in train.file_names)
        for state in division.states:
            assert trained[state].isdisjoint(names[n] for n in val.file_names)


def test_renamed_images_stay_in_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, store = tmp_path / "data", tmp_path / "store"

    def divide(name: str) -> tuple[list[str], tuple[str, ...], int]:
        """Return the numbers of the images to validate, the states, and how many notes there are."""
        shutil.rmtree(root, ignore_errors=True)
        names = [name.replace("*", f"{n:02}") for n in range(20)]
        labels = {f"labels/{n}.txt": "0 .5 .5 .5 .5\n" for n in names}
        exports.tree(
            root, {"classes.txt": "x", **labels, **{f"images/{n}.jpg": None for n in names}}
        )
        outcome = prepare(root, store, INDEX_ONLY, Conversion(split=0.7), force=True)
        held = sorted(n.partition("x")[2][:2] for n in read_images(store, "val").names)
        made = read_made(store)
        return held, made.divisions, sum("held out" in n for n in outcome.splits[0].notes)

    first = divide("a/x*")
    for count, name in enumerate(("b/x*", "x*", "c/x*.rf.01", "x*.rf.a2"), 2):
        held, states, num_notes = divide(name)
        assert (held, states[count - 1 :], num_notes) == (first[0], first[1], 0)
    prepare(root, store, INDEX_ONLY, Conversion())
    assert divide("d/x*")[0] == first[0]
    _, states, num_notes = divide("y/x-*")
    assert (len(states), num_notes) == (1, 1)
    (sources,) = store.glob("sources-*")
    sources.write_bytes(b"")
    divide("y/x-*")
    assert "division by --split is lost" in caplog.text


@pytest.mark.parametrize("name", [" lead", "red, round", "[1]"])
def test_the_hint_for_classes_is_accepted(name: str, cli: Cli) -> None:
    labels = {"images/a.jpg": None, "labels/a.txt": "0 .5 .5 .2 .2\n1 .5 .5 .2 .2"}
    exports.tree(Path("data"), {"data.yaml": json.dumps({"names": ["cat", name]}), **labels})
    prepare = ("prepare", "--data", "data", "--no-pack")
    result = cli(*prepare, "--classes", f"cat,{name.strip('[]')}")
    right = shlex.split(result.err.split("hint: write ")[1])[:2]
    cli(*prepare, *right).expect(0)
    splits = open_dataset(Path("data"), Path("data/prepared"))
    assert [c.name for c in splits["train"].classes] == ["cat", name]


FRAMES = [f"clip{clip}_{frame:04d}.jpg" for clip in range(8) for frame in range(10)]


def annotations_of(names: list[str]) -> Annotations:
    images = [LabeledImage(n, 9, 9, [LabeledBox("x", 0, 0, 1, 1)]) for n in names]
    return from_images({"train": images}, ["x"], Path(), Path("labels"))["train"]


@pytest.mark.parametrize("group", ["(", "nothing"])
def test_a_group_that_is_no_expression_or_matches_nothing_is_refused(group: str) -> None:
    with pytest.raises(UsageError, match="--group"):
        divided(annotations_of(FRAMES), 0.9, group)
    with pytest.raises(UsageError, match="'clip'"):
        divided(annotations_of(FRAMES), 0.9, "clip")


ROBOFLOW = [f"p{n}_jpg.rf.{n * 7 + c:032x}.jpg" for n in range(20) for c in range(3)]
FOLDERS = [f"video {clip}/{frame}.png" for clip in range(4) for frame in range(9)]


@pytest.mark.parametrize("names", [FRAMES, ROBOFLOW, FOLDERS])
def test_the_warning_about_frames_has_an_expression_that_works(names: list[str]) -> None:
    whole = annotations_of(names)
    (warning,) = series_warning(*(part.file_names for part in divided(whole, 0.8)), ["x"])
    (group,) = shlex.split(warning.partition("--group ")[2])
    parts = [part.file_names for part in divided(whole, 0.8, group)]
    assert all(parts)
    assert not series_warning(*parts, ["x"])


@pytest.mark.parametrize(
    "names",
    [
        [f"{n:012d}.jpg" for n in range(50)],  # COCO
        [f"BloodImage_{n:05d}.jpg" for n in range(50)],
        [f"{fruit}_{n}.jpg" for fruit in ("apple", "banana", "orange", "x") for n in range(20)],
        [f"{word}.jpg" for word in "abcdefghijklmnop"],
    ],
)
def test_numbered_images_are_not_frames(names: list[str]) -> None:
    parts = (part.file_names for part in divided(annotations_of(names), 0.8))
    assert not series_warning(*parts, ["Apple", "banana", "Orange"])
