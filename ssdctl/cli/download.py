"""`ssdctl download`, `fetch-weights` and `models`: get a dataset, and weights by name."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ssdctl.cli.command import Call, command, stoppable
from ssdctl.cli.console import Console, is_encodable
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.files import free_bytes, refuse_url
from ssdctl.runtime.progress import progress_bar
from ssdctl.runtime.safe_text import listed, printable_line, quoted

if TYPE_CHECKING:
    from ssdctl.config.sections import DownloadConfig
    from ssdctl.download.http import RetryPolicy
    from ssdctl.download.pinned_files import DetectorSource, PinnedFile
    from ssdctl.download.transfer import Progress
    from ssdctl.model.pretrained import Weights

COCO_DIR = "data/coco"
SHAPES_DIR = "data/shapes"
MAX_LISTED_FILES = 10  # in an error message
LINE_INTERVAL_S = 30.0  # between two lines of progress if there is no terminal
TRUST = {
    "prefix": "SHA-256 prefix verified",
    "first use": "SHA-256 pinned on first download",
}


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
    is_selection = bool(config.manifest or config.part)
    if config.dataset == "shapes":
        names = ("manifest", "part", "mirror", "timeout", "connections", "keep_archives")
        reason = "does not apply to generated shapes"
        call.config.require_not_given((f"download.{n}" for n in names), reason, "leave it out")
        if verify:
            raise UsageError(f"--verify {reason}", hint="leave it out")
        _generate_shapes(call, dest or Path(SHAPES_DIR), dry_run)
        return
    own = ["download.images", "download.val_images", "download.seed"]
    call.config.require_not_given(own, "is for --dataset shapes", "add it, or leave this out")
    if verify:
        _verify(call, _files(config), dest or Path(COCO_DIR), is_selection=is_selection)
    else:
        _download(call, _files(config), dest or Path(COCO_DIR), dry_run)


def _files(config: DownloadConfig) -> list[PinnedFile]:
    from ssdctl.download.pinned_files import COCO2017, read_manifest

    if config.manifest is not None:
        return read_manifest(Path(config.manifest))
    if config.part is not None:
        return [COCO2017[config.part]]
    # The smallest first, so that errors show early.
    return sorted(COCO2017.values(), key=lambda file: file.bytes or 0)


def _download(call: Call, files: list[PinnedFile], dest: Path, dry_run: bool) -> None:
    from ssdctl.download.dataset import download, list_files, needed_bytes
    from ssdctl.download.fetch import check_space

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
        check_space(dest, needed, "the download")
        return
    missing = [row["name"] for row in rows if row["state"] == "missing"]
    with fetching(call.console, missing) as progress:
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
    is_selection = config.manifest or config.part
    commands = [] if is_selection else [f"ssdctl prepare --data {quoted(dest)}"]
    call.console.closing([("wrote", f"{dest} ({len(results)} archives or files)")], commands)


def _verify(call: Call, files: list[PinnedFile], dest: Path, *, is_selection: bool) -> None:
    """Check the files; unless some were selected, parts of COCO may be missing, but not all."""
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
    from ssdctl.data.shapes import generate, refuse_others

    config, is_drawn, action = call.config.download, False, "would generate"
    train, val = config.images, config.val_images
    if dry_run:
        refuse_others(dest)
    else:
        with stoppable("the dataset is incomplete"):
            is_drawn = generate(
                dest,
                num_train=train,
                num_val=val,
                seed=config.seed,
                progress=call.console.progress,
            )
        action = "generated" if is_drawn else "already has"
    call.console.result(
        {"dest": str(dest), "dataset": "shapes", "generated": is_drawn, "train": train, "val": val},
        f"{dest}: {action} {train:,} training and {val:,} validation images",
    )
    if not dry_run:
        call.console.closing([], [f"ssdctl prepare --data {quoted(dest)}"])


def _completed(incomplete: str) -> list[str]:
    from ssdctl.download.pinned_files import DETECTORS
    from ssdctl.model.pretrained import built_in_weights

    names = [name for w in built_in_weights() for name in (w.alias, w.name)]
    names += [detector.name for detector in DETECTORS]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


WeightsFolder = Annotated[
    Path | None, Option(metavar="DIR", help="Folder [default: ~/.cache/torch/hub/checkpoints]")
]
WeightsName = Annotated[
    str | None,
    Argument(
        metavar="NAME",
        help="Weights to download [default: those of the preset]",
        autocompletion=_completed,
    ),
]


@command(
    "fetch-weights",
    panel="Data",
    settings="download.mirror download.timeout",
    examples=[
        "ssdctl fetch-weights resnet34-imagenet-v1",
        "ssdctl fetch-weights resnet34-333f7ec4 --dest weights",
        "ssdctl fetch-weights ssd300-vgg16-coco",
        "ssdctl fetch-weights --list",
    ],
)
def fetch_weights(
    call: Call,
    name: WeightsName = None,
    dest: WeightsFolder = None,
    list_all: Annotated[bool, Option("--list", help="List all names")] = False,
) -> None:
    """Download pretrained weights into the cache.

    NAME is a backbone's weights (--list) or a detector (`ssdctl models`).
    """
    if list_all:
        if name is not None:
            raise UsageError("--list does not take a NAME")
        _list(call, dest)
        return
    from ssdctl.download.fetch import fetch_detector
    from ssdctl.download.pinned_files import find_detector
    from ssdctl.model.pretrained import fetch_weights, weights_named

    problem = f"{name}: is a path or a URL, not the name of weights"
    if not name:
        name, given = call.config.model.weights_name, call.config.model.weights
        problem = f"model.weights is {given!r} in the config: nothing to download"
    if name is None or "/" in name:
        raise UsageError(problem, hint="give a NAME that `ssdctl fetch-weights --list` shows")
    detector = find_detector(name)
    fetch = partial(fetch_weights, name) if detector is None else partial(fetch_detector, detector)
    config = call.config.download
    policy = retry_policy(config.timeout)
    with fetching(call.console) as progress:
        path = fetch(dest, mirror=config.mirror, retry_policy=policy, progress=progress)
    num_bytes = path.stat().st_size
    data: dict[str, object] = {"name": name, "alias": None, "path": str(path), "bytes": num_bytes}
    shown = name if dest is None else quoted(path)
    if detector is None:
        weights = weights_named(name)
        data |= {"name": weights.name, "alias": _alias(weights), "sha256": weights.file.sha256}
        command = f"ssdctl train --data DIR --backbone-weights {shown}"
        command += f" --backbone {weights.backbone}"
    else:
        data |= _checked_facts(detector, path, dest)
        command = f"ssdctl predict {shown} photo.jpg --out drawn"
    call.console.result(data, str(path))
    call.console.closing([("weights", f"{name}, {num_bytes / 1e6:,.0f} MB, verified")], [command])


def _checked_facts(detector: DetectorSource, path: Path, dest: Path | None) -> dict[str, object]:
    """Return facts about a detector's file; its contents are checked if it has no checksum yet."""
    from ssdctl.download.fetch import cached_detector, sha256_of

    if cached_detector(detector, dest) is None:
        from ssdctl.checkpoint.locate import trust_first_use

        trust_first_use(detector.name, path)
    return {"sha256": sha256_of(path, path.name), "trust": detector.trust}


