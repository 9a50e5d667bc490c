"""Build parts of a pod from the checked settings of the table `kubernetes`; write YAML."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.config.sections.launch import KubernetesConfig
from ssdctl.errors import UsageError
from ssdctl.files import read_limited, unreadable
from ssdctl.launch.request import LaunchRequest

LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
QUALIFIED = r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
FORMS = {
    "name": r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",  # pod names add a suffix, and have at most 63
    "namespace": LABEL,
    "image": r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
    "service_account": rf"{LABEL}(\.{LABEL})*",
    "pull_secret": rf"{LABEL}(\.{LABEL})*",
    "priority_class": rf"{LABEL}(\.{LABEL})*",
    "runtime": rf"{LABEL}(\.{LABEL})*",
    "labels": rf"({QUALIFIED})=([A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?)?",
    "annotations": rf"({QUALIFIED})=.*",
    "claim": rf"{LABEL}(\.{LABEL})*",
    "resources": rf"({QUALIFIED})=(\d+(\.\d+)?([numkMGTPE]|[KMGTPE]i)?)",
    "launcher_resources": rf"({QUALIFIED})=(\d+(\.\d+)?([numkMGTPE]|[KMGTPE]i)?)",
    "node_selector": rf"({QUALIFIED})=([A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?)?",
    "env": r"[A-Za-z_][A-Za-z0-9_]*=.*",
}
PATCHED = ("metadata", "spec", "job")
MAX_PATCH_BYTES = 1 << 20
# Text that every YAML reader parses as text.
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z0-9]")


def checked(name: str, value: str, *, key: str | None = None) -> str:
    """Return the value if Kubernetes accepts its form; raise UsageError otherwise.

    Args:
        name: Of the form.
        value: The value.
        key: The setting that has it, if it is not `name`.
    """
    if not re.fullmatch(FORMS[name], value, re.ASCII | re.DOTALL) or len(value) > 4000:
        raise UsageError(
            f"kubernetes.{key or name}: {value!r} is not a value that Kubernetes accepts there"
        )
    return value


def escape_k8s(text: str) -> str:
    """Escape text, because Kubernetes expands $(NAME) in commands and variables."""
    return text.replace("$", "$$")


def pairs(name: str, entries: tuple[str, ...]) -> dict[str, str]:
    """Return the `KEY=VALUE` entries of a setting as a dict."""
    values = {}
    for entry in entries:
        key, _, value = checked(name, entry).partition("=")
        values[key] = value
    return values


def environment(config: KubernetesConfig) -> dict[str, str]:
    """Return the variables of `kubernetes.env`."""
    return pairs("env", config.env)


def resources(request: LaunchRequest, *, has_devices: bool) -> dict[str, dict[str, str]]:
    """Return a container's resources; requests equal limits, as devices and huge pages require."""
    config = request.kubernetes
    if not has_devices:
        amounts = pairs("launcher_resources", config.launcher_resources)
    else:
        amounts = pairs("resources", config.resources)
        if device := DEVICE_TYPES[request.device].kubernetes_resource:
            amounts = {device: str(request.ranks_per_node), **amounts}
    return {"limits": amounts, "requests": dict(amounts)} if amounts else {}


def without_devices(resources: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return only CPU and memory of a container's resources, for its init container.

    Quotas and the Guaranteed class require both for every container.
    """
    kept = {
        part: {name: amount for name, amount in amounts.items() if name in ("cpu", "memory")}
        for part, amounts in resources.items()
    }
    return {part: amounts for part, amounts in kept.items() if amounts}


def request_little(resources: dict[str, dict[str, str]]) -> None:
    """Request a quarter of a core without changing the limit, in place.

    mpirun only waits for its ranks; reserved cores might not fit on the nodes of the workers.
    """
    cpu = resources.get("limits", {}).get("cpu", "")
    if re.fullmatch(r"\d+(\.\d+)?", cpu) and float(cpu) > 0.25:
        resources["requests"]["cpu"] = "250m"


def volumes(config: KubernetesConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the mounts and the volumes of `SOURCE:PATH[:ro]` entries.

    Raises:
        UsageError: An entry does not have this form.
    """
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
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
            claim = checked("claim", source, key="volumes")
            volume = {"persistentVolumeClaim": {"claimName": claim}}
        volumes.append({"name": name, **volume})
        mount: dict[str, Any] = {"name": name, "mountPath": path}
        mounts.append({**mount, "readOnly": True} if mode == "ro" else mount)
    return mounts, volumes


def to_yaml(document: dict[str, Any]) -> str:
    """Return a document as YAML for 1.1 and 1.2 readers; text that resembles a number is quoted."""
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


def read_patch(path: Path) -> dict[str, Any]:
    """Return the content of `kubernetes.patch`: `metadata` and `spec` of the pods, `job`.

    Raises:
        UsageError: It cannot be read, or has other keys.
    """
    import yaml

    try:
        patch = yaml.safe_load(read_limited(path, MAX_PATCH_BYTES))
    except OSError as error:
        raise unreadable(f"kubernetes.patch {path}", error, UsageError) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"kubernetes.patch {path}: is not YAML: {error}") from None
    parts = patch.values() if isinstance(patch, dict) else [None]
    if not all(isinstance(part, dict) for part in parts) or not set(patch) <= set(PATCHED):
        raise UsageError(
            f"kubernetes.patch {path}: has other keys than {', '.join(PATCHED)}",
            hint="spec and metadata are those of the pods, job is the spec of the job: "
            "spec: {hostNetwork: true}",
        )
    return dict(patch)


def merge(base: Any, patch: Any) -> Any:
    """Return a document with a patch: mappings are merged, lists extended (by `name`, if any)."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{k: merge(base.get(k), value) for k, value in patch.items()}}
    if not (isinstance(base, list) and isinstance(patch, list)):
        return patch
    merged = list(base)
    for entry in patch:
        name = entry.get("name") if isinstance(entry, dict) else None
        names = [e.get("name") if isinstance(e, dict) else None for e in merged]
        if name is not None and name in names:
            merged[names.index(name)] = merge(merged[names.index(name)], entry)
        else:
            merged.append(entry)
    return merged


def _fits_a_block(value: str) -> bool:
    """Return whether text can be written as a literal block: a program of plain lines."""
    lines = value.split("\n")
    is_plain = all(
        line.isascii() and line.isprintable() and line == line.rstrip() for line in lines
    )
    return len(lines) > 2 and bool(lines[0]) and lines[0] == lines[0].strip() and is_plain
