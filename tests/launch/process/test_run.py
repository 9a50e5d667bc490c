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
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import is_alive, wait_for

from ssdctl.config.sections.launch import LaunchConfig
from ssdctl.distributed.addresses import free_port
from ssdctl.distributed.rank_process import EXITS_VARIABLE, last_lines, read_exits
from ssdctl.launch.base import LaunchPlan, LaunchRequest, make_plan, read_node

# Reads a plan from its argument and runs it, as `ssdctl launch` does.
DRIVER = """
import json, os, signal, sys
import ssdctl.launch._run as module
from ssdctl.launch.base import LaunchPlan
module.HANG_S = float(os.environ.get("HANG_S", module.HANG_S))
given = json.loads(sys.argv[1])
sys.exit(module.run(LaunchPlan(**given)).code)
"""


# A rank: prints its number, waits for the stop signal, saves for a while, exits with 75.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
from ssdctl.distributed.rank_process import recorded_exit
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
rank = (
    "import os, time; from ssdctl.distributed.rank_process import recorded_exit\\n"
    "with recorded_exit(): open('up' + str(os.getpid()), 'w'); time.sleep(60)"
)
for n in "01":
    environment = {**os.environ, "RANK": n}
    subprocess.Popen([sys.executable, "-c", rank], start_new_session=True, env=environment)
print(os.getpid(), flush=True)
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
    return LaunchPlan(argv, {}, launcher, num_ranks=2, **more)


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
    "killed", [("launcher",), ("ssdctl launch",), ("launcher", "ssdctl launch")]
)
def test_no_survivor(killed: tuple[str, ...], tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with started(plan_of(sys.executable, "-c", STUBBORN), tmp_path) as launch:
            assert launch.stdout is not None
            launcher = int(launch.stdout.readline())
            wait_for(lambda: len(list(tmp_path.glob("up*"))) == 2)
            family = [launcher, *children(launcher)]
            victims = {"launcher": launcher, "ssdctl launch": launch.pid}
            for victim in killed:
                os.kill(victims[victim], signal.SIGKILL)
            wait_for(lambda: not any(is_alive(pid) for pid in family), timeout_s=5)
            assert launch.wait(5) == (-9 if "ssdctl launch" in killed else 8)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_variables_of_an_outer_job_are_not_inherited(tmp_path: Path) -> None:
    """With PET_NNODES=2, which Kubeflow sets in its pods, torchrun would wait for another node."""
    outer = {"RANK": "9", "PET_NNODES": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = f"import os; print(sorted({set(outer)} & os.environ.keys()))"
    with started(plan_of(sys.executable, "-c", code), tmp_path, **outer) as launch:
        assert launch.communicate(timeout=60)[0] == "[]\n"


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with started(plan_of(sys.executable, "-c", STUBBORN), tmp_path) as launch:
        assert launch.stdout is not None
        launcher = int(launch.stdout.readline())
        wait_for(lambda: len(list(tmp_path.glob("up*"))) == 2)
        # A terminal's Ctrl-C goes to all of a session: it must count once.
        assert os.getsid(launcher) == launcher
        os.killpg(launch.pid, signal.SIGINT)
        time.sleep(0.5)
        assert is_alive(launcher)
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


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")


@pytest.mark.parametrize("device", ["cpu", pytest.param("hpu", marks=needs_mpirun)])
def test_a_killed_launcher_leaves_no_rank(device: str, tmp_path: Path) -> None:
    with started(probe_plan(device), tmp_path, SAVE_S="60") as launch:
        ranks = wait_for(lambda: ranks_of(tmp_path))
        (launcher,) = children(launch.pid)
        os.kill(launcher, signal.SIGKILL)
        wait_for(lambda: not any(is_alive(rank["pid"]) for rank in ranks), timeout_s=5)
        assert launch.wait(5) == 8


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
def test_mpirun_passes_on_a_ranks_exit_code(tmp_path: Path) -> None:
    with started(probe_plan("hpu"), tmp_path, LEAVE_WITH="7") as launch:
        ranks = wait_for(lambda: ranks_of(tmp_path))
        os.kill(ranks[1]["pid"], signal.SIGTERM)
        assert launch.wait(30) == 7


def test_logs_of_ranks(tmp_path: Path) -> None:
    """Rank 0 also writes to the terminal; text that redraws a terminal is not logged."""
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from ssdctl.distributed.rank_process import start_rank_log\n"
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


def test_a_rank_records_its_code_once(tmp_path: Path) -> None:
    """Processes that a rank starts do not write in its name."""
    code = (
        "import os, sys\n"
        "from ssdctl.distributed.rank_process import recorded_exit, EXITS_VARIABLE\n"
        "with recorded_exit():\n"
        "    assert EXITS_VARIABLE not in os.environ\n"
        "    sys.exit('words')\n"
    )
    environment = {**os.environ, EXITS_VARIABLE: str(tmp_path), "RANK": "5"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 1
    assert read_exits(tmp_path) == {5: 1}


def test_torchrun_does_not_log_the_signal_that_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import pathlib, time; pathlib.Path('up').touch(); time.sleep(60)\n")
    command = [sys.executable, "-m", "ssdctl.distributed.quiet_torchrun", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=1", str(script)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not re.search(r"^[WE]\d{4} ", words, re.MULTILINE), words
