"""Videos: every frame or every Nth one, annotated, with memory that does not grow."""

import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import Cli
from PIL import Image
from process.test_full_disk import full_at

import ssdctl
from ssdctl.cli.console import Console
from ssdctl.errors import DataError, UsageError
from ssdctl.inference import video as video_module
from ssdctl.inference.video import Frame, open_video
from ssdctl.model.results import Result

av = pytest.importorskip("av")
SIZE = (160, 120)
COMMON = ("--score", 0.02, "--device", "cpu")


def write_video(path: Path, image_files: list[Path], count: int, *, rate: int = 10) -> None:
    """Write images in turn, each as one key frame, nearly without loss."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "mpeg4", rate=rate, options={"qmin": "1", "qmax": "1", "g": "1"}
        )
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for n in range(count):
            with Image.open(image_files[n % len(image_files)]) as image:
                pixels = np.asarray(image.convert("RGB").resize(SIZE))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def test_all_frames_and_every_second(cli: Cli, checkpoint: Path, image_files: list[Path]) -> None:
    write_video(Path("a.mp4"), image_files, 11)
    result = cli("predict", checkpoint, "a.mp4", "--json", "--bs", 4, *COMMON).expect(0)
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["frame"] for row in rows] == list(range(11))
    assert [row["time_s"] for row in rows] == pytest.approx([n / 10 for n in range(11)], abs=1e-3)
    with open_video("a.mp4") as video:
        third = list(video.frames())[3]
    expected = ssdctl.load(checkpoint, device="cpu", score=0.02).predict(third.pixels)
    assert rows[3]["detections"] == [d.as_json() for d in expected] != []
    frames = ssdctl.load(checkpoint, device="cpu", score=0.02).predict_iter("a.mp4", batch_size=4)
    assert [[d.as_json() for d in result] for result in frames] == [r["detections"] for r in rows]
    with Image.open(image_files[3]) as image:
        original = np.asarray(image.convert("RGB").resize(SIZE)).astype(float)
    assert np.abs(third.pixels - original).mean() < 12  # the image that was written, in RGB
    skipped = cli(
        "predict", checkpoint, "a.mp4", "--json", "--every", 3, "--max-frames", 3, *COMMON
    )
    assert [json.loads(line)["frame"] for line in skipped.out.splitlines()] == [0, 3, 6]
    assert json.loads(skipped.out.splitlines()[1])["detections"] == rows[3]["detections"]


def test_an_annotated_file(cli: Cli, checkpoint: Path, image_files: list[Path]) -> None:
    write_video(Path("a.mkv"), image_files, 9)
    common = ("predict", checkpoint, "a.mkv", "--every", 2, "--tile", 100, *COMMON)
    Path("drawn").mkdir()
    write_video(Path("mine.mp4"), image_files, 1)
    for name in ("a.mp4", "detections.jsonl"):
        shutil.copy("mine.mp4", f"drawn/{name}")
        cli(*common, "--out", "drawn").expect(2, f"{name}: exists")
        Path("drawn", name).unlink()
    Path("drawn/a.mp4").mkdir()
    cli(*common, "--out", "drawn").expect(2, "is a folder")
    Path("drawn/a.mp4").rmdir()
    for _ in range(2):
        cli(*common, "--out", "drawn").expect(0)
    rows = [json.loads(line) for line in Path("drawn/detections.jsonl").read_text().splitlines()]
    assert [row["frame"] for row in rows] == [0, 2, 4, 6, 8]
    with open_video("a.mkv") as video:
        plain = list(video.frames(every=2))
    with open_video("drawn/a.mp4") as video:
        drawn = list(video.frames())
    assert [f.time_s for f in drawn] == pytest.approx([f.time_s for f in plain], abs=2e-3)
    assert [f.pixels.shape for f in drawn] == [f.pixels.shape for f in plain]
    changed = [
        np.abs(a.pixels.astype(float) - b.pixels).mean() for a, b in zip(drawn, plain, strict=True)
    ]
    assert min(changed) > 5  # there are boxes
    tiled = ssdctl.load(checkpoint, device="cpu", score=0.02, tile=100).predict(plain[0].pixels)
    assert rows[0]["detections"] == [d.as_json() for d in tiled]
    assert cli(*common, "--save", "json", "--out", "o", "--max-frames", 1).code == 0
    assert [p.name for p in Path("o").iterdir()] == ["detections.jsonl"]


def test_two_videos_of_a_name(cli: Cli, checkpoint: Path, image_files: list[Path]) -> None:
    write_video(Path("a.mp4"), image_files, 2)
    Path("d").mkdir()
    names = ["a.mp4", shutil.copy("a.mp4", "d")]
    Path("ssdctl.toml").write_text('[predict]\nsave = "coco"')  # for images
    common = ("predict", checkpoint, *names, *COMMON)
    result = cli(*common, "--out", "o", "-v").expect(0)
    rows = [json.loads(line) for line in Path("o/detections.jsonl").read_text().splitlines()]
    assert [row["image"] for row in rows] == ["a.mp4", "a.mp4", "d/a.mp4", "d/a.mp4"]
    assert sorted(p.name for p in Path("o").glob("*.mp4")) == ["a-2.mp4", "a.mp4"]
    assert len(result.out.splitlines()) == sum(1 + len(row["detections"]) for row in rows)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 6)])
def test_ctrl_c_or_a_closed_pipe_keeps_the_results_so_far(
    error: type[BaseException],
    code: int,
    cli: Cli,
    checkpoint: Path,
    image_files: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_video(Path("a.mp4"), image_files, 6)
    shown = []

    def interrupt(_: Console, data: object, text: str) -> None:
        shown.append(text)
        if len(shown) % 3 == 0:
            raise error

    monkeypatch.setattr(Console, "result", interrupt)
    cli("predict", checkpoint, "a.mp4", "--out", "o", *COMMON).expect(code)
    assert len(Path("o/detections.jsonl").read_text().splitlines()) == 3
    with open_video("o/a.mp4") as video:
        assert len(list(video.frames())) == 3
    options = ("--save", "coco", "--out", "c", *COMMON)
    cli("predict", checkpoint, *image_files[:6], *options).expect(code)
    assert len(json.loads(Path("c/coco.json").read_text())["images"]) == 3


def test_a_full_disk_keeps_the_results_so_far(
    cli: Cli, checkpoint: Path, image_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.mkv", "b.mkv"):
        write_video(Path(name), image_files, 9)
    with full_at(3, monkeypatch):  # after the detections and the first video
        cli("predict", checkpoint, "a.mkv", "b.mkv", "--out", "o", *COMMON).expect(6, "o/b.mp4")
    rows = [json.loads(line) for line in Path("o/detections.jsonl").read_text().splitlines()]
    assert {row["image"] for row in rows} >= {"a.mkv"}
    assert sorted(p.name for p in Path("o").iterdir()) == ["a.mp4", "detections.jsonl"]


def test_times_start_at_0_and_never_go_back(image_files: list[Path]) -> None:
    for name in ("a.mpg", "a.ts"):  # the first frame has another time in the file
        write_video(Path(name), image_files, 6)
    Path("joined.ts").write_bytes(2 * Path("a.ts").read_bytes())
    for name, count in (("a.mpg", 6), ("a.ts", 6), ("joined.ts", 12)):
        with open_video(name) as video:
            times = [frame.time_s for frame in video.frames(every=2)]
        assert times == pytest.approx([n / 10 for n in range(0, count, 2)], abs=1e-3)


def test_a_damaged_end_keeps_the_rest(cli: Cli, checkpoint: Path, image_files: list[Path]) -> None:
    Path("b.mkv").write_bytes(b"no video")
    write_video(Path("c.mkv"), image_files, 2)
    result = cli("predict", checkpoint, "?.mkv", "--out", "o", "--json", *COMMON).expect(3, "b.mkv")
    assert "damaged" not in result.err
    assert {json.loads(line)["image"] for line in result.out.splitlines()} == {"c.mkv"}
    assert Path("o/c.mp4").is_file()
    assert not Path("o/b.mp4").exists()
    cli("predict", checkpoint, "b.mkv", "--out", "o", *COMMON).expect(3, "b.mkv")
    assert len(Path("o/detections.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["a.mkv", "a.avi"])
def test_a_truncated_file(cli: Cli, checkpoint: Path, image_files: list[Path], name: str) -> None:
    write_video(Path(name), image_files, 20)
    Path(name).write_bytes(Path(name).read_bytes()[: Path(name).stat().st_size // 2])
    with open_video(name) as video:
        assert len(list(video.frames(limit=5))) == 5
    frames, results = list[Frame](), list[Result]()
    with open_video(name) as video, pytest.raises(DataError, match=name):
        frames.extend(video.frames())
    with pytest.raises(DataError, match=name):
        results.extend(ssdctl.load(checkpoint, device="cpu").predict_iter(name, batch_size=8))
    assert len(results) == len(frames)
    write_video(Path("whole.mkv"), image_files, 1)
    Path(name).write_bytes(Path("whole.mkv").read_bytes()[:2500])
    result = cli("predict", checkpoint, name, "--out", "o", *COMMON)
    assert (result.code, name in result.err, Path("o/a.mp4").exists()) == (3, True, False)


def test_playlists_and_large_frames_are_refused(
    image_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg would open the files and URLs in a playlist."""
    Path("x.mp4").write_text(
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n"
    )
    write_video(Path("a.mp4"), image_files, 1)
    monkeypatch.setattr(video_module, "MAX_PIXELS", 160 * 120 - 1)
    for name, problem in (("x.mp4", r"x\.mp4"), ("a.mp4", "160")):
        with pytest.raises(DataError, match=problem), open_video(name) as video:
            next(video.frames())


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (("none.mp4",), "none.mp4"),
        (("/dev/video97",), "camera"),
        (("https://host/a.mp4?key=1",), "URL"),
        (("a.mp4", "a.jpg"), "a.jpg"),
        (("a.mp4", "--save", "coco", "--out", "o"), "coco"),
        (("a.mp4", "--out", "."), "replace"),
    ],
)
def test_usage_errors(cli: Cli, checkpoint: Path, arguments: tuple[str, ...], subject: str) -> None:
    for name in ("a.mp4", "a.jpg"):
        Path(name).touch()
    cli("predict", checkpoint, *arguments).expect(2, subject)
    if subject == "URL":
        predictor = ssdctl.load(checkpoint, device="cpu")
        for predict in (predictor.predict, lambda url: next(predictor.predict_iter(url))):
            with pytest.raises(UsageError, match="URL"):
                predict(arguments[0])


def test_phone_videos_are_upright(image_files: list[Path]) -> None:
    """The rotation that a container states is undone."""
    write_video(Path("a.mp4"), image_files, 1)
    with open_video("a.mp4") as video:
        _, frame = next(video._decoded())
        stored = {"width": 160, "height": 120, "to_ndarray": frame.to_ndarray}
        for quarters in range(4):
            pixels = video._pixels(SimpleNamespace(rotation=90 * quarters, **stored))
            np.testing.assert_array_equal(np.rot90(pixels, -quarters), video._pixels(frame))


@pytest.mark.slow
def test_memory_is_steady_over_frames(cli: Cli, checkpoint: Path, image_files: list[Path]) -> None:
    write_video(Path("short.mp4"), image_files, 100)
    write_video(Path("long.mp4"), image_files, 2000)
    peaks = []
    for name in ("short.mp4", "long.mp4"):
        cli("predict", checkpoint, name, "--out", "o", *COMMON).expect(0)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 30_000  # KiB
