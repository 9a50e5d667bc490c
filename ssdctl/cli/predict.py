"""`ssdctl predict`."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.errors import DataError, UsageError
from ssdctl.files import atomic_write, write_text
from ssdctl.runtime.malloc import keep_freed_memory
from ssdctl.runtime.printable import printable_line

if TYPE_CHECKING:
    from ssdctl.inference.predict import Prediction

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@command(
    app,
    "predict",
    panel="Results",
    settings=["predict.*"],
    examples=[
        "ssdctl predict runs/stable-r34 street.jpg",
        "ssdctl predict best.pt photos/ --out drawn --score 0.5",
        "ssdctl predict best.pt 'photos/**/*.jpg' --json > boxes.json",
    ],
)
def predict(
    call: Call,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT|RUN", help="Checkpoint or run folder", show_default=False)
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE...",
            help="Picture files, folders or patterns (** for all folders below)",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder for the drawn pictures and detections.json"
        ),
    ] = None,
) -> None:
    """Detect objects on pictures: as a list, as JSON, and drawn with --out.

    A file that is not a picture gives a warning, and exit code 3 after the others are done.
    """
    files = _picture_files(images)
    keep_freed_memory()
    from ssdctl.inference.predict import load, predict_files

    settings = call.config.predict
    predictor = load(
        checkpoint,
        device=settings.device,
        score=settings.score,
        nms_iou=call.config.evaluate.nms_iou,
    )
    threads = len(os.sched_getaffinity(0))
    results = predict_files(predictor, files, batch_size=settings.batch_size, threads=threads)
    records, bad, drawn = [], 0, set[Path]()
    for result in call.console.progress(results, total=len(files), label="predicting", unit="img"):
        if result.error is not None:
            call.console.warn(str(result.error))
            bad += 1
            continue
        records.append(_record(result))
        if not call.console.as_json:
            call.console.result(None, _line(result))
        if out is not None:
            _draw(result, _free_name(Path(out), result.path.stem, drawn))
    if out is not None:
        write_text(Path(out) / "detections.json", json.dumps(records, indent=1) + "\n")
        call.console.say(f"{len(records)} pictures drawn into {out}")
    if call.console.as_json:
        call.console.result(records)
    if bad:
        raise DataError(f"{bad} of {len(files)} files are not readable pictures; see the warnings")


def _record(result: Prediction) -> dict[str, Any]:
    assert result.image is not None
    return {
        "image": str(result.path),
        "width": result.image.width,
        "height": result.image.height,
        "detections": [d.as_json() for d in result.found],
    }


def _line(result: Prediction) -> str:
    items = ", ".join(f"{d.name} {d.score:.2f} {[round(v) for v in d.box]}" for d in result.found)
    return printable_line(f"{result.path}: {items or 'no objects'}")


def _draw(result: Prediction, target: Path) -> None:
    from ssdctl.inference.drawing import draw

    assert result.image is not None
    drawn = draw(result.image, [d.as_box_label() for d in result.found])
    with atomic_write(target) as file:
        drawn.save(file, "PNG", compress_level=1)


def _free_name(folder: Path, stem: str, taken: set[Path]) -> Path:
    """Return an unused name: pictures of two folders may have the same name."""
    path, number = folder / f"{stem}.png", 2
    while path in taken:
        path, number = folder / f"{stem}-{number}.png", number + 1
    taken.add(path)
    return path


def _picture_files(names: list[str]) -> list[Path]:
    """Return the pictures that names stand for: files, folders, patterns."""
    files: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise UsageError(
                    f"{path}: a folder without pictures ({', '.join(SUFFIXES)})",
                    hint=f"for those of all folders below: '{path}/**/*.jpg'",
                )
            files += inside
        elif path.exists():
            files.append(path)
        elif glob.has_magic(name):
            found = glob.glob(name, recursive=True)  # noqa: PTH207 - Path's takes no absolute pattern
            matches = sorted(map(Path, found))
            if not any(p.is_file() for p in matches):
                raise UsageError(f"{name}: matches no file")
            files += [p for p in matches if p.is_file()]
        else:
            raise UsageError(f"{path}: no such file or folder")
    return files
