"""Build a Kubernetes manifest: Job, MPIJob or TrainJob (Kubeflow's operators), as data and as YAML.

A Job of one pod runs `ssdctl launch` in it. On several nodes an Indexed Job runs it in each pod,
and torchrun's ranks meet at pod 0, which a headless Service names; a TrainJob does the same with
pods of Kubeflow Trainer.

An MPIJob has a launcher pod and one worker pod per node, all from one image and with the same
volumes at the same paths. The launcher runs `ssdctl launch --launcher mpirun` on the host file that
the operator writes, so a cluster runs the same command as one machine.
ssdctl is installed by an init container (_pod_install.py), which keeps the image's torch. Workers
count as ready when their sshd answers, and the launcher waits for that: no `sleep`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.errors import UsageError
from ssdctl.launch._pod_values import checked, escape_k8s, merge, pairs, read_volumes
from ssdctl.launch.base import LaunchRequest
from ssdctl.launch.torchrun import RENDEZVOUS_PORT

Manifest = dict[str, Any]
Resources = dict[str, dict[str, str]]
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
WRONG_INPUT = [2, 3, 4, 5, 6, 7]  # exit codes that a restart cannot change


def build(request: LaunchRequest) -> Manifest:
    """Return the manifest; of an Indexed Job, a list with its Service."""
    config, kind = request.table, _kind(request)
    name = checked("name", config.name or request.job_name)
    labels = {"app": "ssdctl", **pairs("labels", config.labels)}
    metadata: Manifest = {"name": name, "labels": labels}
    if annotations := pairs("annotations", config.annotations):
        metadata["annotations"] = annotations
    if config.namespace is not None:
        metadata["namespace"] = checked("namespace", config.namespace)
    spec = {"MPIJob": _mpi_job, "TrainJob": _train_job, "Job": _job}[kind](request)
    # The fields that a user may add to a Job are in the runPolicy of an MPIJob.
    place = spec["runPolicy"] if kind == "MPIJob" else spec
    place.update(merge(place, request.patch.get("job", {})))
    job = {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec}
    if kind != "Job" or request.config.nodes == 1:
        return job
    # The name of pod 0, where the ranks meet: NAME-0.NAME
    spec["template"]["spec"]["subdomain"] = name
    spec["template"]["spec"]["containers"][0]["command"] = _program(request, name)
    headless: Manifest = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
        "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
    }
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless}
    return {"apiVersion": "v1", "kind": "List", "items": [service, job]}


def _kind(request: LaunchRequest) -> str:
    """Return the kind of job: only HPUs on several nodes need the MPI operator."""
    config, is_hpu = request.table, request.device == "hpu"
    needs_mpi = is_hpu and request.config.nodes > 1
    if config.kind == "auto":
        return "MPIJob" if needs_mpi else "Job"
    if needs_mpi and config.kind != "MPIJob":
        raise UsageError(f"kubernetes.kind {config.kind}: HPUs on several nodes need an MPIJob")
    if request.device == "xla" and config.kind == "MPIJob":
        raise UsageError("kubernetes.kind MPIJob: torch_xla takes its chips from torchrun")
    if config.kind == "TrainJob":
        if is_hpu:
            raise UsageError("kubernetes.kind TrainJob: HPUs are started by mpirun, in a Job")
        names = sorted(set(request.patch.get("spec", {})) - TRAIN_JOB_FIELDS)
        names += [name for name in ("priority_class", "host_ipc") if getattr(config, name)]
        if names:
            raise UsageError(
                f"kubernetes.kind TrainJob: its runtime decides about {', '.join(names)}",
                hint=f"set it in the runtime {config.runtime}, or leave kubernetes.kind out",
            )
    return str(config.kind)


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
    drained = [{"type": "DisruptionTarget", "status": "True"}]  # not counted as a crash
    rules = [
        {"action": "FailJob", "onExitCodes": codes},
        {"action": "Ignore", "onPodConditions": drained},
    ]
    limits = {"backoffLimit": restarts * nodes, "podFailurePolicy": {"rules": rules}}
    return {**indexed, **limits, "template": template}  # all pods fail with one


def _mpi_job(request: LaunchRequest) -> Manifest:
    config = request.config
    launcher = _pod(request, "launcher", _program(request), has_devices=False)
    worker = _pod(request, "worker", ["/bin/sh", "-c", SSHD], has_devices=True)
    container = worker["spec"]["containers"][0]  # a patch may add others
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
            "Worker": {"replicas": config.nodes, "restartPolicy": "OnFailure", "template": worker},
        },
    }


def _train_job(request: LaunchRequest) -> Manifest:
    """Return the spec of a TrainJob (Kubeflow Trainer 2.2 or newer).

    Its operator starts a pod per node and tells torchrun its place by PET_* variables. It accepts
    no init container: the command installs ssdctl first.
    """
    config = request.table
    pod = _pod(request, "node", _program(request), has_devices=True)
    container, spec = pod["spec"]["containers"][0], pod["spec"]
    command = container["command"]
    if init := spec.pop("initContainers", None):
        command = [*init[0]["command"], *command]
    trainer: Manifest = {"image": container["image"], "command": command, "env": container["env"]}
    trainer |= {"numNodes": request.config.nodes, "numProcPerNode": request.ranks_per_node}
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
    """Return the command of a pod; for several ranks it is wrapped in `ssdctl launch`."""
    is_image = request.table.install == "image"
    start = [request.table.python if is_image else f"{INSTALLED}/bin/python", "-m", "ssdctl"]
    if request.count == 1:
        return [*start, *map(escape_k8s, request.command)]
    config = request.config
    arguments = ["launch", f"{DEVICE_TYPES[request.device].count_option}={request.count}"]
    is_mpi_job = _kind(request) == "MPIJob"
    if is_mpi_job or request.device == "hpu":
        # The launcher's number of cores is not that of the workers.
        bind_to = config.bind_to if config.cores_per_node else "none"
        arguments += ["--launcher=mpirun", f"--rank-by={config.rank_by}", f"--bind-to={bind_to}"]
    else:
        arguments += ["--launcher=torchrun"]
    if config.nodes > 1:
        arguments += [f"--nodes={config.nodes}"]
    if is_mpi_job:
        arguments += [f"--hostfile={HOSTFILE}"]
        names = [entry.partition("=")[0] for entry in request.table.env]
        if export_env := [*config.export_env, *names]:
            arguments += [f"--export-env={','.join(export_env)}"]
    if service is not None:
        arguments += [f"--rdzv-endpoint={service}-0.{service}:{RENDEZVOUS_PORT}"]
    for option in ("cores_per_node", "devices_per_node"):
        if value := getattr(config, option):
            arguments += [f"--{option.replace('_', '-')}={value}"]
    is_train = request.command[0] == "train"
    rest = request.command[1:] if is_train else ("--", *request.command)
    return [*start, *arguments, *map(escape_k8s, rest)]


def _pod(request: LaunchRequest, name: str, command: list[str], *, has_devices: bool) -> Manifest:
    """Return a pod template of one container; an init container installs ssdctl."""
    config = request.table
    mounts, volumes = read_volumes(config.volumes)
    environment = {**request.variables, **pairs("env", config.env)}
    container: Manifest = {
        "name": name,
        "image": checked("image", str(config.image)),
        "imagePullPolicy": config.pull_policy,
        "command": command,
        "env": [{"name": key, "value": escape_k8s(value)} for key, value in environment.items()],
        "resources": _resources(request, name, has_devices=has_devices),
        "volumeMounts": [*mounts],
    }
    spec: Manifest = {"terminationGracePeriodSeconds": SAVE_S}
    if has_devices and request.count > 1 and not config.host_ipc:
        # The default of container runtimes, 64 MB, is too small for the ranks' collectives.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    if config.install != "image":
        volumes.append({"name": "ssdctl", "emptyDir": {}})
        mount = {"name": "ssdctl", "mountPath": INSTALLED}
        container["volumeMounts"].append(mount)
        # Quotas and the Guaranteed class require CPU and memory for every container.
        kept = {
            part: amounts
            for part, all_amounts in container["resources"].items()
            if (amounts := {n: v for n, v in all_amounts.items() if n in ("cpu", "memory")})
        }
        program = Path(__file__).with_name("_pod_install.py").read_text(encoding="utf-8")
        words = [config.python, "-c", *map(escape_k8s, (program, INSTALLED, config.install))]
        own = {"name": "install-ssdctl", "command": words, "resources": kept}
        spec["initContainers"] = [{**container, **own, "volumeMounts": [*mounts, mount]}]
    spec["containers"] = [container]
    spec["volumes"] = volumes
    if config.host_ipc and has_devices:
        spec["hostIPC"] = True
    if config.service_account is not None:
        spec["serviceAccountName"] = checked("service_account", config.service_account)
    if config.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": checked("pull_secret", config.pull_secret)}]
    if selector := pairs("node_selector", config.node_selector):
        spec["nodeSelector"] = selector
    if has_devices and (device := DEVICE_TYPES[request.device].kubernetes_resource):
        # Clusters reserve their device nodes with a taint of that name.
        spec["tolerations"] = [{"key": device, "operator": "Exists"}]
    if config.priority_class is not None:
        spec["priorityClassName"] = checked("priority_class", config.priority_class)
    labels = {"app": "ssdctl", **NO_SIDECAR, **pairs("labels", config.labels)}
    annotations = {**NO_SIDECAR, **pairs("annotations", config.annotations)}
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    return dict(merge(template, {k: v for k, v in request.patch.items() if k != "job"}))


def _resources(request: LaunchRequest, container: str, *, has_devices: bool) -> Resources:
    """Return a container's resources; requests equal limits, as devices and huge pages require."""
    setting = "resources" if has_devices else "launcher_resources"
    amounts = pairs(setting, getattr(request.table, setting))
    if has_devices and (device := DEVICE_TYPES[request.device].kubernetes_resource):
        amounts = {device: str(request.ranks_per_node), **amounts}
    requests, cpu = dict(amounts), amounts.get("cpu", "")
    if container == "launcher" and re.fullmatch(r"\d+(\.\d+)?", cpu) and float(cpu) > 0.25:
        # mpirun only waits for its ranks; reserved cores might not fit on the nodes of the workers.
        requests["cpu"] = "250m"
    return {"limits": amounts, "requests": requests} if amounts else {}
