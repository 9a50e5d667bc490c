"""Configure the launcher of `ssdctl launch`, and build the command that the ranks run."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import typer

from ssdctl.checkpoint.locate import continued_config
from ssdctl.cli.command import Call
from ssdctl.cli.help import click_root
from ssdctl.cli.option_aliases import AliasCommand
from ssdctl.cli.train import plan_and_check
from ssdctl.config import Config, TrainConfig
from ssdctl.config.fields import device_type
from ssdctl.config.render import toml_value, values
from ssdctl.config.resolve import FILES_VARIABLE, parse_assignment
from ssdctl.config.settings import Kind, all_settings
from ssdctl.data.open_dataset import DatasetSize, count_images
from ssdctl.data.sources import has_dataset, is_prepared
from ssdctl.data.store_folder import dataset_folders, with_absolute_paths
from ssdctl.data.tiles import tiling_of
from ssdctl.distributed import Ranks
from ssdctl.errors import DataError, UsageError
from ssdctl.launch.base import (
    BatchEngine,
    Engine,
    LaunchRequest,
    last_value,
    load_engine,
    read_node,
)
from ssdctl.launch.engines.mpirun import read_hosts
from ssdctl.launch.engines.torchrun import choose_tpu_device
from ssdctl.model.pretrained import weights_named
from ssdctl.runs.folder import run_dir
from ssdctl.runtime.hardware import TPU_VERSIONS
from ssdctl.training.observers.trackers import find_trackers
from ssdctl.training.plan import (
    check_settings,
    check_shares,
    make_plan,
    refuse_settings_of_detectors,
)

# Tables of the config that ranks do not read.
LAUNCH_TABLES = ("launch", "kubernetes", "slurm")
# Commands for several ranks, besides train: they share the work, or examine the nodes.
DISTRIBUTED_COMMANDS = {"benchmark train", "doctor", "evaluate"}


def configure_launch(
    call: Call, device: str, count: int, rest: list[str], *, is_dry_run: bool, is_written: bool
) -> tuple[Engine, LaunchRequest]:
    """Return the launcher and the request for a launch of `train`, or of the command `rest`."""
    config = call.config.launch
    device = _tpu_device(call) if device == "tpu" else device
    if device not in ("tpu", "xla"):
        call.config.require_not_given(["launch.tpu_version"], "is for --tpus", "leave it out")
    name = device_type(device).launcher if config.launcher == "auto" else config.launcher
    engine = load_engine(name)
    may_move = engine.runs_elsewhere or is_written  # the ranks may start in another folder
    file = None if engine.runs_elsewhere else call.config_file
    command = (
        rest_command(call, rest, device, count, file) if rest else train_command(call, device, file)
    )
    settings, variables = all_settings(), dict[str, str]()
    if may_move:
        own = exported_settings(call, Kind.ENVIRONMENT)
        variables = {settings[path].environment: value for path, value in own.items()}
        of_files = exported_settings(call, Kind.FILE)
        if of_files and last_value(command, "--config") is None:  # else the ranks read it
            variables[FILES_VARIABLE] = json.dumps(of_files)
    package = Path(__file__).parents[2]
    if not engine.runs_elsewhere and package not in map(Path, sys.path):  # of a clone's folder
        others = filter(None, [os.environ.get("PYTHONPATH")])
        variables["PYTHONPATH"] = os.pathsep.join([str(package), *others])
    if rest:  # the command may not have --device: set it by variables, which any command accepts
        variables |= {s.environment: device for s in settings.values() if s.name == "device"}
    if issubclass(engine, BatchEngine):
        reason = f"applies to mpirun and torchrun: {name} chooses the hosts"
        call.config.require_not_given(["launch.hostfile"], reason, "leave it out")
        config = msgspec.structs.replace(config, hostfile=None)
    request = LaunchRequest(
        device=device,
        count=count,
        command=tuple(command),
        config=config,
        python=sys.executable,
        environment=dict(os.environ),
        variables=variables,
        hosts=read_hosts(Path(config.hostfile)) if config.hostfile is not None else (),
        run_folder=None if rest else str(run_dir(call.config)),
        resume=None if rest else call.config.train.resume,
        is_dry_run=is_dry_run,
        is_written=is_written,
    )
    if not rest:
        # pods have other folders; on TPU v2 and v3 one rank has several chips
        has_data = not engine.runs_elsewhere and device != "xla"
        has_run, has_init = _files_to_check(call.config.train, request, engine)
        known = {"has_data": has_data, "has_run": has_run, "has_init": has_init}
        for notice in check_train(call.config, device, count, **known):
            call.console.warning(notice)
    return engine.configure(call.config, request), request


def _files_to_check(
    train: TrainConfig, request: LaunchRequest, engine: type[Engine]
) -> tuple[bool, bool]:
    """Return whether to read the run, and the checkpoint of `--init`, before the ranks do.

    Ranks that start now check at once what they continue from; files of a queued job may be
    written by the job before it.
    """
    is_queued, init = issubclass(engine, BatchEngine), Path(str(train.init))
    files = [f for f in (train.init, train.resume) if f not in (None, "auto", "never")]
    has_files = all(Path(str(file)).exists() for file in files)
    has_run = not request.is_written and (request.is_dry_run or (is_queued and has_files))
    has_init = has_run or ((request.is_written or is_queued) and init.exists())
    return has_run, has_init and train.init is not None


def _tpu_device(call: Call) -> str:
    if (named := call.config.train.device) in ("tpu", "xla"):
        return named
    packages = {n for n in ("torch_tpu", "torch_xla") if importlib.util.find_spec(n) is not None}
    return choose_tpu_device(call.config.launch.tpu_version, read_node(), packages)


def check_train(
    config: Config, device_name: str, count: int, *, has_data: bool, has_run: bool, has_init: bool
) -> tuple[str, ...]:
    """Check that the ranks will accept the settings of `train`; return notices of replaced ones.

    Args:
        has_data: Whether the ranks read the dataset that is prepared on this machine.
        has_run: Whether to read the run folder, too, if the dataset is prepared here.
        has_init: Whether to read the checkpoint of `--init`.
    """
    device = device_type(device_name)
    if has_data:  # in pods, which have other packages, the ranks report it
        find_trackers(config.train)
    batch_size, version = config.train.batch_size, config.launch.tpu_version
    has_two_cores = version is not None and TPU_VERSIONS[version].has_two_cores
    if has_two_cores and config.launch.nodes == 1 and batch_size != "auto":
        check_shares(batch_size, 2 * count, device_name)  # one process drives all chips
    refuse_settings_of_detectors(config)
    notices = check_settings(config, device)
    device.choose_execution(config.train.execution)
    weights = config.model.weights_name
    if weights is not None and not Path(weights).exists() and re.fullmatch(r"[\w-]+", weights):
        weights_named(weights)  # not a file elsewhere
    if has_init:
        from ssdctl.training.setup import planned_config  # late: torch takes seconds

        config = planned_config(with_absolute_paths(config))
    elif config.train.init is not None and config.data.tile is None:
        return notices  # its tiles, and so the images of an epoch, are not known
    if has_data and config.train.batch_size != "auto" and (size := _count_images(config)):
        ranks = Ranks(0, count, 0)
        if has_run:
            plan_and_check(with_absolute_paths(config), device, ranks, size)
        else:
            make_plan(config, device, ranks, size, before=continued_config(config))
    return notices


def _count_images(config: Config) -> DatasetSize | None:
    root, folder = dataset_folders(config.data)
    try:
        if not has_dataset(root, folder) or not is_prepared(root, folder):
            return None
        folds = config.train.fold, config.train.group
        size = count_images(root, folder, tiling_of(config), *folds, config.prepare)
    except DataError:  # the ranks report it
        return None
    return size if size.trainable else None


def resumed(request: LaunchRequest) -> LaunchRequest:
    """Return the request for the next attempt of a job that crashed."""
    command = request.command
    if request.resumes_automatically and command[-1] != "--resume=auto":
        command = (*command, "--resume=auto")
    return dataclasses.replace(request, command=command)


def exported_settings(call: Call, kind: Kind) -> dict[str, str]:
    """Return the settings of files or of variables, as text by path."""
    return {
        path: _as_text(value)
        for path, value in values(call.config).items()
        if call.config.sources[path].kind is kind
        and all_settings()[path].section not in LAUNCH_TABLES
    }


def _as_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        parts = [str(part) for part in value]
        return toml_value(parts) if any("," in part for part in parts) else ",".join(parts)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def train_command(call: Call, device: str, file: str | None) -> list[str]:
    """Return `train` with the user's options and the device, as arguments.

    An option and its value are one argument, so that values may begin with '-'.
    """
    arguments, devices = ["train"], []
    if file is not None:
        arguments.append(f"--config={file}")
    for text in call.assignments:
        path, value, _ = parse_assignment(text)
        devices += [value] * (path == "train.device")
        if path.partition(".")[0] not in LAUNCH_TABLES:
            arguments.append(f"--set={text}")
    for path, value, _ in call.overrides:
        setting = all_settings()[path]
        if path == "train.device":
            devices.append(value)
        elif setting.section in LAUNCH_TABLES:
            pass
        elif setting.choice_flags or setting.is_flag:
            arguments.append(setting.as_option(value))
        else:
            arguments.append(f"{setting.flags[0]}={value}")
    _refuse_others({*devices} - {"auto"}, device)
    arguments += ["--quiet"] * call.console.quiet + ["--verbose"] * call.console.verbose
    return [*arguments, f"--device={device}"]


def _refuse_others(devices: set[str], device: str) -> None:
    for other in devices - {device}:
        raise UsageError(
            f"--device {other} contradicts the number of {device} devices: give only the number"
        )


def rest_command(
    call: Call, rest: list[str], device: str, count: int, file: str | None
) -> list[str]:
    """Return the command after `--` with the config file, checked: it must exist, as its options.

    Several ranks would write the same files if it does not share its work among them.
    """
    if rest[0] == "train":
        raise UsageError("launch starts train by itself", hint="leave out the word train")
    commands = click_root(rest[0]).commands
    if rest[0] not in commands or rest[0] == "launch":
        close = difflib.get_close_matches(rest[0], commands, n=1)
        raise UsageError(
            f"{rest[0]!r} is not a command that can be launched",
            hint=f"did you mean {close[0]!r}?" if close else "`ssdctl --help` lists the commands",
        )
    counted = ("train.device", device)  # whose number --devices is
    tables = [(o.source.label, o.path) for o in call.overrides if (o.path, o.value) != counted]
    tables += [(f"--set {a}", a.strip()) for a in call.assignments]
    misplaced = [option for option, path in tables if path.partition(".")[0] not in LAUNCH_TABLES]
    if misplaced:
        raise UsageError(
            f"{misplaced[0]} is an option of train, but {rest[0]} is launched",
            hint=f"put the options of {rest[0]} after --",
        )
    # Its options are parsed as each rank would.
    parsed = commands[rest[0]]
    try:
        context = parsed.make_context(f"ssdctl {rest[0]}", rest[1:])
        own: Any = getattr(parsed, "commands", {}).get(" ".join(rest[1:2]))
        if own is not None:
            context = own.make_context(f"ssdctl {' '.join(rest[:2])}", rest[2:])
    except typer.Exit as end:  # after --help
        raise SystemExit(end.exit_code) from None
    _refuse_others(_given_devices(context.params) - {"auto"}, device)
    name = " ".join(rest[: 1 + hasattr(parsed, "commands")])
    if count > 1 and name not in DISTRIBUTED_COMMANDS:
        hint = "launch it with one device"
        raise UsageError(f"{name} does not share its work among ranks", hint=hint)
    words = parsed.without_aliases(rest[1:]) if isinstance(parsed, AliasCommand) else rest[1:]
    at = len(name.split()) - 1
    words = [  # the ranks must not choose another device
        device
        if (before, word) == ("--device", "auto")
        else re.sub(r"^(--device|(?:--set=)?\s*\w+\.device\s*)=\s*auto\s*$", rf"\1={device}", word)
        for before, word in itertools.pairwise(["", *words])
    ]
    config = [] if file is None else [f"--config={Path(file).absolute()}"]
    return [rest[0], *words[:at], *config, *words[at:]]


def _given_devices(parameters: dict[str, Any]) -> set[str]:
    """Return the devices that a parsed command names, by `--device` and `--set`."""
    options = {value for name, value in parameters.items() if name.endswith("__device")}
    assigned = map(parse_assignment, parameters.get("assignments") or ())
    return options - {None} | {o.value for o in assigned if o.path.endswith(".device")}
