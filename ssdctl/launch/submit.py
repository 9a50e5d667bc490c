"""Submit a plan to Slurm or Kubernetes; follow the job to its end.

    job = submit(plan)          # "4711", or "mpijob.kubeflow.org/ssdctl-3f2a1c"
    code = follow(job, plan, write=sys.stdout.write)

Following only reads: a Ctrl-C here does not affect the job.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ssdctl.errors import DistributedError, ExitCode, UsageError
from ssdctl.launch import pod_status
from ssdctl.launch.exit_codes import PASSED_ON
from ssdctl.launch.request import LaunchPlan

log = logging.getLogger(__name__)
Write = Callable[[str], object]
POLL_S = 2.0
UNREACHABLE_S = 120.0  # how long the engine may be unreachable
INSTALLATIONS = 4  # starts of a worker's installation, about two minutes with the waits between
REMEDIES = {
    "slurm": "run this on a login node of the cluster; --write FILE writes the script for there",
    "kubernetes": "install kubectl and log in to the cluster; --write FILE writes the manifest",
}
LIST = {"slurm": "squeue --me", "kubernetes": "kubectl get jobs"}
POD_0 = "batch.kubernetes.io/job-completion-index=0"
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
ENDED = re.compile(
    r"BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|LAUNCH_FAILED|NODE_FAIL|OUT_OF_MEMORY|"
    r"PREEMPTED|REVOKED|TIMEOUT"
)


def require_engine(plan: LaunchPlan) -> None:
    """Check that the engine's client is installed here.

    Raises:
        UsageError: The engine's client is absent.
    """
    if shutil.which(plan.argv[0]) is None:
        raise UsageError(f"{plan.argv[0]} is not on PATH", hint=REMEDIES[plan.launcher])


def submit(plan: LaunchPlan) -> str:
    """Submit the job; return its id.

    Raises:
        UsageError: The engine rejects it; its message is included.
        DistributedError: The engine accepts it, but does not print its id.
    """
    process = _run(plan.argv, plan.text)
    if process.returncode:
        raise UsageError(f"{plan.argv[0]} refused the job: {process.stderr.strip()}")
    # sbatch: ID;CLUSTER. kubectl: one line per object, the job last.
    job = process.stdout.strip().rpartition("\n")[2].partition(";")[0]
    if not JOB_ID.fullmatch(job):
        raise DistributedError(
            f"{plan.argv[0]} printed {job[:200]!r} instead of the id of the job",
            hint=f"the job may run: `{LIST[plan.launcher]}` lists the jobs",
        )
    return job


def _run(argv: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run an engine's client. Its output may have any bytes."""
    return subprocess.run(argv, input=text, capture_output=True, encoding="utf-8", errors="replace")


def end_command(job: str, plan: LaunchPlan) -> str:
    """Return the command that ends a job."""
    if plan.launcher == "slurm":
        return f"scancel {job}"
    service = f"service/{job.rpartition('/')[2]} " if _is_indexed(plan) else ""
    return f"kubectl delete {service}{job}{_space(plan)}"


def follow(job: str, plan: LaunchPlan, write: Write) -> int:
    """Write the output of the first rank until the job ends; return the job's exit code.

    Args:
        job: The id that `submit` returned.
        plan: The plan of the job.
        write: Called with the job's output.

    Raises:
        DistributedError: The engine no longer answers or no longer lists the job; or a pod
            that the others wait for cannot start.
    """
    if plan.launcher == "slurm":
        return _follow_slurm(job, write)
    return _follow_kubernetes(job, plan, write)


def _follow_slurm(job: str, write: Write) -> int:
    position = 0
    while True:
        fields = _slurm_fields(_query("scontrol", "show", "job", "--oneliner", job))
        position = _copy_new(Path(fields.get("StdOut", "")), position, write)
        state = fields.get("JobState", "")
        if ENDED.match(state):
            _copy_new(Path(fields.get("StdOut", "")), position, write)  # written in the meantime
            code = re.match(r"\d{1,3}(?=:)", fields.get("ExitCode", ""))
            return _slurm_exit(state, int(code[0]) if code else ExitCode.BUG)
        time.sleep(POLL_S)


def _slurm_exit(state: str, code: int) -> int:
    if state == "COMPLETED":
        return 0
    if state.startswith("CANCELLED"):
        return ExitCode.INTERRUPTED
    return code if state == "FAILED" and code in PASSED_ON else ExitCode.DISTRIBUTED


def _slurm_fields(line: str) -> dict[str, str]:
    """Parse the NAME=VALUE fields of `scontrol --oneliner`; values may contain blanks."""
    return {m[1]: m[2] for m in re.finditer(r"(?:^| )([\w:/]+)=(.*?)(?= [\w:/]+=|$)", line.strip())}


