"""`ssdctl download`: download or generate a dataset and verify it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ssdctl.cli.command import Call, command, stoppable
from ssdctl.cli.download_progress import fetching, retry_policy
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.files import free_bytes, refuse_url
from ssdctl.runtime.safe_text import listed

if TYPE_CHECKING:
    from ssdctl.download.pinned_files import PinnedFile

COCO_DIR = "data/coco"
SHAPES_DIR = "data/shapes"
MAX_LISTED_FILES = 10  # in an error message


@command(
    "download",
    short="--dest --dataset --part --mirror --verify --dry-run",
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
        Option(
            "--dest", metavar="DIR", help=f"Dataset folder [default: {COCO_DIR} or {SHAPES_DIR}]"
        ),
    ] = None,
    verify: Annotated[bool, Option("--verify", help="Check the files in DIR, offline")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="List the files without downloading them")
    ] = False,
) -> None:
    """Download COCO 2017, or generate a small dataset.

    Files are checked against their SHA-256 and unpacked. Run the command again to resume an
    interrupted download.
    """
    config = call.config.download
    if dest is not None:
        refuse_url(dest, "--dest")
    if verify and dry_run:
        raise UsageError("--verify and --dry-run exclude each other: give one of them")
    if config.manifest and config.part:
        raise UsageError("--part selects from COCO 2017, --manifest lists its own files: give one")
    if config.dataset == "shapes":
        if config.manifest or config.part or verify:
            raise UsageError(
                "--dataset shapes is generated: --manifest, --part and --verify do not apply"
            )
        _generate_shapes(call, dest or Path(SHAPES_DIR), dry_run)
        return
    from ssdctl.download.pinned_files import COCO2017, read_manifest

    # The smallest first, so that errors show early.
    files = sorted(COCO2017.values(), key=lambda file: file.bytes or 0)
    if config.manifest is not None:
        files = read_manifest(Path(config.manifest))
    elif config.part is not None:
        files = [COCO2017[config.part]]
    folder = dest or Path(COCO_DIR)
    if verify:
        _verify(call, files, folder, is_selection=bool(config.manifest or config.part))
    else:
        _download(call, files, folder, dry_run)


def _download(call: Call, files: list[PinnedFile], dest: Path, dry_run: bool) -> None:
    from ssdctl.download.dataset import download, needed_bytes, plan

    config = call.config.download
    rows = plan(files, dest, config.mirror)
    if dry_run:
        needed = needed_bytes(files, dest, config.keep_archives)
        free = free_bytes(dest.absolute())
        lines = [
            f"{row['name']}: {row['bytes'] / 1e6:,.0f} MB, {row['state']}\n  {row['url']}"
            for row in rows
        ]
        lines.append(f"{dest}: needs {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free")
        data = {"dest": str(dest), "files": rows, "needed_bytes": needed, "free_bytes": free}
        call.console.result(data, "\n".join(lines))
        return
    expected = {row["name"]: row["bytes"] for row in rows if row["state"] == "missing"}
    with fetching(call.console, expected) as progress:
        results = download(
            files,
            dest,
            mirror=config.mirror,
            connections=config.connections,
            keep_archives=config.keep_archives,
            retry_policy=retry_policy(config.timeout),
            progress=progress,
        )
    lines = [
        f"{row['name']}: {row['state']}" + (f", {row['files']:,} files" if "files" in row else "")
        for row in results
    ]
    call.console.result({"dest": str(dest), "files": results}, "\n".join(lines))
    commands = [] if config.manifest else [f"ssdctl prepare --data {shlex.quote(str(dest))}"]
    call.console.closing([("wrote", f"{dest} ({len(results)} archives or files)")], commands)


def _verify(call: Call, files: list[PinnedFile], dest: Path, *, is_selection: bool) -> None:
    """Check the files; without a selection some parts of COCO may be missing, but not all."""
    from ssdctl.download.dataset import verify

    with fetching(call.console) as progress:
        rows = verify(files, dest, progress=progress)
    lines = [f"{row['name']}: {row['state']}" for row in rows]
    call.console.result({"dest": str(dest), "files": rows}, "\n".join(lines))
    all_missing = all(row["state"] == "missing" for row in rows)
    bad = [
        name
        for row in rows
        if row["state"] == "broken" or (row["state"] == "missing" and (is_selection or all_missing))
        for name in row["problems"]
    ]
    if bad:
        raise IntegrityError(
            f"{dest}: missing or broken: {listed(bad, MAX_LISTED_FILES)}",
            hint="run `ssdctl download` again with the same options, without --verify",
        )


def _generate_shapes(call: Call, dest: Path, dry_run: bool) -> None:
    config, is_drawn = call.config.download, False
    counts = {"train": config.images, "val": config.val_images}
    if not dry_run:
        from ssdctl.data.shapes import generate

        with stoppable("the dataset is incomplete"):
            is_drawn = generate(
                dest,
                num_train=config.images,
                num_val=config.val_images,
                seed=config.seed,
                progress=call.console.progress,
            )
    action = "would generate" if dry_run else "generated" if is_drawn else "already has"
    call.console.result(
        {"dest": str(dest), "dataset": "shapes", "generated": is_drawn, **counts},
        f"{dest}: {action} {counts['train']:,} training and {counts['val']:,} validation images",
    )
    if not dry_run:
        call.console.closing([], [f"ssdctl prepare --data {shlex.quote(str(dest))}"])
