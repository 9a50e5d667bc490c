"""Run a job without a shell; forward signals, and leave no process behind.

    ssdctl launch -> torchrun or mpirun -> ranks

Each is killed by the kernel when its parent ends (`die_with_parent`), so nothing survives whichever
of them is killed. Ranks write their process ids into a folder (distributed/rank_process.py): only
those and the launcher are ever signaled.

Batch scripts call `python -m ssdctl.launch.processes DIR LAUNCHER_CODE RANKS` for the exit code.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ssdctl.distributed.rank_process import (
    EXITS_VARIABLE,
    LAUNCHER_VARIABLE,
    PASSED_ON,
    die_with_parent,
    read_exits,
    read_processes,
)
from ssdctl.errors import DiskError, ExitCode, UsageError
from ssdctl.launch.base import Job, is_of_outer_job
from ssdctl.runtime.system import memory_kills

TORCHRUN, QUIET_TORCHRUN = "torch.distributed.run", "ssdctl.distributed.torchrun"
POLL_S = 0.1
REPEAT_S = 5.0
EARLY_S = 20.0  # Python has installed its signal handlers by then; torchrun waits 30 s or more
HANG_S = 20.0  # how long the other ranks may continue after one has failed
GRACE_S = 2.0  # between SIGTERM and SIGKILL


class JobOutcome(NamedTuple):
    code: int
    failure: tuple[list[int], str] | None = None  # the ranks that failed first, and why
    was_signaled: bool = False  # a stop was requested, whatever the code is


def run(job: Job, *, stdout_to_stderr: bool = False) -> JobOutcome:
    """Run a job to its end (see `job_exit_code` for its code).

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP make the job save and stop; a second SIGINT ends it.
    `stdout_to_stderr` redirects the job's output, so that stdout has only the caller's.

    Raises:
        UsageError: The launcher cannot be started.
        DiskError: There is no folder for temporary files.
    """
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by nohup
        signals.append(signal.SIGHUP)
    try:
        folder = Path(tempfile.mkdtemp(prefix="ssdctl-launch-"))
    except OSError as error:
        raise DiskError(
            f"no temporary file can be written {error.filename or ''}: {error.strerror}",
            hint="set TMPDIR to a folder that exists and that you may write to",
        ) from None
    received: list[int] = []
    old = {n: signal.signal(n, lambda number, _: received.append(number)) for n in signals}
    killed_before = memory_kills()
    try:
        running = _RunningJob(job, folder, stdout=2 if stdout_to_stderr else None)
        code, exits = running.wait(received), read_exits(folder)
        num_ranks = job.num_ranks if job.nodes == 1 else None
        is_full = memory_kills() > killed_before
        failure = first_failure(code, exits, num_ranks, running.lost, is_full)
        return JobOutcome(code, failure, was_signaled=bool(received))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in old.items():
            signal.signal(number, handler)


class _RunningJob:
    def __init__(self, job: Job, folder: Path, stdout: int | None) -> None:
        self.job, self.folder = job, folder
        self.seen: set[int] = set()  # ranks that have begun
        self.running: dict[int, int] = {}  # process ids, by rank
        self.files: dict[int, int] = {}  # files of those processes (`pidfd_open`), by rank
        self.lost: int | None = None
        self.signaled: set[int] = set()
        self.stopped_at = self.last_at = 0.0
        environment = {n: v for n, v in os.environ.items() if not is_of_outer_job(n)}
        launcher_file = folder / "launcher"
        own = {EXITS_VARIABLE: str(folder), LAUNCHER_VARIABLE: str(launcher_file)}
        sys.stdout.flush()
        try:
            self.launcher = subprocess.Popen(
                [QUIET_TORCHRUN if word == TORCHRUN else word for word in job.argv],
                env={**environment, **job.environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                start_new_session=True,  # a terminal's Ctrl-C must reach the ranks only once
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise UsageError(f"{job.argv[0]}: {error.strerror}") from None
        launcher_file.write_text(str(self.launcher.pid))

    def wait(self, received: list[int]) -> int:
        """Return the job's exit code at its end; `received` grows by each signal received here."""
        failed_at: float | None = None
        hung = interrupted = False
        while self.launcher.poll() is None and not (hung or interrupted):
            if received:
                self._stop(received[0])
            codes = read_exits(self.folder).values()
            if failed_at is None and any(c not in (0, ExitCode.STOPPED) for c in codes):
                failed_at = time.monotonic()
            hung = failed_at is not None and time.monotonic() - failed_at > HANG_S
            interrupted = received.count(signal.SIGINT) > 1
            self._watch()
        is_early = bool(received) and time.monotonic() - self.stopped_at < EARLY_S
        self._end()
        if interrupted:
            return ExitCode.INTERRUPTED
        code = ExitCode.DISTRIBUTED if hung else self.launcher.returncode
        exits = list(read_exits(self.folder).values())
        return job_exit_code(code, exits, self.job.num_ranks, received[0] if is_early else None)

    def _watch(self) -> None:
        """Wait a moment; remember the first rank that ends without an exit code.

        Open MPI 5 kills the other ranks within half a second, before they can report the lost one.
        A process's handle becomes readable when it ends, which ends this wait.
        """
        self._find_ranks()
        readable = select.select(list(self.files.values()), [], [], POLL_S)[0]
        for rank in [rank for rank, file in self.files.items() if file in readable]:
            os.close(self.files.pop(rank))
            del self.running[rank]
        lost = self.seen - self.running.keys() - read_exits(self.folder).keys()
        if len(lost) == 1 and self.lost is None:
            (self.lost,) = lost

    def _find_ranks(self) -> None:
        """Open a handle to each new rank; its process id may belong to another process later."""
        for rank, pid in read_processes(self.folder).items():
            if rank in self.seen:
                continue
            self.seen.add(rank)
            try:
                if sys.platform == "linux":
                    self.files[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue  # it has ended
            except OSError:  # before Linux 5.3
                pass
            self.running[rank] = pid

    def _stop(self, number: int) -> None:
        """Make the job save and stop.

        The ranks here are signaled themselves, because torchrun would print a traceback, and
        mpirun would kill them two seconds later. Before there are ranks the launcher is signaled.
        """
        now, launchers_signal = time.monotonic(), self.job.stop_signal
        self.stopped_at = self.stopped_at or now
        self._find_ranks()
        for rank, pid in self.running.items() if launchers_signal is None else ():
            if rank not in self.signaled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
                self.signaled.add(rank)
        repeats = launchers_signal is not None and now > self.last_at + REPEAT_S
        if not self.signaled and (repeats or not self.last_at):
            self.last_at = now
            self.launcher.send_signal(launchers_signal or signal.SIGTERM)

    def _end(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(GRACE_S)
            self.launcher.kill()
            self.launcher.wait()
        for file in self.files.values():
            if sys.platform == "linux":
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(file, signal.SIGKILL)
                select.select([file], [], [], GRACE_S)
                os.close(file)


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
