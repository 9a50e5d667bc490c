"""The images that arguments name: files, folders, patterns, URLs and lists."""

import io
import shlex
from pathlib import Path

import pytest
from download.http_server import Reply, Server
from PIL import Image

from ssdctl.data.drawing import save_image
from ssdctl.errors import DataError, NetworkError, UsageError
from ssdctl.inference import sources
from ssdctl.inference.sources import find_sources, looks_like_image, source_of, split_videos


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def names(*given: str, recursive: bool = False, stdin: bytes = b"") -> list[str]:
    return [s.name for s in find_sources(given, recursive=recursive, stdin=io.BytesIO(stdin))]


def test_folders_contain_only_direct_images_unless_recursive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    touch("a/2.JPG", "a/1.tif", "a/notes.txt", "a/.hidden.png", "a/b/3.webp", "a/.trash/4.png")
    touch("a/c.jpg/5.HEIC", "a/c.jpg/6.gif")
    Path("a/again").symlink_to(Path("a").absolute())
    touch("a/b/[v]/1.MOV", "a/b/[v]/2.mp4")
    for suffix in (".jpg", ".png", ".webp", ".tif"):  # results of earlier calls
        save_image(Image.new("RGB", (9, 9)), drawn := Path(f"a/b/drawn{suffix}"))
    touch("a/b/detections.json")
    Path("a/b/link.tif").symlink_to("../1.tif")
    assert names("a") == ["a/1.tif", "a/2.JPG"]
    deep = ["a/b/3.webp", "a/c.jpg/5.HEIC", "a/c.jpg/6.gif"]
    assert names("a", recursive=True) == ["a/1.tif", "a/2.JPG", *deep]
    assert "5 images" in caplog.text
    assert "2 videos" in caplog.text
    assert names(str(drawn)) == [str(drawn)]
    with pytest.raises(UsageError) as caught:
        names("a/b/[v]")
    patterns = [word for word in shlex.split(str(caught.value.hint)) if "*" in word]
    assert split_videos([p.strip(";") for p in patterns]) == ["a/b/[v]/1.MOV", "a/b/[v]/2.mp4"]


def test_a_file_whose_name_is_a_pattern() -> None:
    touch("a[1].png", "a1.png")
    assert names("a[1].png") == ["a[1].png"]
    assert names("a*.png") == ["a1.png", "a[1].png"]


def test_lists_on_standard_input() -> None:
    touch("x.png")
    listed = ["no [such] file.jpg", "https://host/a.jpg?t=1"]
    assert names("x.png", "-", stdin="\n\n".join(listed).encode()) == ["x.png", *listed]
    assert names("-", stdin=b"two\nlines.png\0b.png\0") == ["two\nlines.png", "b.png"]
    with pytest.raises(UsageError):
        names("-", stdin=b"\n")
    with pytest.raises(DataError, match=r"a\.mp4: a video"):
        find_sources(["-"], stdin=io.BytesIO(b"a.mp4"))[0].open()


@pytest.mark.parametrize(
    ("url", "shown"),
    [("s3://key:pw@bucket/a.jpg", "bucket/a.jpg"), ("RTSP://cam/1", "rtsp://"),
     ("file:///a", "file://"), ("http:///a.jpg", "http:///a.jpg")],
)  # fmt: skip
def test_other_schemes_are_refused_by_name(url: str, shown: str) -> None:
    for given, stdin in ([url], b""), (["-"], url.encode()):
        with pytest.raises(UsageError) as caught:
            names(*given, stdin=stdin)
        assert shown in str(caught.value)
        assert "pw" not in str(caught.value)
        assert caught.value.hint


def test_names_of_urls_hide_secrets_and_are_safe_file_names() -> None:
    source = source_of("https://me:pw@host/x/%2e%2e%2fa%20b.jpg?token=1")
    assert "pw" not in source.label
    assert "token" not in source.label
    assert source.path == Path("a_b.jpg")
    assert source_of("https://host/").path == Path("image")


@pytest.mark.parametrize("length", [True, False])
def test_large_files_are_not_read_to_their_end(
    server: Server, length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_URL_BYTES", 1 << 20)
    url = server.route("/a?key=s3cret", lambda _: Reply(body=bytes(32 << 20), length=length))
    with pytest.raises(NetworkError, match="1 MiB") as caught:
        source_of(url).open()
    assert "s3cret" not in str(caught.value)
    assert server.body_bytes < 24 << 20


def test_failures_of_the_network(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "READ_S", 0.2)
    monkeypatch.setattr(sources, "TOTAL_S", 0.3)
    silent = server.route("/silent", lambda _: Reply(head_pause_s=5))
    slow = Reply(body=b"x" * 1000, pause_s=0.05, slice_bytes=1)
    cut = Reply(body=b"x" * 1000, cut=10)
    redirect = Reply(302, {"Location": "file:///etc/passwd"})
    for url, words in (
        (server.url + "/absent", "404"),
        (silent, "timed out"),
        (server.route("/slow", lambda _: slow), "too slow"),
        (server.route("/cut", lambda _: cut), "10"),
        (server.route("/elsewhere", lambda _: redirect), "file:"),
        ("http://127.0.0.1:9/a.jpg", "refused"),
    ):
        with pytest.raises(NetworkError, match=words) as caught:
            source_of(url).open()
        assert url in str(caught.value)


def test_which_names_are_images_and_videos() -> None:
    touch("photos/a.jpg", "run/a.jpg", "run/metrics.jsonl", "new/a.jpg", "new/checkpoints/last.pt")
    touch("model/a.jpg", "model/model.safetensors", "films/a.MKV")
    assert [looks_like_image(n) for n in ("photos", "run", "new", "model")] == [True, *[False] * 3]
    for name in ("-", "films", "/dev/video0", "HTTPS://host/", "a.MP4", "a.jpg", "*.none"):
        assert looks_like_image(name), name
    for name in ("best.pt", "hf://org/name", "ssd300-vgg16-coco", "s3://bucket/a"):
        assert not looks_like_image(name), name
    assert split_videos(["a.MP4", "/dev/video0"]) == ["a.MP4", "/dev/video0"]
    assert split_videos(["a.jpg", "-", "https://host/a.jpg?of=x.mov"]) == []
