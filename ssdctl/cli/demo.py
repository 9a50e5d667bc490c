"""`ssdctl demo`: the whole way once, by the very commands that a user would type."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from ssdctl.cli.app import app, run_command
from ssdctl.cli.command import Call, command
from ssdctl.runs.layout import RunDir

# Found by trials on two cores (benchmarks/RESULTS.md): one pass over 1,040 pictures, from random
# weights. No crops: each picture is seen once, so there is nothing to vary.
RECIPE = (
    "--backbone resnet18 --backbone-weights none --augment none "
    "--optimizer adamw --weight-decay 0.01 --clip-grad 10 --bs 4 --steps 260 --lr 8e-3 "
    "--warmup 20st --lr-decay cosine --decay-epochs 0.2,1"
)


@command(
    app,
    "demo",
    panel="Start here",
    examples=["ssdctl demo", "ssdctl demo --out /tmp/tour --seed 1"],
)
def demo(
    call: Call,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the tour")] = "demo",
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of it all")] = 0,
) -> None:
    """Walk the whole way in minutes, without network: data, training, evaluation, report.

    A small detector learns to find shapes, from random weights. The commands are printed, so that
    you can go on alone; a tour that was interrupted goes on where it stopped.
    """
    folder = Path(out)
    data, run = folder / "shapes", folder / "run"
    commands = [
        ["download", "--dataset", "shapes", "--dest", str(data), "--images", "1080",
         "--seed", str(seed)],
        ["prepare", "--data", str(data)],
        ["train", "--data", str(data), "--out", str(run), "--seed", str(seed), *RECIPE.split()],
        ["evaluate", str(RunDir(run).best)],
        ["report", str(run)],
    ]  # fmt: skip
    common = ["--quiet"] if call.console.quiet or call.console.as_json else []
    common += ["--verbose"] if call.console.verbose else []
    common += ["--config", call.config_file] if call.config_file else []
    common += [part for text in call.assignments for part in ("--set", text)]
    start = time.monotonic()
    for arguments in commands:
        call.console.say(f"\n$ {shlex.join(['ssdctl', *arguments])}")
        run_command([*arguments, *common], stdout_to_stderr=call.console.as_json)
    _conclude(call, run, commands, time.monotonic() - start)


def _conclude(call: Call, run: Path, commands: list[list[str]], spent_s: float) -> None:
    from ssdctl.runs.reader import read_run

    best = read_run(run).best
    assert best is not None  # the run above evaluated
    report = RunDir(run).report
    lines = [shlex.join(["ssdctl", *arguments]) for arguments in commands]
    data = {
        "AP": best["AP"],
        "AP50": best["AP50"],
        "report": str(report),
        "seconds": round(spent_s, 1),
        "commands": lines,
    }
    text = "\n".join(
        [
            "",
            f"AP {best['AP']:.3f}, AP50 {best['AP50']:.3f} on held-out pictures, "
            f"in {spent_s:.0f} seconds. The commands of this tour:",
            *(f"  {line}" for line in lines),
            f"Report: {report}",
        ]
    )
    call.console.result(data, text)
