"""`ssdctl launch`: build and run the command that trains on several devices."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ssdctl import files
from ssdctl.cli.command import Call, command
from ssdctl.config.fields import COUNTED_DEVICES, DeviceType
from ssdctl.errors import DistributedError, ExitCode, UsageError

if TYPE_CHECKING:  # imported late, so that `ssdctl --help` stays fast
    from ssdctl.launch import LaunchPlan, LaunchRequest

CRASHES = (ExitCode.BUG, ExitCode.DISTRIBUTED)  # --restarts applies; others would repeat
OUTCOMES: dict[int, str] = {
    ExitCode.DISTRIBUTED: "a rank or the launcher died; the first failure is above",
    ExitCode.STOPPED: "stopped; run the same command again to continue",
    ExitCode.INTERRUPTED: "interrupted",
}


option = functools.partial(Option, rich_help_panel="Launch")


def _count_parameter(device: DeviceType) -> inspect.Parameter:
    text = f"Number of {device.description} over all nodes ({device.launcher})"
    kind = Annotated[int | None, option(device.count_option, min=1, metavar="N", help=text)]
    return inspect.Parameter(
        device.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind
    )


@command(
    "launch",
    panel="Train",
    settings="launch.*",
    takes_train_options=True,
    short="--hpus --gpus --tpus --cpus --nodes --launcher --dry-run",
    more_options=[_count_parameter(device) for device in COUNTED_DEVICES],
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
        bool, option("--dry-run", help="Print the command without running it")
    ] = False,
    write: Annotated[
        str | None,
        option(metavar="FILE", help="Write the script or manifest instead of running it"),
    ] = None,
    wait: Annotated[bool, option("--wait", help="Follow the submitted job until it ends")] = False,
    rest: Annotated[
        list[str] | None,
        Argument(metavar="[-- COMMAND ...]", help="ssdctl command to launch [default: train]"),
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
            f"give exactly one of {', '.join(d.count_option for d in COUNTED_DEVICES)}",
            hint="for example: ssdctl launch --cpus 2",
        )
    from ssdctl.cli.launch_request import make_request
    from ssdctl.launch import load_launcher, make_plan, read_node

    request = make_request(call, *devices[0], rest or [], is_dry_run=dry_run, write=write)
    launcher = load_launcher(request.launcher)
    is_batch = hasattr(launcher, "submit")
    if write is not None and request.config.restarts and not is_batch:
        call.console.warning(f"{write} does not contain --restarts: only ssdctl launch restarts")
    plan = make_plan(request, read_node())
    for warning in plan.warnings:
        call.console.warning(warning)

    if plan.missing and (write is not None or not dry_run):
        raise UsageError(plan.missing)
    result: dict[str, object] = {
        "argv": list(plan.argv),
        "environment": dict(plan.environment),
        "command": plan.to_line(),
    }
    if plan.text is not None:
        result["script" if plan.manifest is None else "manifest"] = plan.manifest or plan.text
    if write is not None and not dry_run:
        path = Path(write)
        if path.exists():
            call.console.info(f"{write} exists and is replaced")
        files.write_text(path, plan.to_script())
        if plan.manifest is None:
            mode = path.stat().st_mode
            with files.disk_errors(path, "writing"):
                path.chmod(mode | (mode & 0o444) >> 2)  # for all who can read it
        result["written"] = write
        submit = f"; submit it with {launcher.SUBMIT} {write}" if is_batch else ""
        call.console.info(f"wrote {write}{submit}")
        call.console.result(result, None if plan.text else plan.to_line())
    elif dry_run:
        if plan.missing:
            call.console.warning(f"{plan.missing}: replace HOST by it")
        call.console.result(result, (plan.text or plan.to_line()).rstrip("\n"))
    else:
        launcher.require()
        if is_batch:
            code = _submit(call, launcher, plan, result, wait)
        else:
            code = _run(call, request, plan)
        if call.console.as_json and (wait or not is_batch):
            call.console.result({**result, "exit_code": code})
        if code:
            outcome = OUTCOMES.get(code, "see above")
            call.console.info(f"the job ended with exit code {code}: {outcome}")
            raise SystemExit(code)


def _run(call: Call, request: LaunchRequest, plan: LaunchPlan) -> int:
    """Run the job with a local launcher, again after crashes; return its exit code."""
    from ssdctl.cli.launch_request import resumed
    from ssdctl.launch import make_plan, read_node
    from ssdctl.launch._run import run

    if plan.launcher == "torchrun" and plan.nodes > 1:
        call.console.info("this starts only the ranks of this node: run it on every node")
    restarts_left = request.config.restarts
    while True:
        call.console.info(plan.to_line(with_secrets=False))
        outcome = run(plan, stdout_to_stderr=call.console.as_json)
        if outcome.failure is not None:
            _show_failure(call, request, *outcome.failure)
        if outcome.code not in CRASHES or not restarts_left:
            return outcome.code
        restarts_left -= 1
        call.console.warning(
            f"restarting after exit code {outcome.code}; {restarts_left} restarts left"
        )
        request = resumed(request, call.config.train.resume)
        plan = make_plan(request, read_node())


def _show_failure(call: Call, request: LaunchRequest, ranks: list[int], reason: str) -> None:
    from ssdctl.distributed.rank_process import last_lines
    from ssdctl.runs.layout import RunDir

    call.console.error(DistributedError(f"rank {', '.join(map(str, ranks))} {reason}"))
    if ranks[0] == 0 or request.run_folder is None:
        return  # the output of rank 0 is already on the terminal
    path = RunDir(Path(request.run_folder)).rank_log(ranks[0])
    if lines := last_lines(path):
        call.console.warning("\n  | ".join([f"the end of {path}:", *lines]))


def _submit(
    call: Call, engine: Any, plan: LaunchPlan, result: dict[str, object], wait: bool
) -> int:
    job = result["id"] = engine.submit(plan)
    cancel = engine.cancel(job, plan)
    call.console.info(f"submitted {job}; to cancel it: {cancel}")
    if not wait:
        call.console.result(result, job)
        return 0
    try:
        code: int = engine.follow(job, plan, call.console.copy)
    except KeyboardInterrupt:
        call.console.warning(f"{job} continues to run; to cancel it: {cancel}")
        raise
    return code
