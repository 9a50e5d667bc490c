"""Run a plan without a shell; forward signals, and end all processes that remain.

    ssdctl launch  <- lifeline (a pipe) ->  guardian  ->  torchrun or mpirun  ->  ranks

The guardian is a fork of this process in a session of its own. It adopts orphaned descendants
(PR_SET_CHILD_SUBREAPER), so it can end ranks after their launcher was killed. If `ssdctl
launch` itself is killed, the lifeline closes and the guardian ends everything; if the guardian is
killed, `ssdctl launch` adopts its processes and does the same. Only descendants are ever signalled;
no process is looked up by name.
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

from ssdctl.distributed.ranks import RANK_NUMBERS
from ssdctl.errors import DiskError, ExitCode, UsageError
from ssdctl.launch.exit_codes import (
    EXITS_VARIABLE,
    job_exit_code,
    read_exits,
)
from ssdctl.launch.process_tree import (
    POLL_S,
    become_subreaper,
    children,
    descendants,
    direct_children,
    end_processes,
    variable_of,
)
from ssdctl.launch.request import LaunchPlan
from ssdctl.runtime.cgroups import memory_kills

TORCHRUN, QUIET_TORCHRUN = "torch.distributed.run", "ssdctl.launch.quiet_torchrun"
REPEAT_S = 5.0
EARLY_S = 20.0  # Python has installed its handlers by then; torchrun waits 30 s or more
HANG_S = 20.0  # how long the other ranks may continue after one has failed
# Variables of an outer job that this one is started from.
OUTER_JOB_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"),
    "TORCHELASTIC_USE_AGENT_STORE",  # rank 0 would wait for the store of the outer torchrun
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
}
TORCHRUN_OPTION = "PET_"  # prefix of torchrun's options as variables; Kubeflow sets PET_NNODES


LOST = "lost"  # file next to the exit codes: the rank that ended first without one


class JobOutcome(NamedTuple):
    """How a job ended.

    Attributes:
        code: Its exit code.
        exits: The recorded codes of this machine's ranks, in the order of their ends.
        lost: The first rank that ended without recording one.
        is_out_of_memory: Whether the kernel killed a process of its cgroup for its memory.
    """

    code: int
    exits: dict[int, int]
    lost: int | None = None
    is_out_of_memory: bool = False


def require_launcher(plan: LaunchPlan) -> None:
    """Check that this machine can run the plan.

    Raises:
        UsageError: The launcher is absent.
    """
    if plan.launcher == "mpirun" and shutil.which(plan.argv[0]) is None:
        raise UsageError(
            f"{plan.argv[0]} is not on PATH",
            hint="install Open MPI (Debian: apt install openmpi-bin; Gaudi's images have it), "
            "or use --launcher torchrun",
        )
    if plan.launcher == "torchrun" and not _has_torchrun():
        raise UsageError(
            f"torch.distributed.run is absent from {sys.executable}",
            hint="install PyTorch there (pip install torch), or use --launcher mpirun",
        )


def _has_torchrun() -> bool:
    spec = importlib.util.find_spec("torch")  # does not import it, unlike torch.distributed
    places = (spec.submodule_search_locations if spec else None) or []
    return any(Path(place, "distributed", "run.py").is_file() for place in places)


def free_port() -> int:
    """Return a free TCP port, chosen by the kernel at random."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run(plan: LaunchPlan, *, stdout_to_stderr: bool = False) -> JobOutcome:
    """Run the plan to its end (see exit_codes.py for its code).

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP make the job save and stop; a second SIGINT ends it.

    Args:
        plan: A complete plan of `make_plan`.
        stdout_to_stderr: Redirect the job's stdout, so that stdout has only the caller's output.
    """
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by nohup
        signals.append(signal.SIGHUP)
    exits, killed_before = _temporary_dir(), memory_kills()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in OUTER_JOB_VARIABLES and not name.startswith(TORCHRUN_OPTION)
    }
    environment |= {**plan.environment, EXITS_VARIABLE: str(exits)}

    inherited = set(descendants(os.getpid()))  # children of a shell that `exec`ed this process
    become_subreaper()
    sys.stdout.flush()
    sys.stderr.flush()
    lifeline, write_end = os.pipe()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    guardian = os.fork()
    if guardian == 0:
        os.close(write_end)
        stdout = 2 if stdout_to_stderr else None
        os._exit(_guarded(plan, environment, lifeline, signals, stdout))
    os.close(lifeline)
    old_handlers = {number: signal.signal(number, _forward_to(guardian)) for number in signals}
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    try:
        _, status = os.waitpid(guardian, 0)
        end_processes(inherited)
        codes, lost = read_exits(exits), _read_lost(exits)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(write_end)
        shutil.rmtree(exits, ignore_errors=True)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else ExitCode.DISTRIBUTED
    return JobOutcome(code, codes, lost, memory_kills() > killed_before)


