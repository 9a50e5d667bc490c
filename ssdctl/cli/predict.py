"""`ssdctl predict`."""

from __future__ import annotations

import io
import itertools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.cli.runs import newest_run
from ssdctl.errors import DataError, NetworkError, UsageError
from ssdctl.files import make_dir, refuse_replacing, remove_stale_temporaries
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.packages import check_memory_limit
from ssdctl.runtime.printable import printable_line
from ssdctl.runtime.process_settings import tune_process

if TYPE_CHECKING:
    from ssdctl.inference.drawing import DrawingStyle
    from ssdctl.inference.image_sources import Source
    from ssdctl.inference.predict import ImageDetector, Prediction, UnreadableImage

MAX_NAMED = 3  # failed images in the error


@command(
    app,
    "predict",
    short=(
        "--out",
        "--save",
        "--score",
        "--classes",
        "--tile",
        "--recursive",
        "--bf16",
        "--fp32",
        "--device",
    ),
    panel="Results",
    settings=["predict.*"],
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
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[CKPT|RUN] IMAGE...",
            help="Checkpoint, ONNX file, run folder, detector, or hf://org/name [default: the "
            "newest run]; then images, folders, glob patterns (** matches subfolders), URLs, - for "
            "a list on stdin; or videos, or a camera (/dev/video0)",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Output folder: annotated images (or the --save format) and detections.json",
        ),
    ] = None,
    line_width: Annotated[
        int | None,
        typer.Option(
            "--line-width",
            metavar="PX",
            min=1,
            max=200,
            help="Line width of drawn boxes [default: from the image's size]",
            show_default=False,
        ),
    ] = None,
    hide_labels: Annotated[bool, typer.Option("--hide-labels", help="Draw no class names")] = False,
    hide_scores: Annotated[bool, typer.Option("--hide-scores", help="Draw no scores")] = False,
) -> None:
    """Detect objects in images and videos.

    Results are counted, drawn (--out), or saved for labeling tools (--save); -v prints the boxes.
    An unreadable image is skipped with a warning and exit code 3, a failed download with 4.
    """
    from ssdctl.inference.drawing import DrawingStyle
    from ssdctl.inference.image_sources import find_sources, looks_like_image, split_videos

    settings = call.config.predict
    if settings.save is not None and out is None:
        raise UsageError(f"--save {settings.save} requires a folder", hint="add --out DIR")
    if looks_like_image(arguments[0]):
        checkpoint, images = newest_run(call.console), arguments
    else:
        checkpoint, images = arguments[0], arguments[1:]
    if not images:
        raise UsageError(f"{checkpoint}: no image named", hint="ssdctl predict CKPT IMAGE...")
    folder = None if out is None else Path(out)
    for written in () if folder is None else (folder, folder / "labels", folder / "images"):
        remove_stale_temporaries(written)
    style = DrawingStyle(line_width, not hide_labels, not hide_scores)
    videos = split_videos(images)
    if videos:
        from ssdctl.cli.predict_video import check_video_options, predict_videos

        check_video_options(call, videos, folder)
        predict_videos(call, _load(call, checkpoint), videos, folder, style)
        return
    sources = find_sources(images, recursive=settings.recursive)
    is_drawn = folder is not None and settings.save is None
    targets = _targets(sources, folder) if folder is not None and is_drawn else []
    detector = _load(call, checkpoint)
    failures = _predict(call, detector, sources, folder, targets, style)
    if failures:
        labels = [printable_line(failure.item.label) for failure in failures]
        more = ", ..." if len(labels) > MAX_NAMED else ""
        counted = (
            f"{len(labels)} of {len(sources)} images failed: {', '.join(labels[:MAX_NAMED])}{more}"
        )
        if any(isinstance(failure.error, NetworkError) for failure in failures):
            raise NetworkError(counted, hint="the warnings name the reasons")
        raise DataError(counted, hint="the warnings name the reasons")


