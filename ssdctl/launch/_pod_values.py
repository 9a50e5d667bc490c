"""Values of a pod: the checked settings of the table `kubernetes`, its volumes, and YAML."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ssdctl.errors import UsageError
from ssdctl.launch.base import LaunchRequest

LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
QUALIFIED = r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
DOTTED = rf"{LABEL}(\.{LABEL})*"
WORD = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
AMOUNT = r"\d+(\.\d+)?([numkMGTPE]|[KMGTPE]i)?"
FORMS = {
    "name": r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",  # pod names add a suffix, and have at most 63
    "namespace": LABEL,
    "image": r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
    **dict.fromkeys(("service_account", "pull_secret", "priority_class", "runtime"), DOTTED),
    "volumes": DOTTED,  # a claim
    **dict.fromkeys(("labels", "node_selector"), f"{QUALIFIED}={WORD}"),
    "annotations": f"{QUALIFIED}=.*",
    **dict.fromkeys(("resources", "launcher_resources"), f"{QUALIFIED}={AMOUNT}"),
    "env": r"[A-Za-z_][A-Za-z0-9_]*=.*",
}
# Text that every YAML reader parses as text.
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z0-9]")
FILE = re.compile(r"/|\.(pth?|safetensors|whl)$")
NAMED = ("--init", "--backbone-weights", "kubernetes.install")  # a file, or a name of something


def checked(name: str, value: str) -> str:
    """Return the value of a setting if Kubernetes accepts its form."""
    if not re.fullmatch(FORMS[name], value, re.ASCII | re.DOTALL) or len(value) > 4000:
        raise UsageError(
            f"kubernetes.{name}: {value!r} is not a value that Kubernetes accepts there"
        )
    return value


def escape_k8s(text: str) -> str:
    """Escape text, because Kubernetes expands $(NAME) in commands and variables."""
    return text.replace("$", "$$")


def pairs(name: str, entries: tuple[str, ...]) -> dict[str, str]:
    """Return the `KEY=VALUE` entries of a setting as a dict."""
    parts = [checked(name, entry).partition("=") for entry in entries]
    return {key: value for key, _, value in parts}


class Volumes(NamedTuple):
    """The volumes of a pod, as `SOURCE:PATH[:ro]` entries name them."""

    mounts: list[dict[str, Any]]
    volumes: list[dict[str, Any]]

    def has(self, path: str, *, writable: bool = False) -> bool:
        clean, places = posixpath.normpath(path), self.places(writable=writable)
        return any(clean == place or clean.startswith(f"{place}/") for place in places)

    def places(self, *, writable: bool = False) -> list[str]:
        """Return the paths at which they are mounted."""
        return [m["mountPath"] for m in self.mounts if not (writable and m.get("readOnly"))]


def read_volumes(entries: tuple[str, ...]) -> Volumes:
    read = Volumes([], [])
    for number, entry in enumerate(entries):
        source, _, rest = entry.partition(":")
        path, _, mode = rest.partition(":")
        is_clean = path.startswith("/") and path == posixpath.normpath(path) != "/"
        if not is_clean or ":" in mode or mode not in ("", "ro", "rw"):
            raise UsageError(
                f"kubernetes.volumes: {entry!r} is not of the form SOURCE:/PATH or SOURCE:/PATH:ro"
            )
        name = f"volume-{number}"
        if source.startswith("/"):
            volume: Any = {"hostPath": {"path": source, "type": "Directory"}}
        else:
            volume = {"persistentVolumeClaim": {"claimName": checked("volumes", source)}}
        read.volumes.append({"name": name, **volume})
        read_only = {"readOnly": True} if mode == "ro" else {}
        read.mounts.append({"name": name, "mountPath": path, **read_only})
    return read


def missing_volumes(request: LaunchRequest) -> list[UsageError]:
    """Return an error for each file of the job that is not on any volume of its pods."""
    volumes, is_image = read_volumes(request.table.volumes), request.table.install == "image"
    errors, paths = _lost_output(request, volumes), dict(request.paths)
    if paths and request.table.install is not None:
        paths["kubernetes.install"] = request.table.install
    for option, path in paths.items():
        is_name = option in NAMED and ("://" in path or not FILE.search(path))
        writable = option == "--mllog"
        if is_name or (is_image and not writable) or volumes.has(path, writable=writable):
            continue  # an image that has ssdctl may have the data too
        errors.append(_not_on_a_volume(option, path, volumes.places(writable=writable)))
    return errors


def _not_on_a_volume(option: str, path: str, places: Sequence[str]) -> UsageError:
    clean = posixpath.normpath(path)
    is_file = option not in ("--data", "--store")
    mount = (posixpath.dirname(clean) if is_file else clean) if clean.startswith("/") else ""
    equals = "=" if option.startswith("kubernetes.") else " "
    hints = [f"mount it by kubernetes.volumes=SOURCE:{mount}"] if mount.strip("/") else []
    if places:
        hints.append(f"give its path in the pods: {option}{equals}{places[0]}/...")
    kind = "writable volume" if option == "--mllog" else "volume"
    return UsageError(
        f"{option}{equals}{path}: the pods have no {kind} there",
        hint=", or ".join(hints) or "mount a volume: kubernetes.volumes=SOURCE:/work",
    )


def _lost_output(request: LaunchRequest, volumes: Volumes) -> list[UsageError]:
    """Return the error if the job does not write to a persistent volume, in a list."""
    option, folder = "--out", request.run_folder
    if request.command[0] == "download":
        option, folder = "--dest", last_value(request.command, "--dest")
    elif request.command[0] != "train":
        folder = last_value(request.command, "--out")
        if folder is None:  # commands such as evaluate print their result
            return []
    path, writable = posixpath.normpath(folder or "."), volumes.places(writable=True)
    if volumes.has(path, writable=True):
        return []
    example = f"{writable[0]}/{posixpath.basename(path)}" if writable else "/runs/first"
    more = "" if writable else " and kubernetes.volumes=NAME_OF_A_CLAIM:/runs"
    text = f"{option} {folder or '(its default)'} is not on a persistent volume and would be "
    hint = f"for example {option} {example}{more}"
    return [UsageError(f"{text}deleted with the pods", hint=hint)]


def last_value(command: tuple[str, ...], option: str) -> str | None:
    """Return the last value of an option in a command."""
    value = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


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
    written = yaml.dump(document, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=False)
    return f"# Written by ssdctl launch.\n{written}"


def _fits_a_block(value: str) -> bool:
    """Return whether text can be a literal block: a program of plain lines."""
    lines = value.split("\n")
    is_plain = value.isascii() and all(n.isprintable() and n == n.rstrip() for n in lines)
    return len(lines) > 2 and bool(lines[0]) and lines[0] == lines[0].strip() and is_plain


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
