"""Settings of `ssdctl launch`. A launcher's own table is in `ssdctl/launch/NAME.py`."""

from typing import TYPE_CHECKING, Annotated, Literal

from ssdctl.config.fields import ClusterName, Count, NonNegativeInt, Section, setting
from ssdctl.runtime.packages import plugin_names

LAUNCHERS = ("ssdctl.launch", "ssdctl.launchers")  # package, group of entry points
NOT_LAUNCHERS = ("base", "exit_codes")  # files of that package
LAUNCHER_NAMES = [name for name in plugin_names(*LAUNCHERS) if name not in NOT_LAUNCHERS]
CHOICES = ("auto", *LAUNCHER_NAMES)
if TYPE_CHECKING:
    LauncherName = str
else:
    LauncherName = Literal[CHOICES]


class LaunchConfig(Section, frozen=True):
    """Settings of `ssdctl launch`: the launcher and how ranks share nodes."""

    launcher: Annotated[
        LauncherName, setting("Program that starts the ranks (auto: by device)", panel="Launch")
    ] = "auto"
    cluster: Annotated[
        ClusterName | None, setting("Start from the settings of a known cluster", panel="Launch")
    ] = None
    nodes: Annotated[
        Count,
        setting(
            "Number of machines that share the devices",
            metavar="N",
            panel="Launch",
            aliases=("--nnodes", "--num-nodes"),
        ),
    ] = 1
    restarts: Annotated[
        NonNegativeInt,
        setting("Maximum automatic restarts after a crash", metavar="N", panel="Launch"),
    ] = 0
    hostfile: Annotated[
        str | None, setting("Open MPI host file, one host per line", metavar="FILE", panel="Launch")
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        setting(
            "torchrun's rendezvous address [default: first host of --hostfile]",
            metavar="HOST:PORT",
            panel="Launch",
        ),
    ] = None
    rank_by: Annotated[
        Literal["core", "slot"],
        setting("mpirun's placement of ranks (core: Open MPI 4)", panel="Launch"),
    ] = "slot"
    bind_to: Annotated[
        Literal["core", "none"], setting("Bind mpirun's ranks to their own cores", panel="Launch")
    ] = "core"
    export_env: Annotated[
        tuple[str, ...],
        setting(
            "More environment variables for the other nodes",
            metavar="NAME,NAME",
            panel="Launch",
            aliases=("--carry",),
        ),
    ] = ()
    cores_per_node: Annotated[
        Count | None,
        setting("Physical cores per node [default: this machine's]", metavar="N", panel="Launch"),
    ] = None
    devices_per_node: Annotated[
        Count | None,
        setting("Devices per node [default: those in use]", metavar="N", panel="Launch"),
    ] = None
