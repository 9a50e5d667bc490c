"""`ssdctl fetch-weights` and `ssdctl models`: weights of backbones and detectors by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.console import is_encodable
from ssdctl.cli.download import fetching, retry_policy
from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from ssdctl.model.pretrained import Weights

TRUST = {
    "prefix": "SHA-256 prefix verified",
    "first use": "SHA-256 pinned on first download",
}


def _completed(incomplete: str) -> list[str]:
    from ssdctl.download.detectors import DETECTORS
    from ssdctl.model.pretrained import all_weights

    names = [name for w in all_weights() for name in (w.alias, w.name)]
    names += [detector.name for detector in DETECTORS]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


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
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="Weights to download [default: those of the preset]",
            autocompletion=_completed,
        ),
    ] = None,
    dest: Annotated[
        Path | None, Option(metavar="DIR", help="Folder [default: ~/.cache/torch/hub/checkpoints]")
    ] = None,
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
    from ssdctl.download.detectors import cached_path, fetch_detector, find_detector
    from ssdctl.download.fetch import sha256_of
    from ssdctl.model.pretrained import fetch_weights, weights_named, weights_of

    name = name or weights_of(call.config.model)
    if name is None or "/" in name:
        raise UsageError(
            f"model.weights is {call.config.model.weights!r} in the config: nothing to download",
            hint="give a NAME that `ssdctl fetch-weights --list` shows",
        )
    detector = find_detector(name)
    fetch = fetch_weights if detector is None else fetch_detector
    config = call.config.download
    policy = retry_policy(config.timeout)
    with fetching(call.console) as progress:
        path = fetch(name, dest, mirror=config.mirror, retry_policy=policy, progress=progress)
    num_bytes = path.stat().st_size
    data: dict[str, object] = {"name": name, "alias": None, "path": str(path), "bytes": num_bytes}
    if detector is None:
        weights = weights_named(name)
        data |= {"name": weights.name, "alias": _alias(weights), "sha256": weights.file.sha256}
        command = f"ssdctl train --data DIR --backbone-weights {name}"
    else:
        if cached_path(detector, dest) is None:  # its contents are checked instead of a checksum
            from ssdctl.inference.locate import trust_first_use

            trust_first_use(name, path)
        data |= {"sha256": sha256_of(path, path.name), "trust": detector.trust}
        command = f"ssdctl predict {name} photo.jpg --out drawn"
    call.console.result(data, str(path))
    call.console.closing([("weights", f"{name}, {num_bytes / 1e6:,.0f} MB, verified")], [command])


def _alias(weights: Weights) -> str | None:
    return None if weights.alias == weights.name else weights.alias


def _list(call: Call, dest: Path | None) -> None:
    from ssdctl.model.pretrained import all_weights, find_weights

    mark = "\u2713" if is_encodable("\u2713", sys.stdout) else "*"
    width = max(len(weights.alias or weights.name) for weights in all_weights())
    rows, lines = list[dict[str, object]](), list[str]()
    for weights in all_weights():
        path, file = find_weights(weights.name, dest), weights.file
        row = {"name": weights.name, "alias": _alias(weights), "note": file.note, "url": file.url}
        more = {"sha256": file.sha256, "bytes": file.bytes, "path": str(path) if path else None}
        rows.append({**row, **more})
        shown = weights.alias or weights.name
        lines.append(f"{mark if path else ' '} {shown:<{width}}  {file.note}")
        if call.console.verbose:
            lines.append(f"  {path or file.url}")
    call.console.result({"weights": rows}, "\n".join(lines))
    call.console.closing([(mark, "downloaded"), ("more", "`ssdctl models` lists whole detectors")])


@command(
    "models",
    panel="Results",
    examples=["ssdctl models", "ssdctl predict ssd300-vgg16-coco street.jpg"],
)
def models(call: Call) -> None:
    """List detectors that can be used by name."""
    from ssdctl.download.detectors import DETECTORS, cached_path

    width = max(len(detector.name) for detector in DETECTORS)
    rows, lines = list[dict[str, object]](), list[str]()
    for detector in DETECTORS:
        path, file = cached_path(detector), detector.file
        num_bytes = path.stat().st_size if path else file.bytes
        rows.append(
            {
                "name": detector.name,
                "network": detector.network,
                "AP": detector.ap,
                "licence": detector.license,
                "url": file.url,
                "page": detector.page,
                "trust": detector.trust,
                "sha256": file.sha256 or None,
                "bytes": num_bytes,
                "path": str(path) if path else None,
            }
        )
        ap = "" if detector.ap is None else f", AP {detector.ap:.3f}"
        state = "downloaded" if path else "not downloaded"
        size = f", {num_bytes / 1e6:.0f} MB" if num_bytes else ""
        lines += [
            f"{detector.name:<{width}}  {detector.network}{ap}, {state}{size}",
            f"  license: {detector.license}; {TRUST[detector.trust]}",
            f"  {detector.page}",
        ]
    call.console.result({"models": rows}, "\n".join(lines))
    call.console.closing([], [f"ssdctl predict {DETECTORS[0].name} photo.jpg --out drawn"])
