"""The CPU cores that this process may use."""

from __future__ import annotations

import os

from ssdctl.runtime.system import usable_cpus


def usable_cores(world_size: int = 1) -> int:
    """Return how many cores this process may use: its affinity mask, shared with the node's ranks.

    Args:
        world_size: Number of ranks of the run.
    """
    cores = len(usable_cpus())
    if world_size > 1:
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # The cores that Slurm gave to a task; not every site binds the task to them.
        cores = min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK", cores)))
    return max(cores, 1)
