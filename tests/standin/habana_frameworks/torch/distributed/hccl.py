import os

import torch

from habana_frameworks.torch import calls


def initialize_distributed_hpu() -> tuple[int, int, int]:
    """Reads the rank variables, so they must be set by now."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    size, rank, local = (int(os.environ[name]) for name in names)
    calls.append(f"card of rank {rank} of {size}")
    if "hccl" not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend(
            "hccl", torch.distributed.ProcessGroupGloo, devices="hpu"
        )
    return size, rank, local
