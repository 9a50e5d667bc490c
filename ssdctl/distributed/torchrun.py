"""torchrun as `ssdctl launch` runs it: `python -m ssdctl.distributed.torchrun [--tpu] OPTIONS`.

Without its traceback and its log lines: the failed rank has printed its error, and `ssdctl launch`
names the rank; torchrun would repeat it in thirty lines at the end, where the user looks first. Its
own errors are still printed.

With `--tpu` for TorchTPU: all ranks must agree on the topology of the chips and on an address for
each, so TorchTPU sets these variables before any rank is started. On several hosts it also numbers
them, unless --node-rank does.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import get_args_parser, main

from ssdctl.errors import ExitCode
from ssdctl.runtime.packages import torch_warnings_ignored


def set_tpu_variables(words: list[str]) -> None:
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
    with torch_warnings_ignored():  # experimental, says the package
        distributed = importlib.import_module("torch.tpu.distributed")
        distributed.set_tpu_launch_env(nnodes=nodes if nodes > 1 else None, nproc_per_node=ranks)
    if nodes > 1 and not has_number:
        for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):  # defaults of torchrun's options
            os.environ.setdefault(f"PET_{name}", os.environ[name])


def run(words: list[str]) -> None:
    """Run torchrun's command line.

    The exit code is 1 if a rank failed, 8 if the nodes do not meet, 128 + N after signal N.
    """
    if words[:1] == ["--tpu"]:
        del words[0]
        try:
            set_tpu_variables(words)
        except (ImportError, ValueError, RuntimeError) as error:
            hint = "pip install torch_tpu" if isinstance(error, ImportError) else "ssdctl doctor"
            print(f"error: TorchTPU: {error}\nhint: {hint}", file=sys.stderr)  # noqa: T201
            sys.exit(ExitCode.USAGE)
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    # `ssdctl launch` reports signals itself. Each module has its own level.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    try:
        main(words)
    except ChildFailedError:
        sys.exit(1)
    except RendezvousConnectionError:
        endpoint = get_args_parser().parse_args(words).rdzv_endpoint
        hint = "another program may use the port, or the first node is not reached at that name"
        print(f"error: no rendezvous at {endpoint}\nhint: {hint}", file=sys.stderr)  # noqa: T201
        sys.exit(ExitCode.DISTRIBUTED)
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    run(sys.argv[1:])