def _alias(weights: Weights) -> str | None:
    return None if weights.alias == weights.name else weights.alias


def _list(call: Call, dest: Path | None) -> None:
    from ssdctl.model.pretrained import all_weights, find_weights

    mark = "\u2713" if is_encodable("\u2713", sys.stdout) else "*"
    listed, errors = all_weights()
    width = max(len(weights.alias or weights.name) for weights in listed)
    rows, lines = list[dict[str, object]](), list[str]()
    for weights in listed:
        path, file = find_weights(weights.name, dest), weights.file
        row = {"name": weights.name, "alias": _alias(weights), "note": file.note, "url": file.url}
        more = {"sha256": file.sha256, "bytes": file.bytes, "path": str(path) if path else None}
        rows.append({**row, **more})
        shown = weights.alias or weights.name
        lines.append(f"{mark if path else ' '} {shown:<{width}}  {file.note}")
        if call.console.verbose:
            lines.append(f"  {path or file.url}")
    for error in errors:
        call.console.warning(f"broken: {error}")
    broken = [str(error) for error in errors]
    call.console.result({"weights": rows, "broken": broken}, "\n".join(lines))
    call.console.closing([(mark, "downloaded"), ("more", "`ssdctl models` lists whole detectors")])


@command(
    "models",
    panel="Results",
    examples=["ssdctl models", "ssdctl predict ssd300-vgg16-coco street.jpg"],
)
def models(call: Call) -> None:
    """List detectors that can be used by name."""
    from ssdctl.download.fetch import cached_detector
    from ssdctl.download.pinned_files import DETECTORS

    width = max(len(detector.name) for detector in DETECTORS)
    rows, lines = list[dict[str, object]](), list[str]()
    broken: list[str] = []
    for detector in DETECTORS:
        path, file, absent = None, detector.file, "not downloaded"
        try:
            path = cached_detector(detector)
        except IntegrityError as error:
            absent = "broken"
            broken.append(str(error))
            call.console.warning(f"broken: {error}; {error.hint}")
        num_bytes = path.stat().st_size if path else file.bytes
        rows.append(
            {
                "name": detector.name,
                "network": detector.network,
                "AP": detector.ap,
                "license": detector.license,
                "url": file.url,
                "page": detector.page,
                "trust": detector.trust,
                "sha256": file.sha256 or None,
                "bytes": num_bytes,
                "path": str(path) if path else None,
            }
        )
        ap = "" if detector.ap is None else f", AP {detector.ap:.3f}"
        state = "downloaded" if path else absent
        size = f", {num_bytes / 1e6:.0f} MB" if num_bytes else ""
        lines += [
            f"{detector.name:<{width}}  {detector.network}{ap}, {state}{size}",
            f"  license: {detector.license}; {TRUST[detector.trust]}",
            f"  {detector.page}",
        ]
    call.console.result({"models": rows, "broken": broken}, "\n".join(lines))
    call.console.closing([], [f"ssdctl predict {DETECTORS[0].name} photo.jpg --out drawn"])


