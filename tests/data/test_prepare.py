"""prepare writes what the dataset contains, and reports what it drops."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import Result
from PIL import Image

from ssdctl.data import image_check_jobs
from ssdctl.data.annotations import AUTOMATIC
from ssdctl.data.dataset import read_dataset
from ssdctl.data.image_check import DAMAGED
from ssdctl.data.index import is_prepared, read_metadata
from ssdctl.data.open_dataset import count_images, open_dataset
from ssdctl.data.prepare import NO_BOXES, prepare
from ssdctl.data.store import Split, open_split
from ssdctl.errors import DataError, DiskError
from ssdctl.files import lock


def opened(root: Path, folder: Path, split: str = "train") -> Split:
    return open_split(root, folder, split)


@contextlib.contextmanager
def edited(dataset: Path, split: str = "train") -> Iterator[dict[str, Any]]:
    """Write a split's annotations as the caller changes them."""
    path = dataset / f"annotations/instances_{split}2017.json"
    document = json.loads(path.read_text())
    yield document
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("pack", [True, False])
def test_store_contains_the_dataset(dataset: Path, tmp_path: Path, pack: bool) -> None:
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
        result = split.boxes[split.starts[row] : split.starts[row + 1]]
        assert len(result) == len(truth)
        for box, entry in zip(result, truth, strict=True):
            x, y, w, h = entry["bbox"]
            pixels = box * np.tile(split.sizes[row], 2)
            np.testing.assert_allclose(pixels, [x, y, x + w, y + h], rtol=1e-6)
    report = next(r for r in outcome.splits if r.split == "train")
    assert report.boxes == len(document["annotations"])
    assert report.trainable == len(split.trainable)
    for place in (store, tmp_path / "none"):  # prepared or not
        size = count_images(dataset, place)
        assert size == (len(split.trainable), 9, [c.name for c in split.classes])


def test_an_image_has_a_place_that_a_message_can_name(dataset: Path, tmp_path: Path) -> None:
    prepare(dataset, tmp_path / "files", pack=False)
    prepare(dataset, tmp_path / "packed", pack=True)
    as_files, packed = (opened(dataset, tmp_path / name) for name in ("files", "packed"))
    assert as_files.place(2) == str(dataset / "train2017/000000000003.jpg")
    (shard,) = (tmp_path / "packed").glob("images-train-*")
    assert packed.place(2) == f"{shard}, row 2"
    (dataset / "train2017/000000000003.jpg").unlink()
    with pytest.raises(DataError, match=r"000000000003\.jpg"):
        as_files.read(2)
    assert bytes(packed.read(2))[:2] == b"\xff\xd8"


