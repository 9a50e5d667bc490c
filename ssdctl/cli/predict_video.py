"""`ssdctl predict` on videos and cameras."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.cli.command import Call
from ssdctl.errors import DataError, UsageError
from ssdctl.files import atomic_write, refuse_replacing
from ssdctl.inference.image_sources import is_camera
from ssdctl.runtime.printable import printable_line

if TYPE_CHECKING:
    from ssdctl.inference.drawing import DrawingStyle
    from ssdctl.inference.predict import ImageDetector
    from ssdctl.inference.results import Result
    from ssdctl.inference.video import Frame

Sink = Callable[["Frame", "Result"], None]


def check_video_options(call: Call, videos: list[str], out: Path | None) -> None:
    """Check before the network is loaded that all videos exist and that the options fit.

    Raises:
        UsageError: They do not.
    """
    save = call.config.predict.save
    if save not in (None, "json"):
        raise UsageError(
            f"--save {save} is for images",
            hint="extract frames first: ffmpeg -i VIDEO -vf fps=1 frames/%06d.jpg",
        )
    for name in videos:
        if not Path(name).exists():
            raise UsageError(f"{name}: no such {'camera' if is_camera(name) else 'file'}")
    names = [Path(name).stem for name in videos]
    if len(set(names)) < len(names):
        raise UsageError("two videos have the same name", hint="run predict once for each")
    if out is not None and save is None:
        for name in videos:
            refuse_replacing(Path(name), _annotated(out, name), "--out")


def predict_videos(
    call: Call, detector: ImageDetector, videos: list[str], out: Path | None, style: DrawingStyle
) -> None:
    """Print the detections of each frame as they come, and write annotated videos.

    Memory does not grow with the length. A camera is read until Ctrl-C or --max-frames.

    Raises:
        DataError: A video is damaged or not one; the frames before, and the other videos, are done.
    """
    from ssdctl.inference.save import image_record

    failures = []
    with contextlib.ExitStack() as stack:
        lines = None
        if out is not None:
            lines = stack.enter_context(atomic_write(out / "detections.jsonl"))
        for name in videos:
            is_drawn = out is not None and call.config.predict.save is None
            target = _annotated(out, name) if out is not None and is_drawn else None

            def add(frame: Frame, found: Result, name: str = name) -> None:
                at = {"frame": frame.number, "time_s": round(frame.time_s, 4)}
                record = image_record(name, found, **at)
                if lines is not None:
                    lines.write(json.dumps(record).encode() + b"\n")
                if call.console.as_json or found:
                    call.console.result(record, _line(name, frame, found))

            try:
                _predict_video(call, detector, name, target, add, style)
            except DataError as error:
                call.console.warning(str(error))
                failures.append(error)
    if failures:
        raise DataError(f"{len(failures)} of {len(videos)} videos are damaged; see the warnings")


def _annotated(out: Path, name: str) -> Path:
    """Return the annotated file of a video."""
    return out / f"{Path(name).stem}.mp4"


def _predict_video(
    call: Call,
    detector: ImageDetector,
    name: str,
    target: Path | None,
    add: Sink,
    style: DrawingStyle,
) -> None:
    from ssdctl.inference.video import open_video, predict_frames

    settings = call.config.predict
    live = is_camera(name)
    failure = None
    with open_video(name) as video, _writer(target, video.rate / settings.every, style) as draw:
        frames = video.frames(every=settings.every, limit=settings.max_frames)
        total = None if live or video.num_frames is None else -(-video.num_frames // settings.every)
        # A camera's frames are not collected to batches: the result would come late.
        batch_size = 1 if live else settings.batch_size
        results = predict_frames(detector, frames, batch_size=batch_size)
        count = 0
        try:
            for frame, found in call.console.progress(
                results, total=total, label=f"predicting {name}", unit="frame"
            ):
                add(frame, found)
                draw(frame, found)
                count += 1
        except DataError as error:  # the frames before it are written
            failure = error
        except KeyboardInterrupt:
            if not live:
                raise
        call.console.info(f"{name}: {count} frames" + (f", written to {target}" if target else ""))
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _writer(target: Path | None, rate: float, style: DrawingStyle) -> Iterator[Sink]:
    """Write frames to an annotated video, published at the end; without a target, do nothing."""
    if target is None:
        yield lambda frame, found: None
        return
    from ssdctl.inference.video import VideoWriter

    with atomic_write(target) as file:
        writer = VideoWriter(file, rate, style)
        try:
            yield writer.add
        finally:
            writer.close()


def _line(name: str, frame: Frame, found: Result) -> str:
    from ssdctl.inference.results import counted

    return printable_line(f"{name} {frame.time_s:.2f} s  {counted(found)}")
