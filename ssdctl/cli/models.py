"""`ssdctl models`: list the published detectors that can be used by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command

if TYPE_CHECKING:
    from rich.table import Table

TRUST = {
    "pinned": "SHA-256 pinned",
    "prefix": "first digits of the SHA-256 pinned",
    "first use": "no published checksum: SHA-256 recorded at the first use",
}


@command(
    app,
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
                "licence": detector.licence,
                "url": detector.file.url,
                "page": detector.page,
                "trust": detector.trust,
                "sha256": detector.file.sha256 or None,
                "bytes": path.stat().st_size if path else detector.file.bytes,
                "path": str(path) if path else None,
            }
        )

    def table() -> Table:
        from rich.table import Table

        result = Table("name", "network", "AP", "licence", "check", "present")
        for column in result.columns:
            column.overflow = "fold"
        result.columns[0].no_wrap = True  # to be copied
        for row in rows:
            ap = "" if row["AP"] is None else f"{row['AP']:.3f}"
            present = f"{row['bytes'] / 1e6:.0f} MB" if row["path"] else "no"
            check = TRUST[row["trust"]]
            result.add_row(row["name"], row["network"], ap, row["licence"], check, present)
        return result

    call.console.result({"models": rows}, table)
