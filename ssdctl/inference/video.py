"""Detect on the frames of videos and cameras, and write annotated videos, with PyAV.

    with open_video("clip.mp4") as video:
        for frame, found in predict_frames(detector, video.frames(every=2), batch_size=8): ...

Memory does not depend on the length: a few batches of frames are decoded ahead, in one thread.
Files are untrusted: only common containers are opened, which cannot name other files or URLs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.data.drawing import MARK
from ssdctl.data.image_decode import MAX_PIXELS
from ssdctl.errors import DataError, SsdctlError, import_package
from ssdctl.files import has_content, refuse_other_file
from ssdctl.inference.image_detector import ImageDetector, PreparedImage, detect_ahead
from ssdctl.inference.sources import is_camera
from ssdctl.model.results import Result

log = logging.getLogger(__name__)

CONTAINERS = "mov,mp4,matroska,webm,avi,mpeg,mpegts,flv,asf,ogg"
ENCODERS = ("libx264", "mpeg4")  # the first that this build of FFmpeg has
TICKS = 30_000  # per second in written videos; MPEG-4 allows up to 65,535
DEFAULT_RATE = 25  # frames per second if a video does not state it
MAX_RATE = 240
MAX_MISSING_S = 1.0  # at the end of an intact MP4 file, whose edit list may skip frames
UNREADABLE_STREAM = "cannot be decoded (pipes need Matroska, or MP4 with -movflags +faststart)"
SEGMENT = b"\x18\x53\x80\x67"  # Matroska's element of everything after the first header
SEGMENT_WITHIN = 4096  # bytes
UNKNOWN_SIZE = (1 << 56) - 1  # live recordings have it


class Frame(NamedTuple):
    number: int  # from 0, counted in the file
    time_s: float  # since the start
    pixels: NDArray[np.uint8]  # (H, W, 3), upright


class Video:
    def __init__(self, av: ModuleType, container: Any, name: str) -> None:
        self._av, self._container, self._name = av, container, name
        if not container.streams.video:
            raise DataError(f"{name}: it has no video stream")
        self._stream = container.streams.video[0]
        self._stream.thread_type = "AUTO"
        context = self._stream.codec_context
        if context.width * context.height > MAX_PIXELS:
            raise DataError(f"{name}: frames of {context.width} x {context.height} are too large")

    @property
    def rate(self) -> float:
        rate = float(self._stream.average_rate or DEFAULT_RATE)
        return rate if 0 < rate <= MAX_RATE else DEFAULT_RATE

    @property
    def num_frames(self) -> int | None:
        """The number of frames that the file states, if it does."""
        return self._stream.frames or None

    def frames(self, *, every: int = 1, limit: int | None = None) -> Iterator[Frame]:
        """Yield every Nth frame, at most `limit`; a damaged file raises DataError after them."""
        decoded = itertools.islice(enumerate(self._decoded()), 0, None, every)
        for number, (time_s, frame) in itertools.islice(decoded, limit):
            yield Frame(number, time_s, self._pixels(frame))

    def _decoded(self) -> Iterator[tuple[float, Any]]:
        """Yield all frames with their times, which continue if the time stamps go back."""
        count, starts, start_s = 0, 0, 0.0
        step_s = 1 / self.rate  # between the last two frames
        time_s = -step_s
        try:
            for frame in self._container.decode(self._stream):
                expected_s = time_s + step_s
                stamp_s = start_s + expected_s if frame.time is None else float(frame.time)
                if not count or stamp_s - start_s < time_s:  # recordings that were joined
                    starts, start_s = starts + 1, stamp_s - expected_s
                    if starts == 2:
                        log.warning("%s: times go back at frame %d; continued", self._name, count)
                step_s = stamp_s - start_s - time_s or step_s
                count, time_s = count + 1, stamp_s - start_s
                yield time_s, frame
        except (self._av.error.FFmpegError, ValueError) as error:
            problem = "damaged video" if Path(self._name).is_file() else UNREADABLE_STREAM
            raise DataError(f"{self._name}: {problem}: {_reason(error)}") from None
        except OSError as error:
            raise DataError(f"{self._name}: cannot be read on: {_reason(error)}") from None
        if not count:
            raise DataError(f"{self._name}: damaged video: no frame can be decoded")
        if self._is_truncated(count, time_s):
            raise DataError(f"{self._name}: damaged video: the file ends after {count} frames")

    def _is_truncated(self, count: int, last_s: float) -> bool:
        """Return whether the file is shorter than its headers say: FFmpeg reports a normal end."""
        container, stream = self._container, self._stream
        kind = container.format.name
        if kind.startswith("matroska") and (path := Path(self._name)).is_file():
            with path.open("rb") as file:
                head = file.read(SEGMENT_WITHIN)
            start = head.find(SEGMENT) + len(SEGMENT) + 8
            size = int.from_bytes(head[start - 8 : start], "big") - (1 << 56)
            return 0 <= size < UNKNOWN_SIZE and start + size > container.size
        if count >= stream.frames or not stream.duration:
            return False
        if kind == "avi":  # in frames; FFmpeg estimates it for a truncated file from the size
            return bool(stream.duration < stream.frames)
        missing_s = stream.duration * stream.time_base - last_s
        return kind.startswith("mov") and missing_s > MAX_MISSING_S

    def _pixels(self, frame: Any) -> NDArray[np.uint8]:
        if frame.width * frame.height > MAX_PIXELS:
            raise DataError(f"{self._name}: a frame of {frame.width} x {frame.height} is too large")
        pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
        quarters = round(getattr(frame, "rotation", 0) / 90) % 4  # counterclockwise; of phones
        return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels


def require_drawn_video(path: Path, option: str) -> None:
    """Refuse to replace a file, unless it is a video that `VideoWriter` wrote, or empty."""
    if not has_content(path, option):
        return
    av = import_package("av")
    with contextlib.suppress(av.error.FFmpegError), av.open(str(path)) as container:
        if container.metadata.get("comment") == MARK:
            return
    refuse_other_file(path, option)


@contextlib.contextmanager
def open_video(name: str) -> Iterator[Video]:
    """Open a video file or a camera.

    Raises:
        UsageError: PyAV is not installed.
        DataError: It cannot be opened, or is not a video.
    """
    av = import_package("av")
    with contextlib.ExitStack() as stack:
        try:
            if is_camera(name):
                container = stack.enter_context(av.open(name, format="v4l2"))
            else:
                file = stack.enter_context(Path(name).open("rb"))
                options = {"format_whitelist": CONTAINERS}
                container = stack.enter_context(av.open(file, container_options=options))
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise DataError(f"{name}: not a readable video: {_reason(error)}") from None
        yield Video(av, container, name)


def predict_frames(
    detector: ImageDetector, frames: Iterator[Frame], *, batch_size: int
) -> Iterator[tuple[Frame, Result]]:
    """Detect on frames in their order; a thread decodes the next batches in the meantime."""

    def prepare(_: None, canceled: threading.Event) -> PreparedImage | None:
        frame = next(frames, None)
        return frame and detector.prepare(frame, frame.pixels, Image.fromarray(frame.pixels))

    stream = detect_ahead(
        detector, itertools.repeat(None), prepare, batch_size=batch_size, threads=1
    )
    with contextlib.closing(stream):
        for frame, result, _ in stream:
            if isinstance(result, SsdctlError):
                raise result
            yield frame, result


class VideoWriter:
    """Write frames with their detections as an MP4 file, which must be seekable.

    The rate is a hint for the encoder; each frame keeps its time. The style is keywords of
    `Result.plot`.
    """

    def __init__(self, file: IO[bytes], rate: float, style: Mapping[str, Any]) -> None:
        self._av, self._style = import_package("av"), style
        self._container = self._av.open(file, "w", format="mp4")
        self._container.metadata["comment"] = MARK
        self._rate = max(round(rate), 1)
        self._stream: Any = None
        self._last = -1

    def add(self, frame: Frame, found: Result) -> None:
        image = found.plot(**self._style)
        # The usual pixel format stores colors for squares of 2 x 2 pixels.
        even = image.crop((0, 0, max(image.width // 2 * 2, 2), max(image.height // 2 * 2, 2)))
        if self._stream is None:
            self._stream = self._add_stream(*even.size)
        if even.size != (self._stream.width, self._stream.height):
            even = even.resize((self._stream.width, self._stream.height))
        encoded = self._av.VideoFrame.from_ndarray(np.asarray(even), format="rgb24")
        self._last = encoded.pts = max(round(frame.time_s * TICKS), self._last + 1)
        encoded.time_base = self._stream.codec_context.time_base
        self._container.mux(self._stream.encode(encoded))

    def close(self) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))
        self._container.close()

    def _add_stream(self, width: int, height: int) -> Any:
        name = next(n for n in ENCODERS if n in self._av.codecs_available)
        stream = self._container.add_stream(name, rate=self._rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, TICKS)
        if name == "libx264":
            stream.options = {"preset": "veryfast", "crf": "23"}
        return stream


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0]
