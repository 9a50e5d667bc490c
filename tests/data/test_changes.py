"""Whatever changes in a dataset is noticed and said; only `prepare` replaces packed images."""

import io
import itertools
import shutil
from pathlib import Path

import pytest
from conftest import TINY_RUN, Cli
from data.formats import exports
from PIL import Image

from ssdctl.config import PrepareConfig
from ssdctl.data import cached_store, usual_store
from ssdctl.data.dataset import find
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.sources import is_prepared, last_store
from ssdctl.errors import DataError

INDEX_ONLY = PrepareConfig(pack=False)
COCO = "annotations/instances_train2017.json"


def shards(store: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in store.glob("images-*")}


def test_new_images_or_toml_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, store = exports.roboflow_yolo(tmp_path / "data"), tmp_path / "store"
    prepare(root, store, INDEX_ONLY)
    exports.tree(root, {"train/images/added.jpg": None})
    assert len(open_dataset(root, store)["train"].image_ids) == 7
    assert "added.jpg is new" in "".join(caplog.messages)
    table = '[train]\nimages = "train/images"\nannotations = "mine.json"\n'
    (root / "dataset.toml").write_text(table)
    with pytest.raises(DataError, match=r"mine\.json"):
        open_dataset(root, store)


def test_labels_of_another_format_are_noticed(tmp_path: Path) -> None:
    """The oracle is what a dataset of the same files is that was never prepared."""
    layouts = ("yolo: roboflow", "voc: folders", "via-json", "createml-json", "coco: roboflow")
    for first, second in itertools.permutations(layouts, 2):
        folder = tmp_path / f"{first} {second}"
        root, store = exports.generated(folder / "a", first, 1), folder / "store"
        prepare(root, store, INDEX_ONLY)
        before = find(root)[0]
        other = exports.generated(folder / "b", second, 1)
        with pytest.raises(DataError):
            find(folder)  # which of both?
        ignore = shutil.ignore_patterns("*.jpg", "*.png")
        shutil.copytree(other, root, dirs_exist_ok=True, ignore=ignore)
        try:
            is_same = find(root)[0] == before
        except DataError:
            is_same = False
        assert is_same or not is_prepared(root, store), (first, second)


def test_the_newer_store_of_a_read_only_dataset_has_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = exports.roboflow_yolo(tmp_path / "data")
    stores = usual_store(root), cached_store(root)
    monkeypatch.setattr("ssdctl.data.sources.is_writable", lambda folder: folder != stores[0])
    for newer in (*stores, *stores):
        prepare(root, newer, INDEX_ONLY, force=True)
        assert last_store(root, stores[1]) == newer


def test_the_files_of_a_run_are_not_labels(tmp_path: Path) -> None:
    root = exports.roboflow_yolo(tmp_path / "data")
    prepare(root, root / "prepared", INDEX_ONLY)
    files = dict.fromkeys(("metrics.jsonl", "config.toml", "logs.txt", "data.yaml"), "")
    exports.tree(root / "runs/a", {"drawn.jpg": None, **files})
    assert is_prepared(root, root / "prepared")


def test_all_labels_of_a_file_in_a_folder_of_annotations_are_compared(tmp_path: Path) -> None:
    root, store = exports.roboflow_yolo(tmp_path / "data"), tmp_path / "store"
    (root / "annotations").mkdir()
    file = (root / "data.yaml").rename(root / "annotations/data.yaml")
    (root / "train/labels/metrics.jsonl").touch()  # no sign of a run
    prepare(file, store, INDEX_ONLY)
    assert is_prepared(file, store)
    sorted((root / "train/labels").glob("*.txt"))[0].write_text("0 .5 .5 .1 .1\n")
    assert not is_prepared(file, store)


def test_other_pixels_in_a_file_of_the_same_size_are_noticed(tmp_path: Path) -> None:
    root = exports.tree(tmp_path, {"a.txt": "0 .5 .5 .1 .1\n", "classes.txt": "bolt\n"})
    for left in (20, 90):
        image = Image.new("RGB", (160, 120))
        image.paste("red", (left, 50, left + 9, 60))
        image.save(root / "a.bmp")
        outcome = prepare(root, root / "store", PrepareConfig())
        assert not outcome.unchanged
        images = open_dataset(root, root / "store")["train"].images
        with Image.open(io.BytesIO(images.read(0))) as packed:
            assert packed.convert("RGB").getpixel((left + 5, 55)) == (255, 0, 0)


