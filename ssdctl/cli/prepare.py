"""`ssdctl prepare` and `ssdctl dataset export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from typer import Argument, Option

from ssdctl.cli.command import Call, command, command_group, stoppable
from ssdctl.cli.console import table
from ssdctl.files import refuse_url
from ssdctl.runtime.safe_text import counted, quoted

if TYPE_CHECKING:
    from rich.console import Group

    from ssdctl.config.fields import Tiling
    from ssdctl.data.annotations import Finding
    from ssdctl.data.report import ObjectSizes, Outcome

group = command_group("dataset", "Data", "Export a dataset in another format.")
MAX_EXAMPLES = 5  # per kind of finding in the table
MAX_CLASSES = 20  # in the table


Preview = Annotated[
    Path | None, Option(metavar="FILE", help="Draw training images with their boxes")
]
Audit = Annotated[
    bool, Option("--audit", help="Find near-duplicates between splits (decodes all images)")
]


@command(
    "prepare",
    short="--data --from --split --classes --shrink --preview --force",
    panel="Data",
    settings="data.* prepare.*",
    examples=[
        "ssdctl prepare --data /data/coco",
        "ssdctl prepare --data /data/coco --no-pack   # only the index, images are not copied",
        "ssdctl prepare --data /readonly/coco --store /scratch/coco-store --shrink 480",
        "ssdctl prepare --data coco --store /nvme/coco --encoding raw --shrink 512",
        "ssdctl prepare --data VOCdevkit/VOC2012 --preview boxes.png   # the format is detected",
        "ssdctl prepare --data export/data.yaml --split 0.9 --classes cat,dog",
    ],
)
def prepare(
    call: Call,
    force: Annotated[bool, Option("--force", help="Prepare again even if nothing changed")] = False,
    preview: Preview = None,
    audit: Audit = False,
) -> None:
    """Check images and annotations, and pack them for training.

    The format of the dataset is detected. Unusable images and boxes are repaired or dropped;
    report.json lists them. Run the command again to continue an interrupted one.
    """
    from ssdctl.data.open_dataset import prepare_dataset
    from ssdctl.data.store_folder import dataset_folders, refuse_in_dataset
    from ssdctl.data.tiles import tiling_of

    tiling = tiling_of(call.config)
    if preview is not None:
        from ssdctl.reporting.preview import check_target

        check_target(preview)
        root, store = dataset_folders(call.config.data)
        if store.resolve() not in preview.resolve().parents:
            refuse_in_dataset(preview, root, "--preview")
    with stoppable("the finished parts are kept"):
        outcome = prepare_dataset(call.config, force=force, progress=call.console.progress)
    _show_notes(call, outcome)
    data: dict[str, Any] = msgspec.to_builtins(outcome)
    if audit:
        _audit(call, outcome, data)
    if preview is not None:
        _preview(call, *dataset_folders(call.config.data), preview)
        data["preview"] = str(preview)
    if tiles := _count_tiles(call, outcome, tiling):
        data["tiles"] = tiles
    call.console.result(data, lambda: _tables(outcome))
    _close(call, outcome)


def _close(call: Call, outcome: Outcome) -> None:
    from ssdctl.data.check import WITHOUT_OBJECTS
    from ssdctl.data.dataset import warning_without_validation

    if "val" not in [report.split for report in outcome.splits]:
        folders = Path(outcome.root), Path(outcome.store)
        num_images = sum(report.images for report in outcome.splits)
        call.console.warning(warning_without_validation(*folders, num_images))
    what = "images and boxes" if outcome.packed else "the index; images stay where they are"
    store = f" --store {quoted(outcome.store)}" if call.config.data.store else ""
    tile = f" --tile {call.config.data.tile}" if call.config.data.tile else ""
    if "data.tile_overlap" in call.config.explicit_settings():
        tile += f" --tile-overlap {call.config.data.tile_overlap:g}"
    command = f"ssdctl train --data {quoted(outcome.root)}{store}{tile}"
    facts: list[tuple[str, str | Path]] = [("store", f"{outcome.store} ({what})")]
    if any(f.kind not in WITHOUT_OBJECTS for report in outcome.splits for f in report.findings):
        facts.append(("issues", Path(outcome.store) / "report.json"))
    has_training = "train" in [report.split for report in outcome.splits]
    call.console.closing(facts, [command] * has_training)


def _show_notes(call: Call, outcome: Outcome) -> None:
    if outcome.unchanged:
        call.console.info("Already up to date (use --force to rebuild)")
    for report in outcome.splits:
        for note in report.notes:
            call.console.info(f"{report.split}: {note}")
        for warning in report.warnings:
            call.console.warning(f"{report.split}: {warning}")


def _preview(call: Call, root: Path, folder: Path, path: Path) -> None:
    from ssdctl.data.store import open_splits
    from ssdctl.reporting.preview import preview

    split, opened = next(iter(open_splits(root, folder).items()))
    num_images = preview(opened, call.config, path)
    call.console.info(f"{path}: {counted(num_images, 'image')} of {split} with their boxes")


def _count_tiles(call: Call, outcome: Outcome, tiling: Tiling | None) -> dict[str, Any]:
    """Return, and log, what the training images are like in the tiles that the user chose."""
    from ssdctl.data.default_boxes import can_match
    from ssdctl.data.store import open_splits
    from ssdctl.data.tiles import tiled

    if tiling is None:
        return {}
    _, split = next(iter(open_splits(Path(outcome.root), Path(outcome.store)).items()))
    split, first = tiled(split, tiling), split.starts[-1]
    boxes = split.boxes[first:][split.labels[first:] > 0]
    unmatched = round(1 - float(can_match(boxes).mean()), 4) if len(boxes) else 0.0
    number = len(split.image_ids) - split.num_images
    call.console.info(
        f"{counted(number, 'tile')} of {tiling.size} pixels: {len(boxes):,} boxes, of which "
        f"{unmatched:.0%} match no default box"
    )
    return {"size": tiling.size, "count": number, "boxes": len(boxes), "unmatched_share": unmatched}


def _audit(call: Call, outcome: Outcome, data: dict[str, Any]) -> None:
    from ssdctl.data.audit import audit
    from ssdctl.data.duplicates import duplicate_warnings

    with stoppable("the store is complete"):
        found = audit(Path(outcome.root), Path(outcome.store), call.console.progress)
    for report, split in zip(outcome.splits, data["splits"], strict=True):
        near = found[report.split]
        split["near_duplicates"] = msgspec.to_builtins(near)
        for warning in duplicate_warnings(report.split, report.images, near, "look like images"):
            call.console.warning(warning)
    if not any(found.values()):
        call.console.info("no image looks like one of another split")


def _tables(outcome: Outcome) -> Group:
    from rich.console import Group

    from ssdctl.data.check import WITHOUT_OBJECTS

    rows, lines, issues = [], [], []
    for report in outcome.splits:
        row = [f"{n:,}" for n in (report.usable, report.boxes, report.classes, report.trainable)]
        rows.append([report.split, *(row if report.split == "train" else row[:-1])])
        if report.split == "train":
            lines.append(_sizes(report.object_sizes))
        for kind, number in report.counts().items():
            if kind in WITHOUT_OBJECTS:
                lines.append(f"{report.split}: {counted(number, 'image')} with {kind}")
                continue
            first = (report.split, f"{number:,}", kind)
            for item in [f for f in report.findings if f.kind == kind][:MAX_EXAMPLES]:
                issues.append((*first, _example(item)))
                first = ("", "", "")
    splits = table("split", "images", "boxes", "classes", "with boxes", rows=rows)
    classes = _class_table(outcome)
    if not issues:
        return Group(splits, *lines, "", *classes, "", "nothing was dropped or repaired")
    dropped = table("split", "count", "issue", "example", rows=issues, left=(0, 2, 3))
    dropped.columns[-1].overflow = "fold"
    return Group(splits, *lines, "", *classes, "", dropped)


def _sizes(sizes: ObjectSizes) -> str:
    width, height = sizes.median
    return (
        f"train: median box {width:.0f} x {height:.0f} of 300 x 300 pixels; "
        f"{sizes.unmatched_share:.0%} match no default box"
    )


def _class_table(outcome: Outcome) -> list[Any]:
    """Return a table of the boxes per class and split, and the number of classes left out.

    Of many classes, those with the most and the fewest training boxes are shown.
    """
    rows = [
        [counts[0].name, *(f"{count.boxes:,}" for count in counts)]
        for counts in zip(*(report.per_class for report in outcome.splits), strict=True)
    ]
    lines = []
    if len(rows) > MAX_CLASSES:
        order = sorted(range(len(rows)), key=lambda n: -outcome.splits[0].per_class[n].boxes)
        half = MAX_CLASSES // 2
        lines = [f"... and {len(rows) - MAX_CLASSES:,} classes between (all: --json)"]
        rows = [rows[n] for n in (*order[:half], *order[-half:])]
    heads = [report.split for report in outcome.splits]
    return [table("boxes per class", *heads, rows=rows), *lines]


def _example(item: Finding) -> str:
    annotation = "" if item.annotation_id is None else f", annotation {item.annotation_id}"
    return f"image {item.image_id}{annotation}: {item.detail}"


@command(
    "export",
    group,
    settings="data.store",
    examples=[
        "ssdctl dataset export /data/parts --to yolo --out parts-yolo",
        "ssdctl dataset export /data/parts --to hf --out parts-hf   # for datasets.load_dataset",
    ],
)
def export(
    call: Call,
    root: Annotated[str, Argument(metavar="DATASET", help="Dataset folder or file")],
    to: Annotated[
        Literal["coco", "yolo", "voc", "hf"],
        Option("--to", metavar="coco|yolo|voc|hf", help="Format (hf: Parquet)"),
    ],
    out: Annotated[Path, Option(metavar="DIR", help="New folder")],
) -> None:
    """Write a dataset in another format.

    All splits are written, with the images and boxes that `prepare` checked. Images that it
    downscaled stay smaller.
    """
    from ssdctl.data.export_dataset import export_dataset
    from ssdctl.data.open_dataset import open_dataset, without_division
    from ssdctl.data.store_folder import dataset_folders, refuse_in_dataset

    refuse_url(str(out), "--out")
    data = msgspec.structs.replace(call.config.data, root=root)
    folder, store = dataset_folders(data)
    refuse_in_dataset(out, folder)
    options = without_division(call.config, folder)
    with stoppable("nothing was exported"):
        splits = open_dataset(folder, store, options, progress=call.console.progress)
        counts = export_dataset(splits, out, to, call.console.progress)
    result: dict[str, Any] = {"out": str(out), "to": to, "images": counts}
    written = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    call.console.result(result, f"{out}: {written} images")
    if to == "coco" or (to != "hf" and "train" in splits):
        call.console.closing([], [f"ssdctl prepare --data {quoted(out)}"])
