"""What prepare writes is what the dataset holds; what it cannot trust it says."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from ssdctl.data.dataset import find_splits
from ssdctl.data.prepare import count_trainable, is_prepared, open_dataset, prepare
from ssdctl.data.store import Split, open_split
from ssdctl.errors import DataError


@pytest.fixture
def dataset(shapes: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    folder = tmp_path / "dataset"
    shutil.copytree(shapes, folder, ignore=shutil.ignore_patterns("prepared"))
    return folder


def opened(root: Path, folder: Path, split: str = "train") -> Split:
    return open_split(folder, split, find_splits(root)[split])


@pytest.mark.parametrize("pack", [True, False])
def test_store_holds_the_dataset(dataset: Path, tmp_path: Path, pack: bool) -> None:
    store = tmp_path / "store"
    outcome = prepare(dataset, store, pack=pack)
    split = opened(dataset, store)
    document = json.loads((dataset / "annotations/instances_train2017.json").read_text())
    assert split.image_ids.tolist() == [i["id"] for i in document["images"]]
    assert [c.id for c in split.classes] == [1, 2, 4, 7, 8]
    for row, image in enumerate(document["images"]):
        content = (dataset / "train2017" / image["file_name"]).read_bytes()
        assert bytes(split.read(row)) == content
        truth = [a for a in document["annotations"] if a["image_id"] == image["id"]]
        found = split.boxes[split.starts[row] : split.starts[row + 1]]
        assert len(found) == len(truth)
        for box, entry in zip(found, truth, strict=True):
            x, y, w, h = entry["bbox"]
            pixels = box * np.tile(split.sizes[row], 2)
            np.testing.assert_allclose(pixels, [x, y, x + w, y + h], rtol=1e-6)
    report = next(r for r in outcome.splits if r.split == "train")
    assert report.boxes == len(document["annotations"])
    assert report.trainable == len(split.trainable) == count_trainable(dataset, store)


def test_any_arrow_reader_opens_the_index(dataset: Path, tmp_path: Path) -> None:
    prepare(dataset, tmp_path / "store", pack=False)
    table = pa.ipc.open_file(str(tmp_path / "store/index-val.arrow")).read_all()
    assert table.num_rows == 9
    assert table.column_names[:4] == ["image_id", "file_name", "width", "height"]


def test_second_prepare_notices_that_nothing_changed(dataset: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = prepare(dataset, store, pack=True)
    written = {p: p.stat().st_mtime_ns for p in store.iterdir()}
    again = prepare(dataset, store, pack=True)
    assert again.unchanged
    assert again.splits == first.splits
    assert {p: p.stat().st_mtime_ns for p in store.iterdir() if p.name != ".lock"} == {
        p: t for p, t in written.items() if p.name != ".lock"
    }
    assert not prepare(dataset, store, pack=True, force=True).unchanged
    assert not prepare(dataset, store, pack=False).unchanged


def test_changed_annotations_are_noticed(dataset: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    prepare(dataset, store, pack=False)
    path = dataset / "annotations/instances_train2017.json"
    document = json.loads(path.read_text())
    document["annotations"].pop()
    path.write_text(json.dumps(document))
    assert not is_prepared(dataset, store)
    with pytest.raises(DataError, match="changed since"):
        opened(dataset, store)
    assert not prepare(dataset, store, pack=False).unchanged
    assert len(opened(dataset, store).labels) == len(document["annotations"])


def test_touched_annotations_are_the_same(dataset: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    prepare(dataset, store, pack=False)
    (dataset / "annotations/instances_train2017.json").touch()
    assert is_prepared(dataset, store)


def test_training_folder_is_indexed_by_itself(dataset: Path) -> None:
    said: list[str] = []
    splits = open_dataset(dataset, dataset / "prepared", say=said.append)
    assert set(splits) == {"train", "val"}
    assert "not prepared yet" in said[0]
    said.clear()
    open_dataset(dataset, dataset / "prepared", say=said.append)
    assert said == []


def test_missing_images_are_refused_by_name(dataset: Path, tmp_path: Path) -> None:
    (dataset / "train2017/000000000003.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 24 images are missing.*000000000003\.jpg"):
        prepare(dataset, tmp_path / "store", pack=False)
    assert not (tmp_path / "store" / "index-train.arrow").exists()


@pytest.mark.parametrize("pack", [True, False])
def test_bad_images_are_dropped_and_listed(dataset: Path, tmp_path: Path, pack: bool) -> None:
    folder = dataset / "train2017"
    (folder / "000000000001.jpg").write_bytes(b"<html>not found</html>")
    (folder / "000000000002.jpg").write_bytes(b"")
    Image.new("RGB", (5, 5)).save(folder / "000000000003.jpg")
    outcome = prepare(dataset, tmp_path / "store", pack=pack)
    dropped = [f for f in outcome.splits[0].findings if f.kind == "image dropped"]
    assert [f.image_id for f in dropped] == [1, 2, 3]
    assert "is 5 x 5" in dropped[2].detail
    assert not {0, 1, 2}.intersection(opened(dataset, tmp_path / "store").trainable.tolist())
    report = json.loads((tmp_path / "store/report.json").read_text())
    assert len(report["splits"][0]["findings"]) == len(outcome.splits[0].findings)


def test_pixel_bomb_is_refused_by_its_header(dataset: Path, tmp_path: Path) -> None:
    path = dataset / "annotations/instances_train2017.json"
    document = json.loads(path.read_text())
    document["images"][0] |= {"width": 40000, "height": 40000}
    path.write_text(json.dumps(document))
    picture = io.BytesIO()
    Image.new("1", (40000, 40000)).save(picture, "PNG")
    (dataset / "train2017/000000000001.jpg").write_bytes(picture.getvalue())
    outcome = prepare(dataset, tmp_path / "store", pack=False)
    (finding,) = [f for f in outcome.splits[0].findings if f.kind == "image dropped"]
    assert "refused by its header" in finding.detail


def test_shrink_re_encodes_large_images_alone(dataset: Path, tmp_path: Path) -> None:
    prepare(dataset, tmp_path / "store", pack=True, shrink=310)
    split = opened(dataset, tmp_path / "store")
    for row, (width, height) in enumerate(split.sizes):
        with Image.open(io.BytesIO(split.read(row))) as picture:
            assert min(picture.size) == min(width, height, 310)


def test_dataset_toml_names_the_folders(dataset: Path, tmp_path: Path) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    shutil.move(dataset / "train2017", root / "photos")
    shutil.move(dataset / "annotations/instances_train2017.json", root / "labels.json")
    (root / "dataset.toml").write_text('[train]\nimages = "photos"\nannotations = "labels.json"\n')
    splits = find_splits(root)
    assert set(splits) == {"train"}
    assert len(open_dataset(root, tmp_path / "store", say=lambda _: None)["train"].image_ids) == 24


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('[train]\nimages = "photos"\n', DataError, "lacks annotations"),
        ('[test]\nimages = "photos"\n', DataError, "dataset.toml:2: unknown key 'test.images'"),
        ('[train]\nimages = "../x"\nannotations = "a"\n', DataError, "no plain path"),
        ('[train]\nimages = 3\nannotations = "a"\n', DataError, "must be a path"),
    ],
)
def test_bad_dataset_toml(tmp_path: Path, text: str, error: type[Exception], words: str) -> None:
    (tmp_path / "dataset.toml").write_text(text)
    with pytest.raises(error, match=words):
        find_splits(tmp_path)


def test_misshaped_folders_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such dataset folder"):
        find_splits(tmp_path / "none")
    with pytest.raises(DataError, match="instances_train2017"):
        find_splits(tmp_path)
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_train2017.json").write_text("{}")
    with pytest.raises(DataError, match="no such image folder"):
        prepare(tmp_path, tmp_path / "store", pack=False)
