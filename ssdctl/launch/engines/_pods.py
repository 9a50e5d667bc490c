"""Cancel a Kubernetes job, or follow it by the answers of `kubectl get -o json`."""

from __future__ import annotations

import logging
import subprocess
import time
from typing import Any

import msgspec

from ssdctl.distributed.rank_process import PASSED_ON
from ssdctl.errors import DistributedError, ExitCode
from ssdctl.launch.base import POLL_S, Write, query
from ssdctl.launch.job import Job

log = logging.getLogger(__name__)
Json = dict[str, Any]  # an object of Kubernetes
INSTALLATIONS = 4  # attempts to install a worker: about two minutes with the waits
POD_0 = "batch.kubernetes.io/job-completion-index=0"


def cancel(job_id: str, job: Job) -> str:
    service = [f"service/{job_id.rpartition('/')[2]}"] if _is_indexed(job) else []
    return " ".join(["kubectl", "delete", *service, job_id, *_namespace(job)])


def follow(job_id: str, job: Job, write: Write) -> int:
    """Write the output of the first rank until the job ends; return the job's exit code.

    Raises:
        DistributedError: kubectl no longer answers; or a worker cannot be installed, for which
            the operator would wait without end.
    """
    return _Follower(job_id, job, write).follow()


def _is_indexed(job: Job) -> bool:
    return job.manifest is not None and "items" in job.manifest


def _namespace(job: Job) -> list[str]:
    manifest = job.manifest or {"metadata": {}}
    metadata = (manifest["items"][-1] if _is_indexed(job) else manifest)["metadata"]
    return ["-n", metadata["namespace"]] if "namespace" in metadata else []


class _Follower:
    """Copies the output of a job's first rank; reports each state of a pod once."""

    def __init__(self, job_id: str, job: Job, write: Write) -> None:
        self.job_id, self.write = job_id, write  # job_id: kind and name, as kubectl prints them
        self.cancel, self.namespace = cancel(job_id, job), _namespace(job)
        name = job_id.rpartition("/")[2]
        # Labels of the pod whose output is followed, and of the pods that it waits for.
        self.first, self.workers = f"job-name={name}", ""
        if job_id.startswith("mpijob"):
            self.first = f"job-name={name}-launcher"
            role = "training.kubeflow.org/job-role=worker"
            self.workers = f"training.kubeflow.org/job-name={name},{role}"
        elif _is_indexed(job):
            self.workers, self.first = self.first, f"{self.first},{POD_0}"
        self.followed: set[str] = set()
        self.reported: dict[str, str] = {}

    def follow(self) -> int:
        while True:
            for pod in self._pods(self.workers) if self.workers else []:
                container, code = self._report(pod)
                starts = container.get("restartCount", 0) + 1
                if code and starts >= INSTALLATIONS:
                    raise DistributedError(
                        f"{pod['metadata']['name']}: its container {container['name']} failed "
                        f"{starts} times, with exit code {code}",
                        hint=f"the job still holds its nodes: {self.cancel} ends it",
                    )
            for pod in self._pods(self.first):
                self._report(pod)
                name, phase = pod["metadata"]["name"], _status(pod).get("phase")
                has_begun = phase in ("Running", "Succeeded", "Failed")
                if has_begun and name not in self.followed and name not in self.reported:
                    self.followed.add(name)
                    self._copy_log("--follow", name)
            conditions = _status(self._get(self.job_id)).get("conditions") or []
            ends = {c["type"] for c in conditions if c["status"] == "True"}
            if ends & {"Succeeded", "Complete"}:
                return 0
            if "Failed" in ends:
                # Query again: the logs were followed after the earlier query.
                return _exit_code(self._pods(self.first))
            time.sleep(POLL_S)

    def _pods(self, label: str) -> list[Json]:
        pods = self._get("pods", "-l", label).get("items") or []
        return sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))

    def _get(self, what: str, *words: str) -> Json:
        answer = query("kubectl", "get", what, *self.namespace, *words, "-o", "json")
        try:
            return msgspec.json.decode(answer, type=Json)
        except (msgspec.DecodeError, RecursionError) as error:
            start = answer[:200].strip() or "nothing"
            raise DistributedError(
                f"kubectl printed something else than {what} in JSON ({error}): {start}",
                hint="run `kubectl get pods -o json`: only JSON must be on its standard output. "
                "The job continues to run",
            ) from None

    def _report(self, pod: Json) -> tuple[Json, int]:
        """Log a pod's new state; return its failed init container and exit code, else {} and 0."""
        name, (container, code) = pod["metadata"]["name"], _installation_failure(pod)
        state = f"{container['name']} failed with exit code {code}" if code else _wait(_status(pod))
        if self.reported.get(name, "") != state:
            self.reported[name] = state
            if state:
                log.info("%s: %s", name, state)
            if code:
                self._copy_log(name, "-c", container["name"], "--tail=20")
        if not state:
            self.reported.pop(name, None)
        return container, code

    def _copy_log(self, *words: str) -> None:
        argv, pipe = ["kubectl", "logs", *self.namespace, *words], subprocess.PIPE
        with subprocess.Popen(argv, stdout=pipe, encoding="utf-8", errors="replace") as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.write(line)


def _status(item: Json) -> Json:
    return item.get("status") or {}


def _end(container: Json, state: str = "state") -> int | None:
    """Return the exit code of a container; of its previous start if `state` is lastState."""
    end = container.get(state, {}).get("terminated")
    return None if end is None else end["exitCode"]


def _waiting(container: Json) -> Json:
    return container.get("state", {}).get("waiting") or {}


def _installation_failure(pod: Json) -> tuple[Json, int]:
    """Return the failed init container that is not running again, and its exit code; else 0."""
    for container in _status(pod).get("initContainerStatuses") or []:
        is_between_starts = bool(_waiting(container))
        code = _end(container) or (is_between_starts and _end(container, "lastState"))
        if code:
            return container, code
    return {}, 0


def _wait(status: Json) -> str:
    """Return why a pod does not run, such as no free node; empty if it runs."""
    if status.get("phase") in ("Succeeded", "Failed"):
        return ""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"waits: {_reason(condition)}"
    # Init containers first: the other containers wait for them.
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or []:
            if _waiting(container).get("reason") not in (None, "PodInitializing"):
                return f"waits: {container['name']}: {_reason(_waiting(container))}"
    return ""


def _reason(state: Json) -> str:
    words = filter(None, (state.get("reason"), state.get("message")))
    return " ".join(": ".join(words).split())


def _exit_code(pods: list[Json]) -> int:
    for pod in reversed(pods):
        if _installation_failure(pod)[1]:
            break
        for container in _status(pod).get("containerStatuses") or []:
            if (code := _end(container)) is not None:
                return code if code in PASSED_ON else ExitCode.DISTRIBUTED
    return ExitCode.DISTRIBUTED
