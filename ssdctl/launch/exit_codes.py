"""Derive a job's exit code and the rank that failed first from what its ranks recorded.

Batch scripts do that by `python -m ssdctl.launch.exit_codes DIR LAUNCHER_CODE RANKS`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from ssdctl.distributed.rank_process import PASSED_ON, read_exits
from ssdctl.errors import ExitCode


def job_exit_code(
    launcher_code: int, exits: list[int], num_ranks: int, stop_signal: int | None = None
) -> int:
    """Return the exit code of a job, from the launcher's (negative for a signal) and its ranks'.

    Args:
        exits: The recorded codes of the ranks, in the order in which they ended.
        num_ranks: The number of ranks that could record one.
        stop_signal: The signal that was sent to the job shortly before, if any.
    """
    if launcher_code == 0:
        return ExitCode.STOPPED if ExitCode.STOPPED in exits else 0
    # A rank that lost another one exits with 8, possibly before that one has recorded its code.
    for consequences in ((0, ExitCode.STOPPED, ExitCode.DISTRIBUTED), (0, ExitCode.STOPPED)):
        reasons = [code for code in exits if code not in consequences]
        if reasons:
            return reasons[0]
    if exits and len(exits) == num_ranks and set(exits) == {ExitCode.STOPPED}:
        return ExitCode.STOPPED
    if stop_signal is not None:
        # Ranks without a code were ended by the signal before Python had installed its handlers:
        # they had nothing to save.
        signal_codes = {1, *(s for n in (stop_signal, signal.SIGTERM) for s in (-n, 128 + n))}
        if exits or launcher_code in signal_codes:
            return ExitCode.STOPPED
    return launcher_code if launcher_code in PASSED_ON else ExitCode.DISTRIBUTED


def first_failure(
    code: int,
    exits: Mapping[int, int],
    num_ranks: int | None,
    lost: int | None = None,
    is_out_of_memory: bool = False,
) -> tuple[list[int], str] | None:
    """Return the ranks that made a job fail with a code, and a description of their failure.

    Args:
        exits: The recorded codes of the ranks, in the order in which they ended.
        num_ranks: The number of ranks; None if not all could record a code here.
        lost: The first rank that ended without recording a code.
        is_out_of_memory: Whether the kernel killed a process of the job for its memory.
    """
    if code in (ExitCode.OK, ExitCode.STOPPED, ExitCode.INTERRUPTED):
        return None
    for rank, exit_code in exits.items():
        if exit_code not in (ExitCode.OK, ExitCode.STOPPED, ExitCode.DISTRIBUTED):
            return [rank], f"failed first, with exit code {exit_code}"
    silent = sorted(set(range(num_ranks or 0)) - set(exits)) if exits else []
    if lost is not None:
        silent = [lost]
    if silent and is_out_of_memory:
        return silent, "was killed: the job used more memory than its cgroup grants"
    if silent:
        return silent, "died or hung: no exit code was recorded"
    reporting = [rank for rank, code in exits.items() if code == ExitCode.DISTRIBUTED]
    return (reporting[:1], "was the first to report a lost rank") if reporting else None


def main(folder: str, launcher_code: str, num_ranks: str) -> int:
    """Print the failed ranks to stderr; return the job's exit code for a batch script."""
    exits, count = read_exits(Path(folder)), int(num_ranks)
    code = job_exit_code(int(launcher_code), list(exits.values()), count)
    if failure := first_failure(code, exits, count):
        ranks, reason = failure
        sys.stderr.write(f"error: rank {', '.join(map(str, ranks))} {reason}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
