"""Real processes: exit codes, forwarded signals, no remaining process.

The launchers are small fakes if torchrun's seconds of imports would add nothing; torchrun
and mpirun themselves run where what they do is what matters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_alive, wait_for

from ssdctl.config.sections.launch import LaunchConfig
from ssdctl.launch.exit_codes import (
    EXITS_VARIABLE,
    describe_failure,
    first_failure,
    job_exit_code,
    read_exits,
)
from ssdctl.launch.logs import last_lines, start_rank_log
from ssdctl.launch.node import read_node
from ssdctl.launch.plan import make_plan
from ssdctl.launch.request import LaunchPlan, LaunchRequest
from ssdctl.launch.run import free_port
from ssdctl.runtime.cgroups import memory_kills

# Reads a plan from its argument and runs it, as `ssdctl launch` does.
DRIVER = """
import json, os, signal, sys
import ssdctl.launch.run as module
from ssdctl.launch.request import LaunchPlan
module.HANG_S = float(os.environ.get("HANG_S", module.HANG_S))
given = json.loads(sys.argv[1])
given["stop_signal"] = signal.Signals(given["stop_signal"])
sys.exit(module.run(LaunchPlan(**given)).code)
"""

# A rank: prints its number, waits for the stop signal, saves for a while, exits with 75.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
from ssdctl.launch.exit_codes import recorded_exit
with recorded_exit():
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: asked.append(n))
    rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    about = {"pid": os.getpid(), "arguments": sys.argv[1:], "port": os.environ["MASTER_PORT"]}
    Path(f"{rank}.tmp").write_text(json.dumps(about))
    Path(f"{rank}.tmp").rename(f"{rank}.json")
    while not asked:
        time.sleep(0.05)
    time.sleep(float(os.environ.get("SAVE_S", "0")))
    Path(f"{rank}.saved").touch()
    sys.exit(int(os.environ.get("LEAVE_WITH", "75")))
"""

# A launcher of two ranks in sessions of their own (as torchrun's are) that ignore SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(os.getpid(), os.getppid(), flush=True)
time.sleep(60)
"""

# A launcher that does not notice that its first rank has failed.
DEAF = """
import os, time
from pathlib import Path
Path(os.environ["_SSDCTL_RANK_EXITS"], "0").write_text("3 1")
time.sleep(60)
"""

ARGUMENTS = ("train", "--data=$(touch x)", "-x", "--", "$$${local_rank}", "a;b\nc", "")


def plan_of(*argv: str, launcher: str = "torchrun", **more: Any) -> LaunchPlan:
    return LaunchPlan(argv, {}, launcher, num_ranks=2, stop_signal=signal.SIGTERM, **more)


def probe_plan(device: str) -> LaunchPlan:
    """What `launch` would run, with the module `probe` in the place of `ssdctl`."""
    request = LaunchRequest(
        device=device,
        count=2,
        command=ARGUMENTS,
        config=LaunchConfig(cores_per_node=1),  # mpirun binds nothing: the machine may be busy
        python=sys.executable,
        environment=os.environ,
        free_port=free_port(),
    )
    plan = make_plan(request, read_node())
    return dataclasses.replace(plan, argv=tuple("probe" if a == "ssdctl" else a for a in plan.argv))


@contextlib.contextmanager
def started(plan: LaunchPlan, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`ssdctl launch`, running the plan in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "probe.py").write_text(RANK)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(dataclasses.asdict(plan))],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(folder: Path) -> list[dict[str, Any]] | None:
    """The output of both ranks, when both have printed."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return None


@pytest.mark.parametrize("code", [0, 3, 75])
def test_exit_code_passes_through(code: int, tmp_path: Path) -> None:
    with started(plan_of(sys.executable, "-c", f"exit({code})"), tmp_path) as launch:
        assert launch.wait(20) == code
    assert list(tmp_path.glob("ssdctl-launch-*")) == []


