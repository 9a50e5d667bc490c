"""`ssdctl launch`: build and run the command that trains on several devices."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl import files
from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.config.devices import DEVICE_TYPES, DeviceType
from ssdctl.errors import DistributedError, ExitCode, UsageError

if TYPE_CHECKING:  # imported late, so that `ssdctl --help` stays fast
    from ssdctl.launch.request import LaunchPlan, LaunchRequest
    from ssdctl.launch.run import JobOutcome

CRASHES = (ExitCode.BUG, ExitCode.DISTRIBUTED)  # --restarts applies; others would repeat
SUBMIT = {"slurm": "sbatch", "kubernetes": "kubectl create -f"}  # the batch engines
OUTCOMES: dict[int, str] = {
    ExitCode.DISTRIBUTED: "a rank or the launcher died; the first failure is above",
    ExitCode.STOPPED: "stopped; run the same command again to continue",
    ExitCode.INTERRUPTED: "interrupted",
}


def _count_parameter(device: DeviceType) -> inspect.Parameter:
    """Return the option that counts the devices of one type, for the signature of `launch`."""
    option: typer.models.OptionInfo = typer.Option(
        device.count_option,
        min=1,
        metavar="N",
        help=f"Number of {device.description} over all nodes ({device.launcher})",
        rich_help_panel="Launch",
        show_default=False,
    )
    return inspect.Parameter(
        device.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[int | None, option],
    )


@command(
    app,
    "launch",
    panel="Train",
    settings=["launch.*"],
    settings_of=("train", ["data.*", "model.*", "train.*"]),
    short=("--hpus", "--gpus", "--tpus", "--cpus", "--nodes", "--launcher", "--dry-run"),
    more_options=[_count_parameter(device) for device in DEVICE_TYPES.values()],
    examples=[
        "ssdctl launch --hpus 8 --bs 128 --bf16",
        "ssdctl launch --gpus 4 --data data/coco --dry-run",
        "ssdctl launch --hpus 16 --nodes 2 --hostfile hosts --write train.sh",
        "ssdctl launch --gpus 16 --nodes 2 --launcher slurm --set slurm.time=12:00:00",
        "ssdctl launch --hpus 8 --cluster voyager --dry-run   # see docs/clusters.md",
        "ssdctl launch --cpus 2 -- evaluate ckpt.pt",
    ],
)
def launch(
    call: Call,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the command without running it",
            rich_help_panel="Launch",
        ),
    ] = False,
    write: Annotated[
        str | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write the script or manifest instead of running it",
            rich_help_panel="Launch",
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Follow the submitted job until it ends",
            rich_help_panel="Launch",
        ),
    ] = False,
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND ...]", help="ssdctl command to launch [default: train]"
        ),
    ] = None,
    **counts: int | None,
) -> None:
    """Train on several devices or nodes.

    The command of the launcher is generated and run. Slurm and Kubernetes jobs are submitted; the
    tables `slurm` and `kubernetes` of the config describe them.
    """
    devices = [(device, count) for device, count in counts.items() if count is not None]
    if len(devices) != 1:
        raise UsageError(
            f"give exactly one of {', '.join(d.count_option for d in DEVICE_TYPES.values())}",
            hint="for example: ssdctl launch --cpus 2",
        )
    from ssdctl.cli.launch_request import make_request
    from ssdctl.launch import sky
    from ssdctl.launch.node import read_node
    from ssdctl.launch.plan import make_plan

    request = make_request(call, *devices[0], rest or [], is_dry_run=dry_run)
    if write is not None:  # the script may run on other machines
        request = dataclasses.replace(request, local_address=None)
    request = dataclasses.replace(request, is_planned=dry_run or write is not None)
    if write is not None and write.endswith(sky.SUFFIXES) and not dry_run:
        files.write_text(Path(write), sky.to_task(request, read_node()))
        call.console.info(f"wrote {write}; start it with sky launch --gpus TYPE:COUNT {write}")
        call.console.result({"written": write}, None)
        return
    plan = make_plan(request, read_node())
    for warning in plan.warnings:
        call.console.warning(warning)

    result: dict[str, object] = {
        "argv": list(plan.argv),
        "environment": dict(plan.environment),
        "command": plan.to_line(),
    }
    if plan.text is not None:
        result["script" if plan.manifest is None else "manifest"] = plan.manifest or plan.text
    if write is None and not dry_run:
        if plan.launcher in SUBMIT:
            _submit(call, plan, result, wait)
        else:
            _run(call, request, plan, result)
        return
    if plan.missing and write is not None:
        raise UsageError(plan.missing)
    if plan.missing:
        call.console.warning(f"{plan.missing}: replace HOST by it")
    if write is not None:
        if Path(write).exists():
            call.console.info(f"{write} exists and is replaced")
        _write_script(Path(write), plan)
        result["written"] = write
        submit = SUBMIT.get(plan.launcher)
        call.console.info(
            f"wrote {write}" + (f"; submit it with {submit} {write}" if submit else "")
        )
    human = plan.to_line() if plan.text is None else plan.text.rstrip("\n")
    call.console.result(result, None if plan.text and write is not None else human)


def _write_script(path: Path, plan: LaunchPlan) -> None:
    files.write_text(path, plan.to_script())
    if plan.manifest is None:
        mode = path.stat().st_mode
        with files.disk_errors(path, "writing"):
            path.chmod(mode | (mode & 0o444) >> 2)  # executable for all who can read it


def _run(call: Call, request: LaunchRequest, plan: LaunchPlan, result: dict[str, object]) -> None:
    """Run the job with a local launcher; restart it after crashes as often as --restarts allows."""
    from ssdctl.cli.launch_request import resumed
    from ssdctl.launch.node import read_node
    from ssdctl.launch.plan import make_plan
    from ssdctl.launch.run import require_launcher, run

    if plan.missing:
        raise UsageError(plan.missing)
    require_launcher(plan)
    if plan.launcher == "torchrun" and plan.nodes > 1:
        call.console.info("this starts only the ranks of this node: run it on every node")
    restarts_left = request.config.restarts
    while True:
        call.console.info(plan.to_log_line())
        outcome = run(plan, stdout_to_stderr=call.console.as_json)
        _show_failure(call, request, plan, outcome)
        if outcome.code not in CRASHES or not restarts_left:
            break
        restarts_left -= 1
        call.console.warning(
            f"restarting after exit code {outcome.code}; {restarts_left} restarts left"
        )
        request = resumed(request)
        plan = make_plan(request, read_node())
    if call.console.as_json:
        call.console.result({**result, "exit_code": outcome.code})
    _exit_with(call, outcome.code)


def _show_failure(
    call: Call, request: LaunchRequest, plan: LaunchPlan, outcome: JobOutcome
) -> None:
    """Print the ranks that failed first and the end of their log."""
    from ssdctl.launch.exit_codes import first_failure
    from ssdctl.launch.logs import last_lines
    from ssdctl.runs.layout import RunDir

    if outcome.code in (ExitCode.OK, ExitCode.STOPPED, ExitCode.INTERRUPTED):
        return
    num_ranks = plan.num_ranks if plan.nodes == 1 else None
    memory = outcome.is_out_of_memory
    failure = first_failure(outcome.exits, num_ranks, outcome.lost, is_out_of_memory=memory)
    if failure is None:
        return
    ranks, reason = failure
    call.console.error(DistributedError(f"rank {', '.join(map(str, ranks))} {reason}"))
    for rank in ranks[:1]:
        if rank == 0 or request.run_folder is None:
            continue  # the output of rank 0 is already on the terminal
        path = RunDir(Path(request.run_folder)).rank_log(rank)
        if lines := last_lines(path):
            call.console.warning("\n  | ".join([f"the end of {path}:", *lines]))


def _submit(call: Call, plan: LaunchPlan, result: dict[str, object], wait: bool) -> None:
    """Submit the job to its batch engine; with `wait` follow it until it ends."""
    from ssdctl.launch import submit

    submit.require_engine(plan)
    job = submit.submit(plan)
    result["id"] = job
    cancel = submit.end_command(job, plan)
    if not wait:
        call.console.info(f"submitted; to cancel it: {cancel}")
        call.console.result(result, job)
        return
    call.console.info(f"submitted {job}; to cancel it: {cancel}")
    try:
        code = submit.follow(job, plan, call.console.copy)
    except KeyboardInterrupt:
        call.console.warning(f"{job} continues to run; to cancel it: {cancel}")
        raise
    if call.console.as_json:
        call.console.result({**result, "exit_code": code})
    _exit_with(call, code)


def _exit_with(call: Call, code: int) -> None:
    """Exit with the code of a failed job; return if it is 0."""
    if code:
        call.console.info(f"the job ended with exit code {code}: {OUTCOMES.get(code, 'see above')}")
        raise SystemExit(code)
