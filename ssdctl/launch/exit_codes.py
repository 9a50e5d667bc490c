"""The job's exit code, and who failed first.

torchrun exits 1 whatever its ranks said, and mpirun and srun pass one code of many on. So each rank
leaves its code in a folder that the launch made and named in the environment:

    with recorded_exit():       # in ssdctl/__main__.py, around main()
        main()

A batch script reads the job's exit code by `python -m ssdctl.launch.exit_codes DIR CODE RANKS`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ssdctl.errors import ExitCode
from ssdctl.files import no_follow

# Names the folder. Not SSDCTL_*: those are settings. Only `ssdctl launch` sets it.
EXITS_VARIABLE = "_SSDCTL_RANK_EXITS"
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# The codes that no launcher makes up.
PASSED_ON = frozenset(ExitCode) - {ExitCode.OK, ExitCode.BUG}
TERMINATED = 15


@contextlib.contextmanager
def recorded_exit() -> Iterator[None]:
    """Leave this process's exit code for `ssdctl launch`, if that is what started it."""
    # Taken out of the environment, so that a process this one starts does not write in its name.
    folder = os.environ.pop(EXITS_VARIABLE, None)
    try:
        yield
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if _record(folder, code) and code == ExitCode.STOPPED:
            # To a launcher every code but 0 is a failure: it would end the ranks that are not
            # through yet, and print a traceback. The launch reads what was recorded.
            raise SystemExit(0) from None
        raise
    except BaseException:
        _record(folder, 1)
        raise
    else:
        _record(folder, 0)


def _record(folder: str | None, code: int) -> bool:
    """Write the exit code for the launch; return whether a launch asked for it."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    if not folder or not rank or not rank.isdigit():
        return False
    target = Path(folder, rank)
    with contextlib.suppress(OSError):  # the launch is gone, or on another node
        temporary = target.with_name(f"{rank}.tmp")
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", opener=no_follow) as file:
            file.write(str(code))
        temporary.replace(target)
        return True
    return False


def read_exits(folder: Path) -> dict[int, int]:
    """The exit codes that ranks left, by rank, the first to end first."""
    with contextlib.suppress(OSError):
        written = [path for path in folder.iterdir() if path.name.isdigit()]
        written.sort(key=lambda path: path.stat().st_mtime_ns)
        return {int(path.name): int(path.read_text()) for path in written}
    return {}


def job_exit_code(
    launcher_code: int, exits: list[int], *, num_ranks: int, stop_signal: int | None
) -> int:
    """What the job came to.

    Args:
        launcher_code: The launcher's, negative for a signal.
        exits: The codes that ranks left, the first to end first.
        num_ranks: How many could have left one.
        stop_signal: The signal that asked the job to stop a short while ago; None otherwise.
    """
    if launcher_code == 0:
        return ExitCode.STOPPED if ExitCode.STOPPED in exits else 0
    # A rank that lost another one says 8, perhaps before the other has said why it went.
    for not_a_reason in ((0, ExitCode.STOPPED, ExitCode.DISTRIBUTED), (0, ExitCode.STOPPED)):
        reasons = [code for code in exits if code not in not_a_reason]
        if reasons:
            return reasons[0]
    if exits and len(exits) == num_ranks and set(exits) == {ExitCode.STOPPED}:
        return ExitCode.STOPPED
    if stop_signal is not None:
        # Ranks that left no code died of the signal before Python had its handlers: nothing of
        # theirs was there to save.
        of_the_signal = {1, *(s for n in (stop_signal, TERMINATED) for s in (-n, 128 + n))}
        if exits or launcher_code in of_the_signal:
            return ExitCode.STOPPED
    return launcher_code if launcher_code in PASSED_ON else ExitCode.DISTRIBUTED


def first_failure(
    exits: Mapping[int, int], num_ranks: int | None, lost: int | None = None
) -> tuple[list[int], str] | None:
    """The ranks that a failed job owes to, and what became of them.

    Args:
        exits: The codes that ranks left, the first to end first.
        num_ranks: How many there were; None where not all could leave a code here.
        lost: The rank that was seen to end first without leaving a code.
    """
    silent = sorted(set(range(num_ranks or 0)) - set(exits))
    reasons = [
        r for r, code in exits.items() if code not in (0, ExitCode.STOPPED, ExitCode.DISTRIBUTED)
    ]
    if reasons:
        return reasons[:1], f"failed first, with exit code {exits[reasons[0]]}"
    if lost is not None:
        return [lost], "died or hung: no exit code was left"
    if silent and exits:
        return silent, "died or hung: no exit code was left"
    reporting = [rank for rank, code in exits.items() if code == ExitCode.DISTRIBUTED]
    if reporting:
        return reporting[:1], "was the first to miss another rank"
    return None


def described(exits: Mapping[int, int], num_ranks: int | None) -> str | None:
    """`rank 3 failed first, ...`, or None where nothing is known."""
    failure = first_failure(exits, num_ranks)
    if failure is None:
        return None
    ranks, what = failure
    return f"rank {', '.join(map(str, ranks))} {what}"


def main(arguments: list[str]) -> int:
    """The end of a batch script: the job's exit code; who failed goes to stderr."""
    folder, launcher_code, num_ranks = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    exits = read_exits(folder)
    code = job_exit_code(launcher_code, list(exits.values()), num_ranks=num_ranks, stop_signal=None)
    if code not in (0, ExitCode.STOPPED) and (words := described(exits, num_ranks)):
        sys.stderr.write(f"error: {words}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
