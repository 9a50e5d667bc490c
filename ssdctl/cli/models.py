"""`ssdctl models`: list the published detectors that can be used by name."""

from __future__ import annotations

from typing import Any

from ssdctl.cli.command import Call, command

TRUST = {
    "pinned": "SHA-256 verified",
    "prefix": "SHA-256 prefix verified",
    "first use": "SHA-256 pinned on first download",
}


@command(
    "models",
    panel="Results",
    settings=[],
    examples=["ssdctl models", "ssdctl predict ssd300-vgg16-coco street.jpg"],
)
def models(call: Call) -> None:
    """List detectors that can be used by name."""
    from ssdctl.download.detectors import DETECTORS, cached_path

    rows: list[dict[str, Any]] = []
    for detector in DETECTORS:
        path = cached_path(detector)
        rows.append(
            {
                "name": detector.name,
                "network": detector.network,
                "AP": detector.ap,
                "licence": detector.license,
                "url": detector.file.url,
                "page": detector.page,
                "trust": detector.trust,
                "sha256": detector.file.sha256 or None,
                "bytes": path.stat().st_size if path else detector.file.bytes,
                "path": str(path) if path else None,
            }
        )

    lines: list[str] = []
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        size = f", {row['bytes'] / 1e6:.0f} MB" if row["bytes"] else ""
        state = f"downloaded{size}" if row["path"] else f"not downloaded{size}"
        ap = "" if row["AP"] is None else f", AP {row['AP']:.3f}"
        lines += [
            f"{row['name']:<{width}}  {row['network']}{ap}, {state}",
            f"  license: {row['licence']}; {TRUST[row['trust']]}",
            f"  {row['page']}",
        ]
    call.console.result({"models": rows}, "\n".join(lines))
    call.console.closing([], [f"ssdctl predict {rows[0]['name']} photo.jpg --out drawn"])
