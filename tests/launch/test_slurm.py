"""Slurm: the script as text, and real jobs on a Slurm of this test's own.

munged, slurmctld and slurmd (Debian: munge slurmctld slurmd slurm-client) run on this machine with
a key, ports and folders of their own; nothing of an installed cluster is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_RUN
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import wait_for

from ssdctl.config.sections.launch import LaunchConfig, SlurmConfig
from ssdctl.errors import UsageError
from ssdctl.launch.node import Node
from ssdctl.launch.plan import make_plan
from ssdctl.launch.request import LaunchPlan, LaunchRequest
from ssdctl.launch.submit import follow, submit

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
ARGUMENTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
OverTimeLimit=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def plan_for(
    device: str, count: int, *command: str, slurm: dict[str, Any] | None = None, **launch: Any
) -> LaunchPlan:
    request = LaunchRequest(
        device=device,
        count=count,
        command=command or ("train",),
        config=LaunchConfig(launcher="slurm", **launch),
        python=sys.executable,
        slurm=SlurmConfig(**(slurm or {})),
    )
    return make_plan(request, Node(2, 1))


def directives(plan: LaunchPlan) -> list[str]:
    """The options as sbatch reads them: up to the first line that is not a comment."""
    assert plan.text is not None
    head = plan.text.partition("\nset -u\n")[0]
    return [line.removeprefix("#SBATCH ") for line in head.splitlines() if "#SBATCH" in line]


def test_options_for_slurm() -> None:
    settings = {"time": "1-00:00:00", "partition": "gaudi", "options": ("--exclusive",)}
    plan = plan_for("hpu", 16, nodes=2, cores_per_node=48, slurm=settings)
    assert directives(plan) == [
        *("--job-name=ssdctl", "--nodes=2", "--ntasks=16", "--ntasks-per-node=8"),
        *(
            "--cpus-per-task=6",
            "--hint=nomultithread",
            "--gres=hpu:8",
            "--partition=gaudi",
            "--time=1-00:00:00",
        ),
        *("--signal=USR1@300", "--open-mode=append", "--requeue", "--exclusive"),
    ]
    assert "--gres=gpu:4" in directives(plan_for("cuda", 4))
    assert not any("gres" in d for d in directives(plan_for("cuda", 4, slurm={"gres": "none"})))
    settings = {"constraint": "[rack1|rack2]", "options": ("--exclude=gpu[01-03,7]",)}
    found = directives(plan_for("cuda", 4, slurm=settings))
    assert {"--constraint=[rack1|rack2]", "--exclude=gpu[01-03,7]"} <= set(found)


@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --uid=0", "$(x)", "`x`", "a;b", "-x", ""])
@pytest.mark.parametrize(
    "name", ["job_name", "partition", "time", "memory", "gres", "options", "srun_options"]
)
def test_hostile_settings_are_refused(name: str, value: str) -> None:
    given = (value,) if "options" in name else value
    with pytest.raises(UsageError, match=f"slurm.{name}"):
        plan_for("cuda", 2, slurm={name: given})


def test_options_of_srun_are_quoted_and_precede_others() -> None:
    mounts = "--container-mounts=/data:/data,$HOME:/home"
    plan = plan_for("cuda", 2, slurm={"srun_options": ("--mpi=none", mounts)})
    line = next(line for line in str(plan.text).splitlines() if line.startswith("  srun "))
    assert shlex.split(line)[1:4] == ["--mpi=none", mounts, "--export=ALL"]
    assert shlex.quote(mounts) in line
    assert not any("container" in d for d in directives(plan))


@settings(max_examples=25, deadline=None)
@given(ARGUMENTS)
@pytest.mark.process
def test_arguments_are_inert_in_the_script(arguments: list[str]) -> None:
    """bash runs the script; small programs replace Slurm's and print their arguments."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for program in ("srun", "scontrol", "python"):
            (folder / program).write_text(
                f'#!/bin/sh\nprintf "%s\\0" "$@" >{name}/{program}.asked\n'
            )
            (folder / program).chmod(0o755)
        plan = plan_for("cpu", 2, "evaluate", *arguments)
        assert plan.text is not None
        text = plan.text.replace(shlex.quote(sys.executable), f"{name}/python")
        done = subprocess.run(
            ["/bin/bash"],
            input=text.encode(),
            env={"PATH": f"{name}:/usr/bin:/bin", "SLURM_JOB_ID": "1"},
            cwd=name,
            capture_output=True,
            timeout=20,
        )
        assert done.returncode == 0, done.stderr
        asked = (folder / "srun.asked").read_bytes().decode().split("\0")[:-1]
        assert asked[asked.index("evaluate") + 1 :] == arguments
    assert len(directives(plan)) == 9


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("", 0))
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """A cluster of one node, this machine."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"needs {', '.join(absent)}")
    if os.geteuid() != 0:
        pytest.skip("slurmd must be started by root")
    folder = Path(tempfile.mkdtemp(prefix="ssdctl-slurm-"))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    controller_port, node_port = free_ports()
    conf = SLURM_CONF.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        controller_port=controller_port,
        node_port=node_port,
    )
    (folder / "slurm.conf").write_text(conf)
    files = {n: f"--{n}-file={folder}/munge.{n}" for n in ("key", "pid", "log", "seed")}
    with contextlib.ExitStack() as daemons, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PATH", path)

        def daemon(*argv: str) -> None:
            with (folder / f"{argv[0]}.out").open("wb") as out:
                process = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
            daemons.callback(process.wait, 20)
            daemons.callback(process.terminate)

        munge = ("munged", "--foreground", "--force", *files.values())
        daemon(*munge, f"--socket={folder}/munge.socket")
        wait_for(lambda: (folder / "munge.socket").exists())
        daemon("slurmctld", "-D")
        daemon("slurmd", "-D")
        try:
            wait_for(lambda: "idle" in asked("sinfo", "-h", "-o", "%T"))
        except AssertionError:
            words = [p.read_text()[-500:] for p in folder.glob("*.out")]
            pytest.skip(f"Slurm does not start here: {words}")
        try:
            yield
        finally:
            asked("scancel", "--user=root")
            wait_for(lambda: not asked("squeue", "-h"))
    shutil.rmtree(folder, ignore_errors=True)


def asked(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True).stdout.strip()


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]
    return []


@contextlib.contextmanager
def launch(run: Path, shapes: Path, *more: object) -> Iterator[subprocess.Popen[str]]:
    words = ["launch", "--cpus", 2, "--launcher", "slurm", "--cores-per-node", 2, *more]
    words += ["--data", shapes, "--out", run]
    options = [word for word in TINY_RUN.split() if word not in ("--device", "cpu")]
    argv = [sys.executable, "-m", "ssdctl", *map(str, words), *options]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, cwd=run.parent, **streams) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def finish_after_a_requeue(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Wait until the job is queued again, skip Slurm's two minutes, and wait for its end."""
    assert process.stderr is not None
    job = re.search(r"submitted (\d+);", process.stderr.readline())
    assert job is not None
    wait_for(lambda: "Restarts=1" in asked("scontrol", "show", "job", job[1]), 150)
    assert [r["signal"] for r in records(run, "event") if r["event"] == "stopped"] == ["SIGUSR1"]
    # The remains of the first run are removed by then; the second one must not start before.
    wait_for(lambda: asked("sinfo", "-h", "-o", "%T") == "idle")
    time.sleep(3)  # slurmd removes the first run's script a little later, by the job's number
    update = ["scontrol", "update", f"jobid={job[1]}", "StartTime=now", "TimeLimit=60"]
    # Each update triggers the scheduler; otherwise it runs once a minute.
    show = ["scontrol", "show", "job", job[1]]
    wait_for(lambda: asked(*update) or "JobState=PENDING" not in asked(*show))
    out, words = process.communicate(timeout=200)
    assert process.returncode == 0, out + words
    assert [r["step"] for r in records(run, "train")] == list(range(1, steps + 1))
    assert "resuming from" in out
    assert "rank 1, process" in (run / "logs" / "rank-1.log").read_text()
    assert not list(run.parent.glob(".ssdctl-*"))