def _temporary_dir() -> Path:
    """Create a private folder for the ranks' exit codes.

    Raises:
        DiskError: There is no folder for temporary files.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="ssdctl-launch-"))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise DiskError(
            f"no temporary file can be written{where}: {error.strerror}",
            hint="set TMPDIR to a folder that exists and that you may write to",
        ) from None


def _read_lost(exits: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((exits / LOST).read_text())
    return None


def _forward_to(process: int) -> Any:
    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)

    return forward


def _guarded(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    lifeline: int,
    signals: list[signal.Signals],
    stdout: int | None,
) -> int:
    """Run as the guardian; never raise, since the fork must not continue its parent's work."""
    try:
        os.setsid()  # a terminal's Ctrl-C must reach the ranks once, through `ssdctl launch`
        received: list[int] = []
        for number in signals:
            signal.signal(number, lambda n, _: received.append(n))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        become_subreaper()
        return _guard(plan, environment, lifeline, received, stdout)
    except OSError as error:  # the launcher cannot be started
        os.write(2, f"error: {plan.argv[0]}: {error.strerror}\n".encode())
        return UsageError.exit_code
    except BaseException:
        traceback.print_exc()
        return 1


def _guard(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    lifeline: int,
    received: list[int],
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
    stop, watch = _Stop(plan, launcher), _RankWatch(launcher.pid, exits)
    interrupted = abandoned = hung = False
    failed_at: float | None = None
    while launcher.poll() is None and not (interrupted or abandoned or hung):
        if received:
            stop.request(received[0])
        if failed_at is None and any(
            c not in (0, ExitCode.STOPPED) for c in read_exits(exits).values()
        ):
            failed_at = time.monotonic()
        hung = failed_at is not None and time.monotonic() - failed_at > HANG_S
        interrupted = received.count(signal.SIGINT) > 1
        if plan.launcher == "mpirun":
            watch.poll()
        ready = select.select([lifeline, *watch.process_files()], [], [], POLL_S)[0]
        abandoned = lifeline in ready
    early = stop.is_early()
    launcher_code = launcher.returncode  # None if the launcher is still running
    end_processes()
    if abandoned:
        shutil.rmtree(exits, ignore_errors=True)
    if interrupted or (launcher_code is None and not hung):
        return ExitCode.INTERRUPTED
    return job_exit_code(
        ExitCode.DISTRIBUTED if launcher_code is None else launcher_code,
        list(read_exits(exits).values()),
        num_ranks=plan.num_ranks,
        stop_signal=received[0] if early else None,
    )


def _without_traceback(argv: Sequence[str]) -> list[str]:
    """Return the command with torchrun's module replaced by quiet_torchrun.py."""
    if list(argv[1:3]) == ["-m", TORCHRUN]:
        return [argv[0], "-m", QUIET_TORCHRUN, *argv[3:]]
    return list(argv)


class _RankWatch:
    """Record which rank of this machine ends first without an exit code.

    Open MPI 5 kills the other ranks within half a second, before they can report the lost one. A
    process's file (`pidfd_open`) becomes readable when it ends, so that the guardian wakes then,
    and not at its next poll, when all of them may have ended.
    """

    def __init__(self, launcher: int, exits: Path) -> None:
        self.launcher, self.exits = launcher, exits
        self.ranks: dict[int, int] = {}  # by process id
        self.files: dict[int, int] = {}  # of running ranks, by process id
        self.ended: set[int] = set()
        self.has_lost = False

    def process_files(self) -> list[int]:
        """Return a file of each running rank, readable after its end; none before Linux 5.3."""
        return list(self.files.values())

    def poll(self) -> None:
        running = set(direct_children(self.launcher))
        for pid in running:
            if pid not in self.ranks:
                rank = variable_of(pid, RANK_NUMBERS)
                if rank is not None and rank.isdigit():
                    self.ranks[pid] = int(rank)
                    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
                        with contextlib.suppress(OSError):
                            self.files[pid] = os.pidfd_open(pid)
        for file in select.select(self.process_files(), [], [], 0)[0]:
            pid = next(pid for pid, opened in self.files.items() if opened == file)
            os.close(self.files.pop(pid))
            running.discard(pid)
        self.ended |= self.ranks.keys() - running
        ended = [self.ranks[pid] for pid in self.ended]
        lost = [rank for rank in ended if rank not in read_exits(self.exits)] if ended else []
        if len(lost) == 1 and not self.has_lost:
            self.has_lost = True
            with contextlib.suppress(OSError):
                (self.exits / LOST).write_text(str(lost[0]))


class _Stop:
    """Signal a job to save and stop.

    The ranks of one machine are signalled directly, because torchrun would print a traceback, and
    mpirun would kill them two seconds later. Before there are ranks the launcher is signalled. On
    several nodes mpirun forwards the signal to the ranks it has started so far: so it is repeated.
    """

    def __init__(self, plan: LaunchPlan, launcher: subprocess.Popen[bytes]) -> None:
        self.plan, self.launcher = plan, launcher
        self.signalled: set[int] = set()
        self.began_at = self.last_at = 0.0

    def request(self, number: int) -> None:
        now = time.monotonic()
        self.began_at = self.began_at or now
        ranks = children(self.launcher.pid) if self.plan.signals_ranks else []
        for pid in set(ranks) - self.signalled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
            self.signalled.add(pid)
        is_time = not self.last_at or (self.plan.repeats_stop and now > self.last_at + REPEAT_S)
        if not self.signalled and is_time:
            self.last_at = now
            self.launcher.send_signal(self.plan.stop_signal)

    def is_early(self) -> bool:
        """Return whether a rank that ends now without an exit code was ended by the signal.

        Later it would have been killed while it saved.
        """
        return bool(self.began_at) and time.monotonic() - self.began_at < EARLY_S
