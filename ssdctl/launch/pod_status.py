"""What Kubernetes says of a pod (an item of `kubectl get pods -o json`): what it waits for, how its
containers ended."""

from __future__ import annotations

from typing import Any, NamedTuple

from ssdctl.errors import ExitCode
from ssdctl.launch.exit_codes import PASSED_ON

Pod = dict[str, Any]


class Failure(NamedTuple):
    """A container that runs before the pod's own and failed."""

    container: str
    code: int
    starts: int  # how often it was started so far


def name_of(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def phase_of(pod: Pod) -> str:
    return str(pod["status"].get("phase", "Pending"))


def installation_failure(pod: Pod) -> Failure | None:
    """The first container that failed before the pod's own, and does not run again now."""
    for status in pod["status"].get("initContainerStatuses", []):
        state = status.get("state", {})
        ends = [state.get("terminated")]
        if "waiting" in state:  # between two starts
            ends.append(status.get("lastState", {}).get("terminated"))
        for end in filter(None, ends):
            if code := end.get("exitCode", 0):
                return Failure(status["name"], code, status.get("restartCount", 0) + 1)
    return None


def waits_for(pod: Pod) -> str | None:
    """Why a pod does not run: no node for it, an image that cannot be had, and the like."""
    status = pod["status"]
    if phase_of(pod) in ("Succeeded", "Failed"):
        return None
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _words(condition)
    # What runs before the pod's own containers comes first: those only wait for it.
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind, []):
            waiting = container.get("state", {}).get("waiting")
            if waiting and waiting.get("reason") not in (None, "PodInitializing"):
                return f"{container['name']}: {_words(waiting)}"
    return None


def exit_code(pods: list[Pod]) -> int:
    """The exit code of the last pod that ended."""
    for pod in reversed(pods):
        if installation_failure(pod):
            return ExitCode.DISTRIBUTED
        for container in pod["status"].get("containerStatuses", []):
            code = container.get("state", {}).get("terminated", {}).get("exitCode")
            if code is not None:
                return code if code in PASSED_ON else ExitCode.DISTRIBUTED
    return ExitCode.DISTRIBUTED


def _words(found: dict[str, Any]) -> str:
    """`REASON: MESSAGE`, on one line."""
    said = [str(found[key]) for key in ("reason", "message") if found.get(key)]
    return " ".join(": ".join(said).split())
