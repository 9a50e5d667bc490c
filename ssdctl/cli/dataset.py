"""`ssdctl dataset`: write a prepared dataset in another layout."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.files import refuse_url

group = typer.Typer(no_args_is_help=True, help="Write a dataset in another layout.")
app.add_typer(group, name="dataset", rich_help_panel="Data")


class Target(str, Enum):
    """The layouts that `dataset export` writes."""

    coco = "coco"
    yolo = "yolo"
    voc = "voc"
    hf = "hf"


@command(
    group,
    "export",
    settings=["data.store"],
    examples=[
        "ssdctl dataset export /data/parts --to yolo --out parts-yolo",
        "ssdctl dataset export /data/parts --to hf --out parts-hf   # for datasets.load_dataset",
    ],
)
def export(
    call: Call,
    root: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="Dataset folder or file, as for --data", show_default=False
        ),
    ],
    to: Annotated[
        Target, typer.Option("--to", help="Layout to write; hf is Hugging Face's (Parquet)")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="New folder", show_default=False)
    ],
) -> None:
    """Write the prepared images and their checked boxes to a new folder.

    All splits are written. A dataset that was never prepared is checked first. Image files are
    copied from the store: if it was prepared with --shrink, they are the smaller ones.
    """
    from ssdctl.cli.interrupts import stoppable
    from ssdctl.data.export_dataset import export_dataset
    from ssdctl.data.open_dataset import open_dataset
    from ssdctl.data.store_folder import dataset_folders

    refuse_url(str(out), "--out")
    data = msgspec.structs.replace(call.config.data, root=root)
    folder, store = dataset_folders(data)
    with stoppable("nothing was exported"):
        splits = open_dataset(folder, store, progress=call.console.progress)
        counts = export_dataset(splits, store, out, to.value, call.console.progress)
    result: dict[str, Any] = {"out": str(out), "to": to.value, "images": counts}
    written = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    call.console.result(result, f"{out}: {written} images")
