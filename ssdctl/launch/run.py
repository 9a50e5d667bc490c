"""Run a plan: no shell, forwarded signals, no survivor.

    ssdctl launch  <- lifeline (a pipe) ->  guardian  ->  torchrun or mpirun  ->  ranks

The guardian is a fork of this process in a session of its own. It adopts whatever loses its parent
below it (PR_SET_CHILD_SUBREAPER), so it can end ranks whose launcher was killed. Where `ssdctl
launch` itself is killed, the lifeline closes and the guardian ends everything; where the guardian
is killed, its processes fall to `ssdctl launch`, which does the same. Nobody else's process is
ever looked for by name: only descendants are touched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssdctl.errors import ExitCode, UsageError
from ssdctl.launch.exit_codes import EXITS_VARIABLE, job_exit_code, read_exits
from ssdctl.launch.plan import Plan
from ssdctl.launch.process_tree import (
    POLL_S,
    become_subreaper,
    children,
    descendants,
    end_processes,
)

TORCHRUN, QUIET_TORCHRUN = "torch.distributed.run", "ssdctl.launch.quiet_torchrun"
ASK_AGAIN_S = 5.0
EARLY_S = 20.0  # Python has its handlers by then; torchrun's patience ends at 30 s or later
HANG_S = 20.0  # how long the other ranks may go on once one has failed
# Another job's ranks, where this one is started from inside it.
FOREIGN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"),
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
}


class Outcome(NamedTuple):
    """How a job ended: its exit code, and the codes that ranks of this machine left."""

    code: int
    exits: dict[int, int]


def require_launcher(plan: Plan) -> None:
    """See that this machine can run the plan.

    Raises:
        UsageError: The launcher is absent.
    """
    if plan.launcher == "mpirun" and shutil.which(plan.argv[0]) is None:
        raise UsageError(
            f"{plan.argv[0]} is not on PATH",
            hint="install Open MPI (Debian: apt install openmpi-bin; Gaudi's images bring it), "
            "or use --launcher torchrun",
        )
    if plan.launcher == "torchrun" and not _has_torchrun():
        raise UsageError(
            f"torch.distributed.run is absent from {sys.executable}",
            hint="install PyTorch there (pip install torch), or use --launcher mpirun",
        )


def _has_torchrun() -> bool:
    spec = importlib.util.find_spec("torch")  # finds without importing, unlike torch.distributed
    places = (spec.submodule_search_locations if spec else None) or []
    return any(Path(place, "distributed", "run.py").is_file() for place in places)


def free_port() -> int:
    """A TCP port that nobody listens on now; the kernel draws it at random."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run(plan: Plan, *, stdout_to_stderr: bool = False) -> Outcome:
    """Run the plan to its end (exits.py says what the job came to).

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask the job to save and stop; a second SIGINT ends it.

    Args:
        plan: Of `make_plan`, with nothing missing.
        stdout_to_stderr: Keep this process's stdout for the caller's own words.
    """
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        signals.append(signal.SIGHUP)
    exits = Path(tempfile.mkdtemp(prefix="ssdctl-launch-"))
    environment = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    environment |= {**plan.environment, EXITS_VARIABLE: str(exits)}

    not_ours = set(descendants(os.getpid()))  # of the shell that `exec`ed us
    become_subreaper()
    sys.stdout.flush()
    sys.stderr.flush()
    lifeline, held = os.pipe()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    guardian = os.fork()
    if guardian == 0:
        os.close(held)
        stdout = 2 if stdout_to_stderr else None
        os._exit(_guarded(plan, environment, lifeline, signals, stdout))
    os.close(lifeline)
    old_handlers = {number: signal.signal(number, _forward_to(guardian)) for number in signals}
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    try:
        _, status = os.waitpid(guardian, 0)
        end_processes(not_ours)
        left = read_exits(exits)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(held)
        shutil.rmtree(exits, ignore_errors=True)
    return Outcome(os.WEXITSTATUS(status) if os.WIFEXITED(status) else ExitCode.DISTRIBUTED, left)


