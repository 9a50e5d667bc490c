"""The Python API and `ssdctl predict`: the boxes that the evaluation gives, on anybody's images."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Result as CliResult
from download.http_server import Reply, Server, file
from PIL import Image

import ssdctl
from ssdctl.errors import DataError, UsageError
from ssdctl.inference.detector import Detector
from ssdctl.inference.drawing import label_font
from ssdctl.inference.predict import Predictor
from ssdctl.inference.tiles import tile_windows

Cli = Callable[..., CliResult]


@pytest.fixture(scope="module")
def predictor(tiny_run: Path) -> Predictor:
    return ssdctl.load(tiny_run, device="cpu", score=0.02)


@pytest.fixture(scope="module")
def image_file(shapes: Path) -> Path:
    return sorted((shapes / "val2017").iterdir())[0]


def test_any_kind_of_image(predictor: Predictor, image_file: Path) -> None:
    detections = predictor.predict(image_file)
    assert detections
    with Image.open(image_file) as image:
        assert predictor.predict(image) == detections
        assert predictor.predict(np.asarray(image.convert("RGB"))) == detections
        width, height = image.size
    assert predictor.predict(str(image_file)) == detections
    assert [f.score for f in detections] == sorted((f.score for f in detections), reverse=True)
    for item in detections:
        assert item.name == predictor.model.class_names[item.label - 1]
        left, top, right, bottom = item.box
        assert 0 <= left <= right <= width
        assert 0 <= top <= bottom <= height


def test_many_at_once_are_as_one_by_one(predictor: Predictor, shapes: Path) -> None:
    image_files = sorted((shapes / "val2017").iterdir())[:3]
    together = predictor.predict([image_files[0].read_bytes(), *image_files[1:]])
    for result, path in zip(together, image_files, strict=True):
        single = predictor.predict(path)
        assert [f.label for f in result] == [f.label for f in single]
        np.testing.assert_allclose([f.box for f in result], [f.box for f in single], atol=0.05)
    assert predictor.predict([]) == []


def test_results_are_arrays(predictor: Predictor, image_file: Path) -> None:
    result = predictor(image_file)
    assert result.boxes.shape == (len(result), 4)
    assert result.boxes[1].tolist() == list(result[1].box)
    assert result.scores.tolist() == [d.score for d in result]
    assert [result.class_names[label - 1] for label in result.labels] == result.names.tolist()
    assert result[-1] == list(result)[-1]
    for selected in (result[:2], result[np.arange(len(result)) < 2], result[[0, 1]]):
        assert list(selected) == list(result)[:2]
        assert selected.to_coco() == result.to_coco()[:2]
    name = result[0].name
    assert {d.name for d in result[result.names == name]} == {name}
    assert result.to_pandas()["score"].tolist() == result.scores.tolist()
    for empty in (result[:0], result[[]], result[result.scores > 1]):
        assert (len(empty), empty.boxes.shape, list(empty), empty.to_coco()) == (0, (0, 4), [], [])
        assert len(empty.to_pandas()) == 0
    with pytest.raises(IndexError):
        result[len(result)]
    assert result[0].name in repr(result)
    assert str(result.size[0]) in repr(result)


def test_results_are_drawn(predictor: Predictor, image_file: Path) -> None:
    result = predictor.predict(image_file)
    with Image.open(image_file) as image:
        before, size = np.asarray(image.convert("RGB")), image.size
    assert result.size == size
    plots = [result.plot(), predictor.predict(io.BytesIO(image_file.read_bytes())).plot()]
    for plot in plots:  # from a path, and a file object read to its end
        assert plot.size == size
        assert (np.asarray(plot) != before).any()
    assert np.array_equal(*map(np.asarray, plots))
    assert np.array_equal(result[:0].plot(), before)
    with Image.open(result.save("drawn.PNG", scores=False)) as drawn:
        assert (drawn.format, drawn.size) == ("PNG", size)
    with pytest.raises(UsageError, match=r"drawn\.txt"):
        result.save("drawn.txt")
    shown = result._repr_html_()
    assert "data:image/png" in shown
    assert shown.count("<tr>") == 1 + min(len(result), 10)
    Path("gone.png").write_bytes(image_file.read_bytes())
    gone = predictor("gone.png")
    Path("gone.png").unlink()
    assert (gone._repr_png_(), "<img" in gone._repr_html_()) == (None, False)


def test_a_predictor_has_few_names(predictor: Predictor) -> None:
    names = [name for name in dir(predictor) if not name.startswith("_")]
    assert names == ["model", "predict", "predict_iter"]
    assert not predictor.model.training
    classes = len(predictor.model.class_names)
    assert repr(predictor) == f"Predictor(ssd300-tiny, {classes} classes, cpu)"
    for old in ("predict_many", "class_names"):
        with pytest.raises(AttributeError, match=r"Predictor\.predict|Result\.class_names"):
            getattr(predictor, old)


def test_results_as_coco_are_scored_as_evaluate_scores(
    cli: Cli, predictor: Predictor, shapes: Path
) -> None:
    listed = json.loads((shapes / "annotations/instances_val2017.json").read_text())["images"]
    rows = []
    for image in listed:
        rows += predictor.predict(shapes / "val2017" / image["file_name"]).to_coco(image["id"])
    Path("rows.json").write_text(json.dumps(rows))
    result = cli("evaluate", "rows.json", "--data", shapes, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["detections"] == len(rows) > 0


def test_a_stream_of_images(predictor: Predictor, shapes: Path) -> None:
    image_files = sorted((shapes / "val2017").iterdir())[:4]
    taken = []

    def stream() -> Iterator[Path | bytes]:
        for path in itertools.cycle(image_files):
            taken.append(path)
            yield path
            yield path.read_bytes()

    results = predictor.predict_iter(stream(), batch_size=3)
    first = list(itertools.islice(results, 7))
    results.close()
    assert len(taken) < 20  # the stream is endless
    assert [result.image for result in first[::2]] == image_files[:4]
    for result, path in zip(first, [p for p in image_files for _ in range(2)], strict=False):
        assert [d.label for d in result] == [d.label for d in predictor.predict(path)]
    broken = predictor.predict_iter([image_files[0], b"no image", image_files[1]], batch_size=8)
    assert len(next(broken)) > 0
    with pytest.raises(DataError, match="not a readable image"):
        next(broken)


def test_supervision_is_named_if_it_is_absent(
    predictor: Predictor, image_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(UsageError, match="supervision") as error:
        predictor.predict(image_file).to_supervision()
    assert error.value.hint == "pip install supervision"


def test_leaving_a_stream_ends_downloads(
    predictor: Predictor, image_file: Path, server: Server
) -> None:
    """As Ctrl-C does: the slow server could send 2,400 bytes until the time limit."""
    slow = Reply(body=bytes(10_000), pause_s=0.05, slice_bytes=1)
    urls = [server.route(f"/{n}.jpg", lambda _: slow) for n in range(4)]
    for _ in predictor.predict_iter([image_file, *urls], batch_size=1):
        while not server.body_bytes:
            time.sleep(0.01)
        break
    assert server.body_bytes < 400


@pytest.mark.slow  # importing it takes seconds
def test_results_for_supervision(predictor: Predictor, image_file: Path) -> None:
    pytest.importorskip("supervision")
    result = predictor.predict(image_file)
    detections = result.to_supervision()
    assert len(detections) == len(result)
    np.testing.assert_allclose(detections.xyxy, result.boxes, atol=0.01)
    best = detections[detections.confidence >= np.float32(result.scores[0])]
    assert best.data["class_name"][0] == result[0].name
    assert predictor.model.class_names[best.class_id[0]] == result[0].name


def test_the_same_boxes_as_evaluate(
    cli: Cli, predictor: Predictor, checkpoint: Path, shapes: Path
) -> None:
    low = ("--score-threshold", 0.02, "--device", "cpu")
    assert cli("evaluate", checkpoint, "--detections", "d.json", *low).code == 0
    listed = json.loads((shapes / "annotations/instances_val2017.json").read_text())["images"]
    rows = json.loads(Path("d.json").read_text())
    for image in listed[:3]:
        evaluated = [r for r in rows if r["image_id"] == image["id"]]
        predicted = predictor.predict(shapes / "val2017" / image["file_name"])
        assert [f.category_id for f in predicted] == [r["category_id"] for r in evaluated]
        scores = [r["score"] for r in evaluated]
        np.testing.assert_allclose([f.score for f in predicted], scores, atol=2e-5)
        x, y, w, h = np.array([r["bbox"] for r in evaluated]).T
        size = [image["width"], image["height"]] * 2
        boxes = np.stack([x, y, x + w, y + h], axis=1).clip(0, size)
        np.testing.assert_allclose([f.box for f in predicted], boxes, atol=0.02)


def test_turned_images_are_put_upright(predictor: Predictor, image_file: Path) -> None:
    with Image.open(image_file) as image:
        upright = image.convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned a quarter clockwise
    path = Path("turned.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    expected = predictor.predict(upright)
    assert expected
    assert predictor.predict(path) == expected
    assert predictor.predict(path.read_bytes()) == expected
    with Image.open(path) as image, path.open("rb") as file:
        assert predictor.predict(image) == expected
        assert predictor.predict(file) == expected
    pixels = torch.from_numpy(np.array(upright))
    assert predictor.predict(pixels.permute(2, 0, 1)) == expected


@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff\xe0 cut"])
def test_no_image(predictor: Predictor, content: bytes) -> None:
    Path("x.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.jpg"):
        predictor.predict("x.jpg")


def test_wrong_streams_of_images(predictor: Predictor, image_file: Path) -> None:
    for size in (0, -1):  # a batch of 0 would end the stream at once
        with pytest.raises(UsageError, match=f"batch_size {size}"):
            next(predictor.predict_iter([image_file], batch_size=size))
    for single in (image_file, str(image_file), b"x"):
        with pytest.raises(UsageError, match=type(single).__name__):
            next(predictor.predict_iter(single))  # type: ignore[arg-type]


def test_usage_errors_of_the_api(predictor: Predictor, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="float64"):
        predictor.predict(np.zeros((5, 5, 3)))
    with pytest.raises(UsageError, match=r"none\.pt"):
        ssdctl.load("none.pt", device="cpu")
    for name in ("ssd.pt2", "ssd.xml"):
        Path(name).write_bytes(b"PK")
        with pytest.raises(UsageError, match=name):
            ssdctl.load(name, device="cpu")
    with pytest.raises(UsageError, match="fp8"):
        ssdctl.load(checkpoint, device="cpu", precision="fp8")


def test_letters_of_other_languages_are_drawn() -> None:
    """Not the empty box of a letter that is missing in the font."""
    font = label_font(16)
    missing = bytes(font.getmask("\U0010ffff"))
    for letter in "aäßñøřżжщλ":
        assert bytes(font.getmask(letter)) != missing, letter


def test_folders_patterns_and_bad_files(cli: Cli, checkpoint: Path, shapes: Path) -> None:
    image_files = sorted((shapes / "val2017").iterdir())[:5]
    Path("photos/deep").mkdir(parents=True)
    for path in image_files[:2]:
        shutil.copy(path, "photos")
    shutil.copy(image_files[2], f"photos/deep/{image_files[0].name}")  # a name that is taken
    Path("photos/bad.png").write_text("no image")
    result = cli(
        "predict", checkpoint, "photos", "photos/deep/*", "--out", "drawn", "--bs", 2, "--json",
        "--score", 0.02, "--device", "cpu",
    )  # fmt: skip
    assert result.code == 3  # one was bad, the others were processed
    assert "photos/bad.png: " in result.err
    assert "1 of 4" in result.err
    answers = json.loads(result.out)
    names = [a["image"] for a in answers]
    assert names == [
        *(f"photos/{p.name}" for p in image_files[:2]),
        f"photos/deep/{image_files[0].name}",
    ]
    assert json.loads(Path("drawn/detections.json").read_text()) == answers
    drawn = sorted(p.name for p in Path("drawn").glob("*.jpg"))
    stems = [image_files[0].stem, image_files[1].stem]
    assert drawn == sorted([f"{stems[0]}.jpg", f"{stems[1]}.jpg", f"{stems[0]}-2.jpg"])
    with Image.open(f"drawn/{stems[0]}.jpg") as image:
        assert image.size == (answers[0]["width"], answers[0]["height"])


def test_drawn_images_keep_their_format_and_failures_are_named(
    cli: Cli, checkpoint: Path, image_file: Path
) -> None:
    Path("photos").mkdir()
    with Image.open(image_file) as image:
        for suffix in ("JPG", "png", "webp", "bmp", "tif", "gif"):
            image.save(f"photos/{suffix.lower()}.{suffix}")
    common = ("--out", "drawn", "--device", "cpu", "--score", 0.02, "--bs", 4)
    result = cli("predict", checkpoint, "none.jpg", "photos", "*.none", *common)
    assert result.code == 3
    assert "2 of 8" in result.err
    assert all(name in result.err.splitlines()[-2] for name in ("none.jpg", "*.none"))
    formats = {}
    for path in Path("drawn").iterdir():
        if path.suffix != ".json":
            with Image.open(path) as drawn:
                formats[path.name] = drawn.format
    assert formats == {
        "jpg.JPG": "JPEG", "png.png": "PNG", "webp.webp": "WEBP", "bmp.bmp": "BMP",
        "tif.tif": "TIFF", "gif.png": "PNG",
    }  # fmt: skip
    counts = [len(a["detections"]) for a in json.loads(Path("drawn/detections.json").read_text())]
    lines = result.out.splitlines()
    assert len(lines) == 6
    for line, count in zip(lines, counts, strict=True):
        assert sum(map(int, re.findall(r"(\d+) [a-z]+[,  ]", line))) == count
        assert line.endswith(" ms)")
    assert f"{sum(counts):,}" in next(x for x in result.err.splitlines() if "drawn/" in x)


def test_an_image_alone_is_predicted_with_the_newest_run(
    cli: Cli, tiny_run: Path, image_file: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = cli("predict", image_file, "--device", "cpu")
    assert (absent.code, absent.out) == (2, "")
    assert "runs" in absent.err
    Path("runs").mkdir()
    for name, time_s in (("old", 1000), ("new", 2000), ("newest-without-checkpoint", 3000)):
        shutil.copytree(tiny_run, f"runs/{name}")
        os.utime(f"runs/{name}/metrics.jsonl", (time_s, time_s))
    shutil.rmtree("runs/newest-without-checkpoint/checkpoints")
    for images in (["val/*.jpg"], ["val"], ["val/a.jpg"]):
        shutil.copytree(shapes / "val2017", "val", dirs_exist_ok=True)
        shutil.copy(image_file, "val/a.jpg")
        result = cli("predict", *images, "--device", "cpu", "--score", 0.02, "-v")
        assert result.code == 0, result.err
        assert result.err.splitlines()[0].split()[-1] == "runs/new"
        assert "val/a.jpg" in result.out
    named = cli("predict", "runs/old", "val/a.jpg", "--device", "cpu")
    assert "runs/new" not in named.err
    assert cli("predict", "runs/old", "--device", "cpu").code == 2  # no image


def test_precision_and_style(cli: Cli, checkpoint: Path, image_file: Path) -> None:
    """-v prints the boxes; --bf16 computes others, and options change what is drawn."""
    common = ("predict", checkpoint, image_file, "--device", "cpu", "--score", 0.02)
    assert cli(*common, "--bf16", "-v").out != cli(*common, "-v").out
    sizes = []
    for options in ([], ["--hide-scores"], ["--hide-scores", "--hide-labels"]):
        assert cli(*common, "--out", "drawn", *options).code == 0
        sizes.append(Path("drawn", image_file.name).stat().st_size)
    assert len(set(sizes)) == 3
    assert cli(*common, "--line-width", 0).code == 2


def test_images_are_not_replaced_by_drawn_ones(cli: Cli, checkpoint: Path) -> None:
    Path("photos").mkdir()
    Image.new("RGB", (40, 30), "red").save("photos/a.png")
    content = Path("photos/a.png").read_bytes()
    result = cli("predict", checkpoint, "photos", "--out", "./photos", "--device", "cpu")
    assert result.code == 2
    assert "photos/a.png" in result.err
    assert Path("photos/a.png").read_bytes() == content
    shutil.copy("photos/a.png", "b.jpg")
    common = ("--out", "photos", "--device", "cpu")
    assert cli("predict", checkpoint, "photos", "--save", "json", *common).code == 0
    assert cli("predict", checkpoint, "b.jpg", *common).code == 0
    assert Path("photos/b.jpg").is_file()
    Path("deep").mkdir()
    shutil.copy("b.jpg", "deep/b.jpg")  # its drawn image gets the name of an input, b-2.jpg
    shutil.copy("b.jpg", "b-2.jpg")
    assert cli("predict", checkpoint, "b-2.jpg", "b.jpg", "deep", "--out", "x").code == 0
    before = Path("b-2.jpg").read_bytes()
    result = cli("predict", checkpoint, "deep/b.jpg", "deep/b.jpg", "b-2.jpg", "--out", ".")
    assert (result.code, Path("b-2.jpg").read_bytes()) == (2, before)


def test_a_folder_that_cannot_be_written_is_reported_before_the_detection(
    cli: Cli, checkpoint: Path, image_file: Path
) -> None:
    Path("file").touch()
    for options in ((), ("--save", "coco")):
        result = cli(
            "predict", checkpoint, image_file, "--out", "file", "--device", "cpu", *options
        )
        assert result.code == 6
        assert result.out == ""


def test_an_empty_folder(cli: Cli, checkpoint: Path) -> None:
    Path("empty").mkdir()
    result = cli("predict", checkpoint, "empty")
    assert result.code == 2
    assert "--recursive" in result.err


def test_chosen_classes(cli: Cli, checkpoint: Path, predictor: Predictor, image_file: Path) -> None:
    everything = predictor.predict(image_file)
    name = everything[-1].name
    common = ("predict", checkpoint, image_file, "--score", 0.02, "--device", "cpu", "--json")
    answer = json.loads(cli(*common, "--classes", name, "--max-detections", 2).out)[0]
    expected = [d.as_json() for d in everything if d.name == name][:2]
    assert answer["detections"] == expected
    result = cli(*common, "--classes", f"{name},{predictor.model.class_names[0].upper()}x")
    assert result.code == 2
    assert f"{predictor.model.class_names[0]!r}" in result.err  # the nearest one


def test_nms_iou(cli: Cli, checkpoint: Path, predictor: Predictor, image_file: Path) -> None:
    score = predictor.predict(image_file)[30].score  # few detections, so that their number matters

    def count(*options: object) -> int:
        common = ("--score", score, "--device", "cpu", "--json")
        answers = json.loads(cli("predict", checkpoint, image_file, *common, *options).out)
        return len(answers[0]["detections"])

    assert count("--nms-iou", 0.1) < count("--nms-iou", 0.9)
    assert count("--nms-iou", 0.5) == count() == count("--set", "evaluate.nms_iou=0.5")


def test_urls_and_lists(
    cli: Cli, checkpoint: Path, image_file: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.route("/a.png", file(image_file.read_bytes()))
    page = server.route("/page", file(b"<html>"))
    lines = f"{image_file}\n{url}\n{page}\nabsent.jpg\n".encode()
    options = ("--out", "drawn", "--score", 0.02, "--device", "cpu", "--json")

    def run(*names: str, stdin: bytes = b"") -> CliResult:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return cli("predict", checkpoint, *names, *options)

    result = run("-", stdin=lines)
    assert result.code == 3
    first, second = json.loads(result.out)
    assert [first["image"], second["image"]] == [str(image_file), url]
    assert first["detections"] == second["detections"] != []
    assert str(page) in result.err
    assert "absent.jpg" in result.err
    assert Path("drawn/a.png").is_file()
    result = run(server.url + "/absent.jpg", str(image_file))
    assert result.code == 4
    assert [answer["image"] for answer in json.loads(result.out)] == [str(image_file)]
    assert run("s3://bucket/a.jpg").code == 2


def test_tiles_find_small_objects(
    tiny_run: Path, image_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of a corner of a large image, at their own resolution."""
    with Image.open(image_file) as small:
        corner = small.convert("RGB").resize((400, 400))
    large = Image.new("RGB", (1200, 1000), "gray")
    large.paste(corner, (800, 600))
    single = ssdctl.load(tiny_run, device="cpu", score=0.02, nms_iou=1).predict(corner)
    complete = next(d for d in single if min(d.box[:2]) > 10)  # not at an inner edge of its tile
    passes = []
    forward = Detector.forward

    def counted(detector: Detector, pixels: torch.Tensor) -> Any:
        passes.append(len(pixels))
        return forward(detector, pixels)

    monkeypatch.setattr(Detector, "forward", counted)
    tiled = ssdctl.load(tiny_run, device="cpu", score=0.02, nms_iou=1, tile=400)
    detections = tiled.predict(large)
    assert max(passes) <= 8  # for any size of the image
    assert sum(passes) == len(tile_windows(1200, 1000, 400, 0.2))
    expected = np.add(complete.box, [800, 600, 800, 600])
    assert any(d.label == complete.label and np.abs(d.box - expected).max() < 1 for d in detections)
    assert [d.score for d in detections] == sorted((d.score for d in detections), reverse=True)
    assert tiled.predict(corner) == single


