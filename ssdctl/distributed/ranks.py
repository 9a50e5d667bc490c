"""The rank of this process in a run. Torch-free.

The rank comes from torchrun's, Open MPI's or Slurm's variables; without them the process is the
only one. So is the shell of an `sbatch` script: Slurm sets its rank to 0 of all tasks, but only
`srun` starts the tasks, and those have a step id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ssdctl.errors import UsageError

RANK_VARIABLES = (  # rank, world size, local rank
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
RANK_NUMBERS = tuple(dict.fromkeys(rank for rank, _, _ in RANK_VARIABLES))
SLURM_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID")
HINT = "unset these variables to use a single process; ssdctl launch sets them for ranks"


class Ranks(NamedTuple):
    """This process among all processes of a run."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and the terminal output."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1


SINGLE_PROCESS = Ranks(0, 1, 0)


def find_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return the rank of this process.

    Raises:
        UsageError: The variables contradict each other.
    """
    environment = os.environ if environment is None else environment
    for names in RANK_VARIABLES:
        given = {name: environment[name] for name in names if name in environment}
        if not {*names[:2]} <= given.keys():
            continue
        # The shell of a batch script has a rank, but no step.
        is_step = not environment.keys().isdisjoint(SLURM_STEP_VARIABLES)
        if given.get("SLURM_PROCID") == "0" and not is_step:
            continue
        try:
            rank, size, local = (int(given.get(name, "0")) for name in names)
        except ValueError:
            values = " ".join(f"{name}={value!r}" for name, value in given.items())
            raise UsageError(f"{values}: not a number", hint=HINT) from None
        if not 0 <= rank < size:
            raise UsageError(f"{names[0]}={rank} is not below {names[1]}={size}", hint=HINT)
        return Ranks(rank, size, local)
    return SINGLE_PROCESS
