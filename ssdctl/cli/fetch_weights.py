"""`ssdctl fetch-weights`: download and verify backbone weights by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.cli.download_progress import fetching, retry_policy
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
            help=r"Weights to download \[default: those of the config's preset]",
            autocompletion=_complete,
            show_default=False,
        ),
    ] = None,
    dest: Annotated[
        Path | None,
        typer.Option(
            "--dest",
            metavar="DIR",
            help=r"Folder \[default: torch.hub's cache, ~/.cache/torch/hub/checkpoints]",
            show_default=False,
        ),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all names, and the files that are present")
    ] = False,
) -> None:
    """Download backbone weights to the folder from which training loads them, and verify them."""
    if list_all:
        if name is not None:
            raise UsageError("--list does not take a NAME")
        _list(call, dest)
        return
    from ssdctl.download.backbone_weights import fetch_weights, weights_of
    from ssdctl.download.sources import weights_named

    weights_name = name or weights_of(call.config.model)
    if weights_name is None or "/" in weights_name:
        raise UsageError(
            f"model.weights is {call.config.model.weights!r} in the config: nothing to download",
            hint="give a NAME that `ssdctl fetch-weights --list` shows",
        )

    weights = weights_named(weights_name)
    config = call.config.download
    with fetching(call.console) as progress:
        path = fetch_weights(
            weights_name,
            dest,
            mirror=config.mirror,
            retry_policy=retry_policy(config.timeout),
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

        result = Table("name", "alias", "description", "present")
        for row in rows:
            result.add_row(row["name"], row["alias"] or "", row["note"], row["path"] or "no")
        return result

    call.console.result({"weights": rows}, table)
