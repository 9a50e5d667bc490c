"""Build the command line of torchrun (torch.distributed.run) for GPUs, CPUs and TPUs."""

from __future__ import annotations

import re
from string import Template

from ssdctl.errors import UsageError
from ssdctl.launch.node import Node
from ssdctl.launch.request import LaunchRequest
from ssdctl.runtime.torch_compat import NUMA_BINDING

# How long torchrun waits for ranks to stop; its default of 30 s can interrupt a save.
SHUTDOWN_TIMEOUT_S = 120
RENDEZVOUS_PORT = 29400
# How libtpu names a part of a host's chips, by their number.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
# Variables of a pod with its number: of Kubeflow's torchrun runtime, and of an Indexed Job.
NODE_RANKS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
POD_START_S = 1800
PLACEHOLDER = "HOST"  # printed if a host's name is still missing; never run


def build(request: LaunchRequest, node: Node) -> tuple[tuple[str, ...], dict[str, str], str | None]:
    """Return the command line, its variables, and what the user must still specify."""
    config, ranks = request.config, num_ranks(request, node)
    missing = None
    if config.nodes == 1:
        if config.hostfile or config.rdzv_endpoint:
            raise UsageError("--hostfile and --rdzv-endpoint are for several nodes: give --nodes")
        # The kernel chooses the rendezvous port, so two jobs on a host cannot conflict; the
        # loopback is used because some machines cannot resolve their own name.
        rendezvous = ["--standalone", "--local-addr=127.0.0.1"]
    else:
        endpoint = rendezvous_endpoint(request)
        if endpoint.startswith(f"{PLACEHOLDER}:"):
            missing = "torchrun on several nodes needs --rdzv-endpoint HOST:PORT (the first node)"
        rendezvous = [f"--nnodes={config.nodes}", "--rdzv-id=ssdctl"]
        node_rank = next((n for v in NODE_RANKS if (n := request.environment.get(v))), None)
        if node_rank is not None:
            # In the order of the pods, so that rank 0 is in pod 0, whose output is followed. Pods
            # start at different times: images are pulled, ssdctl is installed.
            rendezvous += ["--rdzv-backend=static", f"--node-rank={node_rank}"]
            host, _, port = endpoint.rpartition(":")
            rendezvous += [f"--master-addr={host}", f"--master-port={port}"]
            rendezvous += [f"--rdzv-conf=timeout={POD_START_S}"]
        else:
            rendezvous += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        if request.local_address is not None:
            # torchrun would publish the address of the machine's own name, on many 127.0.1.1.
            rendezvous.append(f"--local-addr={request.local_address}")
    if request.device == "cuda" and _binds_to_numa_nodes(request, node):
        rendezvous.append("--numa-binding=node")
    cores = config.cores_per_node or node.local_cores
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S),
    }
    if request.device == "xla":
        defaults |= {"PJRT_DEVICE": "TPU", **_chips(request, node)}
    environment = {k: v for k, v in defaults.items() if k not in request.environment}
    argv = (
        request.python,
        *("-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={ranks}"),
        *("-m", "ssdctl", *map(_escaped, request.command)),
    )
    return argv, {**request.settings, **environment}, missing


def num_ranks(request: LaunchRequest, node: Node) -> int:
    """Return the processes on a node: one per device, but one for all chips of TPU v2 and v3.

    Their chips have two cores each, which only one process can drive (ssdctl/device/xla.py).
    """
    return 1 if request.device == "xla" and node.has_two_core_tpus else request.ranks_per_node


def _chips(request: LaunchRequest, node: Node) -> dict[str, str]:
    """Return the variables that restrict a process to some chips of its host; none: to all.

    torch_xla divides a host of TPU v4 or later into all of its chips or, by these variables, into
    one. The chips are unknown (0) if the plan is for another machine.

    Raises:
        UsageError: The host does not have them, or cannot use only a part of them.
    """
    count, nodes = request.ranks_per_node, request.config.nodes
    if node.has_two_core_tpus and nodes > 1:
        raise UsageError(
            "--tpus on several hosts needs TPU v4 or later",
            hint="on v2 and v3 train on one host: leave --nodes out",
        )
    possible = [node.tpus] if nodes > 1 else [1, node.tpus]
    if node.has_two_core_tpus:
        possible = [n for n in TPU_BOUNDS if n <= node.tpus]
    if node.tpus and count not in possible:
        numbers = " or ".join(str(nodes * n) for n in sorted(set(possible)))
        raise UsageError(
            f"--tpus {request.count}: a host has {node.tpus} chips, and not every part of them "
            "can be used",
            hint=f"--tpus counts chips; possible is {numbers}",
        )
    if nodes > 1 or (count > 1 and not node.has_two_core_tpus):
        return {}
    return {
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(count))),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[count],
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


def _escaped(argument: str) -> str:
    """Escape an argument: torchrun expands ${local_rank} in it with `string.Template`."""
    if Template(argument).safe_substitute(local_rank="0") == argument:
        return argument
    return argument.replace("$", "$$")


def _binds_to_numa_nodes(request: LaunchRequest, node: Node) -> bool:
    """Return whether torchrun can keep each rank on the cores next to its GPU."""
    if request.torch_version < NUMA_BINDING or request.config.bind_to == "none":
        return False
    return node.sockets > 1 and node.has_topology and node.has_numactl


def rendezvous_endpoint(request: LaunchRequest) -> str:
    """Return the HOST:PORT of torchrun's rendezvous.

    Raises:
        UsageError: The user's endpoint does not have this form.
    """
    if request.config.rdzv_endpoint is not None:
        endpoint = request.config.rdzv_endpoint
    elif request.hosts:
        endpoint = f"{_bracketed(request.hosts[0])}:{RENDEZVOUS_PORT}"
    else:
        given = request.environment
        host = given.get("PET_MASTER_ADDR") or given.get("MASTER_ADDR", PLACEHOLDER)
        port = given.get("PET_MASTER_PORT") or given.get("MASTER_PORT", str(RENDEZVOUS_PORT))
        endpoint = f"{_bracketed(host)}:{port}"
    if not re.fullmatch(r"(?!-)([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}", endpoint):
        raise UsageError(f"rendezvous endpoint {endpoint!r} is not of the form HOST:PORT")
    return endpoint


def _bracketed(host: str) -> str:
    """Return a host as it precedes a port: IPv6 addresses have colons themselves."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
