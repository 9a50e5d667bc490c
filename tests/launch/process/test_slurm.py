"""Jobs on a Slurm of this test's own.

munged, slurmctld and slurmd (Debian: munge slurmctld slurmd slurm-client) run on this machine with
a key, ports and folders of their own; nothing of an installed cluster is touched.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from conftest import TINY_RUN
from helpers import records, wait_for
from launch.plans import plan_for

from ssdctl.config.sections import SlurmConfig
from ssdctl.distributed import free_port
from ssdctl.launch.engines.slurm import Slurm

COMMENT = "--comment=$(touch x) 'a\\b\" #c"  # sbatch reads quotes otherwise than a shell
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
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
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def asked(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def slurm_daemons() -> Iterator[None]:
    """A cluster of two nodes, both on this machine: a slurmd each, with a port of its own."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"needs {', '.join(absent)}")
    if os.geteuid() != 0:
        pytest.skip("slurmd must be started by root")
    folder = Path(tempfile.mkdtemp(prefix="ssdctl-slurm-"))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    nodes = (host, f"{host}-second")  # the ranks meet at the first one, by its name
    where = f"NodeHostname={host} NodeAddr=127.0.0.1"
    lines = [f"NodeName={node} {where} Port={free_port()} CPUs=2 State=UNKNOWN" for node in nodes]
    conf = {"folder": folder, "host": host, "controller_port": free_port()}
    text = SLURM_CONF.format(nodes="\n".join(lines), **conf)
    (folder / "slurm.conf").write_text(text)
    files = {n: f"--{n}-file={folder}/munge.{n}" for n in ("key", "pid", "log", "seed")}
    with contextlib.ExitStack() as daemons, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PATH", path)

        def daemon(*argv: str) -> None:
            with (folder / f"{argv[0]}-{argv[-1]}.out".replace("/", "_")).open("wb") as out:
                process = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
            daemons.callback(process.wait, 20)
            daemons.callback(process.terminate)

        munge = ("munged", "--foreground", "--force", *files.values())
        daemon(*munge, f"--socket={folder}/munge.socket")
        wait_for(lambda: (folder / "munge.socket").exists())
        daemon("slurmctld", "-D")
        for node in nodes:
            daemon("slurmd", "-D", "-N", node)
        try:
            wait_for(lambda: asked("sinfo", "-h", "-o", "%D %T") == f"{len(nodes)} idle")
        except AssertionError:
            words = [p.read_text()[-500:] for p in folder.glob("*.out")]
            pytest.skip(f"Slurm does not start here: {words}")
        try:
            yield
        finally:
            asked("scancel", "--user=root")
            wait_for(lambda: not asked("squeue", "-h"))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow(in_ci=True)