def _forward_to(process: int) -> Any:
    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)

    return forward


def _guarded(
    plan: Plan,
    environment: Mapping[str, str],
    lifeline: int,
    signals: list[signal.Signals],
    stdout: int | None,
) -> int:
    """The guardian's life; never raises, for the fork must not go on with its parent's work."""
    try:
        os.setsid()  # a terminal's Ctrl-C must reach the ranks once, through `ssdctl launch`
        asked: list[int] = []
        for number in signals:
            signal.signal(number, lambda n, _: asked.append(n))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        become_subreaper()
        return _guard(plan, environment, lifeline, asked, stdout)
    except OSError as error:  # the launcher cannot be started
        os.write(2, f"error: {plan.argv[0]}: {error.strerror}\n".encode())
        return UsageError.exit_code
    except BaseException:
        traceback.print_exc()
        return 1


def _guard(
    plan: Plan,
    environment: Mapping[str, str],
    lifeline: int,
    asked: list[int],
    stdout: int | None,
) -> int:
    launcher = subprocess.Popen(
        _without_traceback(plan.argv),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
    )
    exits = Path(environment[EXITS_VARIABLE])
    stop = _Stop(plan, launcher)
    interrupted = abandoned = hung = False
    failed_at: float | None = None
    while launcher.poll() is None and not (interrupted or abandoned or hung):
        if asked:
            stop.ask(asked[0])
        if failed_at is None and any(
            c not in (0, ExitCode.STOPPED) for c in read_exits(exits).values()
        ):
            failed_at = time.monotonic()
        hung = failed_at is not None and time.monotonic() - failed_at > HANG_S
        interrupted = asked.count(signal.SIGINT) > 1
        abandoned = bool(select.select([lifeline], [], [], POLL_S)[0])
    early = stop.is_early()
    launcher_code = launcher.returncode  # None where the launcher is among those to end
    end_processes()
    if abandoned:
        shutil.rmtree(exits, ignore_errors=True)
    if interrupted or (launcher_code is None and not hung):
        return ExitCode.INTERRUPTED
    return job_exit_code(
        ExitCode.DISTRIBUTED if launcher_code is None else launcher_code,
        list(read_exits(exits).values()),
        num_ranks=plan.num_ranks,
        stop_signal=asked[0] if early else None,
    )


def _without_traceback(argv: Sequence[str]) -> list[str]:
    """The command with torchrun's module replaced by the quiet one (quiet_torchrun.py)."""
    if list(argv[1:3]) == ["-m", TORCHRUN]:
        return [argv[0], "-m", QUIET_TORCHRUN, *argv[3:]]
    return list(argv)


class _Stop:
    """Asking a job to save and stop.

    The ranks of one machine are asked themselves: torchrun and mpirun, asked to end, would print a
    traceback or kill them two seconds later. Before there are ranks the launcher may go. On several
    nodes mpirun forwards the signal, to the ranks it has started so far: so it is repeated.
    """

    def __init__(self, plan: Plan, launcher: subprocess.Popen[bytes]) -> None:
        self.plan, self.launcher = plan, launcher
        self.told: set[int] = set()
        self.began_at = self.last_at = 0.0

    def ask(self, number: int) -> None:
        now = time.monotonic()
        self.began_at = self.began_at or now
        ranks = children(self.launcher.pid) if self.plan.asks_ranks else []
        for pid in set(ranks) - self.told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
            self.told.add(pid)
        is_time = not self.last_at or (self.plan.repeats_stop and now > self.last_at + ASK_AGAIN_S)
        if not self.told and is_time:
            self.last_at = now
            self.launcher.send_signal(self.plan.stop_signal)

    def is_early(self) -> bool:
        """Whether a rank that ends now without a word died of the signal itself.

        Long after it was asked, it was killed while it saved.
        """
        return bool(self.began_at) and time.monotonic() - self.began_at < EARLY_S
