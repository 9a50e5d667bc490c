"""`ssdctl evaluate`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssdctl.cli.command import Call, command
from ssdctl.cli.main import app
from ssdctl.errors import DataError, UsageError
from ssdctl.train.ranks import find_ranks

if TYPE_CHECKING:
    from rich.table import Table

    from ssdctl.evaluate.coco_ap import Scores


@command(
    app,
    "evaluate",
    panel="Results",
    settings=["data.*", "evaluate.*"],
    examples=[
        "ssdctl evaluate runs/stable-r34/checkpoints/best.pt",
        "ssdctl evaluate ckpt.pt --data /data/coco --json",
        "ssdctl evaluate runs/stable-r34   # every checkpoint of the run",
        "ssdctl evaluate detections.json --data /data/coco --verify",
    ],
)
def evaluate(
    call: Call,
    what: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN|DETECTIONS.json", help="What to score", show_default=False
        ),
    ],
    detections: Annotated[
        str | None,
        typer.Option("--detections", metavar="FILE", help="Write the detections as COCO results"),
    ] = None,
) -> None:
    """Score a checkpoint, every checkpoint of a run, or a file of detections by COCO AP.

    A checkpoint remembers its dataset, so its path is enough. All images of the split count; in
    fp32 unless told otherwise.
    """
    path = Path(what)
    if find_ranks().world_size > 1:
        raise UsageError("evaluate runs as one process in this version; start it without launch")
    if not path.exists():
        raise UsageError(f"{path}: no such file or run folder")
    if path.suffix == ".json":
        _score_file(call, path)
        return
    from ssdctl.evaluate.checkpoint import evaluate_checkpoint

    files = [path]
    if path.is_dir():
        files = _checkpoints(path)
    if len(files) > 1 and detections:
        raise UsageError(f"--detections writes one file, {path} holds {len(files)} checkpoints")
    answers = []
    for file in files:
        answer = evaluate_checkpoint(
            file,
            call.config,
            given={p for p, source in call.resolved.sources.items() if source != "default"},
            say=call.console.say,
            warn=call.console.warn,
            progress=call.console.progress,
            detections_file=Path(detections) if detections else None,
        )
        answers.append({"checkpoint": str(file), **answer.as_json()})
        if not call.console.as_json:
            call.console.result(None, functools.partial(table, answer.scores))
    if call.console.as_json:
        call.console.result(
            {"checkpoints": answers} if path.is_dir() else _without_name(answers[0])
        )


def _checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the best one too where it is none of the newest."""
    files = sorted((run / "checkpoints").glob("step-*.pt"))
    best = run / "checkpoints" / "best.pt"
    if best.is_file() and not any(best.samefile(f) for f in files):
        files.insert(0, best)
    if not files:
        raise UsageError(f"{run}: a run folder without checkpoints")
    return files


def _without_name(answer: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in answer.items() if k != "checkpoint"}


def _score_file(call: Call, path: Path) -> None:
    """Score a results file with the annotations alone: no image is read, torch not imported."""
    from ssdctl.data.dataset import dataset_folders, find_splits
    from ssdctl.evaluate.coco_ap import image_ids, read_detections, score

    root, _ = dataset_folders(call.config.data)
    wanted = call.config.evaluate.split
    splits = find_splits(root)
    if wanted not in splits:
        raise DataError(f"{root}: has no split {wanted}")
    found = read_detections(path)
    wishes = call.config.evaluate
    chosen = None
    if wishes.limit is not None or wishes.annotated_only:
        chosen = image_ids(splits[wanted].annotations, wishes.annotated_only)[: wishes.limit]
    scores = score(splits[wanted].annotations, found, image_ids=chosen, verify=wishes.verify)
    call.console.say(f"{len(found.scores)} detections against {splits[wanted].annotations}")
    data = {**scores.figures, "images": scores.images, "detections": len(found.scores)}
    call.console.result(data, lambda: table(scores))


def table(scores: Scores) -> Table:
    """The 12 figures and AP per class."""
    from rich.table import Table

    result = Table()
    result.add_column("figure")
    result.add_column("value", justify="right")
    for name, value in scores.figures.items():
        result.add_row(name, shown(value))
    result.add_section()
    for entry in scores.per_class:
        result.add_row(f"AP {entry.name}", shown(entry.AP))
    return result


def shown(value: float) -> str:
    """A figure for people; -1 means that there was nothing to measure."""
    return "-" if value < 0 else f"{value:.3f}"
