"""`ssdctl launch` by torchrun and Open MPI. Most ranks are a small program in place of a training."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_RUN
from helpers import wait_for
from launch.open_mpi import MPIRUNS, environment_for

OPTIONS = [word for word in TINY_RUN.split() if word not in ("--device", "cpu", "--bs", "2")]
LAUNCHERS = ["torchrun", *MPIRUNS]
# Takes the place of `python -m ssdctl`: the first launch is real.
PROBE = """
import json, os, signal, sys, time
from pathlib import Path
from ssdctl.distributed.rank_process import recorded_exit
with recorded_exit():
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: asked.append(n))
    rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    about = {"pid": os.getpid(), "arguments": sys.argv[1:], "port": os.environ["MASTER_PORT"]}
    Path(rank + ".tmp").write_text(json.dumps(about))
    Path(rank + ".tmp").rename(rank + ".up")
    how = os.environ.get("RANK_" + rank, "")
    if how == "fails once":
        if not Path("failed").exists():
            Path("failed").touch()
            sys.exit(8)
        sys.exit(0)
    if how == "lost":
        time.sleep(1)
        sys.exit(8)
    while how == "hangs" or not asked:
        time.sleep(0.05)
    Path(rank + ".saving").touch()
    time.sleep(float(os.environ.get("SAVE_S", "0")))
    Path(rank + ".saved").touch()
    sys.exit(int(os.environ.get("LEAVE_WITH", "75")))
"""
DRIVER = """
import sys
import ssdctl.launch.processes as module
module.HANG_S = 3.0
real = module.subprocess.Popen
module.subprocess.Popen = lambda argv, **more: real(
    ["probe" if word == "ssdctl" else word for word in argv], **more
)
sys.argv = ["ssdctl", *sys.argv[1:]]
from ssdctl.cli.main import main
main()
"""
HOSTILE = ["--data=$$${local_rank}", "--out=$(touch x)", "--init=-x a;b\nc"]


def start(folder: Path, *words: object, driver: str = "", **environment: str) -> Any:
    program = ["-c", driver] if driver else ["-m", "ssdctl"]
    argv = [sys.executable, *program, "launch", "--cpus", "2", *map(str, words)]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    out = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, cwd=folder, env=env, **out)  # type: ignore[call-overload]


@contextlib.contextmanager
def probed(
    folder: Path, launcher: str, *words: str, **environment: str
) -> Iterator[tuple[Any, str]]:
    """A launch of two probes; every process of it carries the mark."""
    folder.mkdir(exist_ok=True)
    (folder / "probe.py").write_text(PROBE)
    mark = uuid.uuid4().hex
    name, variables = environment_for(launcher)
    more = ["--launcher", name, "--bind-to", "none", *words]
    with start(folder, *more, driver=DRIVER, MARK=mark, **variables, **environment) as process:
        try:
            yield process, mark
        finally:
            process.kill()


def ranks_in(folder: Path, state: str = "up") -> list[Path]:
    """The files of both ranks in a state, when both have reached it."""
    paths = sorted(folder.glob(f"[01].{state}"))
    return paths if len(paths) == 2 else []


def marked(mark: str) -> list[int]:
    """The living processes of a launch, whoever their parents are by now."""
    ranks = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                ranks.append(int(path.parent.name))
    return ranks


def kill_rank_1(mark: str) -> None:
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if {b"RANK=1", b"OMPI_COMM_WORLD_RANK=1"} & set(variables):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("killed", "phase"),
    [("launch", "starting"), ("launch", "up"), ("launcher", "up"), ("launch", "saving")],
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_launch_leaves_nothing(
    launcher: str, killed: str, phase: str, tmp_path: Path
) -> None:
    with probed(tmp_path, launcher, SAVE_S="60") as (process, mark):
        wait_for(lambda: len(marked(mark)) > 3)  # itself, the launcher, ranks without a record
        if phase != "starting":
            wait_for(lambda: ranks_in(tmp_path))
        if phase == "saving":
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: ranks_in(tmp_path, "saving"))
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid if killed == "launch" else int(child), signal.SIGKILL)
        wait_for(lambda: not marked(mark), timeout_s=5)
        assert process.wait(5) == (-9 if killed == "launch" else 8)


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), *MPIRUNS])
def test_two_launches_at_once_save_and_stop(launcher: str, tmp_path: Path) -> None:
    """Arguments arrive as typed, ports do not clash, the rank number of an outer job is not used.

    mpirun itself would kill its ranks two seconds after a SIGTERM.
    """
    folders = [tmp_path / "one", tmp_path / "two"]
    outer = {"RANK": "9", "WORLD_SIZE": "10"}
    with (
        probed(folders[0], launcher, *HOSTILE, SAVE_S="4", **outer) as (first, mark_1),
        probed(folders[1], launcher, *HOSTILE) as (second, mark_2),
    ):
        files = [path for folder in folders for path in wait_for(lambda: ranks_in(folder))]  # noqa: B023
        ranks = [json.loads(path.read_text()) for path in files]
        assert all(r["arguments"] == ["train", *HOSTILE, "--device=cpu"] for r in ranks)
        assert len({rank["port"] for rank in ranks}) == 2
        first.send_signal(signal.SIGTERM)
        second.send_signal(signal.SIGHUP)
        assert [process.wait(30) for process in (first, second)] == [75, 75]
        assert not marked(mark_1) + marked(mark_2)
    assert all(ranks_in(folder, "saved") for folder in folders)
    assert not (folders[0] / "x").exists()


@pytest.mark.parametrize("launcher", MPIRUNS)
def test_mpirun_passes_on_a_ranks_exit_code(launcher: str, tmp_path: Path) -> None:
    with probed(tmp_path, launcher, LEAVE_WITH="7") as (process, _):
        _, second = wait_for(lambda: ranks_in(tmp_path))
        os.kill(json.loads(second.read_text())["pid"], signal.SIGTERM)
        assert process.wait(30) == 7


@pytest.mark.parametrize("end", ["dies", pytest.param("hangs", marks=pytest.mark.slow(in_ci=True))])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_lost_rank_ends_the_job_and_is_named(launcher: str, end: str, tmp_path: Path) -> None:
    """The other rank exits with 8 when it notices the loss, as training does."""
    with probed(tmp_path, launcher, RANK_0="lost", RANK_1=end) as (process, mark):
        if end == "dies":
            wait_for(lambda: ranks_in(tmp_path))
            kill_rank_1(mark)
        _, words = process.communicate(timeout=60)
        assert process.returncode == 8
        assert not marked(mark)
    assert "error: rank 1 died or hung" in words


@pytest.mark.parametrize("launcher", MPIRUNS)
@pytest.mark.parametrize(("restarts", "code"), [(0, 8), (1, 0)])
def test_restarts_are_counted(launcher: str, restarts: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "ssdctl.toml").write_text(f"[launch]\nrestarts = {restarts}\n")
    how = "fails once"
    with probed(tmp_path, launcher, RANK_0=how, RANK_1=how) as (process, _):
        _, words = process.communicate(timeout=60)
        assert process.returncode == code, words
    assert words.count("mpirun -n 2") == restarts + 1
    assert ("--resume=auto" in words) == bool(restarts)


AGENT = """#!/bin/bash
host=$1; shift
exec ip netns exec "{prefix}${{host##*.}}" bash -c "$*"
"""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """Two network namespaces with a wire between them, and what takes ssh's place."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs iproute2 and root")
    prefix = f"t{uuid.uuid4().hex[:6]}-"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for number in ("1", "2"):
            try:
                ip("netns", "add", prefix + number)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        ip(*f"link add wire netns {prefix}1 type veth peer name wire netns {prefix}2".split())
        for number in ("1", "2"):
            for words in (
                f"addr add 10.77.0.{number}/24 dev wire",
                "link set wire up",
                "link set lo up",
            ):
                ip("-n", prefix + number, *words.split())
        agent = tmp_path / "agent"
        agent.write_text(AGENT.format(prefix=prefix))
        agent.chmod(0o755)
        hosts = tmp_path / "hosts"
        # The launching host is not the first, and has slots for both ranks.
        hosts.write_text("10.77.0.2 slots=2\n10.77.0.1 slots=2\n")
        yield f"{prefix}1", agent, hosts
    finally:
        for number in ("1", "2"):
            subprocess.run(["ip", "netns", "del", prefix + number], capture_output=True)


