"""torchrun (torch.distributed.run) for GPUs, CPUs and TPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import ipaddress
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ssdctl.distributed import address_for_peers, find_own
from ssdctl.errors import UsageError
from ssdctl.launch.base import PLACEHOLDER, Engine, Job, LaunchRequest, Node
from ssdctl.runtime.hardware import TPU_VERSIONS
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
TPU_MODULE = ("ssdctl.distributed.torchrun", "--tpu")  # starts the ranks of TorchTPU
TPU_WORKERS = "TPU_WORKER_HOSTNAMES"  # the hosts of a slice, in their order
# libtpu's shape for a number of chips of a host.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
UNKNOWN_TPU = (
    "this machine has no TPU, so TPU v4 or newer is assumed, with one process per chip: give "
    "--tpu-version (on v2 and v3 one process drives all chips of a host)"
)


@dataclass(frozen=True)
class Torchrun(Engine):
    name = "torchrun"
    torch_version: tuple[int, int] = OLDEST_TORCH  # major and minor; newer ones have more options
    # This machine's address on the route to the rendezvous host; None if all ranks are on one
    # machine, or the job is for other machines.
    local_address: str | None = None
    is_host: bool = False  # whether the rendezvous is on this machine, and torchrun misses that
    own_index: int | None = None  # of this host in a slice of TPU hosts; None: TorchTPU numbers it

    @classmethod
    def configure(cls, config: Config, request: LaunchRequest) -> Torchrun:
        """Read PyTorch's version, and the address at which other nodes reach this one."""
        inherited = "leave it out: ranks inherit the environment of the launch on their node"
        config.require_not_given(["launch.export_env"], "is for mpirun", inherited)
        if request.config.nodes == 1:
            others = ["launch.hostfile", "launch.rdzv_endpoint"]
            config.require_not_given(others, "is for several nodes", "add --nodes N")
        (host, _), address, is_host = _endpoint(request), None, False
        if request.config.nodes > 1 and host != PLACEHOLDER and not request.is_planned:
            address = address_for_peers(host.strip("[]"))
            is_host = find_own([host.strip("[]")]) is not None and not _is_found(host.strip("[]"))
        workers = request.environment.get(TPU_WORKERS, "").split(",")
        is_slice = request.device == "tpu" and request.config.nodes > 1
        own_index = find_own(request.hosts or workers) if is_slice else None
        return cls(torch_release(), address, is_host, own_index)

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
        if is_tpu(request):
            node = with_version(request, node)
            warnings += [UNKNOWN_TPU] * (node.tpu is None)
            ranks, variables = num_tpu_processes(request, node), tpu_variables(request, node)
        options, missing = self._rendezvous(request)
        options += self._binding(request, node)
        defaults = {
            "OMP_NUM_THREADS": str(max(1, (config.cores_per_node or node.local_cores) // ranks)),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S),
            "PYTHONSAFEPATH": "1",  # `python -m` would import random.py of the working folder
            **variables,
        }
        unset = {k: v for k, v in defaults.items() if k not in request.environment}
        module = TPU_MODULE if request.device == "tpu" else (MODULE,)
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
            # The kernel chooses the rendezvous port, so two jobs on a host cannot conflict; the
            # loopback is used because some machines cannot resolve their own name.
            return ["--standalone", "--local-addr=127.0.0.1"], None
        host, port = _endpoint(request)
        missing = None if host != PLACEHOLDER else MISSING_HOST
        options = [f"--nnodes={config.nodes}", "--rdzv-id=ssdctl"]
        own = self.own_index
        node_rank = request.environment.get(POD_NUMBER) or (None if own is None else str(own))
        if node_rank or request.device == "tpu":
            # In the order of the pods, so that rank 0 is in pod 0, whose output is followed. Pods
            # start at different times: images are pulled, ssdctl is installed.
            options += ["--rdzv-backend=static"]
            options += [f"--node-rank={node_rank}"] * bool(node_rank)
            options += [f"--master-addr={host}", f"--master-port={port}"]
            options += [f"--rdzv-conf=timeout={POD_START_S}"]
        else:
            options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}"]
            # Nodes start at different times. torchrun compares an address with that of the
            # machine's name only, often 127.0.1.1.
            is_host = ",is_host=true" if self.is_host else ""
            limits = f"join_timeout={POD_START_S},read_timeout={POD_START_S}"
            options += [f"--rdzv-conf={limits}{is_host}"]
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


def _is_found(host: str) -> bool:
    """Return whether torchrun finds that a host is this machine: by its name, or that address.

    Several agents of a job on one machine then meet; told so, each would serve the rendezvous.
    """
    own = socket.gethostname()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in (own, "localhost")
    with contextlib.suppress(OSError):
        return address.is_loopback or host in {found[4][0] for found in socket.getaddrinfo(own, 0)}
    return False


def _escaped(argument: str) -> str:
    """Escape an argument: torchrun expands ${local_rank} in it with `string.Template`."""
    if Template(argument).safe_substitute(local_rank="0") == argument:
        return argument
    return argument.replace("$", "$$")


def _endpoint(request: LaunchRequest) -> tuple[str, str]:
    given, port = request.environment, str(RENDEZVOUS_PORT)
    if request.hosts:
        host = request.hosts[0]
    elif request.device == "tpu" and (workers := given.get(TPU_WORKERS)):
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


def is_tpu(request: LaunchRequest) -> bool:
    return request.device in ("tpu", "xla")


def choose_tpu_device(version: str | None, node: Node, packages: set[str]) -> str:
    """Return the device type of `--tpus`: `tpu` by TorchTPU, or `xla` by torch_xla.

    Args:
        packages: Which of `torch_tpu` and `torch_xla` are installed where the ranks run.
    """
    chip = TPU_VERSIONS[version] if version else node.tpu
    is_older = chip is not None and chip.has_two_cores
    return "xla" if is_older or packages == {"torch_xla"} else "tpu"


def with_version(request: LaunchRequest, node: Node) -> Node:
    """Return the node; for `--tpu-version`, another node with chips of that version."""
    version = request.config.tpu_version
    if version is None or node.tpu == TPU_VERSIONS[version]:
        return node
    if node.tpu is not None and not request.is_planned:
        raise UsageError(f"--tpu-version {version}: this machine has {node.tpu.name}")
    return dataclasses.replace(node, tpus=0, tpu=TPU_VERSIONS[version])


def num_tpu_processes(request: LaunchRequest, node: Node) -> int:
    """Return the number of ranks on a host; UsageError if its chips cannot be divided so.

    The two cores of a chip of v2 or v3 belong to one process, which drives all chips
    (ssdctl/device/xla.py).
    """
    count, nodes = request.ranks_per_node, request.config.nodes
    has_two_cores = node.tpu is not None and node.tpu.has_two_cores
    if has_two_cores and request.device == "tpu":
        raise UsageError(
            "--device tpu needs TPU v4 or newer", hint="TPU v2 and v3 need --device xla"
        )
    if has_two_cores and nodes > 1:
        raise UsageError(
            "--tpus on several hosts needs TPU v4 or newer",
            hint="on v2 and v3 train on one host: leave --nodes out",
        )
    possible = _possible_counts(request, node)
    if possible and count not in possible:
        numbers = " or ".join(str(nodes * n) for n in possible)
        has = f", which has {node.tpus}" if node.tpus else ""
        raise UsageError(
            f"--tpus {request.count}: a job cannot have {count} chips of a host{has}",
            hint=f"--tpus counts chips; possible is {numbers}",
        )
    return 1 if has_two_cores else count


def _possible_counts(request: LaunchRequest, node: Node) -> list[int]:
    """Return the numbers of chips of a host that a job can use; empty if they are unknown."""
    if request.config.nodes > 1:
        return [node.tpus] if node.tpus else []
    if node.tpu is not None and node.tpu.has_two_cores:
        counts = tuple(TPU_BOUNDS)
    elif request.device == "tpu":
        counts = node.tpu.counts if node.tpu is not None else ()
    else:
        counts = (1, node.tpus) if node.tpus else ()
    return sorted({n for n in counts if not node.tpus or n <= node.tpus})


def tpu_variables(request: LaunchRequest, node: Node) -> dict[str, str]:
    """Return the variables of the ranks.

    torch_xla divides a host of v4 or newer into all of its chips or, by these variables, into
    one; TorchTPU's are set by the module that starts its ranks.
    """
    count, nodes = request.ranks_per_node, request.config.nodes
    if request.device == "tpu":
        return {TPU_WORKERS: ",".join(request.hosts)} if nodes > 1 and request.hosts else {}
    own = {"PJRT_DEVICE": "TPU"}
    has_two_cores = node.tpu is not None and node.tpu.has_two_cores
    if nodes > 1 or (count > 1 and not has_two_cores):
        return own
    return own | {
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(count))),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[count],
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
