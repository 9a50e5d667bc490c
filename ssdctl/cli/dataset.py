"""`ssdctl dataset`: write a prepared dataset in another format."""

from __future__ import annotations

import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from ssdctl.cli.command import Call, command, command_group, stoppable
from ssdctl.files import refuse_url

group = command_group("dataset", "Data", "Export a dataset in another format.")


class Target(str, Enum):
    """The formats that `dataset export` writes."""

    coco = "coco"
    yolo = "yolo"
    voc = "voc"
    hf = "hf"


@command(
    "export",
    group,
    settings=["data.store"],
    examples=[
        "ssdctl dataset export /data/parts --to yolo --out parts-yolo",
        "ssdctl dataset export /data/parts --to hf --out parts-hf   # for datasets.load_dataset",
    ],
)
def export(
    call: Call,
    root: Annotated[str, Argument(metavar="DIR", help="Dataset folder or file")],
    to: Annotated[Target, Option("--to", metavar="coco|yolo|voc|hf", help="Format (hf: Parquet)")],
    out: Annotated[Path, Option("--out", metavar="DIR", help="New folder")],
) -> None:
    """Write a dataset in another format.

    All splits are written, with the images and boxes that `prepare` checked. Images that it
    downscaled stay smaller.
    """
    from ssdctl.data.export_dataset import export_dataset
    from ssdctl.data.open_dataset import open_dataset
    from ssdctl.data.store_folder import dataset_folders

    refuse_url(str(out), "--out")
    data = msgspec.structs.replace(call.config.data, root=root)
    folder, store = dataset_folders(data)
    with stoppable("nothing was exported"):
        splits = open_dataset(folder, store, progress=call.console.progress)
        counts = export_dataset(splits, out, to.value, call.console.progress)
    result: dict[str, Any] = {"out": str(out), "to": to.value, "images": counts}
    written = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    call.console.result(result, f"{out}: {written} images")
    if to is not Target.hf:
        call.console.closing([], [f"ssdctl prepare --data {shlex.quote(str(out))}"])
