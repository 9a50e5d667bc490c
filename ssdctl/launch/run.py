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
import ctypes
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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ssdctl.errors import UsageError
from ssdctl.launch.exits import DISTRIBUTED, RANK_VARIABLES, VARIABLE, job_exit_code, read_exits
from ssdctl.launch.plan import Plan

INTERRUPTED = 130
GRACE_S = 2.0  # between asking orphans to end and killing them
GIVE_UP_S = 30.0  # a process in uninterruptible sleep cannot be killed
ASK_AGAIN_S = 5.0
EARLY_S = 20.0  # Python has its handlers by then; torchrun's patience ends at 30 s or later
POLL_S = 0.1
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Another job's ranks, where this one is started from inside it.
FOREIGN = {*RANK_VARIABLES, "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"}


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


def run(plan: Plan, *, stdout_to_stderr: bool = False) -> int:
    """Run the plan to its end; return the job's exit code (exits.py says which).

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask the job to save and stop; a second SIGINT ends it.

    Args:
        stdout_to_stderr: Keep this process's stdout for the caller's own words.
    """
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        signals.append(signal.SIGHUP)
    exits = Path(tempfile.mkdtemp(prefix="ssdctl-launch-"))
    environment = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    environment |= {**plan.environment, VARIABLE: str(exits)}

    not_ours = set(descendants(os.getpid()))  # of the shell that `exec`ed us
    _become_subreaper()
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
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(held)
        shutil.rmtree(exits, ignore_errors=True)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else DISTRIBUTED


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
        _become_subreaper()
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
        plan.argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
    )
    stopping = interrupted = abandoned = False
    asked_at = asked_last = 0.0
    while launcher.poll() is None and not (interrupted or abandoned):
        if asked and (
            not stopping or (plan.repeats_stop and time.monotonic() > asked_last + ASK_AGAIN_S)
        ):
            asked_last = time.monotonic()
            asked_at = asked_at or asked_last
            stopping = True
            launcher.send_signal(plan.stop_signal)
        interrupted = asked.count(signal.SIGINT) > 1
        abandoned = bool(select.select([lifeline], [], [], POLL_S)[0])
    # A rank that ends without a word long after it was asked was killed while it saved.
    early = stopping and time.monotonic() - asked_at < EARLY_S
    launcher_code = launcher.returncode  # None where the launcher is among those to end
    end_processes()
    exits = Path(environment[VARIABLE])
    if abandoned:
        shutil.rmtree(exits, ignore_errors=True)
    if interrupted or launcher_code is None:
        return INTERRUPTED
    return job_exit_code(
        launcher_code,
        read_exits(exits),
        num_ranks=plan.num_ranks,
        stop_signal=plan.stop_signal if early else None,
    )


def end_processes(spared: Collection[int] = ()) -> None:
    """End every descendant of this process: SIGTERM, and SIGKILL `GRACE_S` later."""
    start = time.monotonic()
    asked: set[int] = set()
    while True:
        _reap(spared)
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        waited = time.monotonic() - start
        if not left or waited > GIVE_UP_S:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if waited > GRACE_S:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
                    asked.add(pid)
        time.sleep(POLL_S / 2)


def _reap(spared: Collection[int]) -> None:
    for pid, parent in _parents().items():
        if parent == os.getpid() and pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def descendants(root: int) -> list[int]:
    """The processes below `root`, parents first."""
    parents = _parents()
    found = [root]
    for pid in found:  # grows while we walk
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            # "PID (NAME) STATE PPID ...": the name may hold blanks and parentheses
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return found


def _become_subreaper() -> None:
    """Let orphans below this process fall to it instead of init (Linux alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
