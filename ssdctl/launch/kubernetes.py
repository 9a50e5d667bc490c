"""Kubernetes: the settings of a job and its pods, what a job lacks, and kubectl.

_manifest.py builds the manifest, _pods.py cancels and follows the job.
"""

from __future__ import annotations

import dataclasses
import functools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ssdctl.config.fields import Section, setting
from ssdctl.errors import UsageError
from ssdctl.files import read_limited, unreadable
from ssdctl.launch import (
    LaunchPlan,
    LaunchRequest,
    Node,
    _pods,
    check_text,
    last_value,
    require_program,
    resume_setting,
    submit_text,
    to_yaml,
)
from ssdctl.launch._manifest import build, pairs, read_volumes
from ssdctl.runtime.packages import OLDEST_TORCH

SUBMIT = "kubectl create -f"  # submits a written file
ARGV = ("kubectl", "create", "-o", "name", "-f", "-")
RUNS_ELSEWHERE = True
TPU_LABELS = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")
PATCHED = ("metadata", "spec", "job")
MAX_PATCH_BYTES = 1 << 20
FILE = re.compile(r"/|\.(pth?|safetensors|whl)$")
NAMED = ("--init", "--backbone-weights", "kubernetes.install")  # a file, or a name of something
Words = tuple[str, ...]
_name = functools.partial(setting, metavar="NAME")
_pairs = functools.partial(setting, metavar="KEY=VALUE,...")
_amounts = functools.partial(setting, metavar="NAME=AMOUNT,...")


class Settings(Section, frozen=True):
    """The job and the pods of `launch --launcher kubernetes`."""

    kind: Annotated[
        Literal["auto", "Job", "MPIJob"],
        setting("Kind of job (auto: MPIJob for HPUs on several nodes, else Job)"),
    ] = "auto"
    labels: Annotated[Words, _pairs("Labels of job and pods (Kueue's queue)")] = ()
    annotations: Annotated[Words, _pairs("Annotations of job and pods")] = ()
    priority_class: Annotated[str | None, _name("Priority class of the pods")] = None
    patch: Annotated[
        str | None, setting("YAML file merged into pods (spec, metadata) and job", metavar="FILE")
    ] = None

    name: Annotated[str | None, _name("Job name [default: ssdctl-XXXXXX]")] = None
    namespace: Annotated[str | None, _name("Namespace [default: kubectl's]")] = None
    image: Annotated[str | None, setting("Container image of all pods", metavar="IMAGE")] = None
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], setting("When to pull the image")
    ] = "IfNotPresent"
    pull_secret: Annotated[str | None, _name("Secret for the image's registry")] = None
    service_account: Annotated[str | None, _name("Service account")] = None
    install: Annotated[
        str | None, setting("How pods get ssdctl: image, or pip source", metavar="image|SOURCE")
    ] = None
    python: Annotated[str, setting("Python interpreter of the image", metavar="PROGRAM")] = (
        "python3"
    )
    volumes: Annotated[
        Words, setting("Volumes to mount (node path or claim)", metavar="SOURCE:PATH[:ro],...")
    ] = ()
    resources: Annotated[
        Words, _amounts("Resources per pod, besides devices (cpu=95, memory=409Gi)")
    ] = ()
    launcher_resources: Annotated[Words, _amounts("Resources of the pod that runs mpirun")] = (
        "cpu=2",
        "memory=4Gi",
    )
    node_selector: Annotated[Words, _pairs("Labels of the nodes to run on")] = ()
    host_ipc: Annotated[bool, setting("Share the node's IPC namespace")] = False
    env: Annotated[
        Words, setting("Environment variables of all pods", metavar="NAME=VALUE,...")
    ] = ()


def inspect(request: LaunchRequest) -> LaunchRequest:
    """Add the content of `kubernetes.patch`."""
    path = request.table.patch
    return request if path is None else dataclasses.replace(request, patch=_patch(Path(path)))


def plan(request: LaunchRequest, node: Node) -> LaunchPlan:
    """Return the manifest, and its submission. What a job lacks is a warning in a dry run."""
    config = request.table
    for argument in (*config.env, config.install or ""):
        check_text(argument)
    resume = resume_setting(request, request.variables)
    if request.config.restarts and resume not in (None, "auto"):
        raise UsageError(
            f"--resume {resume} and --restarts exclude each other in pods, since a restart "
            "runs the same command",
            hint="leave one of them out",
        )
    missing, warnings = list(_missing(request)), list(_warnings(request))
    if missing and not request.is_dry_run:
        raise missing[0]
    if missing:
        filled = {"image": config.image or "IMAGE", "install": config.install or "image"}
        request = dataclasses.replace(request, table=msgspec.structs.replace(config, **filled))
    manifest = build(request)
    return LaunchPlan(
        ARGV,
        {},
        "kubernetes",
        request.count,
        request.config.nodes,
        text=to_yaml(manifest),
        manifest=manifest,
        warnings=(*(f"{error}; {error.hint}" for error in missing), *warnings),
    )


