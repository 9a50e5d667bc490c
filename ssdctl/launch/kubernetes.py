"""Build the manifest of a Kubernetes job: Job, MPIJob or TrainJob (Kubeflow's operators).

A Job of one pod runs `ssdctl launch` in it. On several nodes an Indexed Job runs it in each pod,
and torchrun's ranks meet at pod 0, which a headless Service names; a TrainJob does the same with
pods of Kubeflow Trainer.

An MPIJob has a launcher pod and one worker pod per node, all from one image and with the same
volumes at the same paths. The launcher runs `ssdctl launch --launcher mpirun` on the host file that
the operator writes, so a cluster runs the same command as one machine.
ssdctl is installed by an init container (pod_install.py), which keeps the image's torch. Workers
count as ready when their sshd answers, and the launcher waits for that: no `sleep`.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from pathlib import Path
from typing import Any

import msgspec

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.errors import UsageError
from ssdctl.launch import pod_spec
from ssdctl.launch.pod_spec import checked, escape_k8s
from ssdctl.launch.request import LaunchRequest
from ssdctl.launch.torchrun import RENDEZVOUS_PORT
from ssdctl.runtime.torch_compat import OLDEST

Manifest = dict[str, Any]
ARGV = ("kubectl", "create", "-o", "name", "-f", "-")
API_VERSIONS = {
    "Job": "batch/v1",
    "MPIJob": "kubeflow.org/v2beta1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
# What a TrainJob may change in the pods of its runtime, by its definition.
TRAIN_JOB_FIELDS = {
    *("affinity", "containers", "imagePullSecrets", "initContainers", "nodeSelector"),
    *("schedulingGates", "securityContext", "serviceAccountName", "tolerations", "volumes"),
    "terminationGracePeriodSeconds",
}
HOSTFILE = "/etc/mpi/hostfile"  # where the MPI operator mounts it
INSTALLED = "/opt/ssdctl"
# Host keys are generated if the image has none; sshd requires the folder. The mounted key is a link
# into a secret, which sshd's StrictModes refuses.
# sshd gives its sessions none of the container's variables: those of a part of a node's cards.
SSHD = (
    "ssh-keygen -A && mkdir -p /run/sshd && exec /usr/sbin/sshd -De -o StrictModes=no "
    '${HABANA_VISIBLE_MODULES:+-o "SetEnv=HABANA_VISIBLE_MODULES=$HABANA_VISIBLE_MODULES"}'
)
# A deleted worker signals its ranks to save, which stops those of all workers, and waits for them.
WAIT_FOR_RANKS = (
    "pkill -USR1 -f '[-]m ssdctl train'; "
    "while pgrep -f '[-]m ssdctl' >/dev/null 2>&1; do sleep 1; done"
)
SAVE_S = 300  # maximum duration of a stop before Kubernetes kills the pod
NO_SIDECAR = {"sidecar.istio.io/inject": "false"}  # it breaks MPI's connections
TPU_LABELS = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")
WRONG_INPUT = [2, 3, 4, 5, 6, 7]  # exit codes that a restart cannot change


def build(request: LaunchRequest) -> Manifest:
    """Return the manifest; of an Indexed Job, a list with its Service.

    Raises:
        UsageError: Something is missing, malformed, or would be lost with the pods. What is only
            missing is a warning in a dry run.
    """
    if missing := _missing(request):
        if not request.is_dry_run:
            raise missing[0]
        config = request.kubernetes
        filled = {"image": config.image or "IMAGE", "install": config.install or "image"}
        request = dataclasses.replace(request, kubernetes=msgspec.structs.replace(config, **filled))
    config, kind = request.kubernetes, _kind(request)
    _check_kind(request, kind)
    _check_resume(request)
    name = checked("name", config.name or request.job_name)
    metadata: Manifest = {
        "name": name,
        "labels": {"app": "ssdctl", **pod_spec.pairs("labels", config.labels)},
    }
    if annotations := pod_spec.pairs("annotations", config.annotations):
        metadata["annotations"] = annotations
    if config.namespace is not None:
        metadata["namespace"] = checked("namespace", config.namespace)
    spec = {"MPIJob": _mpi_job, "TrainJob": _train_job, "Job": _job}[kind](request)
    # The fields that a user may add to a Job are in the runPolicy of an MPIJob.
    place = spec["runPolicy"] if kind == "MPIJob" else spec
    place.update(pod_spec.merge(place, request.patch.get("job", {})))
    head = {"apiVersion": API_VERSIONS[kind], "kind": kind}
    job: Manifest = {**head, "metadata": metadata, "spec": spec}
    if kind != "Job" or request.config.nodes == 1:
        return job
    # The name of pod 0, where the ranks meet: NAME-0.NAME
    job["spec"]["template"]["spec"]["subdomain"] = name
    job["spec"]["template"]["spec"]["containers"][0]["command"] = _program(request, name)
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        },
    }
    return {"apiVersion": "v1", "kind": "List", "items": [service, job]}


def _missing(request: LaunchRequest) -> list[UsageError]:
    """Return an error for each setting without which pods cannot run or keep their results."""
    config, errors = request.kubernetes, []
    if config.image is None:
        hint = "name the image of the pods, or give --cluster"
        errors.append(UsageError("kubernetes.image is not set", hint=hint))
    if config.install is None:
        text = "kubernetes.install is not set: ssdctl must be installed in the pods"
        hint = "a wheel on one of kubernetes.volumes, a requirement, or `image` if it has one"
        errors.append(UsageError(text, hint=hint))
    if (lost := _lost_output(request)) is not None:
        errors.append(lost)
    return errors


def warnings(request: LaunchRequest) -> tuple[str, ...]:
    """Return what the cluster may need in addition to the manifest."""
    config, texts = request.kubernetes, []
    if request.is_dry_run:
        texts += [f"{error}; {error.hint}" for error in _missing(request)]
    image_torch = re.search(r"pytorch-installer-(\d+)\.(\d+)", config.image or "")
    if image_torch and (int(image_torch[1]), int(image_torch[2])) < OLDEST:
        texts.append(
            f"the image has torch {image_torch[1]}.{image_torch[2]}, and ssdctl needs "
            f"{OLDEST[0]}.{OLDEST[1]} or newer: Intel Gaudi software 1.21 or newer"
        )
    is_bound = request.device == "hpu" and request.count > 1
    if is_bound and request.config.cores_per_node is None:
        texts.append("ranks are not bound to cores, whose number is unknown: give --cores-per-node")
    labels = pod_spec.pairs("node_selector", config.node_selector)
    if request.device == "xla" and (missing := [n for n in TPU_LABELS if n not in labels]):
        setting = "kubernetes.node_selector"
        text = f"{setting} does not name {' and '.join(missing)}: GKE needs it to start TPU pods"
        texts.append(text)
    return tuple(texts)


def _kind(request: LaunchRequest) -> str:
    """Return the kind of job: only HPUs on several nodes need the MPI operator."""
    if request.kubernetes.kind != "auto":
        return request.kubernetes.kind
    return "MPIJob" if request.device == "hpu" and request.config.nodes > 1 else "Job"


def _check_kind(request: LaunchRequest, kind: str) -> None:
    config = request.kubernetes
    if request.device == "hpu" and request.config.nodes > 1 and kind != "MPIJob":
        raise UsageError(f"kubernetes.kind {kind}: HPUs on several nodes need an MPIJob")
    if request.device == "xla" and kind == "MPIJob":
        raise UsageError("kubernetes.kind MPIJob: torch_xla takes its chips from torchrun")
    if kind != "TrainJob":
        return
    if request.device == "hpu":
        raise UsageError("kubernetes.kind TrainJob: HPUs are started by mpirun, in a Job")
    patched = set(request.patch.get("spec", {})) - TRAIN_JOB_FIELDS
    if config.priority_class is not None or config.host_ipc or patched:
        names = [*sorted(patched), *(["priority_class"] if config.priority_class else [])]
        names += ["host_ipc"] if config.host_ipc else []
        raise UsageError(
            f"kubernetes.kind TrainJob: its runtime decides about {', '.join(names)}",
            hint=f"set it in the runtime {config.runtime}, or leave kubernetes.kind out",
        )


def is_mpi(request: LaunchRequest) -> bool:
    """Return whether mpirun on the operator's host file starts the ranks."""
    return _kind(request) == "MPIJob"


