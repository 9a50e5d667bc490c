"""torchrun (torch.distributed.run) for GPUs, CPUs and TPUs."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ssdctl.distributed.ranks import address_for_peers
from ssdctl.errors import UsageError
from ssdctl.launch.base import PLACEHOLDER, Engine, LaunchRequest, Node
from ssdctl.launch.engines import _tpus
from ssdctl.launch.job import Job
from ssdctl.runtime.packages import OLDEST_TORCH, torch_release

if TYPE_CHECKING:
    from ssdctl.config import Config

MODULE = "torch.distributed.run"
NUMA_BINDING = (2, 9)  # PyTorch; torchrun has --numa-binding from here on
# How long torchrun waits for ranks to stop; its default of 30 s can interrupt a save.
SHUTDOWN_TIMEOUT_S = 120
RENDEZVOUS_PORT = 29400
POD_NUMBER = "JOB_COMPLETION_INDEX"  # set in the pods of an Indexed Job
POD_START_S = 1800
MISSING_HOST = "torchrun on several nodes needs --rdzv-endpoint HOST:PORT (the first node)"


@dataclass(frozen=True)
class Torchrun(Engine):
    name = "torchrun"
    torch_version: tuple[int, int] = OLDEST_TORCH  # major and minor; newer ones have more options
    # This machine's address on the route to the rendezvous host; None if all ranks are on one
    # machine, or the job is for other machines.
    local_address: str | None = None

    @classmethod
    def configure(cls, config: Config, request: LaunchRequest) -> Torchrun:
        """Read PyTorch's version, and the address at which other nodes reach this one."""
        (host, _), address = _endpoint(request), None
        if request.config.nodes > 1 and host != PLACEHOLDER and not request.is_written:
            address = address_for_peers(host.strip("[]"))
        return cls(torch_release(), address)

    def require(self) -> None:
        spec = importlib.util.find_spec("torch")  # does not import it, unlike torch.distributed
        folders = (spec.submodule_search_locations if spec else None) or []
        if not any(Path(folder, "distributed", "run.py").is_file() for folder in folders):
            raise UsageError(
                f"{MODULE} is absent from {sys.executable}",
                hint="install PyTorch there (pip install torch), or use --launcher mpirun",
            )

    def build_job(self, request: LaunchRequest, node: Node) -> Job:
        config, ranks = request.config, request.ranks_per_node
        warnings, variables = list[str](), dict[str, str]()
        if _tpus.is_tpu(request):
            node = _tpus.with_version(request, node)
            warnings += [_tpus.UNKNOWN] * (node.tpu is None)
            ranks, variables = _tpus.num_processes(request, node), _tpus.variables(request, node)
        options, missing = self._rendezvous(request)
        options += self._binding(request, node)
        defaults = {
            "OMP_NUM_THREADS": str(max(1, (config.cores_per_node or node.local_cores) // ranks)),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S),
            **variables,
        }
        unset = {k: v for k, v in defaults.items() if k not in request.environment}
        module = _tpus.MODULE if request.device == "tpu" else (MODULE,)
        torchrun = ("-m", *module, *options, f"--nproc-per-node={ranks}")
        return Job(
            (request.python, *torchrun, "-m", "ssdctl", *map(_escaped, request.command)),
            {**request.variables, **unset},
            self.name,
            ranks,
            config.nodes,
            missing=missing,
            warnings=tuple(warnings),
        )

    def _rendezvous(self, request: LaunchRequest) -> tuple[list[str], str | None]:
        """Return torchrun's options to join the nodes, and the option that is missing for it."""
        config = request.config
        if config.nodes == 1:
            if config.hostfile or config.rdzv_endpoint:
                text = "--hostfile and --rdzv-endpoint are for several nodes: give --nodes"
                raise UsageError(text)
            # The kernel chooses the rendezvous port, so two jobs on a host cannot conflict; the
            # loopback is used because some machines cannot resolve their own name.
            return ["--standalone", "--local-addr=127.0.0.1"], None
        host, port = _endpoint(request)
        missing = None if host != PLACEHOLDER else MISSING_HOST
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
        if self.local_address is not None:
            # torchrun would publish the address of the machine's name, often 127.0.1.1.
            options.append(f"--local-addr={self.local_address}")
        return options, missing

    def _binding(self, request: LaunchRequest, node: Node) -> list[str]:
        """Return the option that binds each rank to the cores next to its GPU, if possible."""
        can_bind = self.torch_version >= NUMA_BINDING and node.has_topology and node.has_numactl
        is_wanted = request.device == "cuda" and request.config.bind_to != "none"
        return ["--numa-binding=node"] * (is_wanted and can_bind and node.sockets > 1)


ENGINE = Torchrun


def _escaped(argument: str) -> str:
    """Escape an argument: torchrun expands ${local_rank} in it with `string.Template`."""
    if Template(argument).safe_substitute(local_rank="0") == argument:
        return argument
    return argument.replace("$", "$$")


def _endpoint(request: LaunchRequest) -> tuple[str, str]:
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
