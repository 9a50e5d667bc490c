"""Read the state of a pod from an item of `kubectl get pods -o json`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ssdctl.errors import ExitCode
from ssdctl.launch.exit_codes import PASSED_ON

Pod = dict[str, Any]


class Failure(NamedTuple):
    """A failed init container."""

    container: str
    code: int
    starts: int  # number of starts so far


def name_of(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def phase_of(pod: Pod) -> str:
    return str(pod["status"].get("phase", "Pending"))


def installation_failure(pod: Pod) -> Failure | None:
    """Return the first failed init container that is not running again; None if there is none."""
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
    """Return why a pod does not run, such as no free node or no image; None if it runs."""
    status = pod["status"]
    if phase_of(pod) in ("Succeeded", "Failed"):
        return None
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _reason(condition)
    # Init containers first: the other containers wait for them.
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind, []):
            waiting = container.get("state", {}).get("waiting")
            if waiting and waiting.get("reason") not in (None, "PodInitializing"):
                return f"{container['name']}: {_reason(waiting)}"
    return None


def exit_code(pods: list[Pod]) -> int:
    """Return the exit code of the last pod that ended."""
    for pod in reversed(pods):
        if installation_failure(pod):
            return ExitCode.DISTRIBUTED
        for container in pod["status"].get("containerStatuses", []):
            code = container.get("state", {}).get("terminated", {}).get("exitCode")
            if code is not None:
                return code if code in PASSED_ON else ExitCode.DISTRIBUTED
    return ExitCode.DISTRIBUTED


def _reason(state: dict[str, Any]) -> str:
    """Return `REASON: MESSAGE` on one line."""
    parts = [str(state[key]) for key in ("reason", "message") if state.get(key)]
    return " ".join(": ".join(parts).split())
