"""Find the images and videos that a user names.

for source in find_sources(["photos", "https://host/a.jpg", "-"]):
    pixels = read_rgb(source.open())
"""

from __future__ import annotations

import codecs
import glob
import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import unquote, urlsplit

from ssdctl.checkpoint.locate import is_model_folder
from ssdctl.data.drawing import is_drawn
from ssdctl.data.image_files import IMAGE_SUFFIXES, refuse_unlisted
from ssdctl.errors import DataError, NetworkError, UsageError
from ssdctl.runs.folder import RunDir
from ssdctl.runtime.safe_text import counted, quoted, redact_url

log = logging.getLogger(__name__)

STDIN = "-"
MAX_URL_BYTES = 256 << 20
CONNECT_S = 10.0
READ_S = 30.0  # without a byte
TOTAL_S = 120.0
CHUNK_BYTES = 1 << 16
SEPARATELY = "run predict once for videos and once for images"
GIVE_PATH = "fetch the file by other means, and give its path"
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts"),
    *(".flv", ".wmv", ".ogv"),
)
_CAMERA = re.compile(r"/dev/video\d+")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_sessions = threading.local()


class ImageSource(NamedTuple):
    """An image in a file or on a web server."""

    path: Path  # for a URL: a safe name of files that are written
    url: str = ""

    @property
    def name(self) -> str:
        """The name in results."""
        return self.url or str(self.path)

    @property
    def label(self) -> str:
        """The name in messages, without passwords and tokens."""
        return redact_url(self.url) if self.url else str(self.path)

    def open(self, canceled: threading.Event | None = None) -> Path | io.BytesIO:
        """Return the path, or the content of a URL or pipe, for `read_rgb`."""
        if is_video(self.name):
            raise DataError(f"{self.label}: a video, not an image; {SEPARATELY}")
        if self.url:
            content = fetch_image(self.url, canceled)
        elif _is(self.path.is_fifo):
            content = self.path.read_bytes()
        else:
            return self.path
        file = io.BytesIO(content)
        setattr(file, "name", self.label)  # noqa: B010 - read_rgb names it in errors
        return file


def _is(check: Callable[[], bool]) -> bool:
    """Return what a check of a path returns; of a name that is too long, False."""
    try:
        return check()
    except OSError:  # the error of reading it says so
        return False


def source_of(name: str | os.PathLike[str]) -> ImageSource:
    """Return the image that a path or a URL names; the file need not exist.

    Raises:
        UsageError: A URL that is not http(s), or not a valid one.
    """
    text = os.fspath(name)
    match = _SCHEME.match(text) if isinstance(name, str) else None
    if match is None:
        return ImageSource(Path(text))
    scheme = match[1].lower()
    if scheme not in ("http", "https"):
        raise UsageError(
            f"{redact_url(text)}: {scheme}:// is not supported; images are files, folders, "
            "patterns, or http:// and https:// URLs",
            hint="mount or copy it (aws s3 sync, rclone copy), and give the path without file://; "
            "of a stream, save frames first: ffmpeg -i URL -vf fps=1 frames/%06d.jpg",
        )
    try:
        host = urlsplit(text).hostname
    except ValueError:
        host = None
    if not host:
        raise UsageError(f"{redact_url(text)}: not a valid URL", hint="check the host name")
    file_name = unquote(urlsplit(text).path).rpartition("/")[2]
    return ImageSource(Path(re.sub(r"[^\w.-]", "_", file_name).lstrip(".")[-100:] or "image"), text)


def find_sources(
    names: Sequence[str], *, recursive: bool = False, stdin: IO[bytes] | None = None
) -> list[ImageSource]:
    """Return the images that files, folders, glob patterns, http(s) URLs and `-` name, in order.

    A name that matches nothing is kept as a file, which fails when it is opened: the others are
    still done. `-` is a list on `stdin`: a file or URL per line, or separated by NUL.

    Raises:
        UsageError: A folder without images, another URL.
        DiskError: A folder cannot be listed.
    """
    sources: list[ImageSource] = []
    for name in names:
        path = Path(name)
        if name == STDIN:
            sources += _listed(stdin or sys.stdin.buffer)
        elif _SCHEME.match(name):
            sources.append(source_of(name))
        elif _is(path.is_dir):
            sources += map(ImageSource, _in_folder(path, recursive))
        elif _is_pattern(name):
            sources += map(ImageSource, _without_drawn(_matches(name)) or [path])
        else:
            sources.append(ImageSource(path))
    return sources


def looks_like_image(name: str, *, recursive: bool = False) -> bool:
    """Return whether an argument names images or a video, and not a checkpoint, by its form.

    Paths of images, videos and cameras, patterns, web addresses, `-`, and folders with images or
    videos, except runs and models.
    """
    path = Path(name)
    if name == STDIN or is_video(name) or name.lower().startswith(("http://", "https://")):
        return True
    if _is(path.is_dir):
        run = RunDir(path)
        if is_model_folder(path) or run.metrics.exists() or run.checkpoints.is_dir():
            return False
        files = path.rglob("*") if recursive else path.iterdir()
        return any(p.suffix.lower() in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES) for p in files)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return True
    return _is_pattern(name)


def _is_pattern(name: str) -> bool:
    return glob.has_magic(name) and not _is(Path(name).exists)


