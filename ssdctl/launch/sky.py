"""Write a SkyPilot task around the command of torchrun: `ssdctl launch --write job.sky.yaml`."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from ssdctl._version import __version__
from ssdctl.errors import UsageError
from ssdctl.launch import torchrun
from ssdctl.launch.node import Node
from ssdctl.launch.pod_spec import to_yaml
from ssdctl.launch.request import LaunchRequest

SUFFIXES = (".sky.yaml", ".sky.yml")
FIRST_NODE = "ssdctl-first-node"  # replaced by a shell's words
NODE_RANK = "ssdctl-node-rank"


def to_task(request: LaunchRequest, node: Node) -> str:
    """Return the task as YAML; `sky launch --gpus H100:8 FILE` chooses the accelerators.

    Raises:
        UsageError: Another launcher than torchrun was asked for.
    """
    if request.launcher != "torchrun":
        raise UsageError(
            f"a SkyPilot task starts torchrun, not {request.launcher}",
            hint="leave --launcher out; HPUs are not offered there",
        )
    nodes = request.config.nodes
    variables = {"JOB_COMPLETION_INDEX": NODE_RANK, "MASTER_ADDR": FIRST_NODE}
    config = dataclasses.replace(
        request,
        python="python3",
        environment=variables if nodes > 1 else {},
        hosts=(),
        local_address=None,
    )
    argv, environment, _ = torchrun.build(config, node)
    if request.config.cores_per_node is None:  # this machine's cores say nothing about theirs
        environment = {k: v for k, v in environment.items() if k != "OMP_NUM_THREADS"}
    command = shlex.join(argv).replace(NODE_RANK, '"$SKYPILOT_NODE_RANK"')
    command = command.replace(FIRST_NODE, '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"')
    task: dict[str, Any] = {
        "name": "ssdctl",
        "num_nodes": nodes,
        "workdir": ".",
        "setup": f"python3 -m pip install ./ssdctl-{__version__}-py3-none-any.whl",
        "envs": environment,
        "run": command,
    }
    return to_yaml({name: value for name, value in task.items() if value})
