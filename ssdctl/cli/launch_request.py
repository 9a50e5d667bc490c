"""Build the request of `ssdctl launch` for a plan, with the command that the ranks run."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import uuid
from pathlib import Path

from ssdctl.cli.app import app, click_root
from ssdctl.cli.command import Call
from ssdctl.cli.option_aliases import AliasCommand
from ssdctl.config.render import toml_value, values
from ssdctl.config.resolve import parse_assignment
from ssdctl.config.settings import all_settings
from ssdctl.config.sources import Kind
from ssdctl.distributed.addresses import address_for_peers, own_names
from ssdctl.errors import UsageError
from ssdctl.launch.mpirun import read_hosts, read_version
from ssdctl.launch.pod_spec import read_patch
from ssdctl.launch.preflight import check_train, missing_volumes, read_only_data
from ssdctl.launch.request import LaunchRequest
from ssdctl.launch.run import free_port
from ssdctl.launch.torchrun import PLACEHOLDER, rendezvous_endpoint
from ssdctl.runs.default_folder import run_dir
from ssdctl.runtime.torch_compat import installed_version

LAUNCH_TABLES = ("launch", "slurm", "kubernetes")  # tables of the config that ranks do not read


def make_request(
    call: Call, device: str, count: int, rest: list[str], *, is_dry_run: bool = False
) -> LaunchRequest:
    """Return the request for a launch plan.

    Args:
        call: This call of `launch`.
        device: The device type of the count.
        count: The number of devices.
        rest: The command after `--`; empty: `train`.
        is_dry_run: The plan is only shown: what pods lack is a warning.

    Raises:
        UsageError: The options contradict each other, or the host file cannot be read.
    """
    config, in_pods = call.config.launch, call.config.launch.launcher == "kubernetes"
    command = rest_command(call, rest) if rest else train_command(call, device, in_pods=in_pods)
    settings = exported_settings(call) if in_pods else {}
    if rest:  # the command may not have --device: set it by variables, which any command accepts
        settings |= {s.environment: device for s in all_settings().values() if s.name == "device"}
    if config.hostfile is not None and config.launcher in ("slurm", "kubernetes"):
        raise UsageError(
            f"--hostfile applies to mpirun and torchrun: {config.launcher} chooses the hosts"
        )
    request = LaunchRequest(
        device=device,
        count=count,
        command=tuple(command),
        config=config,
        python=sys.executable,
        environment=dict(os.environ),
        settings=settings,
        hosts=read_hosts(Path(config.hostfile)) if config.hostfile is not None else (),
        own_names=own_names(),
        free_port=free_port(),
        slurm=call.config.slurm,
        kubernetes=call.config.kubernetes,
        job_name=f"ssdctl-{uuid.uuid4().hex[:6]}",
        run_folder=None if rest else str(run_dir(call.config)),
        is_dry_run=is_dry_run,
    )
    if not rest:
        for notice in check_train(request, call.resolved):
            call.console.warning(notice)
    if in_pods:
        for missing in missing_volumes(request, call.config):
            if not is_dry_run:
                raise missing
            call.console.warning(f"{missing}; {missing.hint}")
        if text := read_only_data(request, call.config):
            call.console.warning(text)
        if (patch := call.config.kubernetes.patch) is not None:
            request = dataclasses.replace(request, patch=read_patch(Path(patch)))
    if request.launcher == "mpirun":
        return dataclasses.replace(request, open_mpi=read_version())
    if request.launcher == "torchrun":
        return dataclasses.replace(
            request, torch_version=installed_version(), local_address=_local_address(request)
        )
    return request


def _local_address(request: LaunchRequest) -> str | None:
    """Return the address at which the other nodes of a torchrun job reach this one."""
    host = rendezvous_endpoint(request).rpartition(":")[0].strip("[]")
    if request.config.nodes == 1 or host == PLACEHOLDER:
        return None
    return address_for_peers(host)


def resumed(request: LaunchRequest) -> LaunchRequest:
    """Return the request for the next attempt of a job that crashed."""
    command = request.command
    if command[0] == "train" and command[-1] != "--resume=auto":
        command = (*command, "--resume=auto")  # `never` applies only to the first attempt
    return dataclasses.replace(request, command=command, free_port=free_port())


def exported_settings(call: Call) -> dict[str, str]:
    """Return variables that set in a pod what config files and variables set on this machine."""
    variables = {}
    for path, value in values(call.config).items():
        source, setting = call.resolved.sources[path], all_settings()[path]
        is_of_this_machine = source.kind in (Kind.FILE, Kind.ENVIRONMENT)
        if setting.section not in LAUNCH_TABLES and is_of_this_machine:
            variables[setting.environment] = _as_text(value)
    return variables


def _as_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        parts = [str(part) for part in value]
        return toml_value(parts) if any("," in part for part in parts) else ",".join(parts)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def train_command(call: Call, device: str, *, in_pods: bool = False) -> list[str]:
    """Return `train` with the user's options and the device, as arguments.

    An option and its value are one argument, so that values may begin with '-'.

    Args:
        call: This call of `launch`.
        device: The device type of the count.
        in_pods: The ranks run in pods, which do not have the config file.

    Raises:
        UsageError: The options name another device.
    """
    arguments = ["train"]
    if call.config_file is not None and not in_pods:
        arguments.append(f"--config={call.config_file}")
    for text in call.assignments:
        path, value, _ = parse_assignment(text)
        if path == "train.device":
            _check_device(value, device)
        if path.partition(".")[0] not in LAUNCH_TABLES:
            arguments.append(f"--set={text}")
    for path, value, (_, flag) in call.overrides:
        setting = all_settings()[path]
        if path == "train.device":
            _check_device(value, device)
        elif setting.section in LAUNCH_TABLES:
            pass
        elif setting.choice_flags or setting.is_flag:
            arguments.append(flag)
        else:
            arguments.append(f"{flag}={value}")
    arguments += ["--quiet"] * call.console.quiet + ["--verbose"] * call.console.verbose
    return [*arguments, f"--device={device}"]


def _check_device(value: str, device: str) -> None:
    if value not in ("auto", device):
        raise UsageError(
            f"--device {value} contradicts the number of {device} devices: give only the number"
        )


def rest_command(call: Call, rest: list[str]) -> list[str]:
    """Return the command after `--`, checked: it must exist and have these options.

    Raises:
        UsageError: The command does not exist, or options of train precede `--`.
        SystemExit: The command does not have one of the options.
    """
    commands = [info.name for info in app.registered_commands if info.name]
    commands += [info.name for info in app.registered_groups if info.name]
    if rest[0] not in commands or rest[0] == "launch":
        close = difflib.get_close_matches(rest[0], commands, n=1)
        raise UsageError(
            f"{rest[0]!r} is not a command that can be launched",
            hint=f"did you mean {close[0]!r}?" if close else "`ssdctl --help` lists the commands",
        )
    tables = [(o.source.label, o.path) for o in call.overrides]
    tables += [(f"--set {a}", a.strip()) for a in call.assignments]
    misplaced = [option for option, path in tables if path.partition(".")[0] not in LAUNCH_TABLES]
    if misplaced and rest[0] == "train":
        raise UsageError("launch starts train by itself", hint="leave out the word train")
    if misplaced:
        raise UsageError(
            f"{misplaced[0]} is an option of train, but {rest[0]} is launched",
            hint=f"put the options of {rest[0]} after --",
        )
    return _without_aliases(rest)


def _without_aliases(rest: list[str]) -> list[str]:
    """Parse the options of a command to launch, as each rank would; return it without aliases."""
    command = click_root(rest[0].replace("-", "_")).commands[rest[0]]
    command.make_context(f"ssdctl {rest[0]}", rest[1:])
    return (
        [rest[0], *command.without_aliases(rest[1:])] if isinstance(command, AliasCommand) else rest
    )