@pytest.mark.parametrize(
    ("launcher_code", "exits", "stop_signal", "expected"),
    [
        (0, [0, 0], None, 0),
        (1, [75, 75], None, 75),  # torchrun exits with 1 whatever its ranks returned
        (1, [75], None, 8),  # the other rank died without a word
        (1, [75], 15, 75),  # ... of the signal, before it had begun
        (1, [], 15, 75),
        (-15, [], 15, 75),
        (-9, [], None, 8),
        (-9, [75, 75], None, 75),  # the launcher was killed, but everything is saved
        (1, [75, 6], 15, 6),
        (1, [8, 7], None, 7),  # 8 only reports the loss of the other
        (1, [8, 75], None, 8),
        (1, [2, 2], None, 2),
        (1, [], None, 8),
        (137, [], None, 8),  # mpirun's code for a killed rank
        (75, [], None, 75),  # mpirun hands a rank's code on
        (0, [75, 75], None, 75),  # to their launcher, ranks that saved and stopped ended well
        (0, [0, 0], 15, 0),
        (143, [], 10, 75),  # mpirun, signalled before it had ranks
    ],
)
def test_exit_code_of_a_job(
    launcher_code: int, exits: list[int], stop_signal: int | None, expected: int
) -> None:
    assert job_exit_code(launcher_code, exits, num_ranks=2, stop_signal=stop_signal) == expected