@contextlib.contextmanager
def fetching(console: Console, names: Sequence[str] = ()) -> Iterator[Progress]:
    """Yield a progress display for work that Ctrl-C and signals stop with exit code 75.

    Args:
        console: The output of the command.
        names: The files to download, in this order; several are counted.
    """
    display = _Display(console, names)
    with stoppable("the downloaded bytes are kept"), contextlib.closing(display):
        yield display


class _Display:
    """Shows progress as a bar on a terminal, else as a line now and then.

    The label is the name of a downloaded file, or a verb and the name while it is verified or
    unpacked.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self.console, self.names = console, names
        self.bar: Any = None
        self.label, self.start, self.first, self.next_line = "", 0.0, 0, 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        is_new, now = label != self.label, monotonic()
        if is_new:  # bytes of an earlier attempt do not count for the rate
            self.label, self.start, self.first = label, now, done
        is_counted = label in self.names and len(self.names) > 1
        count = f" ({self.names.index(label) + 1} of {len(self.names)})" if is_counted else ""
        text = printable_line(label) + count
        if self.console.live:
            if is_new:
                self.close()
                self.bar = progress_bar(
                    label=text, unit="B", unit_scale=True, total=total, initial=done
                )
            self.bar.update(done - self.bar.n)
        elif is_new or now >= self.next_line:
            rate = (done - self.first) / max(now - self.start, 1e-9)
            self.console.info(_line(text, done, total, rate))
            self.next_line = now + LINE_INTERVAL_S

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _line(text: str, done: int, total: int, rate: float) -> str:
    text = f"{text}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
    if rate > 0:
        left = datetime.timedelta(seconds=round((total - done) / rate))
        text += f", {rate / 1e6:.1f} MB/s, {left} left"
    return text


def retry_policy(timeout_s: float) -> RetryPolicy:
    """Return timeouts that allow an idle connection one retry within `timeout_s`."""
    from ssdctl.download.http import RetryPolicy

    default = RetryPolicy()
    return default._replace(
        stall_s=timeout_s,
        read_s=min(default.read_s, timeout_s / 2),
        connect_s=min(default.connect_s, timeout_s / 2),
    )
