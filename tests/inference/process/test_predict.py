"""The Python API and `ssdctl predict`: the boxes that the evaluation gives, on anybody's images."""

import io
import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli
from download.http_server import Server, file
from PIL import Image

import ssdctl
from ssdctl.config.fields import Tiling
from ssdctl.data.tiles import tile_windows
from ssdctl.errors import DataError, UsageError
from ssdctl.inference.detector import Detector
from ssdctl.inference.predict import Predictor
from ssdctl.inference.save import YoloWriter

COMMON = ("--score", 0.02, "--device", "cpu")


@pytest.fixture(scope="module")
def predictor(tiny_run: Path) -> Predictor:
    return ssdctl.load(tiny_run, device="cpu", score=0.02)


@pytest.fixture
def predict(cli: Cli, checkpoint: Path) -> Cli:
    """Return a function that runs `ssdctl predict` with the tiny checkpoint."""
    return lambda *arguments: cli("predict", checkpoint, *arguments, *COMMON)


def test_any_kind_of_image_is_put_upright(predictor: Predictor, image_file: Path) -> None:
    detections = predictor.predict(image_file)
    assert detections
    assert detections.scores.tolist() == sorted(detections.scores, reverse=True)
    assert (detections.boxes >= 0).all()
    assert (detections.boxes[:, :2] <= detections.boxes[:, 2:]).all()
    assert (detections.boxes <= detections.size * 2).all()
    with Image.open(image_file) as image:
        upright = image.convert("RGB")
    pixels = np.array(upright)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned a quarter clockwise
    path = Path("turned.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    with Image.open(path) as turned, path.open("rb") as file:
        for image in (path, str(path), path.read_bytes(), turned, file, upright, pixels):
            assert predictor.predict(image) == detections
    assert predictor.predict(torch.from_numpy(pixels).permute(2, 0, 1)) == detections


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
        assert not empty.to_pandas()["name"].str.startswith("b").any()
    with pytest.raises(IndexError):
        result[len(result)]
    for index in ("boxes", None, [0.5]):
        with pytest.raises(TypeError, match="boolean mask or indices"):
            result[index]


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
    for width in (2.5, 10**6):
        with pytest.raises(UsageError, match="line_width"):
            result.plot(line_width=width)  # type: ignore[arg-type]
    Path("gone.png").write_bytes(image_file.read_bytes())
    gone = predictor("gone.png")
    Path("gone.png").unlink()
    assert (gone._repr_png_(), "<img" in gone._repr_html_()) == (None, False)


def test_a_stream_of_images(predictor: Predictor, image_files: list[Path]) -> None:
    taken = []

    def stream() -> Iterator[Path | bytes]:
        for path in itertools.cycle(image_files[:4]):
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
    with pytest.raises(DataError):
        next(broken)
    with pytest.raises(FileNotFoundError):  # the caller's, also without a line of its own
        list(predictor.predict_iter(map(Path.read_bytes, [Path("none.jpg")])))
    for size in (0, -1, 2.0, None):  # a batch of 0 would end the stream at once
        with pytest.raises(UsageError, match=f"batch_size {size}"):
            next(predictor.predict_iter(image_files, batch_size=size))  # type: ignore[arg-type]
    pixels = np.zeros((9, 9, 3), np.uint8)
    for single in (image_files[0], str(image_files[0]), b"x", pixels, io.BytesIO(b"x"), None):
        with pytest.raises(UsageError, match=type(single).__name__):
            next(predictor.predict_iter(single))  # type: ignore[arg-type]


def test_a_stream_may_reuse_its_memory(predictor: Predictor, image_files: list[Path]) -> None:
    images = [Image.open(path).convert("RGB").resize((90, 60)) for path in image_files[:4]]
    drawing, array, file = Image.new("RGB", (90, 60)), np.empty((60, 90, 3), np.uint8), io.BytesIO()
    encoded = bytearray(drawing.tobytes())

    def stream(reused: Any) -> Iterator[Any]:
        for image in images:
            drawing.paste(image)
            array[:] = image
            file.seek(0)
            image.save(file, "BMP")
            file.seek(0)
            encoded[:] = file.getvalue()
            yield reused

        raise KeyError("of the stream")

    expected = list(predictor.predict_iter(images, batch_size=2))
    for reused in (drawing, array, torch.from_numpy(array), file, encoded):
        results = []
        with pytest.raises(KeyError):
            results.extend(predictor.predict_iter(stream(reused), batch_size=2))
        assert results == expected
        assert np.array_equal(results[0].plot(), expected[0].plot())


@pytest.mark.slow  # importing it takes seconds
def test_results_for_supervision(predictor: Predictor, image_file: Path) -> None:
    pytest.importorskip("supervision")
    result = predictor.predict(image_file)
    found = result.to_supervision()
    np.testing.assert_allclose(found.xyxy, result.boxes, atol=0.01)
    assert found.data["class_name"].tolist() == result.names.tolist()


def test_results_score_as_evaluate_does(checkpoint: Path, shapes: Path) -> None:
    """Bit by bit; `boxes` are clipped to the image, what is scored is not."""
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    expected = ssdctl.evaluate(checkpoint, shapes, score_threshold=0.02, **options)
    predictor = ssdctl.load(checkpoint, score=0.02, device="cpu")
    rows, exceeds = [], False
    for image in json.loads((shapes / "annotations/instances_val2017.json").read_text())["images"]:
        result = predictor(shapes / "val2017" / image["file_name"])
        scored = result.to_coco(image["id"])
        rows += scored
        x, y, width, height = np.array([r["bbox"] for r in scored]).T
        boxes = np.stack([x, y, x + width, y + height], axis=1)
        clipped = boxes.clip(0, [*result.size, *result.size])
        exceeds |= bool((boxes != clipped).any())
        np.testing.assert_allclose(result.boxes, clipped, atol=0.006)
    assert exceeds
    Path("rows.json").write_text(json.dumps(rows))
    assert ssdctl.evaluate("rows.json", shapes).metrics == expected.metrics


class Upload(io.BytesIO):
    """A file as web frameworks give it."""

    name = None


class AsyncUpload:
    async def read(self, size: int = -1) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("image", "error", "named"),
    [
        (Upload(b""), DataError, "^image: not a readable image"),
        (AsyncUpload(), UsageError, "give its bytes"),
        (Image.new("RGB", (0, 5)), DataError, r"no pixels \(0 x 5\)"),
        (np.zeros((5, 0, 3), np.uint8), UsageError, r"\(5, 0, 3\)"),
        (torch.zeros(2, 3, 5, 5), UsageError, r"\(2, 3, 5, 5\)[^$]*list\(images\)"),
        (torch.zeros(3, 5, 5).to_sparse(), UsageError, "tensor"),
        (torch.zeros(3, 5, 5, device="meta"), UsageError, "tensor"),
        ("street.mp4", UsageError, r"street\.mp4[^$]*predict_iter"),
    ],
)
def test_what_is_not_one_image_is_named(
    predictor: Predictor, image: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        predictor(image)


def test_folders_patterns_and_bad_files(predict: Cli, image_files: list[Path]) -> None:
    Path("photos/deep").mkdir(parents=True)
    # The second one's name is taken.
    for path, name in zip(image_files, ("a.jpg", "deep/a.jpg"), strict=False):
        shutil.copy(path, f"photos/{name}")
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    frames[0].save("photos/b.gif", save_all=True, append_images=frames[1:])
    Path("photos/bad.png").write_text("no image")
    result = predict("photos", "photos/deep/*", "--out", "drawn", "--bs", 2, "--json")
    result.expect(3, "photos/bad.png: ", "1 of 4")  # the others were processed
    answers = json.loads(result.out)
    assert [a["image"] for a in answers] == ["photos/a.jpg", "photos/b.gif", "photos/deep/a.jpg"]
    assert "first frame of 1 file with several is read: photos/b.gif" in result.err
    assert json.loads(Path("drawn/detections.json").read_text()) == answers
    assert sorted(p.name for p in Path("drawn").glob("*.jpg")) == ["a-2.jpg", "a.jpg"]
    with Image.open("drawn/a.jpg") as image:
        assert image.size == (answers[0]["width"], answers[0]["height"])
    predict("photos/bad.png", "--out", "drawn").expect(3)
    assert json.loads(Path("drawn/detections.json").read_text()) == answers
    for image, code in ("photos/bad.png", 3), ("photos/a.jpg", 0):
        predict(image, "--out", "labels", "--save", "coco").expect(code)


def test_an_image_alone_is_predicted_with_the_newest_run(
    cli: Cli, tiny_run: Path, image_file: Path, shapes: Path
) -> None:
    for number, name in enumerate(("old", "new", "newest-without-checkpoint")):
        shutil.copytree(tiny_run, f"runs/{name}")
        os.utime(f"runs/{name}/metrics.jsonl", (number, number))
    shutil.rmtree("runs/newest-without-checkpoint/checkpoints")
    shutil.copytree(shapes / "val2017", "val")
    shutil.copy(image_file, "val/a.jpg")
    for images in ("val/*.jpg", "val", "val/a.jpg"):
        result = cli("predict", images, *COMMON, "-v").expect(0)
        assert result.err.splitlines()[0].split()[-1] == "runs/new"
        assert "val/a.jpg" in result.out
    Path("above").mkdir()
    Path("val").rename("above/val")
    assert cli("predict", "above", "--recursive", *COMMON).code == 0
    named = cli("predict", "runs/old", "above/val/a.jpg", "--device", "cpu")
    assert "runs/new" not in named.err
    assert cli("predict", "runs/old", "--device", "cpu").code == 2  # no image


def test_images_are_not_replaced_by_drawn_ones(predict: Cli) -> None:
    Path("photos").mkdir()
    Image.new("RGB", (40, 30), "red").save("photos/a.png")
    content = Path("photos/a.png").read_bytes()
    predict("photos", "--out", "./photos").expect(2, "photos/a.png")
    assert Path("photos/a.png").read_bytes() == content
    shutil.copy("photos/a.png", "b.jpg")
    assert predict("photos", "--save", "json", "--out", "photos").code == 0
    shutil.copy("b.jpg", "photos/b.jpg")
    predict("b.jpg", "--out", "photos").expect(2, "photos/b.jpg", "not an earlier result")
    Path("photos/b.jpg").unlink()
    for save, name in (("json", "detections.json"), ("coco", "coco.json")):
        Path("mine").mkdir(exist_ok=True)
        Path("mine", name).write_text("{}")
        predict("b.jpg", "--save", save, "--out", "mine").expect(2, name)
    for suffix in (".jpg", ".png", ".webp", ".tif"):
        Image.new("RGB", (40, 30), "red").save(f"b{suffix}")
        for _ in range(2):
            assert predict(f"b{suffix}", "--out", "photos").code == 0
        assert Path(f"photos/b{suffix}").is_file()
    shutil.copy("photos/a.png", "b.jpg")
    Path("deep").mkdir()
    shutil.copy("b.jpg", "deep/b.jpg")  # its drawn image gets the name of an input, b-2.jpg
    shutil.copy("b.jpg", "b-2.jpg")
    assert predict("b-2.jpg", "b.jpg", "deep", "--out", "x").code == 0
    assert predict("deep/b.jpg", "deep/b.jpg", "b-2.jpg", "--out", ".").code == 2
    assert Path("b-2.jpg").read_bytes() == content


def test_chosen_classes(cli: Cli, predict: Cli, predictor: Predictor, image_file: Path) -> None:
    everything = predictor.predict(image_file)
    name, first = everything[-1].name, predictor.model.class_names[0]
    result = predict(image_file, "--json", "--classes", name, "--max-detections", 2)
    expected = [d.as_json() for d in everything if d.name == name][:2]
    assert json.loads(result.out)[0]["detections"] == expected
    predict(image_file, "--classes", f"{name},{first.upper()}x").expect(2, repr(first))  # is near
    predictor.model.save("m.pt", class_names=["car, big", *predictor.model.class_names[1:]])
    arguments = ("predict", "m.pt", image_file, *COMMON)
    hint = cli(*arguments, "--classes", "car, big").expect(2).err.partition("write ")[2]
    option, value, *_ = shlex.split(hint)
    cli(*arguments, option, value).expect(0)


def test_urls_and_lists(
    predict: Cli, image_file: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.route("/a.png", file(image_file.read_bytes()))
    page = server.route("/page", file(b"<html>"))
    lines = f"{image_file}\n{url}\n{page}\nabsent.jpg\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    result = predict("-", "--out", "drawn", "--json").expect(3, page, "absent.jpg")
    first, second = json.loads(result.out)
    assert [first["image"], second["image"]] == [str(image_file), url]
    assert first["detections"] == second["detections"] != []
    assert Path("drawn/a.png").is_file()
    result = predict(server.url + "/absent.jpg", image_file, "--json").expect(4)
    assert [answer["image"] for answer in json.loads(result.out)] == [str(image_file)]


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
    assert sum(passes) == len(tile_windows(1200, 1000, Tiling(400, 0.2)))
    expected = np.add(complete.box, [800, 600, 800, 600])
    assert any(d.label == complete.label and np.abs(d.box - expected).max() < 1 for d in detections)
    assert [d.score for d in detections] == sorted((d.score for d in detections), reverse=True)
    assert tiled.predict(corner) == single


def test_results_until_a_signal_are_kept(
    predict: Cli, image_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = YoloWriter.add

    def stopped(writer: YoloWriter, *arguments: Any) -> None:
        if any(writer.folder.rglob("*.txt")):
            raise KeyboardInterrupt("SIGTERM")
        add(writer, *arguments)

    monkeypatch.setattr(YoloWriter, "add", stopped)
    predict(*image_files[:2], "--save", "yolo", "--out", "labels").expect(75, "remove labels")
    assert len([*Path("labels/images").iterdir()]) == 1
    assert Path("labels/data.yaml").is_file()
