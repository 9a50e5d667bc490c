"""Read the answers of `kubectl get -o json`: the state of pods, and the end of a job."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from ssdctl.errors import DistributedError, ExitCode
from ssdctl.launch.exit_codes import PASSED_ON

Answer = TypeVar("Answer")


class Reason(Struct):
    """A state or condition in words."""

    reason: str | None = None
    message: str | None = None


class Condition(Reason):
    """Something that is true or false of a pod or a job."""

    type: str = ""
    status: str = ""


class Terminated(Struct, rename="camel"):
    """The end of a container."""

    exit_code: int = 0


class ContainerState(Struct):
    """The state of a container; without any of these it runs."""

    terminated: Terminated | None = None
    waiting: Reason | None = None


class ContainerStatus(Struct, rename="camel"):
    """One container of a pod, and its state before the last start."""

    name: str = ""
    state: ContainerState = field(default_factory=ContainerState)
    last_state: ContainerState = field(default_factory=ContainerState)
    restart_count: int = 0


class PodStatus(Struct, rename="camel"):
    """The state of a pod and its containers."""

    phase: str = "Pending"
    conditions: list[Condition] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    container_statuses: list[ContainerStatus] | None = None


class PodMetadata(Struct, rename="camel"):
    """The name of a pod."""

    name: str
    creation_timestamp: str = ""


class Pod(Struct):
    """A pod."""

    metadata: PodMetadata
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def name(self) -> str:
        return self.metadata.name


class PodList(Struct):
    """The answer of `kubectl get pods -o json`."""

    items: list[Pod]


class JobStatus(Struct):
    """The conditions of a job."""

    conditions: list[Condition] | None = None


class KubernetesJob(Struct):
    """The answer of `kubectl get JOB -o json`."""

    status: JobStatus = field(default_factory=JobStatus)

    def ends(self) -> set[str]:
        """Return the types of the conditions that are true, such as `Succeeded`."""
        return {c.type for c in self.status.conditions or [] if c.status == "True"}


class Failure(NamedTuple):
    """A failed init container."""

    container: str
    code: int
    starts: int  # number of starts so far


def parse(answer: str, kind: type[Answer]) -> Answer:
    """Return an answer of kubectl as `kind`.

    Raises:
        DistributedError: It is not JSON of that form.
    """
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        start = answer[:200].strip() or "nothing"
        raise DistributedError(
            f"kubectl printed something else than a {kind.__name__} in JSON ({error}): {start}",
            hint="run `kubectl get pods -o json`: only JSON must be on its standard output. The "
            "job continues to run",
        ) from None


def installation_failure(pod: Pod) -> Failure | None:
    """Return the first failed init container that is not running again; None if there is none."""
    for container in pod.status.init_container_statuses or []:
        ends = [container.state.terminated]
        if container.state.waiting:  # between two starts
            ends.append(container.last_state.terminated)
        for end in filter(None, ends):
            if end.exit_code:
                return Failure(container.name, end.exit_code, container.restart_count + 1)
    return None


def waits_for(pod: Pod) -> str | None:
    """Return why a pod does not run, such as no free node or no image; None if it runs."""
    status = pod.status
    if status.phase in ("Succeeded", "Failed"):
        return None
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return _in_words(condition)
    # Init containers first: the other containers wait for them.
    for container in [*(status.init_container_statuses or []), *(status.container_statuses or [])]:
        waiting = container.state.waiting
        if waiting and waiting.reason not in (None, "PodInitializing"):
            return f"{container.name}: {_in_words(waiting)}"
    return None


def exit_code(pods: list[Pod]) -> int:
    """Return the exit code of the last pod that ended."""
    for pod in reversed(pods):
        if installation_failure(pod):
            return ExitCode.DISTRIBUTED
        for container in pod.status.container_statuses or []:
            end = container.state.terminated
            if end is not None:
                return end.exit_code if end.exit_code in PASSED_ON else ExitCode.DISTRIBUTED
    return ExitCode.DISTRIBUTED


def _in_words(state: Reason) -> str:
    """Return `REASON: MESSAGE` on one line."""
    parts = [text for text in (state.reason, state.message) if text]
    return " ".join(": ".join(parts).split())
