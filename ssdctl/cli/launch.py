"""`ssdctl launch`: build and run the command that trains on several devices."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ssdctl import files
from ssdctl.cli.command import Call, command
from ssdctl.config.fields import COUNTED_DEVICES, DeviceType
from ssdctl.errors import DistributedError, ExitCode, Stopped, UsageError
from ssdctl.runtime import signals

if TYPE_CHECKING:  # imported late, so that `ssdctl --help` stays fast
    from ssdctl.launch.base import BatchEngine, Engine, Job, LaunchRequest

CRASHES = (ExitCode.BUG, ExitCode.DISTRIBUTED)  # --restarts applies; others would repeat
OUTCOMES: dict[int, str] = {
    ExitCode.DISTRIBUTED: "a rank or the launcher died; the first failure is above",
    ExitCode.STOPPED: "stopped; run the same command again to continue",
    ExitCode.INTERRUPTED: "interrupted",
}


option = functools.partial(Option, rich_help_panel="Launch")


DryRun = Annotated[bool, option("--dry-run", help="Print the command without running it")]
Devices = Annotated[
    int | None,
    option(min=1, metavar="N", help="Number of devices of --device NAME over all nodes"),
]
Write = Annotated[
    str | None, option(metavar="FILE", help="Write the script or manifest instead of running it")
]


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
    dry_run: DryRun = False,
    write: Write = None,
    wait: Annotated[bool, option("--wait", help="Follow the submitted job until it ends")] = False,
    devices: Devices = None,
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
    device, count = _counted_device(counts, call.config.train.device, devices)
    from ssdctl.cli.launch_request import configure_launch
    from ssdctl.launch.base import BatchEngine, make_job, read_node

    engine, request = configure_launch(
        call, device, count, rest or [], is_dry_run=dry_run, is_written=write is not None
    )
    if write is not None and request.config.restarts and not isinstance(engine, BatchEngine):
        call.console.warning(f"{write} does not contain --restarts: only ssdctl launch restarts")
    job = make_job(engine, request, read_node())
    for warning in job.warnings:
        call.console.warning(warning)
    if job.missing and (write is not None or not dry_run):
        raise UsageError(job.missing)
    if dry_run:
        if job.missing:
            call.console.warning(f"{job.missing}: replace HOST by it")
        call.console.result(_as_json(job), (job.text or job.to_line()).rstrip("\n"))
    elif write is not None:
        _write(call, engine, job, write)
    else:
        _start(call, engine, request, job, wait=wait)


def _counted_device(
    counts: dict[str, int | None], named: str, devices: int | None
) -> tuple[str, int]:
    numbers = [*counts.items(), (named, devices)]
    given = [(device, count) for device, count in numbers if count is not None]
    if devices is not None and named == "auto":
        raise UsageError("--devices: give --device, too")
    if len(given) != 1:
        options = [d.count_option for d in COUNTED_DEVICES]
        raise UsageError(
            f"give exactly one of {', '.join(options)}; a plugin's: --device NAME --devices N",
            hint="for example: ssdctl launch --cpus 2",
        )
    return given[0]


def _as_json(job: Job) -> dict[str, object]:
    result: dict[str, object] = {
        "argv": list(job.argv),
        "environment": dict(job.environment),
        "command": job.to_line(),
    }
    if job.text is not None:
        result["script" if job.manifest is None else "manifest"] = job.manifest or job.text
    return result


def _write(call: Call, engine: Engine, job: Job, write: str) -> None:
    from ssdctl.launch.base import WRITTEN, BatchEngine

    path = Path(write)
    files.require_own_file(path, "--write", rf"(#!.*\n)?{re.escape(WRITTEN)}\n")
    if path.is_file():
        call.console.info(f"{write} exists and is replaced")
    files.write_text(path, job.to_script())
    if job.manifest is None:
        mode = path.stat().st_mode
        with files.disk_errors(path, "writing"):
            path.chmod(mode | (mode & 0o444) >> 2)  # for all who can read it
    submit = ""
    if isinstance(engine, BatchEngine):
        submit = f"; submit it with {engine.submit_command} {shlex.quote(write)}"
    call.console.info(f"wrote {write}{submit}")
    call.console.result({**_as_json(job), "written": write}, None if job.text else job.to_line())


def _start(call: Call, engine: Engine, request: LaunchRequest, job: Job, *, wait: bool) -> None:
    from ssdctl.launch.base import BatchEngine

    engine.require()
    result = _as_json(job)
    if isinstance(engine, BatchEngine):
        signals.restore()  # the submitted job continues after Ctrl-C
        signals.interrupt_on_end()
        code = _submit(call, engine, job, result, wait)
    else:
        code = _run(call, engine, request, job)
    if call.console.as_json and (wait or not isinstance(engine, BatchEngine)):
        call.console.result({**result, "exit_code": code})
    if code:
        outcome = OUTCOMES.get(code, "see above")
        call.console.info(f"the job ended with exit code {code}: {outcome}")
        raise SystemExit(code)


def _run(call: Call, engine: Engine, request: LaunchRequest, job: Job) -> int:
    """Run the job again after crashes, at most `--restarts` times; return its exit code.

    A job that was asked to stop is not run again.
    """
    from ssdctl.cli.launch_request import resumed
    from ssdctl.launch import processes
    from ssdctl.launch.base import make_job, read_node

    if job.launcher == "torchrun" and job.nodes > 1:
        text = "this starts only the ranks of this node: run it on every node within half an hour"
        call.console.info(text)
    restarts_left = request.config.restarts
    while True:
        call.console.info(job.to_line(with_secrets=False))
        outcome = processes.run(job, stdout_to_stderr=call.console.as_json)
        if outcome.failure is not None:
            _show_failure(call, request, *outcome.failure)
        if outcome.code not in CRASHES or outcome.was_signaled or not restarts_left:
            return outcome.code
        restarts_left -= 1
        call.console.warning(
            f"restarting after exit code {outcome.code}; {restarts_left} restarts left"
        )
        request = resumed(request)
        engine = engine.configure(call.config, request)
        job = make_job(engine, request, read_node())


def _show_failure(call: Call, request: LaunchRequest, ranks: list[int], reason: str) -> None:
    from ssdctl.distributed.rank_process import last_lines
    from ssdctl.runs.folder import RunDir

    call.console.error(DistributedError(f"rank {', '.join(map(str, ranks))} {reason}"))
    if ranks[0] == 0 or request.run_folder is None:
        return  # the output of rank 0 is already on the terminal
    path = RunDir(Path(request.run_folder)).rank_log(ranks[0])
    if lines := last_lines(path):
        call.console.warning("\n  | ".join([f"the end of {path}:", *lines]))


def _submit(
    call: Call, engine: BatchEngine, job: Job, result: dict[str, object], wait: bool
) -> int:
    job_id = result["id"] = engine.submit(job)
    cancel = engine.cancel(job_id, job)
    call.console.info(f"submitted {job_id}; to cancel it: {cancel}")
    if not wait:
        call.console.result(result, job_id)
        return 0
    try:
        return engine.follow(job_id, job, call.console.copy)
    except KeyboardInterrupt as interrupt:
        call.console.warning(f"{job_id} continues to run; to cancel it: {cancel}")
        if str(interrupt) in signals.ENDING:  # the same command would submit it again
            raise Stopped(f"stopped by {interrupt}") from None
        raise
