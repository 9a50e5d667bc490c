"""`ssdctl predict`."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.results import name_newest_run
from ssdctl.errors import DataError, DiskError, NetworkError, SsdctlError, Stopped, UsageError
from ssdctl.files import (
    atomic_write,
    free_name,
    make_dir,
    refuse_replacing,
    remove_stale_temporaries,
    require_own_file,
)
from ssdctl.runtime.safe_text import counted, listed, printable_line, quoted
from ssdctl.runtime.signals import ENDING
from ssdctl.runtime.system import tune_process, usable_cores

if TYPE_CHECKING:
    from ssdctl.inference.image_detector import ImageDetector, Prediction
    from ssdctl.inference.sources import ImageSource
    from ssdctl.inference.video import Frame, Video
    from ssdctl.model.results import Detection, Result

MAX_NAMED = 3  # failed images in the error
# An image with such an error is skipped. The first kind here that occurred is the exit code.
IMAGE_FAILURES = (NetworkError, DiskError, DataError)

CheckpointAndImages = Annotated[
    list[str],
    Argument(
        metavar="[CKPT|RUN] IMAGE...",
        help="Checkpoint, ONNX file, run folder, detector, or hf://org/name [default: the "
        "newest run]; then images, folders, glob patterns (** matches subfolders), URLs, - for "
        "a list on stdin; or videos, or a camera (/dev/video0)",
    ),
]
OutputFolder = Annotated[
    str | None,
    Option(
        metavar="DIR",
        help="Output folder: annotated images (or the --save format) and detections.json",
    ),
]
LineWidth = Annotated[
    int | None,
    Option(
        metavar="PX",
        min=1,
        max=200,
        help="Line width of drawn boxes [default: from the image's size]",
    ),
]


@command(
    "predict",
    short="--out --save --score --classes --tile --recursive --bf16 --fp32 --device",
    panel="Results",
    settings="data.tile data.tile_overlap predict.*",
    examples=[
        "ssdctl predict street.jpg   # with the newest run of runs/",
        "ssdctl predict runs/coco-resnet34 street.jpg --out drawn",
        "ssdctl predict ssd300-vgg16-coco street.jpg",
        "ssdctl predict best.pt photos/ --recursive --out drawn --score 0.5",
        "ssdctl predict best.pt 'photos/**/*.jpg' --json > boxes.json",
        "ssdctl predict best.pt photos/ --save coco --out labels --classes car,bus",
        "ssdctl predict best.pt satellite.tif --tile 600 --out drawn",
        "ssdctl predict best.pt drive.mp4 --every 5 --out drawn",
        "find photos -name '*.png' | ssdctl predict best.pt - --json",
    ],
)
def predict(
    call: Call,
    arguments: CheckpointAndImages,
    out: OutputFolder = None,
    line_width: LineWidth = None,
    hide_labels: Annotated[bool, Option("--hide-labels", help="Draw no class names")] = False,
    hide_scores: Annotated[bool, Option("--hide-scores", help="Draw no scores")] = False,
) -> None:
    """Detect objects in images and videos.

    Results are counted, drawn (--out), or saved for labeling tools (--save); -v prints the boxes.
    An image that fails does not stop the others; the command then exits with 3, 4 (download) or
    6 (refused by the file system).
    """
    from ssdctl.data.drawing import DRAWN_FORMATS, require_drawn
    from ssdctl.data.store_folder import refuse_in_dataset
    from ssdctl.inference.sources import find_sources, looks_like_image, split_videos

    if looks_like_image(arguments[0], recursive=call.config.predict.recursive):
        checkpoint, images = name_newest_run(call.console), arguments
    else:
        checkpoint, images = arguments[0], arguments[1:]
    if not images:
        raise UsageError(f"{checkpoint}: no image named", hint="ssdctl predict CKPT IMAGE...")
    folder, videos = None if out is None else Path(out), split_videos(images)
    call = _with_fitting_save(call, folder, videos)
    settings = call.config.predict
    drawn = folder if settings.save is None else None
    drawing = {
        "--line-width": line_width,
        "--hide-labels": hide_labels,
        "--hide-scores": hide_scores,
    }
    if drawn is None and (given := [option for option, value in drawing.items() if value]):
        raise UsageError(f"{given[0]} is for drawn images", hint="add --out DIR, without --save")
    if folder is not None:
        refuse_in_dataset(folder)
        for written in (folder, folder / "labels", folder / "images"):
            remove_stale_temporaries(written)
    style = {"line_width": line_width, "labels": not hide_labels, "scores": not hide_scores}
    if videos:
        call.config.require_not_given(["predict.recursive"], "is for folders", "leave it out")
        targets = _check_videos(videos, folder, drawn)
        _predict_videos(call, _load(call, checkpoint), videos, folder, targets, style)
        return
    of_videos = ["predict.every", "predict.max_frames"]
    call.config.require_not_given(of_videos, "is for videos", "leave it out")
    sources = find_sources(images, recursive=settings.recursive)
    targets = [] if drawn is None else _targets(sources, drawn, require_drawn, DRAWN_FORMATS)
    _predict(call, _load(call, checkpoint), sources, folder, targets, style)


def _with_fitting_save(call: Call, out: Path | None, videos: list[str]) -> Call:
    """Refuse a --save that does not fit the call; ignore that of a file or a variable."""
    save, refuse = call.config.predict.save, call.config.require_not_given
    if save is not None and out is None:
        refuse(["predict.save"], f"{save} requires a folder", "add --out DIR")
    elif save not in (None, "json") and videos:
        hint = "extract frames first: ffmpeg -i VIDEO -vf fps=1 frames/%06d.jpg"
        refuse(["predict.save"], f"{save} is for images", hint)
    else:
        return call
    return call._replace(config=call.config.with_value("predict.save", None))


def _load(call: Call, checkpoint: str) -> ImageDetector:
    tune_process()
    from ssdctl.inference.predict import load_detector

    return load_detector(checkpoint, call.config)[0]


def _targets(
    sources: list[ImageSource],
    out: Path,
    check: Callable[[Path, str], None],
    formats: Collection[str],
    other: str = ".png",
) -> list[Path]:
    """Return the file of each drawn image or video; one of the inputs themselves is refused.

    Args:
        check: Refuses to replace a file that is not drawn.
        formats: Suffixes that are kept; others become `other`.
    """
    targets, stems = list[Path](), dict[str, int]()
    for source in sources:
        suffix = source.path.suffix
        kept = suffix if suffix.lower() in formats else other
        targets.append(out / f"{free_name(source.path.stem, stems)}{kept}")
    inputs = {s.path.resolve(): s.path for s in sources if not s.url}
    for target in targets:
        if (path := inputs.get(target.resolve())) is not None:
            refuse_replacing(path, target, "--out")
        check(target, "--out")
    return targets


def _predict(
    call: Call,
    detector: ImageDetector,
    sources: list[ImageSource],
    out: Path | None,
    targets: list[Path],
    style: dict[str, Any],
) -> None:
    """Print, draw and save the detections; an image that cannot be read fails only at the end."""
    from ssdctl.inference.save import WRITERS

    writer, settings = None, call.config.predict
    if out is not None:
        # Before the detection, which may take hours.
        writer = WRITERS[settings.save or "json"](make_dir(out), detector.selected_classes)
    records, failures = list[Any](), list[tuple[str, SsdctlError]]()
    interrupt: BaseException | None = None
    images, objects, first_only = 0, 0, list[str]()
    shown = _detect(call, detector, sources, first_only)
    try:
        for found, target in itertools.zip_longest(shown, targets):
            result = _drawn(found.result, target, style)
            if isinstance(result, SsdctlError):
                _warn_of_failure(call, result)
                failures.append((printable_line(found.item.label), result))
                continue
            if writer is not None:
                writer.add(found.item, result)
            images, objects = images + 1, objects + len(result)
            records += _record(call, found, result)
    except (KeyboardInterrupt, BrokenPipeError, SsdctlError) as error:
        if not images:
            raise
        interrupt = error  # after the results until here are written
    if first_only:
        files = counted(len(first_only), "file")
        named = listed(sorted(first_only), MAX_NAMED)
        call.console.warning(f"only the first frame of {files} with several is read: {named}")
    written = [f"{out}/"] if targets else []
    if not images:  # earlier results are not replaced
        out, written = None, []
    elif writer is not None:
        written.append(writer.close())
    total = f"{counted(images, 'image')}, {counted(objects, 'object')}"
    _close(call, records, " -> ".join(filter(None, [total, ", ".join(written)])), out)
    if interrupt is not None:
        if writer is not None and writer.names and str(interrupt) in ENDING:
            names = ", ".join(str(Path(out or "", name)) for name in writer.names)
            hint = f"remove {names}, or choose another --out, then run it again"
            raise Stopped(f"stopped by {interrupt}", hint=hint)
        raise interrupt
    if failures:
        raise _error(failures, len(sources), "images")


def _drawn(
    result: Result | SsdctlError, target: Path | None, style: dict[str, Any]
) -> Result | SsdctlError:
    """Draw a result; return it, or the error of an image that cannot be read again."""
    if isinstance(result, SsdctlError) or target is None:
        return result
    if isinstance(result.image, io.BytesIO):
        result.image.seek(0)
    try:
        # Open the image again: keeping every image until it is drawn would take gigabytes.
        result.save(target, **style)
    except DataError as error:
        return error
    return result


def _warn_of_failure(call: Call, error: SsdctlError) -> None:
    if not isinstance(error, IMAGE_FAILURES):
        raise error
    call.console.warning(str(error))


def _record(call: Call, found: Prediction, result: Result) -> list[dict[str, Any]]:
    from ssdctl.inference.save import image_record
    from ssdctl.model.results import count_text

    if call.console.as_json:
        return [image_record(found.item.name, result)]
    about = f"{found.item.label}  {count_text(result)}  ({1000 * found.seconds:.0f} ms)"
    call.console.result(None, _text(about, result if call.console.verbose else ()))
    return []


def _close(call: Call, records: list[Any], done: str, out: Path | None) -> None:
    if call.console.as_json:
        call.console.result(records)
    facts, commands = [("done", done)], []
    if call.config.predict.save == "yolo" and out is not None:
        facts.append(("then", "correct the boxes in your labeling tool"))
        commands.append(f"ssdctl prepare --data {quoted(out)}")
    call.console.closing(facts, commands)


def _detect(
    call: Call, detector: ImageDetector, sources: list[ImageSource], first_only: list[str]
) -> Iterator[Prediction]:
    """Yield the detections; names of files with more frames are added to `first_only`."""
    from ssdctl.data.image_decode import has_more_frames
    from ssdctl.inference.image_detector import PreparedImage, detect_ahead, open_image

    def prepare(source: ImageSource, canceled: threading.Event) -> PreparedImage:
        content = source.open(canceled)
        opened = open_image(content)
        if has_more_frames(content):
            first_only.append(printable_line(source.label))
        return detector.prepare(source, content, opened)

    how = {"batch_size": call.config.predict.batch_size, "threads": usable_cores()}
    results = detect_ahead(detector, sources, prepare, **how)
    return call.console.progress(results, total=len(sources), label="predicting", unit="img")


def _error(failures: list[tuple[str, SsdctlError]], count: int, what: str) -> SsdctlError:
    kind = next(k for k in IMAGE_FAILURES if any(isinstance(error, k) for _, error in failures))
    names = listed([name for name, _ in failures], MAX_NAMED)
    return kind(
        f"failed {what} ({len(failures)} of {count}): {names}",
        hint="the warnings name the reasons",
    )


def _check_videos(videos: list[str], out: Path | None, drawn: Path | None) -> list[Path]:
    """Check before the network is loaded that all videos exist; return the files to draw."""
    from ssdctl.inference.save import RECORDS
    from ssdctl.inference.sources import ImageSource, is_camera
    from ssdctl.inference.video import require_drawn_video

    for name in videos:
        if not Path(name).exists():
            raise UsageError(f"{name}: no such {'camera' if is_camera(name) else 'file'}")
    if out is not None:
        require_own_file(out / "detections.jsonl", "--out", RECORDS)
    sources = [ImageSource(Path(name)) for name in videos]
    return [] if drawn is None else _targets(sources, drawn, require_drawn_video, (), ".mp4")


def _predict_videos(
    call: Call,
    detector: ImageDetector,
    videos: list[str],
    out: Path | None,
    targets: list[Path],
    style: dict[str, Any],
) -> None:
    """Predict on videos; one that cannot be read does not stop the others."""
    failures = list[tuple[str, SsdctlError]]()
    failure: BaseException | None = None
    with contextlib.ExitStack() as stack:
        lines = None
        if out is not None:
            lines = stack.enter_context(atomic_write(out / "detections.jsonl"))
        for name, target in itertools.zip_longest(videos, targets):
            try:
                _predict_video(call, detector, name, target, lines, style)
            except DataError as error:
                call.console.warning(str(error))
                failures.append((printable_line(name), error))
            except (KeyboardInterrupt, BrokenPipeError, SsdctlError) as error:
                failure = error
                break
        if failures and failure is None:
            failure = _error(failures, len(videos), "videos")
        if failure is not None and (lines is None or not lines.tell()):
            raise failure  # earlier results are not replaced
    if failure is not None:
        raise failure


def _predict_video(
    call: Call,
    detector: ImageDetector,
    name: str,
    target: Path | None,
    lines: IO[bytes] | None,
    style: dict[str, Any],
) -> None:
    """Print the detections of each frame as they come, and write an annotated video.

    Memory does not grow with the length. A camera is read until Ctrl-C or --max-frames. The frames
    before a damaged one, or before Ctrl-C, are written.
    """
    from ssdctl.inference.sources import is_camera
    from ssdctl.inference.video import VideoWriter, open_video

    settings = call.config.predict
    count, written = 0, ""
    failure: DataError | KeyboardInterrupt | BrokenPipeError | None = None
    with contextlib.ExitStack() as stack:
        video, writer = stack.enter_context(open_video(name)), None
        if target is not None:
            file = stack.enter_context(atomic_write(target))
            writer = VideoWriter(file, video.rate / settings.every, style)
            written = f", written to {target}"
        try:
            for frame, found in _frames(call, detector, name, video):
                if writer is not None:
                    writer.add(frame, found)
                count += 1
                _print_frame(call, name, frame, found, lines)
        except (DataError, KeyboardInterrupt, BrokenPipeError) as error:
            failure = error
        if failure is not None and not count:
            raise failure  # nothing is written
        if writer is not None:
            writer.close()  # not after a failed write, whose error it would hide
        call.console.info(f"{name}: {counted(count, 'frame')}{written}")
    if failure is not None and not (is_camera(name) and isinstance(failure, KeyboardInterrupt)):
        raise failure


def _frames(
    call: Call, detector: ImageDetector, name: str, video: Video
) -> Iterator[tuple[Frame, Result]]:
    from ssdctl.inference.sources import is_camera
    from ssdctl.inference.video import predict_frames

    settings, live = call.config.predict, is_camera(name)
    frames = video.frames(every=settings.every, limit=settings.max_frames)
    total = None if live or video.num_frames is None else -(-video.num_frames // settings.every)
    # A camera's frames are not collected to batches: the result would come late.
    batch_size = 1 if live else settings.batch_size
    results = predict_frames(detector, frames, batch_size=batch_size)
    return call.console.progress(results, total=total, label=f"predicting {name}", unit="frame")


def _print_frame(
    call: Call, name: str, frame: Frame, found: Result, lines: IO[bytes] | None
) -> None:
    from ssdctl.inference.save import image_record
    from ssdctl.model.results import count_text

    record = image_record(name, found, frame=frame.number, time_s=round(frame.time_s, 4))
    if lines is not None:
        lines.write(json.dumps(record).encode() + b"\n")
    about = f"{name} {frame.time_s:.2f} s  {count_text(found)}"
    call.console.result(record, _text(about, found if call.console.verbose else ()))


def _text(about: str, detections: Iterable[Detection]) -> str:
    boxes = [f"  {d.name} {d.score:.2f}  {[round(v) for v in d.box]}" for d in detections]
    return "\n".join(map(printable_line, [about, *boxes]))
