"""Who a process is among all: torchrun's, Open MPI's and Slurm's variables."""

from __future__ import annotations

import pytest

from ssdctl.distributed.ranks import Ranks, find_ranks
from ssdctl.errors import UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "2"), ("SIZE", "4"), ("LOCAL_RANK", "0"))
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}  # an sbatch script's shell
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 4, 1)),
        (OPEN_MPI, (2, 4, 0)),
        ({**BATCH, **OPEN_MPI}, (2, 4, 0)),
        (BATCH, (0, 1, 0)),
        ({**BATCH, **STEP}, (0, 4, 0)),
        ({**BATCH, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, (3, 4, 1)),
        # A step of fewer tasks than the job has, as salloc's own shell is.
        ({**BATCH, **STEP, "SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0)),
    ],
)
def test_ranks(environment: dict[str, str], expected: tuple[int, int, int]) -> None:
    assert find_ranks(environment) == Ranks(*expected)


@pytest.mark.parametrize("rank", ["4", "-1", "x", ""])
def test_nonsense_is_refused(rank: str) -> None:
    with pytest.raises(UsageError, match="RANK="):
        find_ranks({**TORCHRUN, "RANK": rank})
