"""Derive the job's exit code and the rank that failed first.

torchrun exits with 1 whatever the codes of its ranks, and mpirun and srun return one of them. So
each rank records its code in a folder that the launch created and named in the environment:

    with recorded_exit():       # in ssdctl/__main__.py, around main()
        main()

A batch script reads the job's exit code by `python -m ssdctl.launch.exit_codes DIR CODE RANKS`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ssdctl.distributed.ranks import RANK_NUMBERS
from ssdctl.errors import ExitCode
from ssdctl.files import no_follow

# Names the folder. Not SSDCTL_*: those are settings. Only `ssdctl launch` sets it.
EXITS_VARIABLE = "_SSDCTL_RANK_EXITS"
# Codes that come from ssdctl, never from a launcher itself.
PASSED_ON = frozenset(ExitCode) - {ExitCode.OK, ExitCode.BUG}
TERMINATED = 15


@contextlib.contextmanager
def recorded_exit() -> Iterator[Callable[[int], None]]:
    """Record this process's exit code for `ssdctl launch`, if that started it.

    Yields:
        A function that records a code and ends the process at once, without cleaning up.
    """
    # Removed from the environment, so that subprocesses do not record their exits.
    folder = os.environ.pop(EXITS_VARIABLE, None)

    def exit_now(code: int) -> None:
        os._exit(0 if _record(folder, code) else code)

    try:
        yield exit_now
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if _record(folder, code) and code == ExitCode.STOPPED:
            # A launcher treats every code but 0 as a failure: it would end the ranks that have not
            # finished, and print a traceback. The launch reads the recorded code.
            raise SystemExit(0) from None
        raise
    except BaseException:
        _record(folder, 1)
        raise
    else:
        _record(folder, 0)


def _record(folder: str | None, code: int) -> bool:
    """Write the exit code for the launch; return whether a launch expects it."""
    rank = next((os.environ[name] for name in RANK_NUMBERS if name in os.environ), None)
    if not folder or not rank or not rank.isdigit():
        return False
    target = Path(folder, rank)
    with contextlib.suppress(OSError):  # the launch is gone, or on another node
        temporary = target.with_name(f"{rank}.tmp")
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", opener=no_follow) as file:
            # File times are too coarse to tell which of two ranks was the first.
            file.write(f"{code} {time.time_ns()}")
        temporary.replace(target)
        return True
    return False


def read_exits(folder: Path) -> dict[int, int]:
    """Return the recorded exit codes by rank, in the order in which the ranks ended."""
    with contextlib.suppress(OSError):
        written = {p.name: p.read_text().split() for p in folder.iterdir() if p.name.isdigit()}
        order = sorted(written, key=lambda name: int(written[name][1]))
        return {int(name): int(written[name][0]) for name in order}
    return {}


def job_exit_code(
    launcher_code: int, exits: list[int], *, num_ranks: int, stop_signal: int | None
) -> int:
    """Return the exit code of the job.

    Args:
        launcher_code: The launcher's exit code, negative for a signal.
        exits: The recorded codes of the ranks, in the order in which they ended.
        num_ranks: The number of ranks that could record one.
        stop_signal: The signal that was sent to the job shortly before; None if there was none.
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
        signal_codes = {1, *(s for n in (stop_signal, TERMINATED) for s in (-n, 128 + n))}
        if exits or launcher_code in signal_codes:
            return ExitCode.STOPPED
    return launcher_code if launcher_code in PASSED_ON else ExitCode.DISTRIBUTED


def first_failure(
    exits: Mapping[int, int],
    num_ranks: int | None,
    lost: int | None = None,
    *,
    is_out_of_memory: bool = False,
) -> tuple[list[int], str] | None:
    """Return the ranks that made a job fail, and a description of their failure.

    Args:
        exits: The recorded codes of the ranks, in the order in which they ended.
        num_ranks: The number of ranks; None if not all could record a code here.
        lost: The first rank that ended without recording a code.
        is_out_of_memory: Whether the kernel killed a process of the job for its memory.
    """
    silence = "died or hung: no exit code was recorded"
    if is_out_of_memory:
        silence = "was killed: the job used more memory than its cgroup grants"
    silent = sorted(set(range(num_ranks or 0)) - set(exits))
    reasons = [
        r for r, code in exits.items() if code not in (0, ExitCode.STOPPED, ExitCode.DISTRIBUTED)
    ]
    if reasons:
        return reasons[:1], f"failed first, with exit code {exits[reasons[0]]}"
    if lost is not None:
        return [lost], silence
    if silent and exits:
        return silent, silence
    reporting = [rank for rank, code in exits.items() if code == ExitCode.DISTRIBUTED]
    if reporting:
        return reporting[:1], "was the first to report a lost rank"
    return None


def describe_failure(exits: Mapping[int, int], num_ranks: int | None) -> str | None:
    """Return `rank 3 failed first, ...`, or None if no rank is known to have failed."""
    failure = first_failure(exits, num_ranks)
    if failure is None:
        return None
    ranks, description = failure
    return f"rank {', '.join(map(str, ranks))} {description}"


def main(arguments: list[str]) -> int:
    """Return the job's exit code at the end of a batch script; print the failed ranks to stderr."""
    folder, launcher_code, num_ranks = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    exits = read_exits(folder)
    code = job_exit_code(launcher_code, list(exits.values()), num_ranks=num_ranks, stop_signal=None)
    if code not in (0, ExitCode.STOPPED) and (text := describe_failure(exits, num_ranks)):
        sys.stderr.write(f"error: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