def _copy_new(path: Path, position: int, write: Write) -> int:
    """Write the content of a file after `position` bytes; return the new position."""
    # A NUL in the path is a ValueError.
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(position)
        if content := file.read():
            write(content.decode(errors="replace"))
            return position + len(content)
    return position


class _Pods:
    """The pods of a job; each state of a pod is reported once."""

    def __init__(self, job: str, plan: LaunchPlan, write: Write) -> None:
        self.write, self.end = write, end_command(job, plan)
        self.space = ["-n", n] if (n := _namespace(plan)) else []
        name = job.rpartition("/")[2]
        # The labels of the pod whose output is followed, and of those that it waits for.
        self.first = f"job-name={name}"
        self.workers: str | None = None
        if job.startswith("mpijob"):
            self.first = f"job-name={name}-launcher"
            role = "training.kubeflow.org/job-role=worker"
            self.workers = f"training.kubeflow.org/job-name={name},{role}"
        elif job.startswith("trainjob"):
            self.workers = f"jobset.sigs.k8s.io/jobset-name={name}"
            self.first = f"{self.workers},{POD_0}"
        elif _is_indexed(plan):
            self.first, self.workers = f"{self.first},{POD_0}", self.first
        self.followed: set[str] = set()
        self.reported: dict[str, str | None] = {}

    def labelled(self, label: str) -> list[pod_status.Pod]:
        """Return the pods with a label, the oldest first."""
        answer = _query("kubectl", "get", "pods", *self.space, "-l", label, "-o", "json")
        pods = pod_status.parse(answer, pod_status.PodList).items
        return sorted(pods, key=lambda pod: pod.metadata.creation_timestamp)

    def copy_logs(self) -> None:
        """Copy the logs of pods that run the command; report what others wait for.

        Raises:
            DistributedError: A worker cannot be installed; the operator would wait without end.
        """
        for pod in self.labelled(self.workers) if self.workers else []:
            self._report(pod)
            failure = pod_status.installation_failure(pod)
            if failure and failure.starts >= INSTALLATIONS:
                raise DistributedError(
                    f"{pod.name}: its container {failure.container} failed "
                    f"{failure.starts} times, with exit code {failure.code}",
                    hint=f"the job still holds its nodes: {self.end} ends it",
                )
        for pod in self.labelled(self.first):
            self._report(pod)
            name = pod.name
            has_begun = pod.status.phase in ("Running", "Succeeded", "Failed")
            if has_begun and name not in self.followed and name not in self.reported:
                self.followed.add(name)
                _copy_log(["kubectl", "logs", *self.space, "--follow", name], self.write)

    def _report(self, pod: pod_status.Pod) -> None:
        name = pod.name
        failure = pod_status.installation_failure(pod)
        if failure is not None:
            state = f"{failure.container} failed with exit code {failure.code}"
        elif (waits_for := pod_status.waits_for(pod)) is not None:
            state = f"waits: {waits_for}"
        else:
            self.reported.pop(name, None)
            return
        if self.reported.get(name) == state:
            return
        self.reported[name] = state
        log.info("%s: %s", name, state)
        if failure is not None:
            options = ["-c", failure.container, "--tail=20"]
            _copy_log(["kubectl", "logs", *self.space, name, *options], self.write)


def _follow_kubernetes(job: str, plan: LaunchPlan, write: Write) -> int:
    pods = _Pods(job, plan, write)
    while True:
        pods.copy_logs()
        answer = _query("kubectl", "get", *pods.space, job, "-o", "json")
        ends = pod_status.parse(answer, pod_status.KubernetesJob).ends()
        if ends & {"Succeeded", "Complete"}:
            return 0
        if "Failed" in ends:
            # Queried again: the earlier states are from before their logs were followed.
            return pod_status.exit_code(pods.labelled(pods.first))
        time.sleep(POLL_S)


def _copy_log(argv: list[str], write: Write) -> None:
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            write(line)


def _is_indexed(plan: LaunchPlan) -> bool:
    """Return whether the manifest is a list of a Service and an Indexed Job."""
    return plan.manifest is not None and "items" in plan.manifest


def _namespace(plan: LaunchPlan) -> str | None:
    if plan.manifest is None:
        return None
    job = plan.manifest["items"][-1] if _is_indexed(plan) else plan.manifest
    return job["metadata"].get("namespace")


def _space(plan: LaunchPlan) -> str:
    return f" -n {name}" if (name := _namespace(plan)) else ""


def _query(*argv: str) -> str:
    """Return the output of an engine's client; retry while a controller is unavailable."""
    end = time.monotonic() + UNREACHABLE_S
    while True:
        process = _run(argv)
        if process.returncode == 0:
            return process.stdout
        if "Invalid job id" in process.stderr or "NotFound" in process.stderr:
            raise DistributedError(f"{argv[0]} no longer lists the job: {process.stderr.strip()}")
        if time.monotonic() > end:
            raise DistributedError(f"{argv[0]} does not answer: {process.stderr.strip()}")
        time.sleep(POLL_S)
