"""Follow a Kubernetes job by the answers of `kubectl get -o json`, to its exit code."""

from __future__ import annotations

import logging
import subprocess
import time
from typing import Any

import msgspec

from ssdctl.distributed.rank_process import PASSED_ON
from ssdctl.errors import DistributedError, ExitCode
from ssdctl.launch._engine import POLL_S, Write, query

log = logging.getLogger(__name__)
Json = dict[str, Any]  # an object of Kubernetes, or a part of one
INSTALLATIONS = 4  # starts of a worker's installation, about two minutes with the waits between
POD_0 = "batch.kubernetes.io/job-completion-index=0"


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
            conditions = _status(self._get(self.job)).get("conditions") or []
            ends = {c["type"] for c in conditions if c["status"] == "True"}
            if ends & {"Succeeded", "Complete"}:
                return 0
            if "Failed" in ends:
                # Queried again: the earlier states are from before their logs were followed.
                return _exit_code(self._pods(self.first))
            time.sleep(POLL_S)

    def _pods(self, label: str) -> list[Json]:
        """Return the pods with a label, the oldest first."""
        pods = self._get("pods", "-l", label).get("items") or []
        return sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))

    def _get(self, what: str, *words: str) -> Json:
        answer = query("kubectl", "get", what, *self.space, *words, "-o", "json")
        try:
            return msgspec.json.decode(answer, type=Json)
        except (msgspec.DecodeError, RecursionError) as error:
            start = answer[:200].strip() or "nothing"
            raise DistributedError(
                f"kubectl printed something else than {what} in JSON ({error}): {start}",
                hint="run `kubectl get pods -o json`: only JSON must be on its standard output. "
                "The job continues to run",
            ) from None

    def _report(self, pod: Json) -> None:
        name, (container, code) = pod["metadata"]["name"], _installation_failure(pod)
        if code:
            state = f"{container['name']} failed with exit code {code}"
        elif (waits_for := _waits_for(_status(pod))) is not None:
            state = f"waits: {waits_for}"
        else:
            self.reported.pop(name, None)
            return
        if self.reported.get(name) == state:
            return
        self.reported[name] = state
        log.info("%s: %s", name, state)
        if code:
            self._copy_log(name, "-c", container["name"], "--tail=20")

    def _copy_log(self, *words: str) -> None:
        argv, pipe = ["kubectl", "logs", *self.space, *words], subprocess.PIPE
        with subprocess.Popen(argv, stdout=pipe, encoding="utf-8", errors="replace") as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.write(line)


def _status(item: Json) -> Json:
    return item.get("status") or {}


def _containers(status: Json, kind: str = "containerStatuses") -> list[Json]:
    return status.get(kind) or []


def _end(container: Json, state: str = "state") -> Json | None:
    """Return how a container ended, or `lastState` before its last start; None if it did not."""
    return container.get(state, {}).get("terminated")


def _installation_failure(pod: Json) -> tuple[Json, int]:
    """Return the first failed init container that is not running again, and its exit code or 0."""
    for container in _containers(_status(pod), "initContainerStatuses"):
        ends = [_end(container)]
        if container.get("state", {}).get("waiting"):  # between two starts
            ends.append(_end(container, "lastState"))
        for end in filter(None, ends):
            if end["exitCode"]:
                return container, end["exitCode"]
    return {}, 0


def _waits_for(status: Json) -> str | None:
    """Return why a pod does not run, such as no free node or no image; None if it runs."""
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _reason(condition)
    # Init containers first: the other containers wait for them.
    for container in [*_containers(status, "initContainerStatuses"), *_containers(status)]:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing"):
            return f"{container['name']}: {_reason(waiting)}"
    return None


def _reason(state: Json) -> str:
    words = filter(None, (state.get("reason"), state.get("message")))
    return " ".join(": ".join(words).split())


def _exit_code(pods: list[Json]) -> int:
    """Return the exit code of the last pod that ended."""
    for pod in reversed(pods):
        if _installation_failure(pod)[1]:
            return ExitCode.DISTRIBUTED
        for container in _containers(_status(pod)):
            if (end := _end(container)) is not None:
                code: int = end["exitCode"]
                return code if code in PASSED_ON else ExitCode.DISTRIBUTED
    return ExitCode.DISTRIBUTED
