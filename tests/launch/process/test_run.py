"""Real processes of small launchers: exit codes, forwarded signals, no remaining process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import run_cli
from helpers import is_alive, wait_for

from ssdctl.distributed.rank_process import EXITS_VARIABLE, last_lines, read_exits
from ssdctl.launch.base import Job

# Runs a plan with the program of its argument as the launcher of two ranks, as `ssdctl launch` does.
DRIVER = """
import os, sys
import ssdctl.launch.processes as module
from ssdctl.launch.base import Job
module.HANG_S = float(os.environ.get("HANG_S", module.HANG_S))
argv = (sys.executable, "-c", sys.argv[1])
plan = Job(argv, {}, "torchrun", num_ranks=2)
sys.exit(module.run(plan, stdout_to_stderr="AS_JSON" in os.environ).code)
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
exit_file = Path(os.environ["_SSDCTL_RANK_EXITS"], "0.tmp")
exit_file.write_text("3 1")
exit_file.rename(exit_file.with_suffix(""))
time.sleep(60)
"""


@contextlib.contextmanager
def started(
    program: str, folder: Path, *before: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`ssdctl launch` with a launcher, in `folder`; `before` are the first words of its command."""
    argv = [*before, sys.executable, "-c", DRIVER, program]
    env = {**os.environ, "TMPDIR": str(folder), **environment}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(argv, cwd=folder, env=env, start_new_session=True, **out)  # type: ignore[call-overload]
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def stubborn(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A launch and the process id of its launcher, when its ranks are up."""
    with started(STUBBORN, folder) as launch:
        launcher = int(launch.stdout.readline())
        wait_for(lambda: len(list(folder.glob("up*"))) == 2)
        yield launch, launcher


INTERRUPTED = """
import os, signal, sys

class Signal:
    def find_spec(name, *_):
        if name == "ssdctl.cli.main":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Signal)
sys.argv = ["ssdctl", "launch", "--cpus", "2", "--fake-data"]
from ssdctl.__main__ import run
run()
"""


def test_a_signal_during_the_imports_of_launch_is_a_stop() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, check=False)
    assert done.returncode == 75, done


def test_no_survivor(tmp_path: Path) -> None:
    """test_engines.py kills the launch, or the launcher."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        with stubborn(tmp_path) as (launch, launcher):
            ranks = [int(path.name.removeprefix("up")) for path in tmp_path.glob("up*")]
            os.kill(launcher, signal.SIGKILL)
            launch.kill()
            wait_for(lambda: not any(map(is_alive, [launcher, *ranks])), timeout_s=5)
            assert launch.wait(5) == -9
        assert bystander.poll() is None


def test_variables_of_an_outer_job_are_not_inherited(tmp_path: Path) -> None:
    """With PET_NNODES=2, which Kubeflow sets in its pods, torchrun would wait for another node."""
    outer = {"RANK": "9", "PET_NNODES": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = f"import os; print(sorted({set(outer)} & os.environ.keys()))"
    with started(code, tmp_path, **outer) as launch:
        assert launch.communicate(timeout=60)[0] == "[]\n"
    to_file = ("sh", "-c", 'exec "$@" 2>messages', "sh")
    with started(code, tmp_path, *to_file, AS_JSON="1", **outer) as launch:
        assert launch.communicate(timeout=60)[0] == ""
    assert (tmp_path / "messages").read_text() == "[]\n"


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with stubborn(tmp_path) as (launch, launcher):
        # A terminal's Ctrl-C goes to all of a session: it must count once.
        assert os.getsid(launcher) == launcher
        os.killpg(launch.pid, signal.SIGINT)
        time.sleep(0.5)
        assert is_alive(launcher)
        launch.send_signal(signal.SIGINT)
        assert launch.wait(5) == 130
        assert not is_alive(launcher)


def test_a_failed_rank_ends_the_hanging_ones(tmp_path: Path) -> None:
    with started(DEAF, tmp_path, HANG_S="0.3") as launch:
        assert launch.wait(20) == 3
    assert list(tmp_path.glob("ssdctl-launch-*")) == []


def test_a_job_that_stops_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank was lost before it had saved."""
    code = (
        "import os, pathlib, signal, sys, time\n"
        "pathlib.Path(sys.argv[1], 'starts').open('a').write('x')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(8))\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "time.sleep(20)"
    )
    job = Job((sys.executable, "-c", code, str(tmp_path)), {}, "torchrun", 2)
    monkeypatch.setattr("ssdctl.launch.base.make_job", lambda *_: job)
    assert run_cli("launch", "--cpus", "2", "--restarts", "1").code == 8
    assert (tmp_path / "starts").read_text() == "x"


def test_nohup_is_respected(tmp_path: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(1)"
    with started(code, tmp_path, "sh", "-c", 'trap "" HUP; exec "$@"', "sh") as launch:
        assert launch.stdout.readline() == "up\n"
        launch.send_signal(signal.SIGHUP)
        assert launch.wait(20) == 0


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
    lines = last_lines(tmp_path / "rank-1.log")
    assert not any("--- rank" in line for line in lines)
    assert last_lines(tmp_path / "rank-1.log", count=1) == lines[-1:] != []
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