def _job(request: LaunchRequest) -> Manifest:
    # Commands such as a download need no more resources than a launcher.
    has_devices = request.device != "cpu" or request.command[0] == "train"
    template = _pod(request, "main", _program(request), has_devices=has_devices)
    template["spec"].setdefault("restartPolicy", "Never")
    restarts, nodes = request.config.restarts, request.config.nodes
    indexed: Manifest = {}
    if nodes > 1:
        indexed = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    if not restarts:
        return {**indexed, "backoffLimit": 0, "template": template}
    codes = {"containerName": "main", "operator": "In", "values": list(WRONG_INPUT)}
    drained = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "FailJob", "onExitCodes": codes},
        {"action": "Ignore", "onPodConditions": drained},  # not counted as a crash
    ]
    return {
        **indexed,
        "backoffLimit": restarts * nodes,  # all pods fail with one
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }


def _mpi_job(request: LaunchRequest) -> Manifest:
    config = request.config
    launcher = _pod(request, "launcher", _program(request), has_devices=False)
    for container in (*launcher["spec"]["containers"], *launcher["spec"].get("initContainers", ())):
        pod_spec.request_little(container["resources"])
    worker = _pod(request, "worker", ["/bin/sh", "-c", SSHD], has_devices=True)
    (container,) = worker["spec"]["containers"]
    container["ports"] = [{"containerPort": 22, "name": "ssh"}]
    container["readinessProbe"] = {"tcpSocket": {"port": 22}, "periodSeconds": 2}
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", WAIT_FOR_RANKS]}}}
    return {
        "slotsPerWorker": request.ranks_per_node,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": config.restarts},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
            # The launcher waits for all workers: a failed installation must be retried.
            "Worker": {
                "replicas": config.nodes,
                "restartPolicy": "OnFailure",
                "template": worker,
            },
        },
    }