@pytest.mark.parametrize(
    "killed", [("launcher",), ("ssdctl launch",), ("guardian",), ("launcher", "ssdctl launch")]
)
def test_no_survivor(killed: tuple[str, ...], tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with started(plan_of(sys.executable, "-c", STUBBORN), tmp_path) as launch:
            assert launch.stdout is not None
            launcher, guardian = map(int, launch.stdout.readline().split())
            family = [launcher, *wait_for(lambda: children(launcher)[1:] and children(launcher))]
            family.append(guardian)
            victims = {"launcher": launcher, "ssdctl launch": launch.pid, "guardian": guardian}
            for victim in killed:
                os.kill(victims[victim], signal.SIGKILL)
            wait_for(lambda: not any(is_alive(pid) for pid in family), timeout_s=5)
            assert launch.wait(5) == (-9 if "ssdctl launch" in killed else 8)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_port_in_use_is_not_chosen() -> None:
    with socket.socket() as used:
        used.bind(("", free_port()))
        assert free_port() != used.getsockname()[1]


def test_children_of_the_shell_that_became_launch_are_spared(tmp_path: Path) -> None:
    plan = plan_of(sys.executable, "-c", STUBBORN)
    script = f'sleep 60 & echo $!; exec {sys.executable} -c "$0" "$1"'
    argv = ["bash", "-c", script, DRIVER, json.dumps(dataclasses.asdict(plan))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as launch:
        assert launch.stdout is not None
        sleeper = int(launch.stdout.readline())
        _, guardian = map(int, launch.stdout.readline().split())
        os.kill(guardian, signal.SIGKILL)  # so that `ssdctl launch` itself cleans up
        try:
            assert launch.wait(8) == 8
            assert is_alive(sleeper)
        finally:
            os.kill(sleeper, signal.SIGKILL)


def test_variables_of_an_outer_job_are_not_inherited(tmp_path: Path) -> None:
    """With PET_NNODES=2, which Kubeflow sets in its pods, torchrun would wait for another node."""
    outer = {"RANK": "9", "PET_NNODES": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = f"import os; print(sorted({set(outer)} & os.environ.keys()))"
    with started(plan_of(sys.executable, "-c", code), tmp_path, **outer) as launch:
        assert launch.communicate(timeout=60)[0] == "[]\n"


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with started(plan_of(sys.executable, "-c", STUBBORN), tmp_path) as launch:
        assert launch.stdout is not None
        launcher, guardian = map(int, launch.stdout.readline().split())
        ranks = wait_for(lambda: children(launcher)[1:] and children(launcher))
        # A terminal's Ctrl-C goes to all of a session: it must count once.
        assert {os.getsid(launch.pid), os.getsid(guardian)} == {launch.pid, guardian}
        os.killpg(launch.pid, signal.SIGINT)
        time.sleep(0.5)
        assert all(is_alive(pid) for pid in [launcher, *ranks])
        launch.send_signal(signal.SIGINT)
        assert launch.wait(5) == 130
        assert not is_alive(launcher)


def test_a_failed_rank_ends_the_hanging_ones(tmp_path: Path) -> None:
    with started(plan_of(sys.executable, "-c", DEAF), tmp_path, HANG_S="0.3") as launch:
        assert launch.wait(20) == 3


def test_nohup_is_respected(tmp_path: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(1)"
    plan = json.dumps(dataclasses.asdict(plan_of(sys.executable, "-c", code)))
    argv = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", DRIVER, plan]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as launch:
        assert launch.stdout is not None
        assert launch.stdout.readline() == "up\n"
        launch.send_signal(signal.SIGHUP)
        assert launch.wait(20) == 0


def test_a_launcher_that_cannot_start(tmp_path: Path) -> None:
    with started(plan_of("/nowhere/mpirun"), tmp_path) as launch:
        assert launch.wait(20) == 2


@pytest.mark.slow
def test_two_torchruns_at_once_save_and_stop(tmp_path: Path) -> None:
    """Arguments arrive as typed, ports do not clash; SIGTERM, or a closed terminal, stops it."""
    one, two = tmp_path / "one", tmp_path / "two"
    with started(probe_plan("cpu"), one) as first, started(probe_plan("cpu"), two) as second:
        ranks = [*wait_for(lambda: ranks_of(one)), *wait_for(lambda: ranks_of(two))]
        assert all(rank["arguments"] == list(ARGUMENTS) for rank in ranks)
        assert len({rank["port"] for rank in ranks}) == 2
        first.send_signal(signal.SIGTERM)
        second.send_signal(signal.SIGHUP)
        assert [first.wait(30), second.wait(30)] == [75, 75]
    assert not (one / "x").exists()
    assert not any(is_alive(rank["pid"]) for rank in ranks)


def test_killed_torchrun_leaves_no_rank(tmp_path: Path) -> None:
    with started(probe_plan("cpu"), tmp_path, SAVE_S="60") as launch:
        ranks = wait_for(lambda: ranks_of(tmp_path))
        (guardian,) = children(launch.pid)
        (torchrun,) = children(guardian)
        os.kill(torchrun, signal.SIGKILL)
        wait_for(lambda: not any(is_alive(rank["pid"]) for rank in ranks), timeout_s=5)
        assert launch.wait(5) == 8


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")


@needs_mpirun
def test_mpirun_lets_its_ranks_save(tmp_path: Path) -> None:
    """mpirun itself would kill them two seconds after a SIGTERM.

    The rank number of an outer job, in which this one was started, is not used.
    """
    with started(probe_plan("hpu"), tmp_path, SAVE_S="4", RANK="9", WORLD_SIZE="10") as launch:
        ranks = wait_for(lambda: ranks_of(tmp_path))
        assert all(rank["arguments"] == list(ARGUMENTS) for rank in ranks)
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(30) == 75
    assert len(list(tmp_path.glob("*.saved"))) == 2
    assert not any(is_alive(rank["pid"]) for rank in ranks)


@needs_mpirun
def test_killed_mpirun_leaves_no_rank(tmp_path: Path) -> None:
    with started(probe_plan("hpu"), tmp_path, SAVE_S="60") as launch:
        ranks = wait_for(lambda: ranks_of(tmp_path))
        (guardian,) = children(launch.pid)
        (mpirun,) = children(guardian)
        os.kill(mpirun, signal.SIGKILL)
        wait_for(lambda: not any(is_alive(rank["pid"]) for rank in ranks), timeout_s=5)
        assert launch.wait(5) == 8


@needs_mpirun
def test_mpirun_passes_on_a_ranks_exit_code(tmp_path: Path) -> None:
    with started(probe_plan("hpu"), tmp_path, LEAVE_WITH="7") as launch:
        ranks = wait_for(lambda: ranks_of(tmp_path))
        os.kill(ranks[1]["pid"], signal.SIGTERM)
        assert launch.wait(30) == 7


@pytest.mark.parametrize(
    ("exits", "num_ranks", "words"),
    [
        ({1: 8, 0: 3}, 2, "rank 0 failed first, with exit code 3"),
        ({0: 8, 2: 8}, 3, "rank 1 died or hung: no exit code was recorded"),
        ({0: 8}, None, "rank 0 was the first to report a lost rank"),
        ({}, 2, None),
        ({0: 0, 1: 0}, 2, None),
    ],
)
def test_the_rank_that_failed(
    exits: dict[int, int], num_ranks: int | None, words: str | None
) -> None:
    assert describe_failure(exits, num_ranks) == words


def test_ranks_are_ordered_by_the_time_of_their_end(tmp_path: Path) -> None:
    """Not by that of their files, which may be the same."""
    for rank, content in ((0, "8 200"), (1, "3 100"), (2, "0 300")):
        (tmp_path / str(rank)).write_text(content)
    assert list(read_exits(tmp_path).items()) == [(1, 3), (0, 8), (2, 0)]


def test_a_rank_that_was_killed_for_its_memory(tmp_path: Path) -> None:
    failure = first_failure({0: 8}, 2, is_out_of_memory=True)
    assert failure is not None
    assert (failure[0], "memory" in failure[1]) == ([1], True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    where = (tmp_path / "proc", tmp_path / "sys")
    assert memory_kills(*where) == 0
    (tmp_path / "sys/fs/cgroup/job/memory.events").write_text("oom 3\noom_kill 2\n")
    assert memory_kills(*where) == 2


def test_logs_of_ranks(tmp_path: Path) -> None:
    """Rank 0 also writes to the terminal; text that redraws a terminal is not logged."""
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from ssdctl.launch.logs import start_rank_log\n"
        "start_rank_log(Path(f'rank-{sys.argv[1]}.log'), int(sys.argv[1]))\n"
        "sys.stderr.write('\\r10%')\nprint('step 1', file=sys.stderr)\n"
        "os.write(2, b'text of a library\\n')\n"
    )
    printed = []
    for rank in ("0", "1", "1"):
        argv = [sys.executable, "-c", code, rank]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=True)
        printed.append(done.stderr)
    assert printed == [b"\r10%step 1\ntext of a library\n", b"", b""]
    assert last_lines(tmp_path / "rank-0.log") == ["step 1"]
    content = (tmp_path / "rank-1.log").read_text()
    assert content.count("--- rank 1, process") == 2
    assert "text of a library\n" in content
    assert last_lines((tmp_path / "rank-1.log"), count=1)[0].endswith(("library", "step 1"))
    assert last_lines(tmp_path / "rank-7.log") == []


def test_a_log_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    start_rank_log(tmp_path / "logs" / "rank-1.log", 1)


def test_a_rank_records_its_code_once(tmp_path: Path) -> None:
    """Processes that a rank starts do not write in its name."""
    code = (
        "import os, sys\n"
        "from ssdctl.launch.exit_codes import recorded_exit, EXITS_VARIABLE\n"
        "with recorded_exit():\n"
        "    assert EXITS_VARIABLE not in os.environ\n"
        "    sys.exit('words')\n"
    )
    environment = {**os.environ, EXITS_VARIABLE: str(tmp_path), "RANK": "5"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 1
    assert read_exits(tmp_path) == {5: 1}


@pytest.mark.slow  # imports torchrun
def test_torchrun_that_is_stopped_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.distributed.elastic.agent.server import api
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from ssdctl.launch import quiet_torchrun

    def stopped() -> None:
        api.logger.warning("Received 15 death signal, shutting down workers")
        raise SignalException("Process 1 got signal: 15", sigval=signal.SIGTERM)

    monkeypatch.setattr(quiet_torchrun, "main", stopped)
    monkeypatch.setattr(api.logger, "handlers", [caplog.handler])  # instead of one for stderr
    with pytest.raises(SystemExit) as end:
        quiet_torchrun.run()
    assert end.value.code == 128 + signal.SIGTERM
    assert not caplog.records


def test_torchrun_does_not_log_the_signal_that_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import pathlib, time; pathlib.Path('up').touch(); time.sleep(60)\n")
    command = [sys.executable, "-m", "ssdctl.launch.quiet_torchrun", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=1", str(script)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not re.search(r"^[WE]\d{4} ", words, re.MULTILINE), words
