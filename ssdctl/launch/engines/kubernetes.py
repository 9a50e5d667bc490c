"""Kubernetes: the settings of a job and its pods, its missing settings, and kubectl.

_manifest.py builds the manifest.
"""

from __future__ import annotations

import logging
import math
import posixpath
import re
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ssdctl.config.sections import KubernetesConfig
from ssdctl.distributed.rank_process import PASSED_ON
from ssdctl.errors import DistributedError, ExitCode, UsageError
from ssdctl.files import DistinctKeys, read_limited, unreadable
from ssdctl.launch.base import (
    POLL_S,
    WRITTEN,
    BatchEngine,
    Job,
    LaunchRequest,
    Node,
    Write,
    check_text,
    last_value,
    query,
    require_program,
    submit_text,
)
from ssdctl.launch.engines._manifest import ManifestBuilder, is_mpi_job, read_volumes

if TYPE_CHECKING:
    from ssdctl.config import Config

log = logging.getLogger(__name__)
Json = dict[str, Any]  # an object of Kubernetes
POD_0 = "batch.kubernetes.io/job-completion-index=0"
ARGV = ("kubectl", "create", "-o", "name", "-f", "-")
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z0-9]")  # a string for every YAML reader
LOG_FAILURES = 5  # of kubectl logs in a row, without another line
PATCHED = ("metadata", "spec", "job")
MAX_PATCH_BYTES = 1 << 20
# How YAML 1.2 reads plain text, with the octal numbers of file modes (0644) and `<<` of 1.1.
SCALARS = {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(0[0-7]*|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|"
    r"\.(nan|NaN|NAN)",
    "merge": "<<",
}


@dataclass(frozen=True)
class Kubernetes(BatchEngine):
    name = "kubernetes"
    submit_command = "kubectl create -f"
    runs_elsewhere = True
    settings: KubernetesConfig = field(default_factory=KubernetesConfig)
    patch: Mapping[str, Any] = field(default_factory=dict)  # the content of kubernetes.patch
    job_name: str = "ssdctl"  # a unique one
    paths: Mapping[str, str | None] = field(default_factory=dict)  # of the config, by option

    @classmethod
    def configure(cls, config: Config, request: LaunchRequest) -> Kubernetes:
        """Read the content of `kubernetes.patch`."""
        settings, others = config.kubernetes, ["launch.rdzv_endpoint"]
        others += ["launch.bind_to"] * (request.device != "hpu")
        config.require_not_given(others, "does not apply to these pods", "leave it out")
        if not is_mpi_job(request):
            given = "--set kubernetes.env=NAME=VALUE sets variables of pods"
            config.require_not_given(["launch.export_env"], "is for mpirun", given)
        patch = {} if settings.patch is None else _patch(Path(settings.patch))
        data, mllog = config.data, config.train.mllog
        paths = {"--data": data.root, "--store": data.store, "--mllog": mllog}
        return cls(settings, patch, f"ssdctl-{uuid.uuid4().hex[:6]}", paths)

    def require(self) -> None:
        hint = "install kubectl and log in to the cluster; --write FILE writes the manifest"
        require_program(ARGV[0], hint)

    def build_job(self, request: LaunchRequest, node: Node) -> Job:
        """Return the manifest, and its submission. What a job lacks is a warning in a dry run."""
        settings = self.settings
        for argument in (*settings.env, settings.install or ""):
            check_text(argument)
        if request.config.restarts and request.resume not in (None, "auto"):
            raise UsageError(
                f"--resume {request.resume} and --restarts exclude each other in pods, since a "
                "restart runs the same command",
                hint="leave one of them out",
            )
        missing, warnings = list(self._missing(request)), list[str]()
        is_bound = request.device == "hpu" and request.count > 1
        if is_bound and request.config.cores_per_node is None:
            text = "ranks are not bound to cores, whose number is unknown: give --cores-per-node"
            warnings.append(text)
        if missing and not request.is_dry_run:
            raise missing[0]
        if missing:
            filled = {"image": settings.image or "IMAGE", "install": settings.install or "image"}
            settings = msgspec.structs.replace(settings, **filled)
        manifest = ManifestBuilder(request, settings, self.patch).build(self.job_name)
        return Job(
            ARGV,
            {},
            self.name,
            request.count,
            request.config.nodes,
            text=to_yaml(manifest),
            manifest=manifest,
            warnings=(*(f"{error}; {error.hint}" for error in missing), *warnings),
        )

    def submit(self, job: Job) -> str:
        return submit_text(job, "kubectl get jobs")  # such as mpijob.kubeflow.org/ssdctl-3f2a1c

    def cancel(self, job_id: str, job: Job) -> str:
        service = [f"service/{job_id.rpartition('/')[2]}"] if _is_indexed(job) else []
        return shlex.join(["kubectl", "delete", *service, job_id, *_namespace(job)])

    def follow(self, job_id: str, job: Job, write: Write) -> int:
        """Write the output of the first rank and what the pods wait for; return the exit code."""
        namespace, (first, others) = _namespace(job), _labels(job_id, job)
        followed, reported = set[str](), dict[str, str]()
        while True:
            for label in filter(None, (others, first)):
                for pod in _pods(label, namespace):
                    name, state = pod["metadata"]["name"], _wait(_status(pod))
                    if state and reported.get(name) != state:
                        log.info("%s: %s", name, state)
                    reported[name] = state
                    has_begun = _status(pod).get("phase") in ("Running", "Succeeded", "Failed")
                    if has_begun and label == first and name not in followed:
                        followed.add(name)
                        _copy_log(name, namespace, write)
            conditions = _status(_get(job_id, *namespace)).get("conditions") or []
            ends = {c["type"] for c in conditions if c["status"] == "True"}
            if ends & {"Succeeded", "Complete"}:
                return 0
            if "Failed" in ends:
                return _exit_code(_pods(first, namespace))
            time.sleep(POLL_S)

    def _missing(self, request: LaunchRequest) -> Iterator[UsageError]:
        """Yield an error for each setting without which pods cannot run or keep their results."""
        config, command = self.settings, request.command
        mounts, _ = read_volumes(config.volumes)
        writable = [m["mountPath"] for m in mounts if "readOnly" not in m]
        if config.image is None:
            hint = "name the image of the pods, or give --cluster"
            yield UsageError("kubernetes.image is not set", hint=hint)
        if config.install is None:
            hint = "a wheel on one of kubernetes.volumes, a requirement, or `image` if it has one"
            text = "kubernetes.install is not set: ssdctl must be installed in the pods"
            yield UsageError(text, hint=hint)

        options = OUTPUTS.get(command[0], ("--out",))
        outputs = {o: last_value(command, o) or self.paths.get(o) for o in options}
        if command[0] == "train":
            outputs["--out"] = request.run_folder
        if outputs.get("--store"):
            del outputs["--data"]  # the default store is in it
        for option, output in outputs.items():
            path = posixpath.normpath(output or command[0])
            is_written = output is not None or command[0] in WRITES
            if not is_written or _is_in(path, writable):
                continue
            example = f"{writable[0]}/{posixpath.basename(path)}" if writable else "/runs/first"
            more = "" if writable else " and kubernetes.volumes=NAME_OF_A_CLAIM:/runs"
            yield UsageError(
                f"{option} {output or '(its default)'} is not on a persistent volume and would be "
                "deleted with the pods",
                hint=f"for example {option} {example}{more}",
            )


ENGINE = Kubernetes
# The options of files and folders that a command writes; of other commands --out.
OUTPUTS = {
    "download": ("--dest",),
    "fetch-weights": ("--dest",),
    "prepare": ("--store", "--data", "--preview"),
    "train": ("--out", "--mllog"),
    "evaluate": ("--detections", "--report", "--suspects"),
}
WRITES = ("download", "fetch-weights", "demo", "export")  # others print their results


def _is_in(path: str, folders: list[str]) -> bool:
    return any(f"{posixpath.normpath(path)}/".startswith(f"{folder}/") for folder in folders)


def _patch(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(DistinctKeys, yaml.SafeLoader):
        def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
            value = super().construct_yaml_float(node)
            return int(value) if value.is_integer() else value  # Go refuses 8.0 for a number

    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    Loader.yaml_implicit_resolvers = {}
    for kind, pattern in SCALARS.items():
        tag = f"tag:yaml.org,2002:{kind}"
        Loader.add_implicit_resolver(tag, re.compile(f"({pattern})$"), None)
    try:
        patch: Any = yaml.load(read_limited(path, MAX_PATCH_BYTES), Loader)
        wrong = next(_not_json(patch), None)
    except OSError as error:
        raise unreadable(f"kubernetes.patch {path}", error, UsageError) from None
    # The others: `!!int a`, `!!bool a`, `!!timestamp a`, and a list that contains itself.
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"kubernetes.patch {path}: is not YAML: {error}") from None
    if wrong is not None:
        raise UsageError(
            f"kubernetes.patch {path}: {wrong} is not a value of JSON, as Kubernetes requires",
            hint="put it in quotes",
        )
    patch = {} if patch is None else patch
    if not isinstance(patch, dict) or not patch.keys() <= set(PATCHED):
        raise UsageError(
            f"kubernetes.patch {path}: has other keys than {', '.join(PATCHED)}",
            hint="spec and metadata are merged into the pods, job into the spec of the job: "
            "spec: {hostNetwork: true}",
        )
    return {key: value for key, value in patch.items() if value is not None}


def _not_json(value: Any, place: str = "") -> Iterator[str]:
    """Yield the places of keys and values that JSON does not have."""
    if isinstance(value, dict):
        for key, inner in value.items():
            at = f"{place}.{key}".lstrip(".")
            yield from _not_json(inner, at) if isinstance(key, str) else [at]
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _not_json(inner, f"{place}[{number}]")
    elif not isinstance(value, str | int | float | None) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        yield place


def _is_indexed(job: Job) -> bool:
    return job.manifest is not None and "items" in job.manifest


def _namespace(job: Job) -> list[str]:
    manifest = job.manifest or {"metadata": {}}
    metadata = (manifest["items"][-1] if _is_indexed(job) else manifest)["metadata"]
    return ["-n", metadata["namespace"]] if "namespace" in metadata else []


def _labels(job_id: str, job: Job) -> tuple[str, str]:
    name = job_id.rpartition("/")[2]
    if job_id.startswith("mpijob"):
        role = "training.kubeflow.org/job-role=worker"
        return f"job-name={name}-launcher", f"training.kubeflow.org/job-name={name},{role}"
    if _is_indexed(job):
        return f"job-name={name},{POD_0}", f"job-name={name}"
    return f"job-name={name}", ""


def _pods(label: str, namespace: list[str]) -> list[Json]:
    pods = _get("pods", *namespace, "-l", label).get("items") or []
    return sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))


