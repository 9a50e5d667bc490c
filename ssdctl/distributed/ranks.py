"""Who this process is among the ranks of a run. Torch-free.

The rank comes from torchrun's, Open MPI's or Slurm's variables; without any of them the process is
alone. So is the shell of an `sbatch` script: Slurm calls it process 0 of all tasks, but the tasks
are what `srun` starts, and those know the step that they belong to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ssdctl.errors import UsageError

VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
UNSET = "unset these variables to train alone; ssdctl launch sets them for ranks"
STEP = ("SLURM_STEP_ID", "SLURM_STEPID")


class Ranks(NamedTuple):
    """This process among all."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and talks."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1


def find_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Who this process is.

    Raises:
        UsageError: The variables contradict each other.
    """
    environment = os.environ if environment is None else environment
    for names in VARIABLES:
        if names[0] in environment and names[1] in environment:
            if _is_batch_shell(names[0], environment):
                continue
            try:
                rank, size, local = (int(environment.get(n, "0")) for n in names)
            except ValueError:
                shown = " ".join(f"{n}={environment[n]!r}" for n in names if n in environment)
                raise UsageError(f"{shown}: not a number", hint=UNSET) from None
            if not 0 <= rank < size:
                raise UsageError(f"{names[0]}={rank} is not below {names[1]}={size}", hint=UNSET)
            return Ranks(rank, size, local)
    return Ranks(0, 1, 0)


def _is_batch_shell(rank_variable: str, environment: Mapping[str, str]) -> bool:
    """Whether Slurm's variables are those of a batch script's shell."""
    if rank_variable != "SLURM_PROCID" or environment[rank_variable] != "0":
        return False
    return not any(name in environment for name in STEP)
