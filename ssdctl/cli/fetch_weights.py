"""`ssdctl fetch-weights`: backbone weights by name, verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.cli.download_progress import fetching, patience
from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table


def _names() -> list[str]:
    from ssdctl.download.sources import WEIGHTS

    return [name for weights in WEIGHTS for name in (weights.alias, weights.name) if name]


def _complete(incomplete: str) -> list[str]:
    return [name for name in _names() if name.startswith(incomplete)]


@command(
    app,
    "fetch-weights",
    panel="Data",
    settings=["download.mirror", "download.timeout"],
    examples=[
        "ssdctl fetch-weights resnet34-imagenet-v1",
        "ssdctl fetch-weights resnet34-333f7ec4 --dest weights",
        "ssdctl fetch-weights --list",
    ],
)
def fetch_weights(
    call: Call,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=r"Weights to fetch \[default: those of the config's preset]",
            autocompletion=_complete,
            show_default=False,
        ),
    ] = None,
    dest: Annotated[
        Path | None,
        typer.Option(
            "--dest",
            metavar="DIR",
            help=r"Folder \[default: where torch.hub looks, ~/.cache/torch/hub/checkpoints]",
            show_default=False,
        ),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Show the names, and which ones are here")
    ] = False,
) -> None:
    """Fetch and verify backbone weights into the folder from which training loads them."""
    if list_all:
        if name is not None:
            raise UsageError("--list takes no NAME")
        _list(call, dest)
        return
    from ssdctl.download.backbone_weights import fetch_weights, weights_of
    from ssdctl.download.sources import weights_named

    chosen = name or weights_of(call.config.model)
    if chosen is None or "/" in chosen:
        raise UsageError(
            f"the config's backbone weights are {call.config.model.weights!r}: nothing to fetch",
            hint="give a NAME of `ssdctl fetch-weights --list`",
        )

    weights = weights_named(chosen)
    config = call.config.download
    with fetching(call.console) as progress:
        path = fetch_weights(
            chosen,
            dest,
            mirror=config.mirror,
            patience=patience(config.timeout),
            report=progress,
        )
    data = {
        "name": weights.name,
        "alias": weights.alias,
        "path": str(path),
        "bytes": path.stat().st_size,
        "sha256": weights.file.sha256,
    }
    call.console.result(data, str(path))


def _list(call: Call, dest: Path | None) -> None:
    from ssdctl.download.backbone_weights import find_weights
    from ssdctl.download.sources import WEIGHTS

    rows: list[dict[str, Any]] = []
    for weights in WEIGHTS:
        path = find_weights(weights.name, dest)
        rows.append(
            {
                "name": weights.name,
                "alias": weights.alias,
                "note": weights.note,
                "url": weights.file.url,
                "sha256": weights.file.sha256,
                "bytes": weights.file.bytes,
                "path": str(path) if path else None,
            }
        )

    def table() -> Table:
        from rich.table import Table

        shown = Table("name", "alias", "what it is", "here")
        for row in rows:
            shown.add_row(row["name"], row["alias"] or "", row["note"], row["path"] or "no")
        return shown

    call.console.result({"weights": rows}, table)