def _get(what: str, *words: str) -> Json:
    answer = query("kubectl", "get", what, *words, "-o", "json")
    try:
        return msgspec.json.decode(answer, type=Json)
    except (msgspec.DecodeError, RecursionError) as error:
        start = answer[:200].strip() or "nothing"
        raise DistributedError(
            f"kubectl printed something else than {what} in JSON ({error}): {start}",
            hint="run `kubectl get pods -o json`: only JSON must be on its standard output. "
            "The job continues to run",
        ) from None


def _copy_log(pod: str, namespace: list[str], write: Write) -> None:
    """Write a pod's output; start again after the last line if kubectl loses the connection."""
    argv = ["kubectl", "logs", *namespace, "--follow", pod]
    pipe, written, failures = subprocess.PIPE, 0, 0
    while failures < LOG_FAILURES:
        before = written
        with subprocess.Popen(argv, stdout=pipe, encoding="utf-8", errors="replace") as process:
            assert process.stdout is not None
            for number, line in enumerate(process.stdout):
                if number >= written:
                    write(line)
                    written += line.endswith("\n")
        if process.returncode == 0:
            return
        failures = 1 if written > before else failures + 1
        time.sleep(POLL_S)
    log.warning("%s: kubectl logs fails: the rest of the output is not shown", pod)


