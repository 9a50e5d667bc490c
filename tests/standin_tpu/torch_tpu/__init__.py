"""A recording fake of TorchTPU 0.2.0: it computes on the CPU and records its calls.

It has the names that ssdctl uses and nothing more. Importing it adds the module `torch.tpu`, as the
package does on a machine with a TPU. Tests put this folder on the path.
"""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

calls: list[str] = []  # in order


def _set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    calls.append(f"launch {nnodes} x {nproc_per_node}")
    if nnodes is None:
        addresses = [f"localhost:{8070 + n}" for n in range(nproc_per_node or 0)]
    else:
        hosts = os.environ["TPU_WORKER_HOSTNAMES"].split(",")
        addresses = [f"{h}:{8070 + n}" for h in hosts for n in range(nproc_per_node or 0)]
        chosen = {"NODE_RANK": "1", "MASTER_ADDR": hosts[0], "MASTER_PORT": "29500"}
        for name, value in chosen.items():
            os.environ.setdefault(name, value)  # a variable that is set is kept
    os.environ.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", ",".join(addresses))
    os.environ.setdefault("TORCH_TPU_TOPOLOGY", "2,2,1")


def _module(name: str, **names: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)


_module(
    "torch.tpu",
    get_device_properties=lambda: SimpleNamespace(name="TPU v5e", total_memory=16 << 30),
)
_module("torch.tpu.distributed", set_tpu_launch_env=_set_tpu_launch_env)
