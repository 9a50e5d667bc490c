"""`ssdctl predict`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.errors import DataError, NetworkError, UsageError
from ssdctl.files import atomic_write, make_dir, refuse_replacing
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.printable import printable_line
from ssdctl.runtime.process_settings import tune_process

if TYPE_CHECKING:
    from ssdctl.inference.predict import Predictor
    from ssdctl.inference.results import Prediction, UnreadablePicture
    from ssdctl.inference.sources import Source


@command(
    app,
    "predict",
    panel="Results",
    settings=["predict.*"],
    examples=[
        "ssdctl predict runs/coco-resnet34 street.jpg",
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
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN",
            help="Checkpoint, ONNX file, run folder, detector, or hf://org/name",
            show_default=False,
        ),
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE...",
            help="Images, folders, glob patterns (** matches subfolders), URLs, - for a list on "
            "stdin; or videos, or a camera (/dev/video0)",
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
) -> None:
    """Detect objects in images and videos.

    Results are listed, drawn (--out), or saved for labeling tools (--save). An unreadable image is
    skipped with a warning and exit code 3, one that cannot be fetched with 4.
    """
    from ssdctl.inference.sources import UrlSource, find_sources, split_videos

    settings = call.config.predict
    if settings.save is not None and out is None:
        raise UsageError(f"--save {settings.save} requires a folder", hint="add --out DIR")
    videos = split_videos(images)
    if videos:
        from ssdctl.cli.predict_video import check_video_options, predict_videos

        folder = None if out is None else Path(out)
        check_video_options(call, videos, folder)
        predict_videos(call, _load(call, checkpoint), videos, folder)
        return
    sources = find_sources(images, recursive=settings.recursive)
    if out is not None and settings.save is None:
        for source in sources:
            if not isinstance(source, UrlSource):
                refuse_replacing(source.path, Path(out) / f"{source.path.stem}.png", "--out")
    predictor = _load(call, checkpoint)
    failures = _predict(call, predictor, sources, None if out is None else Path(out))
    if failures:
        counted = f"{len(failures)} of {len(sources)} pictures"
        if any(isinstance(failure.error, NetworkError) for failure in failures):
            raise NetworkError(f"{counted} cannot be fetched or read; see the warnings")
        raise DataError(f"{counted} are not readable; see the warnings")


def _load(call: Call, checkpoint: str) -> Predictor:
    tune_process()
    from ssdctl.inference import predict as inference

    settings = call.config.predict
    return inference.load(
        checkpoint,
        device=settings.device,
        score=settings.score,
        nms_iou=call.config.evaluate.nms_iou if settings.nms_iou is None else settings.nms_iou,
        options=inference.Options(
            settings.classes, settings.max_detections, settings.tile, settings.tile_overlap
        ),
        mirror=call.config.download.mirror,
    )


def _predict(
    call: Call, predictor: Predictor, sources: list[Source], out: Path | None
) -> list[UnreadablePicture]:
    """Print, draw and save the detections; return the pictures that cannot be read."""
    from ssdctl.inference.batches import predict_sources
    from ssdctl.inference.results import UnreadablePicture
    from ssdctl.inference.save import free_stem, open_writer

    settings, console = call.config.predict, call.console
    is_drawn = out is not None and settings.save is None
    writer = None
    if out is not None:
        make_dir(out)  # before the detection, which may take hours
        writer = open_writer(settings.save or "json", out, predictor.returned_classes)
    threads = usable_cores()
    results = predict_sources(predictor, sources, batch_size=settings.batch_size, threads=threads)
    records, failures, stems = [], list[UnreadablePicture](), set[str]()
    for result in console.progress(results, total=len(sources), label="predicting", unit="img"):
        if isinstance(result, UnreadablePicture):
            console.warning(str(result.error))
            failures.append(result)
            continue
        if console.as_json:
            records.append(result.as_json())
        else:
            console.result(None, _line(result))
        if is_drawn and out is not None:
            _draw(result, out / f"{free_stem(result.source.file_name, stems)}.png")
        if writer is not None:
            writer.add(result)
    if writer is not None:
        console.info(writer.close())
    if console.as_json:
        console.result(records)
    return failures


def _line(result: Prediction) -> str:
    items = ", ".join(f"{d.name} {d.score:.2f} {[round(v) for v in d.box]}" for d in result.found)
    return printable_line(f"{result.source.label}: {items or 'no objects'}")


def _draw(result: Prediction, target: Path) -> None:
    from ssdctl.inference.drawing import draw
    from ssdctl.inference.predict import open_picture

    if isinstance(result.content, io.BytesIO):
        result.content.seek(0)
    # Opened a second time: to keep every picture until it is drawn would take gigabytes.
    drawn = draw(open_picture(result.content), [d.as_box_label() for d in result.found])
    with atomic_write(target) as file:
        drawn.save(file, "PNG", compress_level=1)