def test_tiles_from_the_command_line(cli: Cli, checkpoint: Path, image_file: Path) -> None:
    with Image.open(image_file) as small:
        small.resize((700, 500)).save("large.png")
    Path("bad.png").write_text("no image")
    common = ("--score", 0.02, "--device", "cpu", "--json", "--bs", 3)
    result = cli("predict", checkpoint, "large.png", "bad.png", "--tile", 300, *common)
    assert result.code == 3
    tiled = json.loads(result.out)[0]
    assert (tiled["width"], tiled["height"]) == (700, 500)
    expected = ssdctl.load(checkpoint, device="cpu", score=0.02, tile=300).predict("large.png")
    assert [d["name"] for d in tiled["detections"]] == [d.name for d in expected]
    assert cli("predict", checkpoint, "large.png", "--tile", 5).code == 2
    with pytest.raises(UsageError, match="tile: 5"):
        ssdctl.load(checkpoint, device="cpu", tile=5)


def test_a_third_party_file_without_class_names(
    cli: Cli, checkpoint: Path, image_file: Path, predictor: Predictor
) -> None:
    """Its label_map is None, as some programs write it: the classes get numbers, which is said."""
    assert cli("export", checkpoint, "--format", "mlperf", "--out", "x.pt").code == 0
    payload = torch.load("x.pt", weights_only=True)
    torch.save({**payload, "label_map": None}, "x.pt")
    result = cli("predict", "x.pt", image_file, "--score", 0.02, "--device", "cpu", "--json")
    assert result.code == 0, result.err
    assert "x.pt" in result.err
    found = json.loads(result.out)[0]["detections"]
    assert [d["label"] for d in found] == predictor.predict(image_file).labels.tolist()
    assert all(d["name"].endswith(str(d["label"])) for d in found)


def test_a_saved_yolo_folder_is_a_dataset(cli: Cli, checkpoint: Path, shapes: Path) -> None:
    """What `predict` writes, `prepare` reads."""
    result = cli(
        "predict", checkpoint, shapes / "val2017", "--save", "yolo", "--out", "labels",
        "--score", 0.02, "--max-detections", 3, "--device", "cpu",
    )  # fmt: skip
    assert result.code == 0, result.err
    lines = [p.read_text().splitlines() for p in Path("labels/labels").iterdir()]
    assert 0 < max(map(len, lines)) <= 3
    assert cli("prepare", "--data", "labels", "--no-pack").code == 0
    assert cli("predict", checkpoint, shapes / "val2017", "--save", "coco").code == 2