@pytest.mark.usefixtures("slurm_daemons")
def test_a_requeued_job_on_two_nodes_resumes(
    shapes: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that Slurm sends before the time limit, here sent by the test.

    The job continues from a checkpoint of another run, the requeued one from its own.
    """
    run, file = tmp_path / "run", tiny_run / "checkpoints/step-00000003.pt"
    words = ["launch", "--cpus", 2, "--launcher", "slurm", "--cores-per-node", 2, "--nodes", 2]
    words += ["--data", shapes, "--out", run, "--resume", file, "--resume-changed", "--wait"]
    options = [word for word in TINY_RUN.split() if word not in ("--device", "cpu")]
    argv = [sys.executable, "-m", "ssdctl", *map(str, words), *options, "--steps", "9"]
    (tmp_path / "selectors.py").write_text("not Python")
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")  # the config's requeue counts

    def trains() -> bool:
        return (run / "metrics.jsonl").exists() and len(records(run, "train")) > 1

    with subprocess.Popen(argv, text=True, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        try:
            wait_for(trains)
            asked("scancel", "--signal=USR1", "--name=ssdctl")
            submitted = next(line for line in process.stderr if "submitted" in line)
            start_the_requeued_job(submitted, run)
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, out + err
    assert [r["step"] for r in records(run, "train")] == list(range(2, 10))
    assert "resuming from" in out
    assert "rank 1, process" in (run / "logs" / "rank-1.log").read_text()
    assert not list(tmp_path.glob(".ssdctl-*"))


def start_the_requeued_job(line: str, run: Path) -> None:
    """Wait until the job is queued again, and skip Slurm's two minutes."""
    job = re.search(r"submitted (\d+);", line)[1]
    show = ["scontrol", "show", "job", job]
    wait_for(lambda: "Restarts=1" in asked(*show), timeout_s=150)
    assert [r["signal"] for r in records(run, "event") if r["event"] == "stopped"] == ["SIGUSR1"]
    # The remains of the first run are removed by then; the second one must not start before.
    wait_for(lambda: asked("sinfo", "-h", "-o", "%T") == "idle")
    time.sleep(3)  # slurmd removes the first run's script a little later, by the job's number
    update = ["scontrol", "update", f"jobid={job}", "StartTime=now", "TimeLimit=60"]
    # Each update triggers the scheduler; otherwise it runs once a minute.
    wait_for(lambda: asked(*update) or "JobState=PENDING" not in asked(*show))
    assert "NumNodes=2 " in asked(*show)


PROBE = """
import os, signal, sys, time
from pathlib import Path
from ssdctl.distributed.rank_process import recorded_exit
with recorded_exit():
    rank = os.environ["SLURM_PROCID"]
    Path("node" + rank).write_text(os.environ["SLURMD_NODENAME"])
    lives = Path("lives" + rank)
    lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
    if len(lives.read_text()) == 1:
        while not Path("lives" + "10"[int(rank)]).exists():  # the other one may start later
            time.sleep(0.1)
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        sys.exit(8)
"""


@pytest.mark.usefixtures("slurm_daemons")
@pytest.mark.parametrize(("restarts", "nodes", "code"), [(0, 1, 8), (1, 2, 0)])
def test_a_dead_task_ends_the_job_and_is_named(
    restarts: int, nodes: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    settings = {"restarts": restarts, "nodes": nodes, "cores_per_node": 2}
    plan = plan_for("cpu", 2, "evaluate", launcher="slurm", **settings)
    plan = dataclasses.replace(plan, text=str(plan.text).replace("-m ssdctl evaluate", "-m probe"))
    output: list[str] = []
    assert Slurm().follow(Slurm().submit(plan), plan, output.append) == code
    assert "task 1: Killed" in "".join(output)
    assert len({path.read_text() for path in tmp_path.glob("node?")}) == nodes
    assert ("starting again" in "".join(output)) == (restarts == 1)


@pytest.mark.usefixtures("slurm_daemons")
def test_a_canceled_job_leaves_no_folder(tmp_path: Path) -> None:
    settings = SlurmConfig(options=(COMMENT,))
    plan = plan_for("cpu", 1, "evaluate", launcher="slurm", settings=settings)
    sleeps = f"-c {shlex.quote('import time; time.sleep(60)')}"
    plan = dataclasses.replace(plan, text=str(plan.text).replace("-m ssdctl evaluate", sleeps))
    job = Slurm().submit(plan)
    wait_for(lambda: list(tmp_path.glob(".ssdctl-*")))
    assert COMMENT.partition("=")[2] in asked("scontrol", "show", "job", job)
    asked("scancel", job)
    wait_for(lambda: not list(tmp_path.glob(".ssdctl-*")))


@pytest.mark.usefixtures("slurm_daemons")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_mpirun_takes_the_slots_of_its_machine_in_an_allocation_of_one_task(tmp_path: Path) -> None:
    (tmp_path / "random.py").touch()  # is not imported
    words = f"salloc -n1 -c2 {sys.executable} -m ssdctl launch --cpus 2 --launcher mpirun -- doctor"
    done = subprocess.run(words.split(), cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout.count(b"Ready to train")) == (0, 2), done.stderr
