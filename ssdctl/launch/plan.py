"""Turn a launch request and a node into a command line and its environment, without side effects.

plan = make_plan(LaunchRequest(device="hpu", count=8, command=("train", "--bs=128"), ...), node)
plan.argv, plan.environment
"""

from __future__ import annotations

import signal

from ssdctl.errors import UsageError
from ssdctl.launch import kubernetes, mpirun, pod_spec, slurm, torchrun
from ssdctl.launch.node import Node
from ssdctl.launch.request import LaunchPlan, LaunchRequest


def make_plan(request: LaunchRequest, node: Node) -> LaunchPlan:
    """Return the plan of a launch: the launcher, its command line and its environment.

    Raises:
        UsageError: The numbers contradict each other, or a setting is missing or malformed.
    """
    _check(request)
    launcher, count, nodes = request.launcher, request.count, request.config.nodes
    if launcher == "slurm":
        text = slurm.build(request, node)
        warnings = slurm.warnings(request)
        return LaunchPlan(slurm.ARGV, {}, launcher, count, nodes, text=text, warnings=warnings)
    if launcher == "kubernetes":
        manifest = kubernetes.build(request)
        text = pod_spec.to_yaml(manifest)
        return LaunchPlan(
            kubernetes.ARGV,
            {},
            launcher,
            count,
            nodes,
            text=text,
            manifest=manifest,
            warnings=kubernetes.warnings(request),
        )
    if launcher == "torchrun":
        argv, environment, missing = torchrun.build(request, node)
        return LaunchPlan(
            argv,
            environment,
            launcher,
            torchrun.num_ranks(request, node),
            nodes,
            signals_ranks=True,
            missing=missing,
        )
    argv, environment, missing = mpirun.build(request, node)
    is_local = nodes == 1 and not request.hosts
    return LaunchPlan(
        argv,
        environment,
        launcher,
        count,
        nodes if is_local else max(nodes, 2),
        stop_signal=signal.SIGTERM if is_local else mpirun.STOP_SIGNAL,
        signals_ranks=is_local,
        repeats_stop=not is_local,
        missing=missing,
        warnings=mpirun.warnings(request),
    )


def _check(request: LaunchRequest) -> None:
    config = request.config
    if request.device == "xla" and request.launcher == "mpirun":
        raise UsageError(
            "--launcher mpirun: torch_xla takes its chips from torchrun's variables",
            hint="leave --launcher out",
        )
    if request.count % config.nodes:
        raise UsageError(
            f"{request.count} devices do not divide by --nodes {config.nodes}",
            hint="the count is that of all nodes together",
        )
    if config.devices_per_node is not None and config.devices_per_node < request.ranks_per_node:
        raise UsageError(
            f"{request.ranks_per_node} devices per node are requested, "
            f"but --devices-per-node is {config.devices_per_node}"
        )
    values = [*request.command, *request.settings.values()]
    for argument in [*values, *request.kubernetes.env, request.kubernetes.install or ""]:
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UsageError(f"argument {argument!r} is not UTF-8 text")
