"""Kubernetes: the settings of a job and its pods, what a job lacks, and kubectl.

_manifest.py builds the manifest, _pods.py follows the job.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ssdctl.config.fields import Section, setting
from ssdctl.errors import UsageError
from ssdctl.files import read_limited, unreadable
from ssdctl.launch._engine import Write, require_client, submit_text
from ssdctl.launch._manifest import build
from ssdctl.launch._pod_values import last_value, missing_volumes, pairs, read_volumes, to_yaml
from ssdctl.launch.base import LaunchPlan, LaunchRequest, Node, check_text
from ssdctl.runtime.torch_compat import OLDEST

SUBMIT = "kubectl create -f"  # submits a written file
ARGV = ("kubectl", "create", "-o", "name", "-f", "-")
RUNS_ELSEWHERE = True
TPU_LABELS = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")
PATCHED = ("metadata", "spec", "job")
MAX_PATCH_BYTES = 1 << 20
RESUME_VARIABLE = "SSDCTL_TRAIN__RESUME"


class Settings(Section, frozen=True):
    """The job and the pods of `launch --launcher kubernetes`."""

    kind: Annotated[
        Literal["auto", "Job", "MPIJob", "TrainJob"],
        setting("Kind of job (auto: MPIJob for HPUs on several nodes, else Job)"),
    ] = "auto"
    runtime: Annotated[
        str, setting("Training runtime that a TrainJob refers to", metavar="NAME")
    ] = "torch-distributed"
    labels: Annotated[
        tuple[str, ...], setting("Labels of job and pods (Kueue's queue)", metavar="KEY=VALUE,...")
    ] = ()
    annotations: Annotated[
        tuple[str, ...], setting("Annotations of job and pods", metavar="KEY=VALUE,...")
    ] = ()
    priority_class: Annotated[str | None, setting("Priority class of the pods", metavar="NAME")] = (
        None
    )
    patch: Annotated[
        str | None, setting("YAML file merged into pods (spec, metadata) and job", metavar="FILE")
    ] = None

    name: Annotated[str | None, setting("Job name [default: ssdctl-XXXXXX]", metavar="NAME")] = None
    namespace: Annotated[str | None, setting("Namespace [default: kubectl's]", metavar="NAME")] = (
        None
    )
    image: Annotated[str | None, setting("Container image of all pods", metavar="IMAGE")] = None
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], setting("When to pull the image")
    ] = "IfNotPresent"
    pull_secret: Annotated[
        str | None, setting("Secret for the image's registry", metavar="NAME")
    ] = None
    service_account: Annotated[str | None, setting("Service account", metavar="NAME")] = None
    install: Annotated[
        str | None, setting("How pods get ssdctl: image, or pip source", metavar="image|SOURCE")
    ] = None
    python: Annotated[str, setting("Python interpreter of the image", metavar="PROGRAM")] = (
        "python3"
    )
    volumes: Annotated[
        tuple[str, ...],
        setting("Volumes to mount (node path or claim)", metavar="SOURCE:PATH[:ro],..."),
    ] = ()
    resources: Annotated[
        tuple[str, ...],
        setting(
            "Resources per pod, besides devices (cpu=95, memory=409Gi)", metavar="NAME=AMOUNT,..."
        ),
    ] = ()
    launcher_resources: Annotated[
        tuple[str, ...], setting("Resources of the pod that runs mpirun", metavar="NAME=AMOUNT,...")
    ] = ("cpu=2", "memory=4Gi")
    node_selector: Annotated[
        tuple[str, ...], setting("Labels of the nodes to run on", metavar="KEY=VALUE,...")
    ] = ()
    host_ipc: Annotated[bool, setting("Share the node's IPC namespace")] = False
    env: Annotated[
        tuple[str, ...], setting("Environment variables of all pods", metavar="NAME=VALUE,...")
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
    resume = last_value(request.command, "--resume") or request.variables.get(RESUME_VARIABLE)
    if request.config.restarts and resume not in (None, "auto"):
        raise UsageError(
            f"--resume {resume} and --restarts exclude each other in pods, since a restart "
            "runs the same command",
            hint="leave one of them out",
        )
    missing, warnings = _missing(request), _warnings(request)
    if missing:
        if not request.is_dry_run:
            raise missing[0]
        warnings = (*(f"{error}; {error.hint}" for error in missing), *warnings)
        filled = {"image": config.image or "IMAGE", "install": config.install or "image"}
        request = dataclasses.replace(request, table=msgspec.structs.replace(config, **filled))
    manifest, ranks, nodes = build(request), request.count, request.config.nodes
    text = to_yaml(manifest)
    return LaunchPlan(
        ARGV, {}, "kubernetes", ranks, nodes, text=text, manifest=manifest, warnings=warnings
    )


def _missing(request: LaunchRequest) -> list[UsageError]:
    """Return an error for each setting without which pods cannot run or keep their results."""
    errors = missing_volumes(request)
    if request.table.install is None:
        text = "kubernetes.install is not set: ssdctl must be installed in the pods"
        hint = "a wheel on one of kubernetes.volumes, a requirement, or `image` if it has one"
        errors.insert(0, UsageError(text, hint=hint))
    if request.table.image is None:
        hint = "name the image of the pods, or give --cluster"
        errors.insert(0, UsageError("kubernetes.image is not set", hint=hint))
    return errors


def _warnings(request: LaunchRequest) -> tuple[str, ...]:
    """Return what the cluster may need in addition to the manifest."""
    config, texts = request.table, []
    torch = re.search(r"pytorch-installer-(\d+)\.(\d+)", config.image or "")
    if torch and (int(torch[1]), int(torch[2])) < OLDEST:
        texts.append(
            f"the image has torch {torch[1]}.{torch[2]}, and ssdctl needs {OLDEST[0]}.{OLDEST[1]} "
            "or newer: Intel Gaudi software 1.21 or newer"
        )
    is_bound = request.device == "hpu" and request.count > 1
    if is_bound and request.config.cores_per_node is None:
        texts.append("ranks are not bound to cores, whose number is unknown: give --cores-per-node")
    labels = pairs("node_selector", config.node_selector)
    if request.device == "xla" and (missing := [n for n in TPU_LABELS if n not in labels]):
        named = " and ".join(missing)
        texts.append(
            f"kubernetes.node_selector does not name {named}: GKE needs it to start TPU pods"
        )
    volumes, data = read_volumes(config.volumes), request.paths.get("--data")
    is_read_only = data is not None and volumes.has(data) and not volumes.has(data, writable=True)
    if is_read_only and "--store" not in request.paths:
        texts.append(
            f"{data} is on a read-only volume, and every job would index it again: prepare it once "
            "on another volume (--store DIR)"
        )
    return tuple(texts)


def _patch(path: Path) -> dict[str, Any]:
    """Return the content of a patch: `metadata` and `spec` of the pods, `job`."""
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


def require() -> None:
    require_client(
        ARGV[0], "install kubectl and log in to the cluster; --write FILE writes the manifest"
    )


def submit(plan: LaunchPlan) -> str:
    return submit_text(plan, "kubectl get jobs")  # such as mpijob.kubeflow.org/ssdctl-3f2a1c


def cancel(job: str, plan: LaunchPlan) -> str:
    service = f"service/{job.rpartition('/')[2]} " if _is_indexed(plan) else ""
    space = f" -n {name}" if (name := _namespace(plan)) else ""
    return f"kubectl delete {service}{job}{space}"


def follow(job: str, plan: LaunchPlan, write: Write) -> int:
    """Write the output of the first rank until the job ends; return the job's exit code."""
    from ssdctl.launch._pods import PodFollower

    is_indexed, end = _is_indexed(plan), cancel(job, plan)
    return PodFollower(
        job, _namespace(plan), is_indexed=is_indexed, cancel=end, write=write
    ).follow()


def _is_indexed(plan: LaunchPlan) -> bool:
    """Return whether the manifest is a list of a Service and an Indexed Job."""
    return plan.manifest is not None and "items" in plan.manifest


def _namespace(plan: LaunchPlan) -> str | None:
    if plan.manifest is None:
        return None
    job = plan.manifest["items"][-1] if _is_indexed(plan) else plan.manifest
    return job["metadata"].get("namespace")