def _missing(request: LaunchRequest) -> Iterator[UsageError]:
    """Yield an error for each thing without which pods cannot run or keep their results."""
    config, command = request.table, request.command
    folders, writable = _mounted(config)
    if config.image is None:
        hint = "name the image of the pods, or give --cluster"
        yield UsageError("kubernetes.image is not set", hint=hint)
    if config.install is None:
        hint = "a wheel on one of kubernetes.volumes, a requirement, or `image` if it has one"
        text = "kubernetes.install is not set: ssdctl must be installed in the pods"
        yield UsageError(text, hint=hint)

    option = "--dest" if command[0] == "download" else "--out"
    output = request.run_folder if command[0] == "train" else last_value(command, option)
    is_printed = output is None and command[0] not in ("train", "download")  # as evaluate's
    path = posixpath.normpath(output or ".")
    if not is_printed and not _is_in(path, writable):
        example = f"{writable[0]}/{posixpath.basename(path)}" if writable else "/runs/first"
        more = "" if writable else " and kubernetes.volumes=NAME_OF_A_CLAIM:/runs"
        yield UsageError(
            f"{option} {output or '(its default)'} is not on a persistent volume and would be "
            "deleted with the pods",
            hint=f"for example {option} {example}{more}",
        )

    paths = dict(request.paths)
    if paths and config.install is not None:
        paths["kubernetes.install"] = config.install
    for option, path in paths.items():
        is_name = option in NAMED and ("://" in path or not FILE.search(path))
        # An image that has ssdctl may have the data too.
        is_in_image = config.install == "image" and option != "--mllog"
        needed = writable if option == "--mllog" else folders
        if not is_name and not is_in_image and not _is_in(path, needed):
            yield _not_mounted(option, path, needed)


def _not_mounted(option: str, path: str, folders: list[str]) -> UsageError:
    folder = path if option in ("--data", "--store") else posixpath.dirname(path)
    folder, equals = posixpath.normpath(folder), "=" if option.startswith("kubernetes.") else " "
    hints = []
    if path.startswith("/") and folder.strip("/"):
        hints.append(f"mount it by kubernetes.volumes=SOURCE:{folder}")
    if folders:
        hints.append(f"give its path in the pods: {option}{equals}{folders[0]}/...")
    kind = "writable volume" if option == "--mllog" else "volume"
    return UsageError(
        f"{option}{equals}{path}: the pods have no {kind} there",
        hint=", or ".join(hints) or "mount a volume: kubernetes.volumes=SOURCE:/work",
    )


def _mounted(config: Settings) -> tuple[list[str], list[str]]:
    """Return the folders at which volumes are mounted: all, and those that are writable."""
    mounts, _ = read_volumes(config.volumes)
    return [m["mountPath"] for m in mounts], [m["mountPath"] for m in mounts if "readOnly" not in m]


def _is_in(path: str, folders: list[str]) -> bool:
    return any(f"{posixpath.normpath(path)}/".startswith(f"{folder}/") for folder in folders)


def _warnings(request: LaunchRequest) -> Iterator[str]:
    """Yield what the cluster may need in addition to the manifest."""
    config = request.table
    torch = re.search(r"pytorch-installer-(\d+)\.(\d+)", config.image or "")
    if torch and (int(torch[1]), int(torch[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield (
            f"the image has torch {torch[1]}.{torch[2]}, and ssdctl needs {oldest} or newer: "
            "Intel Gaudi software 1.21 or newer"
        )
    is_bound = request.device == "hpu" and request.count > 1
    if is_bound and request.config.cores_per_node is None:
        yield "ranks are not bound to cores, whose number is unknown: give --cores-per-node"
    missing = [label for label in TPU_LABELS if label not in pairs("node_selector", config)]
    if request.device in ("tpu", "xla") and missing:
        named = " and ".join(missing)
        yield f"kubernetes.node_selector does not name {named}: GKE needs it to start TPU pods"
    data, (folders, writable) = request.paths.get("--data", ""), _mounted(config)
    is_read_only = _is_in(data, folders) and not _is_in(data, writable)
    if is_read_only and "--store" not in request.paths:
        yield (
            f"{data} is on a read-only volume, and every job would index it again: prepare it once "
            "on another volume (--store DIR)"
        )


def _patch(path: Path) -> dict[str, Any]:
    """Return the content of a patch: `metadata` and `spec` of the pods, `job`."""
    import yaml

    try:
        patch = yaml.safe_load(read_limited(path, MAX_PATCH_BYTES))
    except OSError as error:
        raise unreadable(f"kubernetes.patch {path}", error, UsageError) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"kubernetes.patch {path}: is not YAML: {error}") from None
    is_mapping = isinstance(patch, dict) and all(isinstance(n, dict) for n in patch.values())
    if not is_mapping or not set(patch) <= set(PATCHED):
        raise UsageError(
            f"kubernetes.patch {path}: has other keys than {', '.join(PATCHED)}",
            hint="spec and metadata are those of the pods, job is the spec of the job: "
            "spec: {hostNetwork: true}",
        )
    return dict(patch)


def require() -> None:
    hint = "install kubectl and log in to the cluster; --write FILE writes the manifest"
    require_program(ARGV[0], hint)


def submit(plan: LaunchPlan) -> str:
    return submit_text(plan, "kubectl get jobs")  # such as mpijob.kubeflow.org/ssdctl-3f2a1c


cancel, follow = _pods.cancel, _pods.follow
