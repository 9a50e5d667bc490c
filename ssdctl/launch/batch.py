"""Hand a plan to Slurm or Kubernetes; follow the job to its end.

    job = submit(plan)          # "4711", or "mpijob.kubeflow.org/ssdctl-3f2a1c"
    code = follow(job, plan, write=sys.stdout.write)

Following only reads: a Ctrl-C here leaves the job alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssdctl.errors import DistributedError, UsageError
from ssdctl.launch.exits import DISTRIBUTED, INTERRUPTED, PASSED_ON
from ssdctl.launch.plan import Plan

Write = Callable[[str], object]
POLL_S = 2.0
PATIENCE_S = 120.0  # how long the engine may be out of reach
REMEDIES = {
    "slurm": "run this on a login node of the cluster; --write FILE writes the script for there",
    "kubernetes": "install kubectl and log in to the cluster; --write FILE writes the manifest",
}
ENDED = re.compile(
    r"BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|TIMEOUT"
)


def require_engine(plan: Plan) -> None:
    """See that this machine can hand the plan over.

    Raises:
        UsageError: The engine's client is absent.
    """
    if shutil.which(plan.argv[0]) is None:
        raise UsageError(f"{plan.argv[0]} is not on PATH", hint=REMEDIES[plan.launcher])


def submit(plan: Plan) -> str:
    """Hand the job over; return its id.

    Raises:
        UsageError: The engine does not take it; the message is the engine's.
    """
    done = subprocess.run(plan.argv, input=plan.text, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{plan.argv[0]} refused the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # sbatch: ID;CLUSTER


def how_to_end(job: str, plan: Plan) -> str:
    """The command that ends a job."""
    return f"scancel {job}" if plan.launcher == "slurm" else f"kubectl delete {job}{_space(plan)}"


def follow(job: str, plan: Plan, write: Write) -> int:
    """Pass on what the first rank says, to the job's end; return the job's exit code.

    Raises:
        DistributedError: The engine does not answer any more, or has forgotten the job.
    """
    if plan.launcher == "slurm":
        return _follow_slurm(job, write)
    return _follow_kubernetes(job, plan, write)


def _follow_slurm(job: str, write: Write) -> int:
    told = 0
    while True:
        facts = _slurm_facts(_ask("scontrol", "show", "job", "--oneliner", job))
        told = _pass_on(Path(facts.get("StdOut", "")), told, write)
        state = facts.get("JobState", "")
        if ENDED.match(state):
            _pass_on(Path(facts.get("StdOut", "")), told, write)  # what came meanwhile
            code = int(facts.get("ExitCode", "1:0").partition(":")[0])
            return _slurm_exit(state, code)
        time.sleep(POLL_S)


def _slurm_exit(state: str, code: int) -> int:
    if state == "COMPLETED":
        return 0
    if state.startswith("CANCELLED"):
        return INTERRUPTED
    return code if state == "FAILED" and code in PASSED_ON else DISTRIBUTED


def _slurm_facts(line: str) -> dict[str, str]:
    """`scontrol --oneliner`: NAME=VALUE, the values may hold blanks."""
    return {m[1]: m[2] for m in re.finditer(r"(?:^| )([\w:/]+)=(.*?)(?= [\w:/]+=|$)", line.strip())}


def _pass_on(path: Path, told: int, write: Write) -> int:
    """Write what a file holds past `told` bytes; return how far that was."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(told)
        if found := file.read():
            write(found.decode(errors="replace"))
            return told + len(found)
    return told


def _follow_kubernetes(job: str, plan: Plan, write: Write) -> int:
    space = ["-n", n] if (n := _namespace(plan)) else []
    name = job.rpartition("/")[2]
    owner = f"{name}-launcher" if job.startswith("mpijob") else name  # the batch Job of the pods
    followed: set[str] = set()
    while True:
        answer = _ask("kubectl", "get", "pods", *space, "-l", f"job-name={owner}", "-o", "json")
        pods = json.loads(answer)["items"]
        pods.sort(key=lambda pod: pod["metadata"].get("creationTimestamp", ""))
        for pod in pods:
            its_name = pod["metadata"]["name"]
            phase = pod["status"].get("phase", "Pending")
            if its_name not in followed and phase in ("Running", "Succeeded", "Failed"):
                followed.add(its_name)
                _pass_log_on(["kubectl", "logs", *space, "--follow", its_name], write)
        status = json.loads(_ask("kubectl", "get", *space, job, "-o", "json")).get("status", {})
        ends = {c["type"] for c in status.get("conditions", []) if c.get("status") == "True"}
        if ends & {"Succeeded", "Complete"}:
            return 0
        if "Failed" in ends:
            return _pods_exit(pods)
        time.sleep(POLL_S)


def _pass_log_on(argv: list[str], write: Write) -> None:
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            write(line)


def _pods_exit(pods: list[dict[str, Any]]) -> int:
    """The exit code of the last pod that ended."""
    for pod in reversed(pods):
        for container in pod["status"].get("containerStatuses", []):
            code = container.get("state", {}).get("terminated", {}).get("exitCode")
            if code is not None:
                return code if code in PASSED_ON else DISTRIBUTED
    return DISTRIBUTED


def _namespace(plan: Plan) -> str | None:
    return plan.manifest["metadata"].get("namespace") if plan.manifest else None


def _space(plan: Plan) -> str:
    return f" -n {name}" if (name := _namespace(plan)) else ""


def _ask(*argv: str) -> str:
    """What an engine's client answers; a controller may be away for a while."""
    end = time.monotonic() + PATIENCE_S
    while True:
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
        if "Invalid job id" in done.stderr or "NotFound" in done.stderr:
            raise DistributedError(f"{argv[0]} knows the job no more: {done.stderr.strip()}")
        if time.monotonic() > end:
            raise DistributedError(f"{argv[0]} does not answer: {done.stderr.strip()}")
        time.sleep(POLL_S)
