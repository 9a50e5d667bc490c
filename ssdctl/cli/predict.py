"""`ssdctl predict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl.cli.command import Call, command
from ssdctl.cli.main import app
from ssdctl.errors import DataError, UsageError
from ssdctl.files import atomic_write

if TYPE_CHECKING:
    from ssdctl.report.predict import Found

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@command(
    app,
    "predict",
    panel="Results",
    settings=["predict.*"],
    examples=[
        "ssdctl predict runs/stable-r34 street.jpg",
        "ssdctl predict best.pt photos/ --out drawn --score 0.5",
        "ssdctl predict best.pt photos/*.jpg --json > boxes.json",
    ],
)
def predict(
    call: Call,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT|RUN", help="Checkpoint or run folder", show_default=False)
    ],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE...", help="Picture files or folders", show_default=False),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Draw the pictures with their boxes into it"),
    ] = None,
) -> None:
    """Find objects on pictures: as JSON, as a list, and drawn with --out."""
    files = _picture_files(images)
    from ssdctl.device import open_device
    from ssdctl.model.weights import load_network, read_checkpoint
    from ssdctl.report.predict import Predictor, draw, open_picture

    device = open_device(call.config.predict.device)
    read = read_checkpoint(checkpoint_of(Path(checkpoint)))
    predictor = Predictor(
        device.place(load_network(read)),
        read.classes,
        device,
        score_threshold=call.config.predict.score,
        nms_iou=call.config.evaluate.nms_iou,
    )
    answers: dict[str, list[Found]] = {}
    bad = 0
    drawn: set[Path] = set()
    for file in call.console.progress(files, total=len(files), label="predicting", unit="img"):
        try:
            picture = open_picture(file)
        except DataError as error:
            call.console.warn(str(error))
            bad += 1
            continue
        answers[str(file)] = predictor(picture)
        if out is not None:
            with atomic_write(_free_name(Path(out), file.stem, drawn)) as target:
                draw(picture, answers[str(file)]).save(target, "PNG")
    if out is not None:
        call.console.say(f"{len(answers)} pictures drawn into {out}")
    data = [
        {"image": f, "detections": [d.as_json() for d in found]} for f, found in answers.items()
    ]
    call.console.result(data, "\n".join(_line(f, found) for f, found in answers.items()))
    if bad:
        raise DataError(f"{bad} of {len(files)} files are no readable pictures; see the warnings")


def checkpoint_of(path: Path) -> Path:
    """The checkpoint itself, or the best (else the last) one of a run folder."""
    if not path.is_dir():
        return path
    for name in ("best.pt", "last.pt"):
        if (path / "checkpoints" / name).is_file():
            return path / "checkpoints" / name
    raise UsageError(f"{path}: a run folder without checkpoints")


def _free_name(folder: Path, stem: str, taken: set[Path]) -> Path:
    """Where to draw: pictures of one name from two folders must not replace each other."""
    path, number = folder / f"{stem}.png", 2
    while path in taken:
        path, number = folder / f"{stem}-{number}.png", number + 1
    taken.add(path)
    return path


def _picture_files(names: list[str]) -> list[Path]:
    files: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise UsageError(f"{path}: a folder without pictures ({', '.join(SUFFIXES)})")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(f"{path}: no such file or folder")
    return files


def _line(file: str, found: list[Found]) -> str:
    items = ", ".join(f"{d.name} {d.score:.2f} {[round(v) for v in d.box]}" for d in found)
    return f"{file}: {items or 'nothing found'}"
