"""`ssdctl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssdctl.cli.command import Call, command, completer
from ssdctl.cli.main import app
from ssdctl.errors import UsageError

FORMATS = ("safetensors", "mlperf", "nvidia")


@command(
    app,
    "export",
    panel="Results",
    examples=[
        "ssdctl export best.pt --format safetensors --out ssd.safetensors",
        "ssdctl export best.pt --format mlperf --out iter_120000.pt",
    ],
)
def export(
    call: Call,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="Checkpoint or run folder", show_default=False)
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors, or a peer's: mlperf, nvidia",
            autocompletion=completer(FORMATS),
            show_default=False,
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="File to write", show_default=False)
    ],
) -> None:
    """Write a checkpoint for other programs, or back to the peers' formats."""
    if kind not in FORMATS:
        raise UsageError(f"--format: {kind!r} is not one of {', '.join(FORMATS)}")
    from ssdctl.cli.predict import checkpoint_of
    from ssdctl.model.weights import read_checkpoint
    from ssdctl.report.export import export as write

    source = checkpoint_of(Path(checkpoint))
    write(read_checkpoint(source), kind, Path(out))
    call.console.result({"file": out, "format": kind}, f"{source} -> {out} ({kind})")