@pytest.mark.parametrize(
    ("time", "is_enough"),
    [
        ("6", False),
        ("7", True),
        ("5:59", False),
        ("0:06:01", True),
        ("0-1", True),
        ("1-0:00:01", True),
    ],
)
def test_a_job_that_would_be_requeued_for_ever_is_refused(time: str, is_enough: bool) -> None:
    """Its ranks would be stopped 300 s before the end, before they had started."""
    if is_enough:
        text = plan_for("cuda", 8, slurm={"time": time}).text
        assert f"#SBATCH --time={time}\n" in str(text)
        return
    with pytest.raises(UsageError, match="nothing would be trained"):
        plan_for("cuda", 8, slurm={"time": time})
    assert plan_for("cuda", 8, slurm={"time": time, "requeue": False}).text


def test_assumed_cores_cause_a_warning() -> None:
    assert "--cores-per-node" in plan_for("cuda", 8).warnings[0]
    assert plan_for("cuda", 8, cores_per_node=64).warnings == ()


@pytest.mark.slow(in_ci=True)
@pytest.mark.usefixtures("slurm")
def test_a_job_is_signalled_requeued_and_resumes(shapes: Path, tmp_path: Path) -> None:
    """The signal that Slurm sends before the time limit, here sent by the test."""
    run = tmp_path / "run"
    with launch(run, shapes, "--steps", 6, "--wait") as process:
        wait_for(lambda: records(run, "train"), 120)
        asked("scancel", "--signal=USR1", "--name=ssdctl")
        finish_after_a_requeue(process, run, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_the_time_limit_itself(shapes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["--set", "slurm.time=1", "--set", "slurm.signal_before=20", "--steps", 40]
    with launch(run, shapes, *more, "--wait") as process:
        finish_after_a_requeue(process, run, 40)


PROBE = """
import os, signal, sys, time
from pathlib import Path
from ssdctl.launch.exit_codes import recorded_exit
with recorded_exit():
    rank = os.environ["SLURM_PROCID"]
    lives = Path("lives" + rank)
    lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
    if rank == "1" and len(lives.read_text()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(lives.read_text()) == 1:
        while not Path("lives1").exists():  # the other one may start later
            time.sleep(0.1)
        time.sleep(1)
        sys.exit(8)
"""


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(("restarts", "code"), [(0, 8), (1, 0)])
def test_a_dead_task_ends_the_job_and_is_named(
    restarts: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    plan = plan_for("cpu", 2, "evaluate", restarts=restarts)
    assert plan.text is not None
    plan = dataclasses.replace(plan, text=plan.text.replace("-m ssdctl evaluate", "-m probe"))
    output: list[str] = []
    assert follow(submit(plan), plan, output.append) == code
    assert "task 1: Killed" in "".join(output)
    assert ("starting again" in "".join(output)) == (restarts == 1)


@pytest.mark.usefixtures("slurm")
def test_the_shell_of_a_batch_script_is_no_rank(tmp_path: Path) -> None:
    """Slurm calls it process 0 of all tasks; it would wait for the others for ever."""
    code = "from ssdctl.distributed.ranks import find_ranks; print(*find_ranks())"
    python = f"{sys.executable} -c {shlex.quote(code)}"
    script = f"#!/bin/bash\n{python}\nsrun --label {python}\n"
    argv = ["sbatch", "--wait", "-n", "2", "-o", "out"]
    subprocess.run(argv, input=script, text=True, check=True, capture_output=True, timeout=60)
    single, *ranks = (tmp_path / "out").read_text().splitlines()
    assert single == "0 1 0"
    assert sorted(ranks) == ["0: 0 2 0", "1: 1 2 1"]


def test_absent_slurm_is_a_usage_error(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = cli("launch", "--gpus", 8, "--launcher", "slurm")
    assert result.code == 2
    assert "sbatch is not on PATH" in result.err


@pytest.mark.usefixtures("slurm")
def test_a_job_that_slurm_refuses(cli: Callable[..., Any]) -> None:
    result = cli("launch", "--cpus", 2, "--launcher", "slurm", "--set", "slurm.partition=nowhere")
    assert result.code == 2
    assert "invalid partition" in result.err
