"""`ssdctl prepare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ssdctl.cli.command import Call, command
from ssdctl.cli.main import app

if TYPE_CHECKING:
    from rich.table import Table

    from ssdctl.data.prepare import Outcome


@command(
    app,
    "prepare",
    panel="Data",
    settings=["data.*", "prepare.*"],
    examples=[
        "ssdctl prepare --data /data/coco",
        "ssdctl prepare --data /data/coco --no-pack   # index only, images stay where they are",
        "ssdctl prepare --data /readonly/coco --store /scratch/coco-store --shrink 480",
    ],
)
def prepare(
    call: Call,
    force: Annotated[
        bool, typer.Option("--force", help="Write the store anew even if nothing changed")
    ] = False,
) -> None:
    """Check every annotation and every image's header, and write the store that training reads.

    What cannot be trained on is dropped or mended, counted here and listed in the store's
    report.json.
    """
    from ssdctl.data.dataset import dataset_folders
    from ssdctl.data.prepare import prepare as write_store

    wishes = call.config.prepare
    root, folder = dataset_folders(call.config.data)
    outcome = write_store(
        root,
        folder,
        pack=wishes.pack,
        shrink=wishes.shrink,
        verify_images=wishes.verify_images,
        jobs=wishes.jobs,
        force=force,
        say=call.console.say,
        progress=call.console.progress,
    )
    call.console.say(f"{outcome.root} -> {outcome.store}")
    if outcome.unchanged:
        call.console.say("nothing changed since it was written (--force writes it anew)")
    call.console.result(msgspec.to_builtins(outcome), lambda: _table(outcome))


def _table(outcome: Outcome) -> Table:
    from rich.table import Table

    table = Table()
    for column in ("split", "images", "boxes", "classes", "to train on"):
        table.add_column(column, justify="left" if column == "split" else "right")
    table.add_column("dropped or mended")
    for report in outcome.splits:
        notes = "\n".join(f"{n} x {kind}" for kind, n in report.counts().items()) or "nothing"
        row = (report.images, report.boxes, report.classes, report.trainable)
        table.add_row(report.split, *map(str, row), notes)
    return table
