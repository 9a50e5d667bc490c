"""Settings of `ssdctl launch`. A launcher's own table is in `ssdctl/launch/NAME.py`."""

import functools
from typing import TYPE_CHECKING, Annotated, Literal

from ssdctl.config.fields import ClusterName, Count, NonNegativeInt, Section, setting
from ssdctl.runtime.packages import plugin_names

_launch = functools.partial(setting, panel="Launch")
LAUNCHERS = ("ssdctl.launch", "ssdctl.launchers")  # package, group of entry points
LAUNCHER_NAMES = [name for name in plugin_names(*LAUNCHERS) if name != "exit_codes"]
CHOICES = ("auto", *LAUNCHER_NAMES)
if TYPE_CHECKING:
    LauncherName = str
else:
    LauncherName = Literal[CHOICES]


class LaunchConfig(Section, frozen=True):
    """Settings of `ssdctl launch`: the launcher and how ranks share nodes."""

    launcher: Annotated[
        LauncherName, _launch("Program that starts the ranks (auto: by device)")
    ] = "auto"
    cluster: Annotated[
        ClusterName | None, _launch("Start from the settings of a known cluster")
    ] = None
    nodes: Annotated[
        Count,
        _launch("Number of machines that share the devices", aliases=("--nnodes", "--num-nodes")),
    ] = 1
    restarts: Annotated[NonNegativeInt, _launch("Maximum automatic restarts after a crash")] = 0
    hostfile: Annotated[
        str | None, _launch("Open MPI host file, one host per line", metavar="FILE")
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        _launch(
            "torchrun's rendezvous address [default: first host of --hostfile]", metavar="HOST:PORT"
        ),
    ] = None
    rank_by: Annotated[
        Literal["core", "slot"], _launch("mpirun's placement of ranks (core: Open MPI 4)")
    ] = "slot"
    bind_to: Annotated[
        Literal["core", "none"], _launch("Bind mpirun's ranks to their own cores")
    ] = "core"
    export_env: Annotated[
        tuple[str, ...],
        _launch(
            "More environment variables for the other nodes",
            metavar="NAME,NAME",
            aliases=("--carry",),
        ),
    ] = ()
    cores_per_node: Annotated[
        Count | None, _launch("Physical cores per node [default: this machine's]")
    ] = None
    devices_per_node: Annotated[
        Count | None, _launch("Devices per node [default: those in use]")
    ] = None