@pytest.mark.slow(in_ci=True)
@pytest.mark.parametrize("launcher", MPIRUNS)
def test_open_mpi_on_two_hosts(
    launcher: str, two_hosts: tuple[str, Path, Path], shapes: Path, tmp_path: Path
) -> None:
    """Train with one rank on each host; after a SIGTERM to the launch both save and stop.

    The launching host is listed second: version 4 starts rank 0 there, version 5 on the first.
    Both hosts resolve their own name to the loopback, where neither would reach the other.
    """
    name, variables = environment_for(launcher)
    space, agent, hosts = two_hosts
    run = tmp_path / "run"
    argv = ["ip", "netns", "exec", space, sys.executable, "-m", "ssdctl", "launch", "--cpus", "2"]
    argv += ["--nodes", "2", "--launcher", name, "--hostfile", str(hosts), "--bind-to", "none"]
    argv += ["--data", str(shapes), "--out", str(run), "--steps", "500", *OPTIONS, "--bs", "1"]
    environment = {**os.environ, **variables, "OMPI_MCA_plm_rsh_agent": str(agent)}
    environment["PRTE_MCA_plm_ssh_agent"] = str(agent)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for((run / "metrics.jsonl").exists)
            process.send_signal(signal.SIGTERM)  # `ip netns exec` has become the launch
            _, words = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 75, words
    assert f"-x MASTER_ADDR=10.77.0.{1 if launcher == 'mpirun-4' else 2} " in words
    # Rank 0 learns it from its own signal, or earlier from the other rank.
    assert re.search("stopped by (SIGUSR1|another rank)", words)
    assert (run / "checkpoints" / "last.pt").exists()
