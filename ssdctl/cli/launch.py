"""`ssdctl launch`: write and run the command that trains on several devices."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl import files
from ssdctl.cli.command import Call, command
from ssdctl.cli.main import app
from ssdctl.config.resolve import parse_assignment
from ssdctl.config.settings import all_settings
from ssdctl.errors import UsageError

if TYPE_CHECKING:  # imported where they are used: `ssdctl --help` pays for every module
    from ssdctl.launch.plan import Plan, Request

OUTCOMES = {
    8: "a rank or the launcher died; the first failure is above",
    75: "stopped; run the same command again to go on",
    130: "interrupted",
}
Devices = int | None


def _count(flag: str, what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        flag,
        min=1,
        metavar="N",
        help=f"Run on N {what}, those of all nodes together",
        rich_help_panel="Launch",
        show_default=False,
    )
    return option


@command(
    app,
    "launch",
    panel="Train",
    settings=["launch.*", "data.*", "model.*", "train.*"],
    examples=[
        "ssdctl launch --hpus 8 --bs 128 --bf16",
        "ssdctl launch --gpus 4 --data data/coco --dry-run",
        "ssdctl launch --hpus 16 --nodes 2 --hostfile hosts --write train.sh",
        "ssdctl launch --cpus 2 -- evaluate ckpt.pt",
    ],
)
def launch(
    call: Call,
    hpus: Annotated[Devices, _count("--hpus", "Gaudi cards (mpirun)")] = None,
    gpus: Annotated[Devices, _count("--gpus", "GPUs (torchrun)")] = None,
    tpus: Annotated[Devices, _count("--tpus", "TPU chips (not in this version)")] = None,
    cpus: Annotated[Devices, _count("--cpus", "processes on CPUs (torchrun)")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command alone", rich_help_panel="Launch")
    ] = False,
    write: Annotated[
        str | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write the command as a bash script instead of running it",
            rich_help_panel="Launch",
        ),
    ] = None,
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND ...]", help="Another ssdctl command to launch instead of train"
        ),
    ] = None,
) -> None:
    """Train on several devices: write the launcher's command, and run it.

    Takes every option of `ssdctl train` and hands it on.
    """
    counts = {"hpu": hpus, "cuda": gpus, "xla": tpus, "cpu": cpus}
    given = [(device, count) for device, count in counts.items() if count is not None]
    if len(given) != 1:
        raise UsageError(
            "give exactly one of --hpus, --gpus, --tpus and --cpus",
            hint="for example: ssdctl launch --cpus 2",
        )
    from ssdctl.launch.node import read_node
    from ssdctl.launch.plan import make_plan

    plan = make_plan(_request(call, *given[0], rest or []), read_node())

    answer: dict[str, object] = {
        "argv": list(plan.argv),
        "environment": dict(plan.environment),
        "command": plan.to_line(),
    }
    if write is None and not dry_run:
        _run(call, plan, answer)
        return
    if plan.missing and write is not None:
        raise UsageError(plan.missing)
    if plan.missing:
        call.console.warn(f"{plan.missing}: put it where HOST stands")
    if write is not None:
        _write_script(Path(write), plan)
        answer["written"] = write
        call.console.say(f"wrote {write}")
    call.console.result(answer, plan.to_line())


def _request(call: Call, device: str, count: int, rest: list[str]) -> Request:
    from ssdctl.launch.mpirun import read_hosts
    from ssdctl.launch.plan import Request
    from ssdctl.launch.run import free_port

    config = call.config.launch
    forwarded = rest_command(call, rest) if rest else train_command(call, device)
    # Another command may have no --device: the settings say it to those that have one.
    settings = {s.environment: device for s in all_settings().values() if s.name == "device"}
    return Request(
        device=device,
        count=count,
        command=tuple(forwarded),
        config=config,
        python=sys.executable,
        environment=dict(os.environ),
        settings=settings if rest else {},
        hosts=read_hosts(Path(config.hostfile)) if config.hostfile is not None else (),
        free_port=free_port(),
    )


def train_command(call: Call, device: str) -> list[str]:
    """`train` with the options that the user gave, and the device.

    An option and its value are one word, so a value that begins with '-' stays a value.

    Raises:
        UsageError: The user asked for another device.
    """
    words = ["train"]
    if call.config_file is not None:
        words.append(f"--config={call.config_file}")
    for text in call.assignments:
        path, value, _ = parse_assignment(text)
        if path == "train.device":
            _check_device(value, device)
        if not path.startswith("launch."):
            words.append(f"--set={text}")
    for path, value, flag in call.overrides:
        setting = all_settings()[path]
        if path == "train.device":
            _check_device(value, device)
        elif setting.section == "launch":
            pass
        elif setting.choice_flags or setting.is_flag:
            words.append(flag)
        else:
            words.append(f"{flag}={value}")
    words += ["--quiet"] * call.console.quiet + ["--verbose"] * call.console.verbose
    return [*words, f"--device={device}"]


def _check_device(asked: str, device: str) -> None:
    if asked not in ("auto", device):
        raise UsageError(f"--device {asked} contradicts the count of {device} devices")


def rest_command(call: Call, rest: list[str]) -> list[str]:
    """What follows `--`, seen to be a command of ours.

    Raises:
        UsageError: No such command, or options of train before `--`.
    """
    known = [info.name for info in app.registered_commands if info.name]
    known += [info.name for info in app.registered_groups if info.name]
    if rest[0] not in known or rest[0] == "launch":
        close = difflib.get_close_matches(rest[0], known, n=1)
        raise UsageError(
            f"{rest[0]!r} is no command that can be launched",
            hint=f"did you mean {close[0]!r}?" if close else "`ssdctl --help` lists them",
        )
    stray = [o.source for o in call.overrides if not o.path.startswith("launch.")]
    stray += [f"--set {a}" for a in call.assignments if not a.strip().startswith("launch.")]
    if stray:
        raise UsageError(
            f"{stray[0]} belongs to train, but {rest[0]} is launched",
            hint=f"put the options of {rest[0]} after --",
        )
    return rest


def _write_script(path: Path, plan: Plan) -> None:
    files.write_text(path, plan.to_script())
    mode = path.stat().st_mode
    with files.disk_errors(path, "writing"):
        path.chmod(mode | (mode & 0o444) >> 2)  # who may read may run


def _run(call: Call, plan: Plan, answer: dict[str, object]) -> None:
    from ssdctl.launch.run import require_launcher, run

    if plan.missing:
        raise UsageError(plan.missing)
    require_launcher(plan)
    if plan.launcher == "torchrun" and call.config.launch.nodes > 1:
        call.console.say("this starts the ranks of this node: run it on every node")
    call.console.say(plan.to_line())
    code = run(plan, stdout_to_stderr=call.console.as_json)
    if call.console.as_json:
        call.console.result({**answer, "exit_code": code})
    if code:
        call.console.say(f"the job ended with exit code {code}: {OUTCOMES.get(code, 'see above')}")
        raise SystemExit(code)
