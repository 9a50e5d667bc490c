"""Build a Kubernetes manifest: Job, or MPIJob of the MPI operator, as data and as YAML.

A Job of one pod runs `ssdctl launch` in it. On several nodes an Indexed Job runs it in each pod,
and torchrun's ranks meet at pod 0, which a headless Service names.

An MPIJob has a launcher pod and one worker pod per node, all from one image and with the same
volumes at the same paths. The launcher runs `ssdctl launch --launcher mpirun` on the host file that
the operator writes, so a cluster runs the same command as one machine.
ssdctl is installed by an init container, which keeps the image's torch. Workers
count as ready when their sshd answers, and the launcher waits for that: no `sleep`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ssdctl.config.fields import DEVICE_TYPES, device_type
from ssdctl.config.sections import KubernetesConfig
from ssdctl.errors import UsageError
from ssdctl.launch.base import LaunchRequest
from ssdctl.launch.engines.mpirun import refuse_separator
from ssdctl.launch.engines.torchrun import RENDEZVOUS_PORT

Manifest = dict[str, Any]
Resources = dict[str, dict[str, str]]
API_VERSIONS = {
    "Job": "batch/v1",
    "MPIJob": "kubeflow.org/v2beta1",
}
HOSTFILE = "/etc/mpi/hostfile"  # where the MPI operator mounts it
INSTALLED = "/opt/ssdctl"
# A virtual environment with the image's packages. pip fails if it would have to replace its torch.
INSTALL = """\
"$0" -m venv --system-site-packages --without-pip "$1"
for folder in "$1"/lib/python3*/site-packages; do  # this Python may have its own environment
  "$0" -c 'import site; print(*site.getsitepackages(), sep="\\n")' > "$folder/image.pth"
