"""Build the manifest of a Kubernetes job: an MPIJob (Kubeflow's operator) or, for one pod, a Job.

An MPIJob has a launcher pod and one worker pod per node, all from one image and with the same
volumes at the same paths. The launcher runs `ssdctl launch --launcher mpirun` on the host file that
the operator writes, so a cluster runs the same command as one machine.
ssdctl is installed by an init container (pod_install.py), which keeps the image's torch. Workers
count as ready when their sshd answers, and the launcher waits for that: no `sleep`.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.errors import UsageError
from ssdctl.launch import pod_spec
from ssdctl.launch.pod_spec import checked, escape_k8s
from ssdctl.launch.request import LaunchRequest

Manifest = dict[str, Any]
ARGV = ("kubectl", "create", "-o", "name", "-f", "-")
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
    """Return the manifest.

    Raises:
        UsageError: Something is missing, malformed, or would be lost with the pods.
    """
    config = request.kubernetes
    if config.image is None:
        raise UsageError(
            "kubernetes.image is not set", hint="name the image of the pods, or give --cluster"
        )
    if config.install is None:
        raise UsageError(
            "kubernetes.install is not set: ssdctl must be installed in the pods",
            hint="a wheel on one of kubernetes.volumes, a requirement, or `image` if it has one",
        )
    if request.device == "xla" and request.config.nodes > 1:
        raise UsageError(
            "--tpus on several nodes: Kubernetes needs an Indexed Job with a headless Service for "
            "that, which ssdctl cannot write yet",
            hint="leave --nodes out, or run ssdctl launch --tpus on every host of the slice",
        )
    _check_written(request)
    _check_resume(request)
    name = checked("name", config.name or request.job_name)
    metadata: Manifest = {"name": name, "labels": {"app": "ssdctl"}}
    if config.namespace is not None:
        metadata["namespace"] = checked("namespace", config.namespace)
    if is_mpi(request):
        return {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": metadata,
            "spec": _mpi_job(request),
        }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job(request)}


def warnings(request: LaunchRequest) -> tuple[str, ...]:
    """Return what the cluster may need in addition to the manifest."""
    if is_mpi(request) and request.config.cores_per_node is None:
        return ("ranks are not bound to cores, whose number is unknown: give --cores-per-node N",)
    labels = pod_spec.pairs("node_selector", request.kubernetes.node_selector)
    if request.device == "xla" and (missing := [n for n in TPU_LABELS if n not in labels]):
        setting = "kubernetes.node_selector"
        return (f"{setting} does not name {' and '.join(missing)}: GKE needs it to start TPU pods",)
    return ()


def is_mpi(request: LaunchRequest) -> bool:
    """Return whether the job needs the MPI operator: several pods, or HPUs, which mpirun starts."""
    return request.config.nodes > 1 or (request.device == "hpu" and request.count > 1)


def _job(request: LaunchRequest) -> Manifest:
    # Commands such as a download need no more resources than a launcher.
    has_devices = request.device != "cpu" or request.command[0] == "train"
    template = _pod(request, "main", _program(request), has_devices=has_devices)
    template["spec"]["restartPolicy"] = "Never"
    restarts = request.config.restarts
    if not restarts:
        return {"backoffLimit": 0, "template": template}
    codes = {"containerName": "main", "operator": "In", "values": list(WRONG_INPUT)}
    drained = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "FailJob", "onExitCodes": codes},
        {"action": "Ignore", "onPodConditions": drained},  # not counted as a crash
    ]
    return {
        "backoffLimit": restarts,
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


def _program(request: LaunchRequest) -> list[str]:
    """Return the command of the first pod; for several ranks it is wrapped in `ssdctl launch`."""
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
    else:
        arguments += ["--launcher=torchrun"]
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
    labels = {"app": "ssdctl", **NO_SIDECAR}
    return {"metadata": {"labels": labels, "annotations": dict(NO_SIDECAR)}, "spec": spec}


def _check_written(request: LaunchRequest) -> None:
    """Check that the job writes to a persistent volume."""
    option, folder = "--out", request.run_folder
    if request.command[0] == "download":
        option, folder = "--dest", _value(request.command, "--dest")
    elif request.command[0] != "train":
        folder = _value(request.command, "--out")
        if folder is None:  # commands such as evaluate print their result
            return
    mounts, _ = pod_spec.volumes(request.kubernetes)
    writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
    path = posixpath.normpath(folder or ".")
    if any(path == place or path.startswith(f"{place}/") for place in writable):
        return
    example = f"{writable[0]}/{posixpath.basename(path)}" if writable else "/runs/first"
    more = "" if writable else " and kubernetes.volumes=NAME_OF_A_CLAIM:/runs"
    raise UsageError(
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