def test_a_damaged_store_is_refused_and_written_again(dataset: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    prepare(dataset, store, pack=True)
    index, (shard,) = store / "index-train.arrow", store.glob("images-train-*")
    (other,) = store.glob("images-val-*")
    complete = shard.read_bytes()
    for content, words in (
        (complete[: len(complete) // 2], "not a readable part of a store"),
        (other.read_bytes(), "9 rows, not 24"),
    ):
        shard.write_bytes(content)
        with pytest.raises(DataError, match=f"{shard.name}: {words}"):
            opened(dataset, store)
    shard.write_bytes(complete)
    index.write_bytes(index.read_bytes().replace(b"image_id", b"image_\xe4d"))
    with pytest.raises(DataError, match=index.name):
        opened(dataset, store)
    index.write_bytes(b"spoiled")
    assert not is_prepared(dataset, store)
    with pytest.raises(DataError, match="no index"):
        opened(dataset, store)
    assert not prepare(dataset, store, pack=True).unchanged
    assert (
        bytes(opened(dataset, store).read(0))
        == (dataset / "train2017/000000000001.jpg").read_bytes()
    )


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
    store, path = tmp_path / "store", dataset / "annotations/instances_train2017.json"
    prepare(dataset, store, pack=False)
    path.touch()
    assert is_prepared(dataset, store)  # touched annotations are the same
    size = path.stat().st_size
    path.write_text(path.read_text().replace('"ball"', '"bell"'))
    assert path.stat().st_size == size
    assert not is_prepared(dataset, store)
    with edited(dataset) as document:
        document["annotations"].pop()
    assert not is_prepared(dataset, store)
    assert len(open_dataset(dataset, store)["train"].labels) == len(document["annotations"])


def test_training_folder_is_indexed_by_itself(
    dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ssdctl")
    splits = open_dataset(dataset, dataset / "prepared")
    assert set(splits) == {"train", "val"}
    assert "not prepared yet" in caplog.messages[0]
    caplog.clear()
    open_dataset(dataset, dataset / "prepared")
    assert caplog.messages == []


def test_missing_images_are_refused_by_name(dataset: Path, tmp_path: Path) -> None:
    (dataset / "train2017/000000000003.jpg").unlink()
    with pytest.raises(DataError, match=r"\b1 of 24\b.*000000000003\.jpg"):
        prepare(dataset, tmp_path / "store", pack=False)
    assert not (tmp_path / "store" / "index-train.arrow").exists()


@pytest.mark.parametrize("pack", [True, False])
def test_bad_images_are_dropped_and_listed(dataset: Path, tmp_path: Path, pack: bool) -> None:
    folder = dataset / "train2017"
    (folder / "000000000001.jpg").write_bytes(b"<html>not found</html>")
    (folder / "000000000002.jpg").write_bytes(b"")
    Image.new("RGB", (5, 5)).save(folder / "000000000003.jpg")
    with pytest.raises(DataError, match=r"3 of 24 images"):
        prepare(dataset, tmp_path / "store", pack=pack)
    outcome = prepare(dataset, tmp_path / "store", pack=pack, allow_dropped=True)
    dropped = [f for f in outcome.splits[0].findings if f.kind == "image dropped"]
    assert [f.image_id for f in dropped] == [1, 2, 3]
    assert "is 5 x 5" in dropped[2].detail
    assert not {0, 1, 2}.intersection(opened(dataset, tmp_path / "store").trainable.tolist())
    report = json.loads((tmp_path / "store/report.json").read_text())
    assert len(report["splits"][0]["findings"]) == len(outcome.splits[0].findings)


def test_pixel_bomb_is_refused_by_its_header(dataset: Path, tmp_path: Path) -> None:
    with edited(dataset) as document:
        document["images"][0] |= {"width": 15000, "height": 15000}
    Image.new("1", (15000, 15000)).save(dataset / "train2017/000000000001.jpg", "PNG")
    outcome = prepare(dataset, tmp_path / "store", pack=False)
    (finding,) = [f for f in outcome.splits[0].findings if f.kind == "image dropped"]
    assert "refused by its header" in finding.detail


def test_shrink_re_encodes_only_large_images(dataset: Path, tmp_path: Path) -> None:
    prepare(dataset, tmp_path / "store", pack=True, shrink=310)
    split = opened(dataset, tmp_path / "store")
    for row, (width, height) in enumerate(split.sizes):
        with Image.open(io.BytesIO(split.read(row))) as opened_image:
            assert min(opened_image.size) == min(width, height, 310)


def test_dataset_toml_names_the_folders(dataset: Path, tmp_path: Path) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    shutil.move(dataset / "train2017", root / "photos")
    shutil.move(dataset / "annotations/instances_train2017.json", root / "labels.json")
    (root / "dataset.toml").write_text('[train]\nimages = "photos"\nannotations = "labels.json"\n')
    splits = read_dataset(root, AUTOMATIC)
    assert set(splits) == {"train"}
    assert len(open_dataset(root, tmp_path / "store")["train"].image_ids) == 24


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('[train]\nimages = "photos"\n', DataError, "lacks annotations"),
        ('[train]\nimags = "photos"\n', DataError, "dataset.toml:2: unknown key 'train.imags'"),
        ('[tests]\nimages = "photos"\n', DataError, "dataset.toml:2: unknown key 'tests.images'"),
        ('[train]\nimages = "../x"\nannotations = "a"\n', DataError, r"\.\./x"),
        ('[train]\nimages = 3\nannotations = "a"\n', DataError, "must be a path"),
    ],
)
def test_bad_dataset_toml(tmp_path: Path, text: str, error: type[Exception], words: str) -> None:
    (tmp_path / "dataset.toml").write_text(text)
    with pytest.raises(error, match=words):
        read_dataset(tmp_path, AUTOMATIC)


def test_errors_about_wrong_folders_name_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/none\b"):
        read_dataset(tmp_path / "none", AUTOMATIC)
    with pytest.raises(DataError, match=r"dataset\.toml.*data\.yaml"):
        read_dataset(tmp_path, AUTOMATIC)
    (tmp_path / "annotations").mkdir()
    empty = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "annotations/instances_train2017.json").write_text(json.dumps(empty))
    with pytest.raises(DataError, match="no such image folder"):
        prepare(tmp_path, tmp_path / "store", pack=False)


class TestChanges:
    """Unchanged parts are kept, changed ones are repeated, and training reports which."""

    def test_an_image_changed(self, dataset: Path, tmp_path: Path) -> None:
        store, image = tmp_path / "store", dataset / "train2017/000000000002.jpg"
        prepare(dataset, store, pack=True)
        with Image.open(image) as opened_image:
            opened_image.transpose(Image.Transpose.ROTATE_180).save(
                image.with_suffix(".tmp"), "JPEG"
            )
        image.with_suffix(".tmp").replace(image)
        assert not prepare(dataset, store, pack=True).unchanged
        assert bytes(opened(dataset, store).read(1)) == image.read_bytes()

    def test_a_copied_dataset_is_the_same(self, dataset: Path, tmp_path: Path) -> None:
        prepare(dataset, dataset / "prepared", pack=False)
        copied = tmp_path / "copied"
        shutil.copytree(dataset, copied, copy_function=shutil.copyfile)  # other times
        assert prepare(copied, copied / "prepared", pack=False).unchanged
        open_dataset(copied, copied / "prepared")

    @pytest.mark.parametrize("change", ["missing", "other"])
    def test_24_training_names_what_changed(
        self, dataset: Path, tmp_path: Path, change: str
    ) -> None:
        store, image = tmp_path / "store", dataset / "train2017/000000000002.jpg"
        prepare(dataset, store, pack=False)
        if change == "missing":
            image.unlink()
        else:
            image.write_bytes(image.read_bytes() + b"?")
        with pytest.raises(DataError, match=r"\b1 images.*000000000002\.jpg"):
            open_dataset(dataset, store)

    def test_of_many_images_some_are_compared_at_the_start(
        self, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepare(dataset, tmp_path / "store", pack=False)
        monkeypatch.setattr("ssdctl.data.open_dataset.MAX_CHECKED", 5)
        images = sorted((dataset / "train2017").iterdir())
        images[1].unlink()  # not one of the five
        open_dataset(dataset, tmp_path / "store")
        images[-1].unlink()
        with pytest.raises(DataError, match=images[-1].name):
            open_dataset(dataset, tmp_path / "store")
        with pytest.raises(DataError, match=images[1].name):
            prepare(dataset, tmp_path / "store", pack=False)  # compares all

    def test_24_a_packed_store_needs_no_images(self, dataset: Path, tmp_path: Path) -> None:
        store = tmp_path / "store"
        first = prepare(dataset, store, pack=True)
        shutil.rmtree(dataset / "train2017")
        shutil.rmtree(dataset / "val2017")
        assert len(open_dataset(dataset, store)["train"].read(0)) > 1000
        again = prepare(dataset, store, pack=True)
        assert again.unchanged
        assert again.splits == first.splits

    def test_other_options_write_it_again_without_remains(
        self, dataset: Path, tmp_path: Path
    ) -> None:
        store = tmp_path / "store"
        for options in ({"pack": True}, {"pack": True, "shrink": 310}, {"pack": False}):
            prepare(dataset, store, **options)  # type: ignore[arg-type]
            assert prepare(dataset, store, **options).unchanged  # type: ignore[arg-type]
            index = pa.ipc.open_file(str(store / "index-train.arrow")).read_all()
            assert index.num_rows == 24
            shards = {p.name for p in store.glob("images-*")}
            assert len(shards) == (2 if options["pack"] else 0)
        assert sorted(p.name for p in store.iterdir()) == [
            ".lock", "index-train.arrow", "index-val.arrow", "report.json",
        ]  # fmt: skip

    def test_verifying_counts_as_verified_from_then_on(self, dataset: Path, tmp_path: Path) -> None:
        store = tmp_path / "store"
        prepare(dataset, store, pack=False)
        assert not prepare(dataset, store, pack=False, verify_images=True).unchanged
        assert prepare(dataset, store, pack=False, verify_images=True).unchanged
        assert prepare(dataset, store, pack=False).unchanged

    def test_images_that_are_decoded_partly_are_dropped_unless_they_are_kept(
        self, dataset: Path, tmp_path: Path, cli: Callable[..., Result]
    ) -> None:
        damaged = sorted((dataset / "train2017").iterdir())[3]
        content = damaged.read_bytes()
        middle = len(content) // 2
        damaged.write_bytes(content[:middle] + content[middle + 500 :])
        command = ["prepare", "--data", dataset, "--store", tmp_path / "store", "--json"]
        command += ["--verify-images"]
        usable = []
        for more in ([], ["--keep-damaged"], []):
            result = cli(*command, *more)
            assert result.code == 0, result.err
            train = json.loads(result.out)["splits"][0]
            (finding,) = [f for f in train["findings"] if damaged.name in f["detail"]]
            assert DAMAGED in finding["detail"]
            usable.append(int(opened(dataset, tmp_path / "store").usable.sum()))
        assert usable == [23, 24, 23]

    def test_a_store_that_may_only_be_read(self, dataset: Path, tmp_path: Path) -> None:
        """Checked without a lock: its time is unchanged (root could write anywhere)."""
        store = tmp_path / "store"
        prepare(dataset, store, pack=True)
        (store / ".lock").unlink()
        assert prepare(dataset, store, pack=True).unchanged
        assert not (store / ".lock").exists()

    def test_a_store_that_cannot_be_written(self, dataset: Path) -> None:
        (dataset / "file").write_text("")
        with pytest.raises(DiskError) as error:
            prepare(dataset, dataset / "file" / "store", pack=True)
        assert "--store" in (error.value.hint or "")

    def test_a_full_disk_is_seen_before_the_first_byte(
        self, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ssdctl.data.image_check_jobs.free_bytes", lambda _: 1000)
        with pytest.raises(DiskError, match="train") as error:
            prepare(dataset, tmp_path / "store", pack=True)
        assert "--no-pack" in (error.value.hint or "")
        prepare(dataset, tmp_path / "store", pack=False)


PROGRAM = """
import logging, sys
from pathlib import Path
from ssdctl.data import image_check_jobs
from ssdctl.data.prepare import prepare
image_check_jobs.PART_BYTES, image_check_jobs.PART_ROWS, image_check_jobs.TASK_IMAGES = 60_000, 4, 2
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
print("go", flush=True)
outcome = prepare(Path(sys.argv[1]), Path(sys.argv[2]), pack=sys.argv[3] == "pack", verify_images=True)
print("unchanged" if outcome.unchanged else "written")
"""


def start(dataset: Path, store: Path, pack: bool) -> subprocess.Popen[str]:
    """`prepare` in a process of its own, in small parts, past its imports."""
    command = [sys.executable, "-c", PROGRAM, str(dataset), str(store), "pack" if pack else ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    return process


class TestKills:
    """A killed prepare leaves the old store or none, and the next one continues."""

    @pytest.mark.slow(in_ci=True)
    def test_a_few(self, dataset: Path, tmp_path: Path) -> None:
        self._kill(dataset, tmp_path / "store", num_kills=4)

    @pytest.mark.slow
    def test_many(self, dataset: Path, tmp_path: Path) -> None:
        self._kill(dataset, tmp_path / "store", num_kills=50)

    @staticmethod
    def _kill(dataset: Path, store: Path, num_kills: int) -> None:
        dice = random.Random(num_kills)
        image = dataset / "train2017/000000000020.jpg"
        killed = 0
        for number in range(num_kills):
            if dice.random() < 0.3:  # the dataset changes meanwhile
                with Image.open(image) as opened_image:
                    turned = opened_image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                turned.save(image, "JPEG", quality=90 - number % 3)
            process = start(dataset, store, pack=number % 3 != 0)
            time.sleep(dice.random() * 0.12)
            process.kill()
            killed += process.wait() == -signal.SIGKILL
            assert process.stdout is not None
            process.stdout.close()
            # A store that is there is complete: it opens and fits the dataset; else it is ignored.
            for split in ("train", "val"):
                metadata = read_metadata(store, split)
                if metadata is not None:
                    actual = opened(dataset, store, split)
                    assert len(actual.image_ids) == (24 if split == "train" else 9)
                    for row in range(len(actual.image_ids)):
                        # Bytes: a packed image is a view, of signed ones.
                        assert bytes(actual.read(row)[:2]) == b"\xff\xd8"
        assert killed > num_kills / 3
        for pack in (True, False):
            process = start(dataset, store, pack)
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
            fresh = store.with_name(f"fresh-{pack}")
            prepare(dataset, fresh, pack=pack, verify_images=True)
            actual, expected = opened(dataset, store), opened(dataset, fresh)
            for row in range(24):
                assert bytes(actual.read(row)) == bytes(expected.read(row))
            assert not [p.name for p in store.iterdir() if p.name.endswith(".tmp")]
            assert not list(store.glob(".checked-*"))

    def test_finished_parts_are_not_done_again(
        self, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(image_check_jobs, "PART_BYTES", 60_000)
        monkeypatch.setattr(image_check_jobs, "TASK_IMAGES", 2)
        store = tmp_path / "store"
        checked: list[str] = []
        check = image_check_jobs.check_image

        def dies_late(path: Path, *more: Any) -> Any:
            if path.name == "000000000020.jpg" and len(checked) < 30:
                raise DataError("the power went")
            checked.append(path.name)
            return check(path, *more)

        monkeypatch.setattr(image_check_jobs, "check_image", dies_late)
        with pytest.raises(DataError, match="power"):
            prepare(dataset, store, pack=True, jobs=1)
        done = len(checked)
        kept = len(list(store.glob("images-train-*")))
        assert kept > 2
        checked.extend([""] * 30)
        prepare(dataset, store, pack=True, jobs=1)
        again = len(checked) - done - 30
        assert again < 24 + 9 - 4 * 2
        split = opened(dataset, store)
        for row in range(24):
            path = dataset / f"train2017/{row + 1:012d}.jpg"
            assert bytes(split.read(row)) == path.read_bytes()

    def test_an_index_is_removed_before_its_parts(
        self, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would describe the old images, not the new ones."""
        monkeypatch.setattr(image_check_jobs, "PART_BYTES", 60_000)
        monkeypatch.setattr(image_check_jobs, "TASK_IMAGES", 2)
        store = tmp_path / "store"
        prepare(dataset, store, pack=True)
        (dataset / "train2017/000000000001.jpg").write_bytes(b"spoiled")
        check = image_check_jobs.check_image

        def dies_late(path: Path, *more: Any) -> Any:
            if path.name == "000000000020.jpg":
                raise DataError("the power went")
            return check(path, *more)

        monkeypatch.setattr(image_check_jobs, "check_image", dies_late)
        with pytest.raises(DataError, match="power"):
            prepare(dataset, store, pack=True, jobs=1)
        assert not is_prepared(dataset, store)

    def test_force_takes_nothing_over(
        self, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepare(dataset, tmp_path / "store", pack=True)
        checked: list[str] = []
        check = image_check_jobs.check_image

        def noted(path: Path, *more: Any) -> Any:
            checked.append(path.name)
            return check(path, *more)

        monkeypatch.setattr(image_check_jobs, "check_image", noted)
        prepare(dataset, tmp_path / "store", pack=True, force=True)
        assert len(checked) == 24 + 9

    @pytest.mark.slow(in_ci=True)
    def test_25_two_at_once(self, dataset: Path, tmp_path: Path) -> None:
        """Both wait; the second one has nothing to do."""
        with lock(tmp_path / "store" / ".lock"):
            both = [start(dataset, tmp_path / "store", pack=True) for _ in range(2)]
            for process in both:
                assert process.stdout is not None
                assert "waiting for another" in process.stdout.readline()
        outcomes = sorted(process.communicate(timeout=60)[0].splitlines()[-1] for process in both)
        assert [process.returncode for process in both] == [0, 0]
        assert outcomes == ["unchanged", "written"]

    def test_25_one_waits_and_reports_it_and_a_dead_holder_does_not_block(
        self, dataset: Path, tmp_path: Path
    ) -> None:
        store = tmp_path / "store"
        store.mkdir()
        program = (
            "import sys, time\nfrom pathlib import Path\nfrom ssdctl.files import lock\n"
            "with lock(Path(sys.argv[1])):\n print('held', flush=True)\n time.sleep(60)"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", program, str(store / ".lock")], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting = start(dataset, store, pack=False)
        assert waiting.stdout is not None
        assert "waiting for another" in waiting.stdout.readline()
        holder.kill()
        holder.wait()
        holder.stdout.close()
        assert waiting.communicate(timeout=60)[0] == "written\n"


def test_21_images_without_boxes_and_crowds(dataset: Path, tmp_path: Path) -> None:
    with edited(dataset) as document:
        kept = [a for a in document["annotations"] if a["image_id"] not in (3, 4)]
        crowd = {"id": 9999, "image_id": 3, "category_id": 1, "bbox": [1, 1, 50, 50], "iscrowd": 1}
        document["annotations"] = [*kept, crowd]
    report = prepare(dataset, tmp_path / "store", pack=False).splits[0]
    without = [f.image_id for f in report.findings if f.kind == NO_BOXES]
    assert 4 in without
    assert 3 not in without  # a crowd is trained on
    assert report.trainable == report.images - len(without)


@pytest.mark.parametrize("pack", [True, False])
def test_a_split_without_images_is_prepared(dataset: Path, tmp_path: Path, pack: bool) -> None:
    with edited(dataset, "val") as document:
        document |= {"images": [], "annotations": []}
    prepare(dataset, tmp_path / "store", pack=pack)
    assert prepare(dataset, tmp_path / "store", pack=pack).unchanged
    assert len(opened(dataset, tmp_path / "store", "val").image_ids) == 0


def as_fractions(bbox: list[float], image: dict[str, Any]) -> list[float]:
    sides = [image["width"], image["height"]] * 2
    return [value / side for value, side in zip(bbox, sides, strict=True)]


def as_corners(bbox: list[float], image: dict[str, Any]) -> list[float]:
    x, y, w, h = bbox
    return [x, y, x + w, y + h]


@pytest.mark.parametrize(
    ("bbox_of", "words"),
    [
        (as_fractions, "fractions of the image"),
        (as_corners, "if bbox were left, top, right, bottom"),
        (lambda bbox, _: [0.5, 0.5, 1.4, 40], ""),  # thin, but large enough
        (lambda bbox, _: [30, 30, 1.4, 1.4], ""),  # small, but not a fraction
        (lambda bbox, image: [image["width"] - 5, 5, 20, 20], ""),  # clipped only
    ],
)
def test_boxes_in_another_form_are_reported(
    dataset: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    bbox_of: Callable[..., Any],
    words: str,
) -> None:
    with edited(dataset) as document:
        images = {i["id"]: i for i in document["images"]}
        for entry in document["annotations"]:
            entry["bbox"] = bbox_of(entry["bbox"], images[entry["image_id"]])
    outcome = prepare(dataset, tmp_path / "store", pack=False)
    assert [words in w for r in outcome.splits for w in r.warnings] == [True] * bool(words)
    shutil.rmtree(tmp_path / "store")
    caplog.set_level(logging.INFO, "ssdctl")
    open_dataset(dataset, tmp_path / "store")
    assert any("bbox" in line for line in caplog.messages) == bool(words)


def test_a_folder_named_twice_is_resolved(dataset: Path, tmp_path: Path) -> None:
    with edited(dataset) as document:
        for image in document["images"]:
            image["file_name"] = "train2017/" + image["file_name"]
    outcome = prepare(dataset, tmp_path / "store", pack=False)
    assert "24 file names" in outcome.splits[0].notes[0]
    assert len(opened(dataset, tmp_path / "store").trainable) == outcome.splits[0].trainable


@pytest.mark.parametrize("pack", [True, False])
def test_image_folders_may_be_links(dataset: Path, tmp_path: Path, pack: bool) -> None:
    (dataset / "train2017").rename(tmp_path / "elsewhere")
    (dataset / "train2017").symlink_to(tmp_path / "elsewhere")
    prepare(dataset, tmp_path / "store", pack=pack)
    split = open_dataset(dataset, tmp_path / "store")["train"]
    assert bytes(split.read(0)) == (tmp_path / "elsewhere/000000000001.jpg").read_bytes()


def test_a_folder_in_a_dataset_names_the_dataset(dataset: Path) -> None:
    with pytest.raises(DataError, match="train2017") as caught:
        read_dataset(dataset / "train2017", AUTOMATIC)
    assert f"--data {dataset}" in str(caught.value.hint)
