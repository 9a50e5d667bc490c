"""torchrun for TorchTPU: `python -m ssdctl.distributed.tpu_torchrun` with torchrun's options.

All ranks must agree on the topology of the chips and on an address for each: TorchTPU sets these
variables before any rank is started. On several hosts it also numbers them, unless --node-rank
does.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings

from torch.distributed.run import get_args_parser

from ssdctl.distributed import quiet_torchrun
from ssdctl.errors import ExitCode


def set_variables(words: list[str]) -> None:
    """Set TorchTPU's variables, and torchrun's that number this host.

    Raises:
        ValueError: This host has no TPU, or its number is unknown.
        RuntimeError: The chips cannot be divided among so many ranks.
    """
    options = get_args_parser().parse_args(words)
    nodes, ranks = int(options.nnodes.partition(":")[0]), int(options.nproc_per_node)
    has_number = any(word.startswith(("--node-rank", "--node_rank")) for word in words)
    if has_number:
        os.environ["NODE_RANK"] = str(options.node_rank)
    importlib.import_module("torch_tpu")
    with warnings.catch_warnings():  # experimental, says the package
        warnings.simplefilter("ignore")
        distributed = importlib.import_module("torch.tpu.distributed")
        distributed.set_tpu_launch_env(nnodes=nodes if nodes > 1 else None, nproc_per_node=ranks)
    if nodes > 1 and not has_number:
        for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):  # defaults of torchrun's options
            os.environ.setdefault(f"PET_{name}", os.environ[name])


def run() -> None:
    try:
        set_variables(sys.argv[1:])
    except (ImportError, ValueError, RuntimeError) as error:
        hint = "pip install torch_tpu" if isinstance(error, ImportError) else "ssdctl doctor"
        print(f"error: TorchTPU: {error}\nhint: {hint}", file=sys.stderr)  # noqa: T201
        sys.exit(ExitCode.USAGE)
    quiet_torchrun.run()


if __name__ == "__main__":
    run()
