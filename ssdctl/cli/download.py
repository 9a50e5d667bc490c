"""`ssdctl download`: get a dataset, verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.cli.download_progress import fetching, patience
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.files import refuse_url

if TYPE_CHECKING:
    from rich.table import Table

    from ssdctl.download.sources import PinnedFile

COCO_DIR = "data/coco"
SHAPES_DIR = "data/shapes"
MAX_NAMED = 10


@command(
    app,
    "download",
    panel="Data",
    settings=["download.*"],
    examples=[
        "ssdctl download --dest data/coco",
        "ssdctl download --dest data/coco --part val --connections 16",
        "ssdctl download --dest data/coco --verify",
        "ssdctl download --dataset shapes --dest data/shapes",
    ],
)
def download(
    call: Call,
    dest: Annotated[
        Path | None,
        typer.Option(
            "--dest",
            metavar="DIR",
            help=f"Dataset folder [default: {COCO_DIR} or {SHAPES_DIR}]".replace("[", r"\["),
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the files there byte by byte, without network"),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be fetched, and fetch nothing")
    ] = False,
) -> None:
    """Get a dataset: COCO 2017, generated shapes, or the files of a manifest.

    Resumes after any end, checks every file against its pinned SHA-256 and unpacks it.
    """
    config = call.config.download
    if dest is not None:
        refuse_url(dest, "--dest")
    if verify and dry_run:
        raise UsageError("--verify and --dry-run exclude each other")
    if config.manifest and config.part:
        raise UsageError("--part chooses from COCO 2017, --manifest names its own files: give one")
    if config.dataset == "shapes":
        if config.manifest or config.part or verify:
            raise UsageError("--dataset shapes is generated: no --manifest, --part or --verify")
        _generate_shapes(call, dest or Path(SHAPES_DIR), dry_run)
        return
    files = _chosen(config.manifest, config.part)
    folder = dest or Path(COCO_DIR)
    if verify:
        _verify(call, files, folder, chosen=bool(config.manifest or config.part))
    elif dry_run:
        _show_plan(call, files, folder)
    else:
        _download(call, files, folder)


def _chosen(manifest: str | None, part: str | None) -> list[PinnedFile]:
    from ssdctl.download.sources import COCO2017, read_manifest

    if manifest is not None:
        return read_manifest(Path(manifest))
    if part is not None:
        return [COCO2017[part]]
    return sorted(COCO2017.values(), key=lambda file: file.bytes or 0)  # errors show early


def _download(call: Call, files: list[PinnedFile], dest: Path) -> None:
    from ssdctl.download.dataset import download, plan

    config = call.config.download
    planned = plan(files, dest, config.mirror)
    expected = {row["name"]: row["bytes"] for row in planned if row["state"] == "missing"}
    with fetching(call.console, expected) as progress:
        done = download(
            files,
            dest,
            mirror=config.mirror,
            connections=config.connections,
            keep_archives=config.keep_archives,
            patience=patience(config.timeout),
            report=progress,
        )
    lines = [
        f"{d['name']}: {d['state']}" + (f", {d['files']:,} files" if "files" in d else "")
        for d in done
    ]
    call.console.result({"dest": str(dest), "files": done}, "\n".join(lines))
    if not config.manifest:
        call.console.say(f"{dest} is ready; next: ssdctl prepare --data {dest}")


def _show_plan(call: Call, files: list[PinnedFile], dest: Path) -> None:
    from ssdctl.download.dataset import needed_bytes, plan
    from ssdctl.files import free_bytes

    config = call.config.download
    planned = plan(files, dest, config.mirror)
    needed = needed_bytes(files, dest, config.keep_archives)
    free = free_bytes(dest.absolute())

    def table() -> Table:
        from rich.table import Table

        caption = f"{dest}: needs {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free"
        shown = Table("file", "state", "bytes", caption=caption)
        shown.add_column("URL", overflow="fold")
        for row in planned:
            shown.add_row(row["name"], row["state"], f"{row['bytes']:,}", row["url"])
        return shown

    data = {"dest": str(dest), "files": planned, "needed_bytes": needed, "free_bytes": free}
    call.console.result(data, table)


def _verify(call: Call, files: list[PinnedFile], dest: Path, *, chosen: bool) -> None:
    """Check; a part of COCO that was never asked for may be missing, nothing else."""
    from ssdctl.download.dataset import verify

    with fetching(call.console) as progress:
        checked = verify(files, dest, report=progress)
    lines = [f"{row['name']}: {row['state']}" for row in checked]
    call.console.result({"dest": str(dest), "files": checked}, "\n".join(lines))
    all_missing = all(row["state"] == "missing" for row in checked)
    bad = [
        row
        for row in checked
        if row["state"] == "broken" or (row["state"] == "missing" and (chosen or all_missing))
    ]
    if bad:
        raise IntegrityError(
            f"{dest}: missing or broken: {_named(bad)}",
            hint="run `ssdctl download` again with the same options, without --verify",
        )


def _named(rows: list[dict[str, Any]]) -> str:
    names = [name for row in rows for name in row["problems"]]
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _generate_shapes(call: Call, dest: Path, dry_run: bool) -> None:
    config = call.config.download
    counts = {"train": config.images, "val": config.val_images}
    if not dry_run:
        from ssdctl.data.shapes import generate

        with fetching(call.console):
            generate(
                dest,
                num_train=config.images,
                num_val=config.val_images,
                seed=config.seed,
                progress=call.console.progress,
            )
    action = "would generate" if dry_run else "generated"
    call.console.result(
        {"dest": str(dest), "dataset": "shapes", "generated": not dry_run, **counts},
        f"{dest}: {action} {counts['train']:,} training and {counts['val']:,} validation images",
    )
