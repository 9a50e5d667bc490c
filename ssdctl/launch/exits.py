"""The job's exit code.

mpirun hands a rank's exit code on; torchrun exits 1 whatever its ranks said. So each rank leaves
its code in a folder that `ssdctl launch` made and named in the environment:

    with recorded_exit():       # in ssdctl/__main__.py, around main()
        main()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Not SSDCTL_*: those are settings. Only `ssdctl launch` sets it.
VARIABLE = "_SSDCTL_RANK_EXITS"
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK")
PASSED_ON = (2, 3, 4, 5, 6, 7, 8, 75, 130)  # the contract's codes, which no launcher makes up
DISTRIBUTED = 8
STOPPED = 75


@contextlib.contextmanager
def recorded_exit() -> Iterator[None]:
    """Leave this process's exit code for `ssdctl launch`, if that is what started it."""
    # Taken out of the environment, so that a process this one starts does not write in its name.
    folder = os.environ.pop(VARIABLE, None)
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    code: object = 1
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code
        raise
    finally:
        if folder and rank and rank.isdigit():
            if not isinstance(code, int):
                code = 0 if code is None else 1
            target = Path(folder, rank)
            with contextlib.suppress(OSError):  # the launch is gone, or on another node
                temporary = target.with_name(f"{rank}.tmp")
                temporary.write_text(str(code))
                temporary.replace(target)


def read_exits(folder: Path) -> list[int]:
    """The exit codes that ranks left, the first to end first."""
    written = [path for path in folder.iterdir() if path.name.isdigit()]
    written.sort(key=lambda path: path.stat().st_mtime_ns)
    return [int(path.read_text()) for path in written]


def job_exit_code(
    launcher_code: int, exits: list[int], *, num_ranks: int, stop_signal: int | None
) -> int:
    """What the job came to.

    Args:
        launcher_code: The launcher's, negative for a signal.
        exits: The codes that ranks left, the first to end first.
        num_ranks: How many could have left one.
        stop_signal: The signal that asked the launcher to stop a short while ago; None otherwise.
    """
    if launcher_code == 0:
        return 0
    # A rank that lost another one says 8, perhaps before the other has said why it went.
    for not_a_reason in ((0, STOPPED, DISTRIBUTED), (0, STOPPED)):
        reasons = [code for code in exits if code not in not_a_reason]
        if reasons:
            return reasons[0]
    if exits and len(exits) == num_ranks and set(exits) == {STOPPED}:
        return STOPPED
    if stop_signal is not None and (exits or launcher_code in (-stop_signal, 128 + stop_signal, 1)):
        # Ranks that left no code died of the signal before Python had its handlers: nothing of
        # theirs was there to save.
        return STOPPED
    return launcher_code if launcher_code in PASSED_ON else DISTRIBUTED