done
"$0" -m pip list --format=freeze | grep -iE '^(torch|numpy|triton|habana|nvidia)' > "$1/kept.txt"
exec "$1/bin/python" -m pip install --no-cache-dir --constraint "$1/kept.txt" -- "$2"
"""
# Host keys are generated if the image has none; sshd requires the folder. The mounted key is a link
# into a secret, which sshd's StrictModes refuses.
# sshd does not pass on the container's environment, so set HABANA_VISIBLE_MODULES explicitly.
SSHD = (
    "ssh-keygen -A && mkdir -p /run/sshd && exec /usr/sbin/sshd -De -o StrictModes=no "
    '${HABANA_VISIBLE_MODULES:+-o "SetEnv=HABANA_VISIBLE_MODULES=$HABANA_VISIBLE_MODULES"}'
)
# A deleted worker signals its ranks to save, which stops the ranks of all workers, and waits.
WAIT_FOR_RANKS = (
    "pkill -USR1 -f '[-]m ssdctl train'; "
    "while pgrep -f '[-]m ssdctl' >/dev/null 2>&1; do sleep 1; done"
)
SAVE_S = 300  # maximum duration of a stop before Kubernetes kills the pod
NO_SIDECAR = {"sidecar.istio.io/inject": "false"}  # it breaks MPI's connections
WRONG_INPUT = [2, 3, 4, 5, 6, 7]  # exit codes that a restart cannot change


@dataclass(frozen=True)
class ManifestBuilder:
    request: LaunchRequest
    settings: KubernetesConfig
    patch: Mapping[str, Any] = field(default_factory=dict)  # the content of kubernetes.patch

    def build(self, job_name: str) -> Manifest:
        """Return the manifest; for an Indexed Job, a list with its Service."""
        config, nodes = self.settings, self.request.config.nodes
        kind = "MPIJob" if is_mpi_job(self.request) else "Job"
        name = config.name or job_name
        metadata: Manifest = {
            "name": name,
            "labels": {"app": "ssdctl", **pairs("labels", config)},
            **_given(namespace=config.namespace),
        }
        spec = (self._mpi_job if kind == "MPIJob" else self._job)(name)
        # The fields that a user may add to a Job are in the runPolicy of an MPIJob.
        patched = spec["runPolicy"] if kind == "MPIJob" else spec
        patched.update(merge(patched, self.patch.get("job", {}), "job"))
        job = {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec}
        if kind != "Job" or nodes == 1:
            return job
        headless: Manifest = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        }
        service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless}
        return {"apiVersion": "v1", "kind": "List", "items": [service, job]}

    def _job(self, name: str) -> Manifest:
        restarts, nodes = self.request.config.restarts, self.request.config.nodes
        # A download needs no more resources than a launcher.
        is_download = self.request.command[0] in ("download", "fetch-weights")
        has_devices = self.request.device != "cpu" or not is_download
        pod_0 = f"{name}-0.{name}"
        rendezvous = [f"--rdzv-endpoint={pod_0}:{RENDEZVOUS_PORT}"] if nodes > 1 else []
        program = self._program(
            "mpirun" if self.request.device == "hpu" else "torchrun", *rendezvous
        )
        template, spec = self._pod("main", program, has_devices=has_devices), Manifest()
        template["spec"].setdefault("restartPolicy", "Never")
        if nodes > 1:
            template["spec"]["subdomain"] = name  # gives pod 0 its name
            spec |= {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
        spec["backoffLimit"] = restarts * nodes  # all pods fail with one
        if restarts:
            codes = {"containerName": "main", "operator": "In", "values": list(WRONG_INPUT)}
            drained = [{"type": "DisruptionTarget", "status": "True"}]  # not counted as a crash
            rules = [
                {"action": "FailJob", "onExitCodes": codes},
                {"action": "Ignore", "onPodConditions": drained},
            ]
            spec["podFailurePolicy"] = {"rules": rules}
        return {**spec, "template": template}

    def _mpi_job(self, name: str) -> Manifest:
        config = self.request.config
        arguments = [f"--hostfile={HOSTFILE}"]
        if exported := [*config.export_env, *(e.partition("=")[0] for e in self.settings.env)]:
            arguments += [f"--export-env={','.join(exported)}"]
        program = self._program("mpirun", *arguments)
        launcher = self._pod("launcher", program, has_devices=False)
        worker = self._pod("worker", ["/bin/sh", "-c", SSHD], has_devices=True)
        container = worker["spec"]["containers"][0]  # a patch may add others
        container["ports"] = [{"containerPort": 22, "name": "ssh"}]
        container["readinessProbe"] = {"tcpSocket": {"port": 22}, "periodSeconds": 2}
        container["lifecycle"] = {
            "preStop": {"exec": {"command": ["/bin/sh", "-c", WAIT_FOR_RANKS]}}
        }
        return {
            "slotsPerWorker": self.request.ranks_per_node,
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

    def _program(self, launcher: str, *options: str) -> list[str]:
        """Return the command of a pod; for several ranks it is wrapped in `ssdctl launch`."""
        config, table = self.request.config, self.settings
        python = table.python if table.install == "image" else f"{INSTALLED}/bin/python"
        start = [python, "-m", "ssdctl"]
        command = [escape_k8s(word) for word in self.request.command]
        if self.request.count == 1:
            return [*start, *command]
        device = DEVICE_TYPES.get(self.request.device)
        option = device.count_option if device else "--devices"  # of a plugin's
        arguments = ["launch", f"{option}={self.request.count}", f"--launcher={launcher}"]
        if launcher == "mpirun":
            refuse_separator(self.request)
            # The launcher and the workers have different numbers of cores.
            bind_to = config.bind_to if config.cores_per_node else "none"
            arguments += [f"--bind-to={bind_to}"]
        if config.nodes > 1:
            arguments += [f"--nodes={config.nodes}"]
        arguments += options
        if config.cores_per_node:
            arguments += [f"--cores-per-node={config.cores_per_node}"]
        if config.devices_per_node:
            arguments += [f"--devices-per-node={config.devices_per_node}"]
        return [*start, *arguments, *(command[1:] if command[0] == "train" else ["--", *command])]

    def _pod(self, name: str, command: list[str], *, has_devices: bool) -> Manifest:
        config = self.settings
        mounts, volumes = read_volumes(config.volumes)
        container = self._container(name, command, has_devices=has_devices)
        # The variables of a service called ssdctl-X would be settings: SSDCTL_X_PORT.
        spec: Manifest = {"terminationGracePeriodSeconds": SAVE_S, "enableServiceLinks": False}
        if has_devices and self.request.count > 1 and not config.host_ipc:
            # The default of container runtimes, 64 MB, is too small for the ranks' collectives.
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
            container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
        if config.install != "image":
            installed = {"name": "ssdctl", "mountPath": INSTALLED}
            volumes.append({"name": "ssdctl", "emptyDir": {}})
            container["volumeMounts"].append(installed)
            installer = {"volumeMounts": [*mounts, installed], **self._installer(container)}
            spec["initContainers"] = [{**container, **installer}]
        secret = config.pull_secret
        device = device_type(self.request.device).kubernetes_resource if has_devices else None
        spec |= {"containers": [container], "volumes": volumes}
        spec |= _given(
            hostIPC=config.host_ipc and has_devices,
            serviceAccountName=config.service_account,
            imagePullSecrets=secret and [{"name": secret}],
            nodeSelector=pairs("node_selector", config),
            # Clusters reserve their device nodes with a taint of that name.
            tolerations=device and [{"key": device, "operator": "Exists"}],
        )
        labels = {"app": "ssdctl", **NO_SIDECAR, **pairs("labels", config)}
        metadata = {"labels": labels, "annotations": NO_SIDECAR}
        template = {"metadata": metadata, "spec": spec}
        for part in template.keys() & self.patch.keys():
            template[part] = merge(template[part], self.patch[part], part)
        return template

    def _container(self, name: str, command: list[str], *, has_devices: bool) -> Manifest:
        config = self.settings
        environment = {**self.request.variables, **pairs("env", config)}
        return {
            "name": name,
            "image": config.image,
            "imagePullPolicy": config.pull_policy,
            "command": command,
            "env": [{"name": key, "value": escape_k8s(v)} for key, v in environment.items()],
            "resources": self._resources(name, has_devices=has_devices),
            "volumeMounts": read_volumes(config.volumes)[0],
        }

    def _installer(self, container: Manifest) -> Manifest:
        """Return the fields in which the init container differs from the container."""
        config = self.settings
        # Quotas and the Guaranteed class require CPU and memory for every container.
        kept = {
            bound: general
            for bound, amounts in container["resources"].items()
            if (general := {n: v for n, v in amounts.items() if n in ("cpu", "memory")})
        }
        words = map(escape_k8s, (INSTALL, config.python, INSTALLED, config.install or ""))
        command = ["/bin/sh", "-c", *words]
        return {"name": "install-ssdctl", "command": command, "resources": kept}

    def _resources(self, container: str, *, has_devices: bool) -> Resources:
        """Return limits and equal requests, as devices and huge pages require."""
        # Both are checked, although a pod takes one of them.
        both = [pairs(name, self.settings) for name in ("launcher_resources", "resources")]
        amounts = both[has_devices]
        if has_devices and (device := device_type(self.request.device).kubernetes_resource):
            amounts = {device: str(self.request.ranks_per_node), **amounts}
        requests, cpu = dict(amounts), amounts.get("cpu", "")
        if container == "launcher" and re.fullmatch(r"\d+(\.\d+)?", cpu) and float(cpu) > 0.25:
            # mpirun only waits; reserved cores might not fit on the nodes of the workers.
            requests["cpu"] = "250m"
        return {"limits": amounts, "requests": requests} if amounts else {}


def is_mpi_job(request: LaunchRequest) -> bool:
    """Return whether the job needs the MPI operator: only HPUs on several nodes do."""
    return request.device == "hpu" and request.config.nodes > 1


def _given(**fields: Any) -> Manifest:
    return {name: value for name, value in fields.items() if value}


def pairs(name: str, config: Any) -> dict[str, str]:
    """Return a setting's `KEY=VALUE` entries as a dict; Kubernetes checks both."""
    entries = [entry.partition("=") for entry in getattr(config, name)]
    if wrong := ["".join(entry) for entry in entries if not entry[1] or not entry[0]]:
        raise UsageError(f"kubernetes.{name}: {wrong[0]!r} is not of the form KEY=VALUE")
    return {key: value for key, _, value in entries}


