"""prepare writes what the dataset contains, and reports what it drops."""

import errno
import io
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from conftest import TINY_RUN, Cli
from data.formats.exports import edited
from data.samples import encoded
from PIL import Image

from ssdctl.config import DataConfig, PrepareConfig
from ssdctl.data import image_check
from ssdctl.data.annotations import AUTOMATIC, Conversion
from ssdctl.data.dataset import read_dataset
from ssdctl.data.export_dataset import export_dataset
from ssdctl.data.image_check import DAMAGED
from ssdctl.data.index import read_metadata
from ssdctl.data.open_dataset import count_images, open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.sources import is_prepared
from ssdctl.data.store import Split, open_split
from ssdctl.data.store_folder import dataset_folders
from ssdctl.errors import DataError, DiskError, UsageError

PACKED, INDEX_ONLY = PrepareConfig(), PrepareConfig(pack=False)
BOTH = pytest.mark.parametrize("config", [PACKED, INDEX_ONLY])


TRAIN, VAL = (f"annotations/instances_{split}2017.json" for split in ("train", "val"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_damaged_store_is_refused_and_written_again(dataset: Path, store: Path) -> None:
    prepare(dataset, store)
    index, (shard,) = store / "index-train.arrow", store.glob("images-train-*")
    (other,) = store.glob("images-val-*")
    complete = shard.read_bytes()
    for content, reason in (
        (complete[: len(complete) // 2], ""),
        (b"", "empty"),
        (other.read_bytes(), "9 rows, not 24"),
    ):
        shard.write_bytes(content)
        with pytest.raises(DataError, match=f"{shard.name}: .*{reason}"):
            open_split(dataset, store, "train")
    shard.write_bytes(complete[:-9])
    assert not prepare(dataset, store).unchanged
    index.write_bytes(index.read_bytes().replace(b"image_id", b"image_\xe4d"))
    with pytest.raises(DataError, match=index.name):
        open_split(dataset, store, "train")
    index.write_bytes(b"spoiled")
    assert not is_prepared(dataset, store)
    with pytest.raises(DataError, match=index.name) as raised:
        open_split(dataset, store, "train")
    assert str(raised.value.hint).endswith(f"--store {store} --force")
    assert not prepare(dataset, store).unchanged
    image = dataset / "train2017/000000000001.jpg"
    assert open_split(dataset, store, "train").read(0) == image.read_bytes()


def test_24_an_unchanged_dataset_is_kept(dataset: Path, store: Path, tmp_path: Path) -> None:
    first = prepare(dataset, store)
    (store / ".lock").unlink()
    written = {p: p.stat().st_mtime_ns for p in store.iterdir()}
    copied = shutil.copytree(dataset, tmp_path / "copied", copy_function=shutil.copyfile)
    for folder in (dataset / "train2017", dataset / "val2017"):
        again = prepare(dataset, store)
        assert (again.unchanged, again.splits) == (True, first.splits)
        shutil.rmtree(folder)  # a packed store needs no images
    assert prepare(dataset, store).unchanged
    assert len(open_dataset(dataset, store)["train"].read(0)) > 1000
    # Not even a lock: the store may be read-only.
    assert {p: p.stat().st_mtime_ns for p in store.iterdir()} == written
    # Of a copy, all files have other times.
    assert not prepare(copied, store, INDEX_ONLY).unchanged
    shutil.copytree(copied, tmp_path / "again", copy_function=shutil.copyfile)
    again = prepare(tmp_path / "again", store, INDEX_ONLY)
    assert (again.unchanged, again.root) == (True, str(tmp_path / "again"))
    open_dataset(tmp_path / "again", store)
    assert not prepare(copied, store, INDEX_ONLY, force=True).unchanged
    with edited(tmp_path / "again" / TRAIN) as document:
        del document["annotations"][0]
    for read in (count_images, open_dataset):
        with pytest.raises(UsageError, match=f"store of {copied}"):
            read(tmp_path / "again", store)


def test_an_index_that_the_system_refuses_is_not_an_absent_one(
    dataset: Path, store: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(dataset, store, INDEX_ONLY, Conversion(classes=("ball",)))
    before, data = sorted(store.iterdir()), ("--data", dataset, "--store", store)

    def refused(path: str, *_: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(pa, "OSFile", refused)
    for command in (("prepare", "--no-pack"), ("train", *TINY_RUN.split())):
        cli(*command, *data).expect(6, "index-train.arrow")
    assert sorted(store.iterdir()) == before


def test_a_dataset_toml_that_was_broken_later_is_refused(dataset: Path, store: Path) -> None:
    """In a copy, too, of which all times differ: the last outcome does not hide it."""
    text = f'[train]\nimages = "train2017"\nannotations = "{TRAIN}"\n'
    toml = dataset / "dataset.toml"
    toml.write_text(text)
    prepare(dataset, store)
    for broken in (text.replace("images", "image"), text.replace(TRAIN, "none.json")):
        toml.write_text(broken)
        for call in (prepare, open_dataset):
            with pytest.raises(DataError, match=r"train\.image'|none\.json"):
                call(dataset, store)
    toml.write_text(text)
    assert prepare(dataset, store).unchanged


@pytest.mark.parametrize("config", [PACKED, INDEX_ONLY, PrepareConfig(encoding="raw")])
def test_bad_images_are_left_out(dataset: Path, store: Path, config: PrepareConfig) -> None:
    folder = dataset / "train2017"
    (folder / "000000000001.jpg").write_bytes(b"<html>not found</html>")
    (folder / "000000000002.jpg").write_bytes((folder / "000000000002.jpg").read_bytes()[:-500])
    Image.new("RGB", (5, 5)).save(folder / "000000000003.jpg")
    with pytest.raises(DataError, match="3 of 24 images"):
        prepare(dataset, store, config)
    outcome = prepare(dataset, store, msgspec.structs.replace(config, allow_dropped=True))
    dropped = [f for f in outcome.splits[0].findings if f.kind == "image dropped"]
    assert [f.image_id for f in dropped] == [1, 2, 3]
    assert "(5 x 5, not " in dropped[2].detail
    split = open_split(dataset, store, "train")
    assert not {0, 1, 2}.intersection(split.trainable.tolist())
    assert split.decode(3).shape[2] == 3
    boxes = len(split.labels) - split.starts[3]
    assert f"<td>train</td><td>21</td><td>{boxes}</td>" in outcome._repr_html_()
    report = json.loads((store / "report.json").read_text())
    assert len(report["splits"][0]["findings"]) == len(outcome.splits[0].findings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[made]\n", r"dataset\.toml"),
        ('[train]\nimages = "photos"\n', "annotations"),
        ('[tests]\nimages = "photos"\n', "dataset.toml:2: .*'tests.images'"),
        ('[train]\nimages = 3\nannotations = "a"\n', "dataset.toml:2: train.images"),
    ],
)
def test_bad_dataset_toml(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "dataset.toml").write_text(text)
    with pytest.raises(DataError, match=words):
        read_dataset(tmp_path, AUTOMATIC)


def test_24_training_names_what_changed_of_some_images(
    dataset: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(dataset, store, INDEX_ONLY)
    monkeypatch.setattr("ssdctl.data.open_dataset.MAX_CHECKED", 5)
    images = sorted((dataset / "train2017").iterdir())
    images[1].unlink()  # not one of the five
    open_dataset(dataset, store)
    images[-1].write_bytes(images[-1].read_bytes() + b"?")
    with pytest.raises(DataError, match=rf"\b1 images.*{images[-1].name}"):
        open_dataset(dataset, store)
    with pytest.raises(DataError, match=images[1].name):
        prepare(dataset, store, INDEX_ONLY)  # compares all


def test_other_options_write_it_again_without_remains(dataset: Path, store: Path) -> None:
    verified = PrepareConfig(pack=False, verify_images=True)
    packed = PACKED, PrepareConfig(encoding="raw"), PrepareConfig(shrink=310)
    for config in (*packed, INDEX_ONLY, verified, INDEX_ONLY):
        assert not prepare(dataset, store, config).unchanged
        assert prepare(dataset, store, config).unchanged
        assert pa.ipc.open_file(str(store / "index-train.arrow")).read_all().num_rows == 24
        assert len(list(store.glob("images-*"))) == (2 if config.pack else 0)
    assert sorted(p.name.partition("-")[0] for p in store.iterdir()) == [
        ".lock", "index", "index", "report.json", "sources",
    ]  # fmt: skip


def test_images_that_are_decoded_partly_are_dropped_unless_they_are_kept(
    dataset: Path, store: Path, cli: Cli
) -> None:
    damaged = sorted((dataset / "train2017").iterdir())[3]
    content = damaged.read_bytes()
    middle = len(content) // 2
    damaged.write_bytes(content[:middle] + content[middle + 500 :])
    command = ["prepare", "--data", dataset, "--store", store, "--json"]
    usable = []
    for more in (["--verify-images"], ["--keep-damaged"], ["--verify-images"], []):
        with edited(dataset / TRAIN) as document:
            document["annotations"].pop()
        train = json.loads(cli(*command, *more).expect(0).out)["splits"][0]
        (finding,) = [f for f in train["findings"] if damaged.name in f["detail"]]
        assert DAMAGED in finding["detail"]
        usable.append(int(open_split(dataset, store, "train").usable.sum()))
    assert usable == [23, 24, 23, 23]
    assert cli(*command, "--no-verify-images").code == 0
    assert open_split(dataset, store, "train").usable.all()


PROGRAM = """
import logging, sys
from pathlib import Path
from ssdctl.config import DataConfig, PrepareConfig
from ssdctl.data import image_check
from ssdctl.data.prepare import prepare
image_check.CHUNK_BYTES, image_check.CHUNK_ROWS, image_check.TASK_IMAGES = 60_000, 4, 2
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
print("go", flush=True)
config = PrepareConfig(pack=sys.argv[3] == "pack", verify_images=True)
print("unchanged" if prepare(Path(sys.argv[1]), Path(sys.argv[2]), config).unchanged else "written")
"""


def start(dataset: Path, store: Path, pack: bool) -> subprocess.Popen[str]:
    """`prepare` in a process of its own, in small chunks, past its imports."""
    command = [sys.executable, "-c", PROGRAM, str(dataset), str(store), "pack" if pack else ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "go\n"
    return process


class Checked(list[str]):
    """The names of the images that were checked."""

    fails_at = ""


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Check images in small chunks, and fail at the image of a name."""
    check, checked = image_check.check_image, Checked()

    def noted(path: str, *more: Any) -> Any:
        name = path.rpartition("/")[2]
        if name == checked.fails_at:
            raise DataError("the power went")
        checked.append(name)
        return check(path, *more)

    monkeypatch.setattr(image_check, "check_image", noted)
    monkeypatch.setattr(image_check, "CHUNK_BYTES", 60_000)
    monkeypatch.setattr(image_check, "TASK_IMAGES", 2)
    return checked


def interrupt(dataset: Path, store: Path, checked: Checked) -> None:
    checked.fails_at = "000000000020.jpg"
    with pytest.raises(DataError, match="power"):
        prepare(dataset, store, PrepareConfig(jobs=1))
    checked.fails_at = ""
    checked.clear()


@pytest.mark.slow
def test_kills(dataset: Path, store: Path) -> None:
    num_kills, dice = 30, random.Random(30)
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
        process.stdout.close()
        # A store that is there is complete: it opens and fits the dataset; else it is ignored.
        for split, count in (("train", 24), ("val", 9)):
            if read_metadata(store, split) is not None:
                actual = open_split(dataset, store, split)
                assert len(actual.image_ids) == count
                for row in range(count):
                    assert actual.read(row)[:2] == b"\xff\xd8"
    assert killed > num_kills / 3
    for pack in (True, False):
        process = start(dataset, store, pack)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        fresh = store.with_name(f"fresh-{pack}")
        prepare(dataset, fresh, PrepareConfig(pack=pack, verify_images=True))
        actual, expected = (open_split(dataset, s, "train") for s in (store, fresh))
        for row in range(24):
            assert actual.read(row) == expected.read(row)
        assert not list(store.glob(".*.tmp"))
        assert not list(store.glob(".checked-*"))


def test_finished_chunks_are_not_done_again(dataset: Path, store: Path, checked: Checked) -> None:
    interrupt(dataset, store, checked)
    assert len(list(store.glob("images-train-*"))) > 2
    (dataset / "train2017/000000000001.jpg").touch()  # a copy has another time
    prepare(dataset, store, PrepareConfig(jobs=1))
    assert len(checked) < 24 + 9 - 4 * 2
    split = open_split(dataset, store, "train")
    for row in range(24):
        path = dataset / f"train2017/{row + 1:012d}.jpg"
        assert split.read(row) == path.read_bytes()


def test_chunks_of_changed_images_are_redone(dataset: Path, store: Path, checked: Checked) -> None:
    """The old store remains until then, and remembers its options."""
    prepare(dataset, store, conversion=Conversion(classes=("ball", "star")))
    image = dataset / "train2017/000000000001.jpg"
    old = image.read_bytes()
    for _ in range(2):
        image.write_bytes(image.read_bytes() + b"?")
        interrupt(dataset, store, checked)
        split = open_split(dataset, store, "train")
        assert (len(split.classes), split.read(0)) == (2, old)
    prepare(dataset, store, PrepareConfig(jobs=1))
    assert len(checked) < 24 + 9 - 2, "what is finished is not done again"
    assert open_split(dataset, store, "train").read(0) == image.read_bytes()
    assert len({path.name.split("-")[2] for path in store.glob("images-train-*")}) == 1


def test_force_takes_nothing_over(dataset: Path, store: Path, checked: Checked) -> None:
    for _ in range(2):
        prepare(dataset, store, force=True)
    assert len(checked) == 2 * (24 + 9)


def test_25_two_wait_for_a_dead_holder_and_one_has_no_work(dataset: Path, store: Path) -> None:
    store.mkdir()
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom ssdctl.files import lock\n"
        "with lock(Path(sys.argv[1])):\n print('held', flush=True)\n time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(store / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        both = [start(dataset, store, pack=True) for _ in range(2)]
        for process in both:
            assert "waiting for another" in process.stdout.readline()
        holder.kill()
    outcomes = sorted(p.communicate(timeout=60)[0].splitlines()[-1] for p in both)
    assert [process.returncode for process in both] == [0, 0]
    assert outcomes == ["unchanged", "written"]


@pytest.mark.parametrize(
    ("bbox_of", "words"),
    [
        (
            lambda x, y, w, h, sides: [x / sides[0], y / sides[1], w / sides[0], h / sides[1]],
            "0 to 1",
        ),
        (lambda x, y, w, h, sides: [x, y, x + w, y + h], "right and bottom edges"),
        (lambda *_: [0.5, 0.5, 1.4, 40], ""),  # thin, but large enough
        (lambda *_: [30, 30, 1.4, 1.4], ""),  # small, but not a fraction
        (lambda x, y, w, h, sides: [sides[0] - 5, 5, 20, 20], ""),  # clipped only
    ],
)
def test_boxes_in_another_form_are_reported(
    dataset: Path,
    store: Path,
    caplog: pytest.LogCaptureFixture,
    bbox_of: Callable[..., list[float]],
    words: str,
) -> None:
    with edited(dataset / TRAIN) as document:
        sides = {i["id"]: (i["width"], i["height"]) for i in document["images"]}
        for entry in document["annotations"]:
            entry["bbox"] = bbox_of(*entry["bbox"], sides[entry["image_id"]])
    caplog.set_level(logging.INFO, "ssdctl")
    open_dataset(dataset, store)
    assert any("--preview" in line for line in caplog.messages) == bool(words)
    outcome = prepare(dataset, store, INDEX_ONLY)
    warnings = [w for report in outcome.splits for w in report.warnings if "--preview" in w]
    assert [words in w for w in warnings] == [True] * bool(words)


def raw(dataset: Path, store: Path, shrink: int | None = None) -> Split:
    """A store of decoded pixels; tests/input/test_batches.py compares its batches."""
    prepare(dataset, store, PrepareConfig(encoding="raw", shrink=shrink))
    return open_split(dataset, store, "train")


def test_decoded_pixels_are_the_images(dataset: Path, store: Path, tmp_path: Path) -> None:
    split = raw(dataset, store)
    pixels = split.decode(3, rows=10)
    assert not pixels.flags.writeable
    with Image.open(dataset / "train2017/000000000004.jpg") as opened:
        np.testing.assert_array_equal(pixels, np.asarray(opened.convert("RGB")))
    with Image.open(io.BytesIO(split.read(3))) as opened:  # as a file
        np.testing.assert_array_equal(pixels, np.asarray(opened))
    export_dataset(open_dataset(dataset, store), tmp_path / "out", "coco")
    exported = open_dataset(tmp_path / "out", tmp_path / "again")["train"]
    np.testing.assert_array_equal(exported.decode(3), pixels)


@BOTH
def test_a_turned_image_without_size(dataset: Path, store: Path, config: PrepareConfig) -> None:
    image = dataset / "train2017/000000000001.jpg"
    image.write_bytes(encoded(Image.open(image).convert("RGB"), turn=6))
    with edited(dataset / TRAIN) as document:
        size = {side: document["images"][0].pop(side) for side in ("width", "height")}
    train = prepare(dataset, store, config).splits[0]
    assert "size is not annotated" in next(f.detail for f in train.findings if "EXIF" in f.detail)
    assert any("without annotated size, read as stored: 1." in text for text in train.warnings)
    with edited(dataset / TRAIN) as document:
        document["images"][0] |= size
    assert not any("EXIF" in text for text in prepare(dataset, store, config).splits[0].warnings)


def test_a_full_disk_is_seen_before_the_first_byte(
    dataset: Path, store: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    split = raw(dataset, store, 310)
    num_bytes = int(3 * split.pixel_sizes.prod(axis=1).sum())
    assert f"{num_bytes / 1e9:.2f} GB" in caplog.text
    written = sum(p.stat().st_size for p in store.glob("images-train-*"))
    assert num_bytes < written < 1.02 * num_bytes + 50_000
    full = store.with_name("full")
    for free, config in (
        (num_bytes - 1, PrepareConfig(encoding="raw", shrink=310)),
        (1000, PACKED),
    ):
        monkeypatch.setattr("ssdctl.data.image_check.free_bytes", lambda _, free=free: free)
        with pytest.raises(DiskError, match="train") as error:
            prepare(dataset, full, config)
        assert "--no-pack" in (error.value.hint or "")
        assert not list(full.glob("images-*"))
    prepare(dataset, full, INDEX_ONLY)


@pytest.mark.parametrize(
    "url", ["s3://bucket/data", "https://bob:hunter2@host/data?sig=x", "gs://b"]
)
def test_urls_are_refused_with_a_way_that_works(url: str) -> None:
    for config in (DataConfig(root=url), DataConfig(root="here", store=url)):
        with pytest.raises(UsageError) as error:
            dataset_folders(config)
        option = "--store" if config.store else "--data"
        assert option in str(error.value)
        assert url.partition("?")[0].replace("bob:hunter2", "***") in str(error.value)
        assert "hunter2" not in str(error.value)
        assert "mount" in (error.value.hint or "")
    assert dataset_folders(DataConfig(root="a:b/c"))[0] == Path("a:b/c")
