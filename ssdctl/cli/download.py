"""`ssdctl download`: download or generate a dataset and verify it."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ssdctl.cli.command import Call, command, stoppable
from ssdctl.cli.console import Console, rich_console
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.files import free_bytes, refuse_url
from ssdctl.runtime.safe_text import listed

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ssdctl.download.http import RetryPolicy
    from ssdctl.download.pinned_files import PinnedFile

COCO_DIR = "data/coco"
SHAPES_DIR = "data/shapes"
MAX_LISTED_FILES = 10  # in an error message
READING = ("checking ", "verifying ", "unpacking ")  # how labels of work on local files begin
LINE_INTERVAL_S = 30.0  # between two lines of progress if there is no terminal


@command(
    "download",
    short="--dest --dataset --part --mirror --verify --dry-run",
    panel="Data",
    settings="download.*",
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
        Option(metavar="DIR", help=f"Dataset folder [default: {COCO_DIR} or {SHAPES_DIR}]"),
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
    from ssdctl.download.dataset import download, list_files, needed_bytes

    config = call.config.download
    rows = list_files(files, dest, config.mirror)
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


class ByteProgress:
    """Show bytes, rate and remaining time of a transfer: bars on a terminal, else lines.

    The transfer calls it as `report`: (label, bytes done, bytes in total). The label is the name
    of a file that is downloaded, or a verb and the name while it is verified or unpacked.

    Args:
        console: The output of the command.
        expected: The bytes of each file to download; several files also get a line for all of
            them.
    """

    def __init__(self, console: Console, expected: Mapping[str, int] | None = None) -> None:
        self._console = console
        self._expected = dict(expected or {})
        self._received = dict.fromkeys(self._expected, 0)
        self._label = ""
        self._bars: Progress | None = None
        self._all: TaskID
        self._current: TaskID
        self._first = self._last_line = (0.0, 0)

    def __call__(self, label: str, done: int, total: int) -> None:
        name = label.rpartition(" ")[2]
        if label in self._received:
            self._received[label] = done
        elif name in self._received and not label.startswith("checking"):
            self._received[name] = self._expected[name]  # complete, as it is verified now
        is_new, self._label = label != self._label, label
        if self._console.live:
            self._draw(label, done, total, is_new)
        elif is_new:
            self._first = self._last_line = (time.monotonic(), done)
            is_resumed = not label.startswith(READING) and 0 < done < total
            resumed = f", {done / 1e6:,.1f} MB already downloaded" if is_resumed else ""
            self._console.info(f"{label}: {total / 1e6:,.1f} MB{resumed}")
        elif time.monotonic() - self._last_line[0] >= LINE_INTERVAL_S:
            self._print_line(label, done, total)

    def close(self) -> None:
        """Remove the display."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._label = None, ""

    def _draw(self, label: str, done: int, total: int, is_new: bool) -> None:
        if self._bars is None:
            self._bars = _byte_bars()
            expected, has_several = sum(self._expected.values()), len(self._expected) > 1
            self._all = self._bars.add_task("all files", total=expected, visible=has_several)
            self._current = self._bars.add_task(label)
            self._bars.start()
        if is_new:  # bytes of an earlier attempt do not count for the rate
            self._bars.reset(self._current, description=label, total=total, completed=done)
        self._bars.update(self._current, completed=done)
        self._bars.update(self._all, completed=sum(self._received.values()))

    def _print_line(self, label: str, done: int, total: int) -> None:
        start, done_at_start = self._first
        rate = (done - done_at_start) / (time.monotonic() - start)

        def left(num_bytes: int) -> str:
            if rate <= 0:
                return ""
            hours, minutes = divmod(round(num_bytes / rate / 60), 60)
            return f", {hours} h {minutes} min left" if hours else f", {minutes} min left"

        text = f"{label}: {100 * done / max(total, 1):.0f}%, {rate / 1e6:.1f} MB/s"
        text += left(total - done)
        if len(self._expected) > 1:
            total_bytes, received = sum(self._expected.values()), sum(self._received.values())
            text += f"; all files: {100 * received / max(total_bytes, 1):.0f}%"
            text += left(total_bytes - received) if label in self._expected else ""
        self._console.info(text)
        self._last_line = (time.monotonic(), done)


def _byte_bars() -> Progress:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.percentage:>3.0f}%"),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=rich_console(sys.stderr),
        transient=True,
        expand=True,
        refresh_per_second=4,
    )


@contextlib.contextmanager
def fetching(console: Console, expected: Mapping[str, int] | None = None) -> Iterator[ByteProgress]:
    """Yield a progress display for work that Ctrl-C and SIGTERM stop with exit code 75.

    Raises:
        Stopped: A signal was received. The downloaded bytes are kept.
    """
    progress = ByteProgress(console, expected)
    with stoppable("the downloaded bytes are kept"):
        try:
            yield progress
        finally:
            progress.close()


def retry_policy(timeout_s: float) -> RetryPolicy:
    """Return timeouts for a limit of `timeout_s` that allows an idle connection one retry."""
    from ssdctl.download.http import RetryPolicy

    default = RetryPolicy()
    return default._replace(
        stall_s=timeout_s,
        read_s=min(default.read_s, timeout_s / 2),
        connect_s=min(default.connect_s, timeout_s / 2),
    )