def _matches(pattern: str) -> list[str]:
    """Return the files that fit a pattern."""
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path's takes no absolute pattern
    return sorted(name for name in found if Path(name).is_file())


def _without_drawn(names: Sequence[str]) -> list[Path]:
    """Return the files of a pattern without earlier results, unless these are all that fit it."""
    paths = [Path(name) for name in names]
    own = [path for path in paths if not is_drawn(path)]
    if 0 < len(own) < len(paths):
        log.info("skipped %s that predict has drawn", counted(len(paths) - len(own), "image"))
    return own or paths


def is_camera(name: str) -> bool:
    return _CAMERA.fullmatch(name) is not None


def is_video(name: str) -> bool:
    """Return whether a name is of a video file or a camera, by its form; a folder is neither."""
    path = Path(re.split("[?#]", name)[0] if _SCHEME.match(name) else name)
    return is_camera(name) or (path.suffix.lower() in VIDEO_SUFFIXES and not _is(path.is_dir))


def refuse_video_url(name: str) -> None:
    if _SCHEME.match(name):
        raise UsageError(
            f"{redact_url(name)}: videos by URL are not supported",
            hint="fetch the file, and give its path",
        )


def split_videos(names: Sequence[str]) -> list[str]:
    """Return the files if all are videos or cameras, an empty list if all are images.

    Raises:
        UsageError: Some are and some are not, or a video is given by URL.
    """
    videos = [name for name in names if is_video(name)]
    for name in videos:
        refuse_video_url(name)
    if videos and len(videos) < len(names):
        other = next(name for name in names if name not in videos)
        raise UsageError(
            f"{videos[0]} is a video, {redact_url(other)} is not",
            hint=SEPARATELY,
        )
    files = ((_is_pattern(name) and _matches(name)) or [name] for name in videos)
    return [file for several in files for file in several]


def _in_folder(folder: Path, recursive: bool) -> list[Path]:
    """Return the images in a folder, without hidden files, links to folders, and earlier results.

    Earlier results are drawn images, and links to images in the folder, as of `--save yolo`.
    """

    files = list[Path]()
    for parent, below, names in os.walk(folder, onerror=refuse_unlisted):
        below[:] = [name for name in below if recursive and not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    files.sort()
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    root = folder.resolve()
    originals = {root / path.relative_to(folder) for path in images if not path.is_symlink()}
    own = [
        path
        for path in images
        if not is_drawn(path)
        and not (path.is_symlink() and Path(os.path.realpath(path)) in originals)
    ]
    notes = []
    if len(own) < len(images):
        skipped = counted(len(images) - len(own), "image")
        notes.append(f"skipped {skipped} that predict has drawn, or that link to others")
    if videos := [path for path in files if is_video(str(path))]:
        start = glob.escape(str(folder)) + ("/**" if recursive else "")
        patterns = " ".join(quoted(f"{start}/*{s}") for s in sorted({p.suffix for p in videos}))
        skipped = counted(len(videos), "video")
        notes.append(f"skipped {skipped}; detect on them with: ssdctl predict CKPT {patterns}")
    if not own:
        notes += [] if recursive else ["--recursive searches the folders below, too"]
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        problem = f"{folder}: a folder without images ({suffixes})"
        raise UsageError(problem, hint="; ".join(notes) or None)
    for note in notes:
        log.info("%s: %s", folder, note)
    return own


def _listed(stdin: IO[bytes]) -> list[ImageSource]:
    content = stdin.read().removeprefix(codecs.BOM_UTF8)
    lines = content.split(b"\0") if b"\0" in content else content.splitlines()
    sources = [source_of(os.fsdecode(line)) for line in lines if line.strip()]
    if not sources:
        raise UsageError(
            "-: standard input names no images",
            hint="one path or URL per line: find photos -name '*.jpg' | ssdctl predict CKPT -",
        )
    return sources


def fetch_image(url: str, canceled: threading.Event | None = None) -> bytes:
    """Fetch a file of at most `MAX_URL_BYTES` within `TOTAL_S` seconds.

    Raises:
        NetworkError: No answer in time, a refusal, a file that is too large, or it was canceled.
    """
    import requests
    import urllib3

    from ssdctl.download.http import describe_error, open_session, request_headers

    if not hasattr(_sessions, "session"):  # each thread reuses its connections
        _sessions.session = open_session(connections=1)
        _sessions.session.headers.update(request_headers(None))
    name, deadline, content = redact_url(url), time.monotonic() + TOTAL_S, bytearray()
    try:
        with _sessions.session.get(url, stream=True, timeout=(CONNECT_S, READ_S)) as reply:
            reply.raise_for_status()
            # iter_content would wait for a whole chunk, however slowly its bytes come.
            while data := reply.raw.read1(CHUNK_BYTES):
                content += data
                if canceled is not None and canceled.is_set():
                    raise NetworkError(f"{name}: canceled")
                if len(content) > MAX_URL_BYTES:
                    problem = f"larger than {MAX_URL_BYTES >> 20} MiB, the limit of an image by URL"
                    raise NetworkError(f"{name}: {problem}", hint=GIVE_PATH)
                if time.monotonic() > deadline:
                    problem = f"{len(content):,} bytes after {TOTAL_S:g} s: too slow"
                    raise NetworkError(f"{name}: {problem}", hint=GIVE_PATH)
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        reason = describe_error(error)
        raise NetworkError(f"{name}: {reason}", hint="check the URL") from error
    return bytes(content)