def _load(call: Call, checkpoint: str) -> ImageDetector:
    check_memory_limit()
    tune_process()
    from ssdctl.inference.detector import DetectorConfig
    from ssdctl.inference.predict import Options, load_detector

    settings = call.config.predict
    iou = call.config.evaluate.nms_iou if settings.nms_iou is None else settings.nms_iou
    detector, _ = load_detector(
        checkpoint,
        device=settings.device,
        config=DetectorConfig(settings.precision, settings.score, iou),
        options=Options(
            settings.classes, settings.max_detections, settings.tile, settings.tile_overlap
        ),
        mirror=call.config.download.mirror,
    )
    return detector


def _targets(sources: list[Source], out: Path) -> list[Path]:
    """Return the file of each drawn image.

    Raises:
        UsageError: It is one of the images.
    """
    from ssdctl.inference.drawing import DRAWN_FORMATS
    from ssdctl.inference.image_sources import FileSource
    from ssdctl.inference.save import free_stem

    targets, stems = list[Path](), set[str]()
    for source in sources:
        suffix = Path(source.file_name).suffix
        kept = suffix if suffix.lower() in DRAWN_FORMATS else ".png"
        targets.append(out / f"{free_stem(source.file_name, stems)}{kept}")
    images = {s.path.resolve(): s.path for s in sources if isinstance(s, FileSource)}
    for target in targets:
        if target.resolve() in images:
            refuse_replacing(images[target.resolve()], target, "--out")
    return targets


def _predict(
    call: Call,
    detector: ImageDetector,
    sources: list[Source],
    out: Path | None,
    targets: list[Path],
    style: DrawingStyle,
) -> list[UnreadableImage]:
    """Print, draw and save the detections; return the images that cannot be read."""
    from ssdctl.inference.drawing import draw, save_image
    from ssdctl.inference.predict import (
        OpenedImage,
        UnreadableImage,
        detect_ahead,
        open_image,
    )
    from ssdctl.inference.save import image_record, open_writer

    settings, console = call.config.predict, call.console
    writer = None
    if out is not None:
        make_dir(out)  # before the detection, which may take hours
        writer = open_writer(settings.save or "json", out, detector.selected_classes)

    def opened(source: Source, cancelled: threading.Event) -> OpenedImage:
        content = source.open(cancelled)
        return OpenedImage(source, content, open_image(content))

    results = detect_ahead(
        detector, sources, opened, batch_size=settings.batch_size, threads=usable_cores()
    )
    records, failures, objects = [], list[UnreadableImage](), 0
    shown = console.progress(results, total=len(sources), label="predicting", unit="img")
    for found, target in itertools.zip_longest(shown, targets):
        if isinstance(found, UnreadableImage):
            if not isinstance(found.error, DataError | NetworkError):
                raise found.error
            console.warning(str(found.error))
            failures.append(found)
            continue
        result = found.result
        objects += len(result)
        if console.as_json:
            records.append(image_record(found.item.name, result))
        else:
            console.result(None, _line(found, with_boxes=console.verbose))
        if target is not None:
            if isinstance(result.image, io.BytesIO):
                result.image.seek(0)
            # Opened a second time: to keep every image until it is drawn would take gigabytes.
            save_image(draw(open_image(result.image), list(result), style), target)
        if writer is not None:
            writer.add(found.item, result)
    written = [writer.close()] if writer is not None else []
    if console.as_json:
        console.result(records)
    if targets:
        written.insert(0, f"{out}/")
    total = f"{_count(len(sources) - len(failures), 'image')}, {_count(objects, 'object')}"
    console.closing([("done", " -> ".join([total, ", ".join(written)] if written else [total]))])
    return failures


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _line(found: Prediction, *, with_boxes: bool) -> str:
    from ssdctl.inference.results import counted

    line = f"{found.item.label}  {counted(found.result)}  ({1000 * found.seconds:.0f} ms)"
    boxes = [
        f"  {d.name} {d.score:.2f}  {[round(v) for v in d.box]}" for d in found.result if with_boxes
    ]
    return "\n".join(map(printable_line, [line, *boxes]))