def _status(item: Json) -> Json:
    return item.get("status") or {}


def _wait(status: Json) -> str:
    """Return why a pod does not run, such as no free node; empty if it runs."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"waits: {_reason(condition)}"
    # Init containers first: the other containers wait for them.
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or []:
            state, name = container.get("state", {}), container.get("name")
            waiting = state.get("waiting") or {}
            if waiting.get("reason") not in (None, "PodInitializing"):
                return f"waits: {name}: {_reason(waiting)}"
            code = (state.get("terminated") or {}).get("exitCode")
            if code and kind == "initContainerStatuses":
                return f"{name} failed with exit code {code} (kubectl logs POD -c {name})"
    return ""


def _reason(state: Json) -> str:
    words = filter(None, (state.get("reason"), state.get("message")))
    return " ".join(": ".join(words).split())


def _exit_code(pods: list[Json]) -> int:
    for container in (_status(pods[-1]).get("containerStatuses") or []) if pods else []:
        is_own = container.get("name") in ("main", "launcher")  # a patch may add others
        if is_own and (end := container.get("state", {}).get("terminated")):
            return end["exitCode"] if end["exitCode"] in PASSED_ON else ExitCode.DISTRIBUTED
    return ExitCode.DISTRIBUTED


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return a document as YAML for 1.1 and 1.2 readers; text that resembles a number is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        lines = value.split("\n")
        is_plain = value.isascii() and all(n.isprintable() and n == n.rstrip() for n in lines)
        is_program = is_plain and len(lines) > 2 and lines[0] == lines[0].strip() != ""
        style = None if PLAIN.fullmatch(value) else "|" if is_program else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    written = yaml.dump(document, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=False)
    return f"{WRITTEN}\n{written}"
