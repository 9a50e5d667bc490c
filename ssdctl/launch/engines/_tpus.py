"""The processes of a job on TPUs, and the variables that give each its chips."""

from __future__ import annotations

import dataclasses

from ssdctl.errors import UsageError
from ssdctl.launch.base import LaunchRequest, Node
from ssdctl.runtime.hardware import TPU_VERSIONS

MODULE = ("ssdctl.distributed.torchrun", "--tpu")  # starts the ranks of TorchTPU
WORKERS = "TPU_WORKER_HOSTNAMES"  # the hosts of a slice, in their order
# libtpu's shape for a number of chips of a host.
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
UNKNOWN = (
    "this machine has no TPU, so TPU v4 or newer is assumed, with one process per chip: give "
    "--tpu-version (on v2 and v3 one process drives all chips of a host)"
)


def is_tpu(request: LaunchRequest) -> bool:
    return request.device in ("tpu", "xla")


def choose_device(version: str | None, node: Node, packages: set[str]) -> str:
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


def num_processes(request: LaunchRequest, node: Node) -> int:
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
        counts = tuple(BOUNDS)
    elif request.device == "tpu":
        counts = node.tpu.counts if node.tpu is not None else ()
    else:
        counts = (1, node.tpus) if node.tpus else ()
    return sorted({n for n in counts if not node.tpus or n <= node.tpus})


def variables(request: LaunchRequest, node: Node) -> dict[str, str]:
    """Return the variables of the ranks.

    torch_xla divides a host of v4 or newer into all of its chips or, by these variables, into
    one; TorchTPU's are set by the module that starts its ranks.
    """
    count, nodes = request.ranks_per_node, request.config.nodes
    if request.device == "tpu":
        return {WORKERS: ",".join(request.hosts)} if nodes > 1 and request.hosts else {}
    own = {"PJRT_DEVICE": "TPU"}
    has_two_cores = node.tpu is not None and node.tpu.has_two_cores
    if nodes > 1 or (count > 1 and not has_two_cores):
        return own
    return own | {
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(count))),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[count],
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


def node_rank(request: LaunchRequest) -> str | None:
    """Return the number of this host in the list of the slice's hosts; None if it is not listed."""
    hosts = request.hosts or tuple(request.environment.get(WORKERS, "").split(","))
    return next((str(n) for n, host in enumerate(hosts) if host in request.own_names), None)
