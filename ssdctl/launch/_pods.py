"""Follow a Kubernetes job by the answers of `kubectl get -o json`, to its exit code."""

from __future__ import annotations

import logging
import subprocess
import time
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from ssdctl.distributed.rank_process import PASSED_ON
from ssdctl.errors import DistributedError, ExitCode
from ssdctl.launch._engine import POLL_S, Write, query

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
INSTALLATIONS = 4  # starts of a worker's installation, about two minutes with the waits between
POD_0 = "batch.kubernetes.io/job-completion-index=0"


class Condition(Struct):
    """Something that is true or false of a pod or a job, or that a container waits for."""

    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None

    def __str__(self) -> str:
        return " ".join(": ".join(filter(None, (self.reason, self.message))).split())


class Terminated(Struct, rename="camel"):
    exit_code: int = 0


class ContainerState(Struct):
    """The state of a container; without any of these it runs."""

    terminated: Terminated | None = None
    waiting: Condition | None = None


class PodContainer(Struct, rename="camel"):
    """One container of a pod, and its state before the last start."""

    name: str = ""
    state: ContainerState = field(default_factory=ContainerState)
    last_state: ContainerState = field(default_factory=ContainerState)
    restart_count: int = 0


class PodStatus(Struct, rename="camel"):
    """The state of a pod and its containers, or of a job."""

    phase: str = "Pending"
    conditions: list[Condition] | None = None
    init_container_statuses: list[PodContainer] | None = None
    container_statuses: list[PodContainer] | None = None


class PodMetadata(Struct, rename="camel"):
    name: str
    creation_timestamp: str = ""


class Pod(Struct):
    metadata: PodMetadata
    status: PodStatus = field(default_factory=PodStatus)


class PodList(Struct):
    """The answer of `kubectl get pods -o json`."""

    items: list[Pod]


class KubernetesJob(Struct):
    """The answer of `kubectl get JOB -o json`."""

    status: PodStatus = field(default_factory=PodStatus)


class PodFollower:
    """Copies the output of a job's first rank; reports each state of a pod once."""

    def __init__(
        self, job: str, space: str | None, *, is_indexed: bool, cancel: str, write: Write
    ) -> None:
        self.job, self.cancel, self.write = job, cancel, write
        self.space = ["-n", space] if space else []
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
        elif is_indexed:
            self.first, self.workers = f"{self.first},{POD_0}", self.first
        self.followed: set[str] = set()
        self.reported: dict[str, str | None] = {}

    def follow(self) -> int:
        """Return the job's exit code at its end.

        Raises:
            DistributedError: kubectl no longer answers; or a worker cannot be installed, for which
                the operator would wait without end.
        """
        while True:
            for pod in self._pods(self.workers) if self.workers else []:
                self._report(pod)
                container, code = _installation_failure(pod)
                starts = container.restart_count + 1
                if code and starts >= INSTALLATIONS:
                    raise DistributedError(
                        f"{pod.metadata.name}: its container {container.name} failed "
                        f"{starts} times, with exit code {code}",
                        hint=f"the job still holds its nodes: {self.cancel} ends it",
                    )
            for pod in self._pods(self.first):
                self._report(pod)
                name = pod.metadata.name
                has_begun = pod.status.phase in ("Running", "Succeeded", "Failed")
                if has_begun and name not in self.followed and name not in self.reported:
                    self.followed.add(name)
                    self._copy_log("--follow", name)
            answer = query("kubectl", "get", *self.space, self.job, "-o", "json")
            conditions = _parse(answer, KubernetesJob).status.conditions or []
            ends = {c.type for c in conditions if c.status == "True"}
            if ends & {"Succeeded", "Complete"}:
                return 0
            if "Failed" in ends:
                # Queried again: the earlier states are from before their logs were followed.
                return _exit_code(self._pods(self.first))
            time.sleep(POLL_S)

    def _pods(self, label: str) -> list[Pod]:
        """Return the pods with a label, the oldest first."""
        answer = query("kubectl", "get", "pods", *self.space, "-l", label, "-o", "json")
        return sorted(_parse(answer, PodList).items, key=lambda p: p.metadata.creation_timestamp)

    def _report(self, pod: Pod) -> None:
        name, (container, code) = pod.metadata.name, _installation_failure(pod)
        if code:
            state = f"{container.name} failed with exit code {code}"
        elif (waits_for := _waits_for(pod)) is not None:
            state = f"waits: {waits_for}"
        else:
            self.reported.pop(name, None)
            return
        if self.reported.get(name) == state:
            return
        self.reported[name] = state
        log.info("%s: %s", name, state)
        if code:
            self._copy_log(name, "-c", container.name, "--tail=20")

    def _copy_log(self, *words: str) -> None:
        argv, pipe = ["kubectl", "logs", *self.space, *words], subprocess.PIPE
        with subprocess.Popen(argv, stdout=pipe, encoding="utf-8", errors="replace") as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.write(line)


def _parse(answer: str, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        start = answer[:200].strip() or "nothing"
        raise DistributedError(
            f"kubectl printed something else than a {kind.__name__} in JSON ({error}): {start}",
            hint="run `kubectl get pods -o json`: only JSON must be on its standard output. The "
            "job continues to run",
        ) from None


def _installation_failure(pod: Pod) -> tuple[PodContainer, int]:
    """Return the first failed init container that is not running again, and its exit code or 0."""
    for container in pod.status.init_container_statuses or []:
        ends = [container.state.terminated]
        if container.state.waiting:  # between two starts
            ends.append(container.last_state.terminated)
        for end in filter(None, ends):
            if end.exit_code:
                return container, end.exit_code
    return PodContainer(), 0


def _waits_for(pod: Pod) -> str | None:
    """Return why a pod does not run, such as no free node or no image; None if it runs."""
    status = pod.status
    if status.phase in ("Succeeded", "Failed"):
        return None
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return str(condition)
    # Init containers first: the other containers wait for them.
    for container in [*(status.init_container_statuses or []), *(status.container_statuses or [])]:
        waiting = container.state.waiting
        if waiting and waiting.reason not in (None, "PodInitializing"):
            return f"{container.name}: {waiting}"
    return None


def _exit_code(pods: list[Pod]) -> int:
    """Return the exit code of the last pod that ended."""
    for pod in reversed(pods):
        if _installation_failure(pod)[1]:
            return ExitCode.DISTRIBUTED
        for container in pod.status.container_statuses or []:
            end = container.state.terminated
            if end is not None:
                return end.exit_code if end.exit_code in PASSED_ON else ExitCode.DISTRIBUTED
    return ExitCode.DISTRIBUTED