def test_packed_images_are_replaced_only_by_prepare(
    dataset: Path, tmp_path: Path, cli: Cli
) -> None:
    store, config = tmp_path / "store", PrepareConfig(shrink=310)
    prepare(dataset, store, config)
    with exports.edited(dataset / COCO) as document:
        document["annotations"].pop()
    originals = (dataset / "train2017").rename(tmp_path / "elsewhere")
    assert len(open_dataset(dataset, store)["train"].labels) == len(document["annotations"])
    originals.rename(dataset / "train2017")
    before = {p: p.read_bytes() for p in store.iterdir() if p.name != ".lock"}
    with exports.edited(dataset / COCO) as document:
        gone = document["images"].pop()["id"]
        document["annotations"] = [a for a in document["annotations"] if a["image_id"] != gone]
    data = ("--data", dataset, "--store", store)
    run, out = tmp_path / "run", tmp_path / "out"
    train = ("train", *data, "--out", run, "--steps", 1, *TINY_RUN.split())
    for command in (
        train,
        (*train, "--dry-run"),
        ("dataset", "export", dataset, "--store", store, "--to", "yolo", "--out", out),
    ):
        result = cli(*command).expect(3, "instances_train2017.json changed")
        assert f"ssdctl prepare --data {dataset} --store {store}" in result.err
        after = {p: p.read_bytes() for p in store.iterdir() if p in before}
        assert after == before
    prepare(dataset, store, config)
    assert len(open_dataset(dataset, store)["train"].image_ids) == 23


@pytest.mark.parametrize("other", ["missing", "annotations"])
def test_images_of_another_folder_are_not_the_packed_ones(dataset: Path, other: str) -> None:
    table = f'[train]\nimages = "{{}}"\nannotations = "{COCO}"\n'
    exports.tree(dataset, {"dataset.toml": table.format("train2017")})
    prepare(dataset, dataset / "store")
    exports.tree(dataset, {"dataset.toml": table.format(other)})
    with pytest.raises(DataError):
        prepare(dataset, dataset / "store")


def test_a_split_that_is_refused_leaves_the_old_store(
    dataset: Path, tmp_path: Path, cli: Cli
) -> None:
    store, val = tmp_path / "store", dataset / "annotations/instances_val2017.json"
    text = val.read_text()
    with exports.edited(val) as document:
        for annotation in document["annotations"]:
            annotation["bbox"] = [9000, 9000, 1, 1]
    broken, data = val.read_text(), ("--data", dataset, "--store", store)
    train = ("train", *data, "--out", tmp_path / "run", *TINY_RUN.split())
    for command in (("prepare", *data), train):
        cli(*command).expect(3, "outside its image")
    assert shards(store), "what is packed serves the next prepare"
    val.write_text(text)
    prepare(dataset, store, PrepareConfig(shrink=310))
    val.write_text(broken)
    with pytest.raises(DataError, match="outside its image"):
        open_dataset(dataset, store)
    val.write_text(text)
    assert is_prepared(dataset, store)


def test_training_does_not_replace_an_interrupted_prepare(dataset: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    prepare(dataset, store)
    for path in store.glob("index-*"):
        path.unlink()
    before = shards(store)
    with pytest.raises(DataError, match="no index"):
        open_dataset(dataset, store)
    assert shards(store) == before


def test_a_dataset_that_is_divided_in_another_way_is_noticed(tmp_path: Path, cli: Cli) -> None:
    root = exports.roboflow_yolo(tmp_path / "parts")
    cli("train", "--data", root, "--out", "zero", "--steps", 1, *TINY_RUN.split()).expect(0)
    for old, new in (("train", "other"), ("val", "train"), ("other", "val")):
        (root / old).rename(root / new)
    cli("prepare", "--data", root, "--no-pack").expect(0)
    cli("evaluate", "zero", "--device", "cpu").expect(0, f"was trained on images of {root}")
    shutil.rmtree(root / "val")
    prepare = ("prepare", "--data", root, "--no-pack")
    train = ("train", "--data", root, "--steps", 1, *TINY_RUN.split())
    cli(*prepare, "--split", 0.5).expect(0)
    for out, option in (("first", "--limit-train=2"), ("second", "--fold=1/2")):
        cli(*train, "--out", out, option).expect(0)
    options = ("--init", "first", "--resume", "never", "--dry-run")
    assert "divided in another way" not in cli(*train, *options).err
    cli(*prepare, "--split", 0.8).expect(0)
    assert "divided in another way" in cli(*train, *options).err
    copy = shutil.copytree(root, "copy")  # the path does not matter
    cli("prepare", "--data", copy, "--no-pack", "--split", 0.2, "--store", "store").expect(0)
    elsewhere = ("--data", copy, "--store", "store", "--device", "cpu")
    cli("evaluate", "first", *elsewhere).expect(0, "was trained on images of copy")
    shutil.rmtree(root / "train")
    exports.roboflow_yolo(root)  # with its own validation images
    assert "so --split 0.8 is not used" in cli(*train, "--dry-run").err
    cli(*prepare).expect(0)
    for command in (
        ("evaluate", "first", "--device", "cpu"),
        ("evaluate", "second", "--device", "cpu", "--split", "val"),
        (*train, "--init", "second", "--fold", "1/2", "--resume", "never", "--dry-run"),
    ):
        cli(*command).expect(0, "divided in another way")
