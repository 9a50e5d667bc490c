"""Parts of a pod from the settings of the table `kubernetes`, each checked; and YAML."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.config.sections.launch import KubernetesConfig
from ssdctl.errors import UsageError
from ssdctl.launch.request import LaunchRequest

LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
QUALIFIED = r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
FORMS = {
    "name": r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",  # the pods' names are longer, and end at 63
    "namespace": LABEL,
    "image": r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
    "service_account": rf"{LABEL}(\.{LABEL})*",
    "pull_secret": rf"{LABEL}(\.{LABEL})*",
    "claim": rf"{LABEL}(\.{LABEL})*",
    "resources": rf"({QUALIFIED})=(\d+(\.\d+)?([numkMGTPE]|[KMGTPE]i)?)",
    "launcher_resources": rf"({QUALIFIED})=(\d+(\.\d+)?([numkMGTPE]|[KMGTPE]i)?)",
    "node_selector": rf"({QUALIFIED})=([A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?)?",
    "env": r"[A-Za-z_][A-Za-z0-9_]*=.*",
}
# What no YAML reader takes for anything but text.
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z0-9]")


def checked(name: str, value: str) -> str:
    """The value, once it is found to be of the form that Kubernetes takes there."""
    if not re.fullmatch(FORMS[name], value, re.ASCII | re.DOTALL) or len(value) > 4000:
        raise UsageError(
            f"kubernetes.{name}: {value!r} is not a value that Kubernetes accepts there"
        )
    return value


def escape_k8s(text: str) -> str:
    """Text that Kubernetes hands on as it is: it replaces $(NAME) in commands and variables."""
    return text.replace("$", "$$")


def pairs(name: str, entries: tuple[str, ...]) -> dict[str, str]:
    """`KEY=VALUE` entries of a setting."""
    found = {}
    for entry in entries:
        key, _, value = checked(name, entry).partition("=")
        found[key] = value
    return found


def environment(config: KubernetesConfig) -> dict[str, str]:
    """The variables of `kubernetes.env`."""
    return pairs("env", config.env)


def resources(request: LaunchRequest, *, has_devices: bool) -> dict[str, dict[str, str]]:
    """What a container gets: its limits are its requests, as devices and huge pages demand."""
    config = request.kubernetes
    if not has_devices:
        amounts = pairs("launcher_resources", config.launcher_resources)
    else:
        amounts = pairs("resources", config.resources)
        if device := DEVICE_TYPES[request.device].kubernetes_resource:
            amounts = {device: str(request.ranks_per_node), **amounts}
    return {"limits": amounts, "requests": dict(amounts)} if amounts else {}


def without_devices(found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return only CPU and memory of a container's resources, for one that runs before it.

    Quotas and the Guaranteed class ask for both of every container.
    """
    kept = {
        part: {name: amount for name, amount in amounts.items() if name in ("cpu", "memory")}
        for part, amounts in found.items()
    }
    return {part: amounts for part, amounts in kept.items() if amounts}


def request_little(found: dict[str, dict[str, str]]) -> None:
    """Ask for a quarter of a core; the limit stays.

    mpirun waits for its ranks: cores kept for it may be more than workers leave on the nodes.
    """
    cpu = found.get("limits", {}).get("cpu", "")
    if re.fullmatch(r"\d+(\.\d+)?", cpu) and float(cpu) > 0.25:
        found["requests"]["cpu"] = "250m"


def volumes(config: KubernetesConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The mounts and the volumes of `SOURCE:PATH[:ro]` entries.

    Raises:
        UsageError: An entry is of another form.
    """
    mounts: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for number, entry in enumerate(config.volumes):
        source, _, rest = entry.partition(":")
        path, _, mode = rest.partition(":")
        is_clean = path.startswith("/") and path == posixpath.normpath(path) != "/"
        if not is_clean or ":" in mode or mode not in ("", "ro", "rw"):
            raise UsageError(
                f"kubernetes.volumes: {entry!r} is not of the form SOURCE:/PATH or SOURCE:/PATH:ro"
            )
        name = f"volume-{number}"
        if source.startswith("/"):
            volume: dict[str, Any] = {"hostPath": {"path": source, "type": "Directory"}}
        else:
            claim = checked("claim", source)
            volume = {"persistentVolumeClaim": {"claimName": claim}}
        found.append({"name": name, **volume})
        mount: dict[str, Any] = {"name": name, "mountPath": path}
        mounts.append({**mount, "readOnly": True} if mode == "ro" else mount)
    return mounts, found


def to_yaml(document: dict[str, Any]) -> str:
    """A document as YAML 1.1 and 1.2 both read it: what could be taken for a number is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = None if PLAIN.fullmatch(value) else "|" if _fits_a_block(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    written: str = yaml.dump(
        document, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=False
    )
    return "# Written by ssdctl launch.\n" + written


def _fits_a_block(value: str) -> bool:
    """Return whether text can be written as a literal block: a program of plain lines."""
    lines = value.split("\n")
    is_plain = all(
        line.isascii() and line.isprintable() and line == line.rstrip() for line in lines
    )
    return len(lines) > 2 and bool(lines[0]) and lines[0] == lines[0].strip() and is_plain
