"""torchrun (torch.distributed.run) for GPUs, CPUs and TPUs."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from string import Template

from ssdctl.distributed.ranks import address_for_peers
from ssdctl.errors import UsageError
from ssdctl.launch import PLACEHOLDER, LaunchPlan, LaunchRequest, Node, _tpus
from ssdctl.runtime.packages import torch_release

MODULE = "torch.distributed.run"
NUMA_BINDING = (2, 9)  # PyTorch; torchrun has --numa-binding from here on
# How long torchrun waits for ranks to stop; its default of 30 s can interrupt a save.
SHUTDOWN_TIMEOUT_S = 120
RENDEZVOUS_PORT = 29400
POD_NUMBER = "JOB_COMPLETION_INDEX"  # set in the pods of an Indexed Job
POD_START_S = 1800


def require() -> None:
    spec = importlib.util.find_spec("torch")  # does not import it, unlike torch.distributed
    folders = (spec.submodule_search_locations if spec else None) or []
    if not any(Path(folder, "distributed", "run.py").is_file() for folder in folders):
        raise UsageError(
            f"{MODULE} is absent from {sys.executable}",
            hint="install PyTorch there (pip install torch), or use --launcher mpirun",
        )


def inspect(request: LaunchRequest) -> LaunchRequest:
    """Add PyTorch's version, and the address at which the other nodes reach this one."""
    (host, _), address = _endpoint(request), None
    if request.config.nodes > 1 and host != PLACEHOLDER:
        address = address_for_peers(host.strip("[]"))
    return dataclasses.replace(request, torch_version=torch_release(), local_address=address)


def plan(request: LaunchRequest, node: Node) -> LaunchPlan:
    """Return the command line of torchrun on this node."""
    config, ranks, module, warnings = request.config, request.ranks_per_node, MODULE, list[str]()
    defaults: dict[str, str] = {}
    if _tpus.is_tpu(request):
        node = _tpus.with_version(request, node)
        warnings += [_tpus.UNKNOWN] * (node.tpu is None)
        module = _tpus.MODULE if request.device == "tpu" else module
        ranks, defaults = _tpus.num_processes(request, node), dict(_tpus.variables(request, node))
    options, missing = _rendezvous(request)
    can_bind = request.torch_version >= NUMA_BINDING and node.has_topology and node.has_numactl
    if request.device == "cuda" and can_bind and node.sockets > 1 and config.bind_to != "none":
        options.append("--numa-binding=node")  # each rank on the cores next to its GPU
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (config.cores_per_node or node.local_cores) // ranks)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S),
        **defaults,
    }
    unset = {k: v for k, v in defaults.items() if k not in request.environment}
    torchrun = ("-m", module, *options, f"--nproc-per-node={ranks}")
    return LaunchPlan(
        (request.python, *torchrun, "-m", "ssdctl", *map(_escaped, request.command)),
        {**request.variables, **unset},
        "torchrun",
        ranks,
        config.nodes,
        missing=missing,
        warnings=tuple(warnings),
    )


def _rendezvous(request: LaunchRequest) -> tuple[list[str], str | None]:
    """Return torchrun's options for the meeting of the nodes, and what is missing for it."""
    config, missing = request.config, None
    if config.nodes == 1:
        if config.hostfile or config.rdzv_endpoint:
            raise UsageError("--hostfile and --rdzv-endpoint are for several nodes: give --nodes")
        # The kernel chooses the rendezvous port, so two jobs on a host cannot conflict; the
        # loopback is used because some machines cannot resolve their own name.
        return ["--standalone", "--local-addr=127.0.0.1"], None
    host, port = _endpoint(request)
    if host == PLACEHOLDER:
        missing = "torchrun on several nodes needs --rdzv-endpoint HOST:PORT (the first node)"
    options = [f"--nnodes={config.nodes}", "--rdzv-id=ssdctl"]
    node_rank = request.environment.get(POD_NUMBER)
    if not node_rank and request.device == "tpu":
        node_rank = _tpus.node_rank(request)
    if node_rank or request.device == "tpu":
        # In the order of the pods, so that rank 0 is in pod 0, whose output is followed. Pods
        # start at different times: images are pulled, ssdctl is installed.
        options += ["--rdzv-backend=static"]
        options += [f"--node-rank={node_rank}"] * bool(node_rank)
        options += [f"--master-addr={host}", f"--master-port={port}"]
        options += [f"--rdzv-conf=timeout={POD_START_S}"]
    else:
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}"]
    if request.local_address is not None:
        # torchrun would publish the address of the machine's own name, on many 127.0.1.1.
        options.append(f"--local-addr={request.local_address}")
    return options, missing


def _escaped(argument: str) -> str:
    """Escape an argument: torchrun expands ${local_rank} in it with `string.Template`."""
    if Template(argument).safe_substitute(local_rank="0") == argument:
        return argument
    return argument.replace("$", "$$")


def _endpoint(request: LaunchRequest) -> tuple[str, str]:
    """Return host and port of torchrun's rendezvous."""
    given, port = request.environment, str(RENDEZVOUS_PORT)
    if request.hosts:
        host = request.hosts[0]
    elif request.device == "tpu" and (workers := given.get(_tpus.WORKERS)):
        host = workers.partition(",")[0]
    else:
        host, port = given.get("MASTER_ADDR", PLACEHOLDER), given.get("MASTER_PORT", port)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"  # IPv6
    endpoint = request.config.rdzv_endpoint or f"{host}:{port}"
    if not re.fullmatch(r"(?!-)([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}", endpoint):
        raise UsageError(f"rendezvous endpoint {endpoint!r} is not of the form HOST:PORT")
    host, _, port = endpoint.rpartition(":")
    return host, port
