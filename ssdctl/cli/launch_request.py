"""What `ssdctl launch` hands on: the command of the ranks, and the request for a plan."""

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
from ssdctl.config.render import values
from ssdctl.config.resolve import parse_assignment
from ssdctl.config.settings import all_settings
from ssdctl.distributed.addresses import address_for_peers, own_names
from ssdctl.errors import UsageError
from ssdctl.launch.mpirun import read_hosts, read_version
from ssdctl.launch.preflight import check_train, check_volumes
from ssdctl.launch.request import LaunchRequest
from ssdctl.launch.run import free_port
from ssdctl.launch.torchrun import PLACEHOLDER, rendezvous_endpoint
from ssdctl.runs.layout import run_dir
from ssdctl.runtime.torch_compat import installed_version

OWN = ("launch", "slurm", "kubernetes")  # the tables that are no concern of the ranks


def make_request(call: Call, device: str, count: int, rest: list[str]) -> LaunchRequest:
    """What the user asked for.

    Raises:
        UsageError: It contradicts itself, or the host file cannot be read.
    """
    config, in_pods = call.config.launch, call.config.launch.launcher == "kubernetes"
    command = rest_command(call, rest) if rest else train_command(call, device, in_pods=in_pods)
    settings = carried_settings(call) if in_pods else {}
    if rest:  # it may have no --device: the settings say it to those that have one
        settings |= {s.environment: device for s in all_settings().values() if s.name == "device"}
    if config.hostfile is not None and config.launcher in ("slurm", "kubernetes"):
        raise UsageError(f"--hostfile is mpirun's: {config.launcher} chooses the hosts")
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
        run_folder=None if rest else str(run_dir(call.config.train)),
    )
    if not rest:
        source = call.resolved.sources["train.precision"]
        for notice in check_train(request, call.config, source):
            call.console.warn(notice)
    if in_pods:
        check_volumes(request, call.config)
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
    """The request for the next attempt of a job that crashed."""
    command = request.command
    if command[0] == "train" and command[-1] != "--resume=auto":
        command = (*command, "--resume=auto")  # `never` was meant for the first attempt
    return dataclasses.replace(request, command=command, free_port=free_port())


def carried_settings(call: Call) -> dict[str, str]:
    """Variables that say in a pod what a config file and the environment say here."""
    found = {}
    for path, value in values(call.config).items():
        source, setting = call.resolved.sources[path], all_settings()[path]
        is_known_there = source == "default" or source.startswith(("preset ", "cluster ", "--"))
        if setting.section not in OWN and not is_known_there:
            found[setting.environment] = _as_text(value)
    return found


def _as_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def train_command(call: Call, device: str, *, in_pods: bool = False) -> list[str]:
    """`train` with the options that the user gave, and the device.

    An option and its value are one word, so a value that begins with '-' stays a value.

    Args:
        call: This call of `launch`.
        device: What the count was given for.
        in_pods: The config file does not exist where the ranks run.

    Raises:
        UsageError: The user asked for another device.
    """
    words = ["train"]
    if call.config_file is not None and not in_pods:
        words.append(f"--config={call.config_file}")
    for text in call.assignments:
        path, value, _ = parse_assignment(text)
        if path == "train.device":
            _check_device(value, device)
        if path.partition(".")[0] not in OWN:
            words.append(f"--set={text}")
    for path, value, flag in call.overrides:
        setting = all_settings()[path]
        if path == "train.device":
            _check_device(value, device)
        elif setting.section in OWN:
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
    """What follows `--`, seen to be a command of ours with options that it has.

    Raises:
        UsageError: No such command, or options of train before `--`.
        SystemExit: Options that it does not have.
    """
    known = [info.name for info in app.registered_commands if info.name]
    known += [info.name for info in app.registered_groups if info.name]
    if rest[0] not in known or rest[0] == "launch":
        close = difflib.get_close_matches(rest[0], known, n=1)
        raise UsageError(
            f"{rest[0]!r} is no command that can be launched",
            hint=f"did you mean {close[0]!r}?" if close else "`ssdctl --help` lists them",
        )
    stray = [o.source for o in call.overrides if o.path.partition(".")[0] not in OWN]
    stray += [f"--set {a}" for a in call.assignments if a.strip().partition(".")[0] not in OWN]
    if stray:
        raise UsageError(
            f"{stray[0]} belongs to train, but {rest[0]} is launched",
            hint=f"put the options of {rest[0]} after --",
        )
    return _without_aliases(rest)


def _without_aliases(rest: list[str]) -> list[str]:
    """Check the options of a command to launch, as every rank would; return it without aliases."""
    command = click_root(rest[0].replace("-", "_")).commands[rest[0]]
    command.make_context(f"ssdctl {rest[0]}", rest[1:])
    return (
        [rest[0], *command.without_aliases(rest[1:])] if isinstance(command, AliasCommand) else rest
    )