def escape_k8s(text: str) -> str:
    """Escape text, because Kubernetes expands $(NAME) in commands and variables."""
    return text.replace("$", "$$")


def read_volumes(entries: Iterable[str]) -> tuple[list[Manifest], list[Manifest]]:
    """Return the mounts and volumes of `SOURCE:PATH[:ro]` entries."""
    mounts, volumes = list[Manifest](), list[Manifest]()
    for number, entry in enumerate(entries):
        source, path, mode = (*entry.split(":", 2), "", "")[:3]
        is_clean = path.startswith("/") and path == posixpath.normpath(path) != "/"
        if not is_clean or mode not in ("", "ro", "rw"):
            raise UsageError(
                f"kubernetes.volumes: {entry!r} is not of the form SOURCE:/PATH or SOURCE:/PATH:ro"
            )
        name = f"volume-{number}"
        if source.startswith("/"):
            volume: Manifest = {"hostPath": {"path": source, "type": "Directory"}}
        else:
            volume = {"persistentVolumeClaim": {"claimName": source}}
        volumes.append({"name": name, **volume})
        mounts.append({"name": name, "mountPath": path, **_given(readOnly=mode == "ro")})
    return mounts, volumes


def merge(base: Any, patch: Any, place: str) -> Any:
    """Merge mappings and extend lists (entries of one `name` are merged); else return the patch.

    Raises:
        UsageError: The patch replaces a mapping or a list; the message has its `place`.
    """
    kind = dict if isinstance(base, dict) else list
    if isinstance(base, kind) and not isinstance(patch, kind):
        noun = "mapping" if kind is dict else "list"
        raise UsageError(f"kubernetes.patch: {place} must be a {noun}", hint="or leave it out")
    if isinstance(base, dict):
        more = {k: merge(base.get(k), value, f"{place}.{k}") for k, value in patch.items()}
        return {**base, **more}
    if not isinstance(base, list):
        return patch
    merged = list(base)
    for entry in patch:
        name = entry.get("name") if isinstance(entry, dict) else None
        names = [e.get("name") if isinstance(e, dict) else None for e in merged]
        if name is not None and name in names:
            merged[names.index(name)] = merge(merged[names.index(name)], entry, f"{place}.{name}")
        else:
            merged.append(entry)
    return merged