def _train_job(request: LaunchRequest) -> Manifest:
    """Return the spec of a TrainJob (Kubeflow Trainer 2.2 or newer).

    Its operator starts a pod per node and tells torchrun its place by PET_* variables. It accepts
    no init container: the command installs ssdctl first.
    """
    config = request.kubernetes
    pod = _pod(request, "node", _program(request), has_devices=True)
    container, spec = pod["spec"]["containers"][0], pod["spec"]
    command = container["command"]
    if init := spec.pop("initContainers", None):
        command = [*init[0]["command"], *command]
    trainer: Manifest = {
        "image": container["image"],
        "command": command,
        "env": container["env"],
        "numNodes": request.config.nodes,
        "numProcPerNode": request.ranks_per_node,
    }
    if container["resources"]:
        trainer["resourcesPerNode"] = container["resources"]
    spec["containers"] = [{"name": "node", "volumeMounts": container["volumeMounts"]}]
    template = {"metadata": pod["metadata"], "spec": spec}
    node = {"name": "node", "template": {"spec": {"template": template}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    return {
        "runtimeRef": {"name": checked("runtime", config.runtime)},
        "trainer": trainer,
        "runtimePatches": [{"manager": "ssdctl", "trainingRuntimeSpec": patch}],
    }


def _program(request: LaunchRequest, service: str | None = None) -> list[str]:
    """Return the command of a pod; for several ranks it is wrapped in `ssdctl launch`.

    Args:
        request: The launch.
        service: The Service that names the pods of an Indexed Job.
    """
    python = request.kubernetes.python
    if request.kubernetes.install != "image":
        python = f"{INSTALLED}/bin/python"
    start = [python, "-m", "ssdctl"]
    if request.count == 1:
        return [*start, *map(escape_k8s, request.command)]
    config = request.config
    arguments = ["launch", f"{DEVICE_TYPES[request.device].count_option}={request.count}"]
    if is_mpi(request):
        arguments += ["--launcher=mpirun", f"--nodes={config.nodes}", f"--hostfile={HOSTFILE}"]
        arguments += [f"--rank-by={config.rank_by}"]
        # The launcher's number of cores is not that of the workers.
        bind_to = config.bind_to if config.cores_per_node else "none"
        arguments += [f"--bind-to={bind_to}"]
        names = [entry.partition("=")[0] for entry in request.kubernetes.env]
        if export_env := [*config.export_env, *names]:
            arguments += [f"--export-env={','.join(export_env)}"]
    elif request.device == "hpu":
        arguments += ["--launcher=mpirun", f"--rank-by={config.rank_by}"]
        arguments += [f"--bind-to={config.bind_to if config.cores_per_node else 'none'}"]
    else:
        arguments += ["--launcher=torchrun", *([f"--nodes={config.nodes}"] * (config.nodes > 1))]
        if service is not None:
            arguments += [f"--rdzv-endpoint={service}-0.{service}:{RENDEZVOUS_PORT}"]
    if config.cores_per_node:
        arguments += [f"--cores-per-node={config.cores_per_node}"]
    if config.devices_per_node:
        arguments += [f"--devices-per-node={config.devices_per_node}"]
    is_train = request.command[0] == "train"
    rest = request.command[1:] if is_train else ("--", *request.command)
    return [*start, *arguments, *map(escape_k8s, rest)]


def _pod(request: LaunchRequest, name: str, command: list[str], *, has_devices: bool) -> Manifest:
    """Return a pod template of one container; an init container installs ssdctl."""
    config = request.kubernetes
    mounts, volumes = pod_spec.volumes(config)
    image = {"image": checked("image", str(config.image)), "imagePullPolicy": config.pull_policy}
    environment = {**request.settings, **pod_spec.environment(config)}
    container: Manifest = {
        "name": name,
        **image,
        "command": command,
        "env": [{"name": key, "value": escape_k8s(value)} for key, value in environment.items()],
        "resources": pod_spec.resources(request, has_devices=has_devices),
    }
    spec: Manifest = {"terminationGracePeriodSeconds": SAVE_S}
    if has_devices and request.count > 1 and not config.host_ipc:
        # The default of container runtimes, 64 MB, is too small for the ranks' collectives.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        container["volumeMounts"] = [*mounts, {"name": "shm", "mountPath": "/dev/shm"}]
    else:
        container["volumeMounts"] = list(mounts)
    if config.install != "image":
        volumes.append({"name": "ssdctl", "emptyDir": {}})
        mount = {"name": "ssdctl", "mountPath": INSTALLED}
        container["volumeMounts"].append(mount)
        program = Path(__file__).with_name("pod_install.py").read_text(encoding="utf-8")
        arguments = [INSTALLED, str(config.install)]
        spec["initContainers"] = [
            {
                "name": "install-ssdctl",
                **image,
                "command": [config.python, "-c", *map(escape_k8s, [program, *arguments])],
                "env": container["env"],
                "resources": pod_spec.without_devices(container["resources"]),
                "volumeMounts": [*mounts, mount],
            }
        ]
    spec["containers"] = [container]
    spec["volumes"] = volumes
    if config.host_ipc and has_devices:
        spec["hostIPC"] = True
    if config.service_account is not None:
        spec["serviceAccountName"] = checked("service_account", config.service_account)
    if config.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": checked("pull_secret", config.pull_secret)}]
    if selector := pod_spec.pairs("node_selector", config.node_selector):
        spec["nodeSelector"] = selector
    if has_devices and (device := DEVICE_TYPES[request.device].kubernetes_resource):
        # Clusters reserve their device nodes with a taint of that name.
        spec["tolerations"] = [{"key": device, "operator": "Exists"}]
    if config.priority_class is not None:
        spec["priorityClassName"] = checked("priority_class", config.priority_class)
    labels = {"app": "ssdctl", **NO_SIDECAR, **pod_spec.pairs("labels", config.labels)}
    annotations = {**NO_SIDECAR, **pod_spec.pairs("annotations", config.annotations)}
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    patch = {part: request.patch[part] for part in ("metadata", "spec") if part in request.patch}
    patched: Manifest = pod_spec.merge(template, patch)
    return patched


def _lost_output(request: LaunchRequest) -> UsageError | None:
    """Return the error if the job does not write to a persistent volume."""
    option, folder = "--out", request.run_folder
    if request.command[0] == "download":
        option, folder = "--dest", _value(request.command, "--dest")
    elif request.command[0] != "train":
        folder = _value(request.command, "--out")
        if folder is None:  # commands such as evaluate print their result
            return None
    mounts, _ = pod_spec.volumes(request.kubernetes)
    writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
    path = posixpath.normpath(folder or ".")
    if any(path == place or path.startswith(f"{place}/") for place in writable):
        return None
    example = f"{writable[0]}/{posixpath.basename(path)}" if writable else "/runs/first"
    more = "" if writable else " and kubernetes.volumes=NAME_OF_A_CLAIM:/runs"
    return UsageError(
        f"{option} {folder or '(its default)'} is not on a persistent volume and would be "
        "deleted with the pods",
        hint=f"for example {option} {example}{more}",
    )


def _check_resume(request: LaunchRequest) -> None:
    """Check that a restarted pod, which runs the same command, resumes the run."""
    resume = _value(request.command, "--resume") or request.settings.get("SSDCTL_TRAIN__RESUME")
    if request.config.restarts and resume not in (None, "auto"):
        raise UsageError(
            f"--resume {resume} and --restarts exclude each other in pods, since a restart "
            "runs the same command",
            hint="leave one of them out",
        )


def _value(command: tuple[str, ...], option: str) -> str | None:
    """Return the last value of an option in a command."""
    value = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
