"""Manifests, checked against schemas: golden/mpijob-v2beta1.json is that of kubeflow.org/v2beta1 MPIJobs,
golden/kubernetes-jobs.json that of batch/v1's JobSpec, without the parts of pods that the first one has.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Cli
from launch import plans
from launch.plans import IN_A_POD

from ssdctl.config.resolve import resolve
from ssdctl.config.sections import KubernetesConfig
from ssdctl.errors import UsageError
from ssdctl.launch.base import Job

GOLDEN = Path(__file__).parent.parent / "golden"
JOBS = json.loads((GOLDEN / "kubernetes-jobs.json").read_text())
REQUESTED = ("nodes", "restarts", "patch", "resume")  # not settings of Kubernetes
VOYAGER = """
[launch]
cluster = "voyager"
[kubernetes]
namespace = "me"
volumes = ["/ceph/me:/work", "coco:/data/coco:ro"]
install = "/work/ssdctl-1.0.0rc1-py3-none-any.whl"
[data]
root = "/data/coco"
[train]
out = "/work/runs/first"
decay_epochs = [40, 50]
"""


def strict(schema: Any) -> Any:
    """The schema, refusing what it does not name: Kubernetes would drop it in silence."""
    if isinstance(schema, list):
        return [strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


CRD = strict(json.loads((GOLDEN / "mpijob-v2beta1.json").read_text()))
del CRD["properties"]["metadata"]  # a plain object there: Kubernetes has its own rules
SCHEMAS = {"Job": {"properties": {"spec": strict(JOBS["job_spec"])}}, "MPIJob": CRD}


def validate(value: Any, schema: Any) -> None:
    """Unlike `jsonschema.validate`, this does not check the large schema itself."""
    jsonschema.validators.validator_for(schema)(schema).validate(value)


def checked(manifest: Any) -> Any:
    """A Job's pods are checked as those of an MPIJob: the schema contains all fields of a pod."""
    given = manifest
    if manifest["kind"] == "List":
        service, manifest = manifest["items"]
        assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
        name = manifest["metadata"]["name"]
        assert service["metadata"]["name"] == name
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": name}
        assert manifest["spec"]["template"]["spec"]["subdomain"] == name
        assert manifest["spec"]["completionMode"] == "Indexed"
    version = {"Job": "batch/v1", "MPIJob": "kubeflow.org/v2beta1"}[manifest["kind"]]
    assert manifest["apiVersion"] == version
    values = {key: value for key, value in manifest.items() if key != "metadata"}
    validate(values, SCHEMAS[manifest["kind"]])
    if manifest["kind"] == "Job":
        # Job controllers accept a podFailurePolicy only with pods that are never restarted.
        assert manifest["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    pod = CRD["properties"]["spec"]["properties"]["mpiReplicaSpecs"]["additionalProperties"]
    for template in templates(manifest):
        assert template["spec"]["enableServiceLinks"] is False
        validate(template, pod["properties"]["template"])
    return given


def plan_for(device: str, count: int, *command: str, **settings: Any) -> Job:
    launch = {name: settings.pop(name) for name in REQUESTED if name in settings}
    settings = {"image": "image:1", "install": "image", "volumes": ("runs:/runs",), **settings}
    launch |= {"launcher": "kubernetes", "run_folder": "/runs/first"}
    return plans.plan_for(device, count, *command, settings=KubernetesConfig(**settings), **launch)


def manifest_for(*arguments: Any, **settings: Any) -> Any:
    return checked(plan_for(*arguments, **settings).manifest)


def templates(manifest: Any) -> list[Any]:
    if manifest["kind"] == "List":
        manifest = manifest["items"][-1]
    spec = manifest["spec"]
    if manifest["kind"] == "Job":
        return [spec["template"]]
    return [r["template"] for r in spec["mpiReplicaSpecs"].values()]


def containers(manifest: Any) -> dict[str, Any]:
    return {c["name"]: c for t in templates(manifest) for c in t["spec"]["containers"]}


def planned(cli: Cli, *arguments: object) -> Any:
    result = cli("launch", *arguments[:2], "--dry-run", "--json", *arguments[2:]).expect(0)
    return json.loads(result.out)


def test_voyager(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the cluster's own example, in both pods, from two short tables."""
    monkeypatch.setenv("SSDCTL_TRAIN__SEED", "3")
    Path("ssdctl.toml").write_text(VOYAGER)
    plan = planned(cli, "--hpus", 16, "--nodes", 2, "--bs", 128, "--bf16")
    manifest = checked(plan["manifest"])
    spec, pods = manifest["spec"], containers(manifest)
    assert manifest["metadata"]["namespace"] == "me"
    assert spec["slotsPerWorker"] == 8
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    replicas = spec["mpiReplicaSpecs"]
    assert [replicas[name]["replicas"] for name in ("Launcher", "Worker")] == [1, 2]
    launcher, worker = (replicas[n]["template"]["spec"] for n in ("Launcher", "Worker"))
    kept = {"cpu": "95", "memory": "409Gi"}
    amounts = {"habana.ai/gaudi": "8", **kept, "hugepages-2Mi": "95000Mi"}
    assert pods["worker"]["resources"] == {"limits": amounts, "requests": amounts}
    assert worker["hostIPC"] is True
    # Quotas, and the Guaranteed class, look at the container that installs too.
    (install,) = worker["initContainers"]
    assert install["resources"] == {"limits": kept, "requests": kept}
    # Workers leave one core of a node, and mpirun only waits.
    few = {"limits": {"cpu": "2", "memory": "4Gi"}, "requests": {"cpu": "250m", "memory": "4Gi"}}
    (install,) = launcher["initContainers"]
    assert install["resources"] == pods["launcher"]["resources"] == few
    for pod in (launcher, worker):
        assert pod["nodeSelector"] == {"brightcomputing.com/node-category": "compute"}
        assert pod["volumes"][:2] == [
            {"name": "volume-0", "hostPath": {"path": "/ceph/me", "type": "Directory"}},
            {"name": "volume-1", "persistentVolumeClaim": {"claimName": "coco"}},
        ]
        mounted = {mount["name"] for mount in pods["worker"]["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}
    assert pods["launcher"]["volumeMounts"] == pods["worker"]["volumeMounts"]
    words = pods["launcher"]["command"]
    assert words[:4] == ["/opt/ssdctl/bin/python", "-m", "ssdctl", "launch"]
    assert {"--hpus=16", "--nodes=2", "--cores-per-node=48", "--bs=128", "--bf16"} <= set(words)
    # The file with the setting is on this machine, not in the pod.
    environment = {entry["name"]: entry["value"] for entry in pods["launcher"]["env"]}
    in_pod = resolve(environment=environment, default_file=False)
    assert (in_pod.train.decay_epochs, in_pod.train.out) == ((40.0, 50.0), "/work/runs/first")
    # A checkpoint's own dataset comes before that of a file.
    assert in_pod.explicit_settings() == {"train.seed"}
    # In its pod, the launcher trusts the workers' new keys.
    Path("ssdctl.toml").unlink()
    Path("hosts").write_text("job-worker-0.job.me.svc slots=8\njob-worker-1.job.me.svc slots=8\n")
    words = [word.replace("/etc/mpi/hostfile", "hosts") for word in words[4:]]
    assert "StrictHostKeyChecking" not in planned(cli, *words)["command"]
    monkeypatch.setenv("K_MPI_JOB_ROLE", "launcher")  # the operator's word for "in its pod"
    line = planned(cli, *words)["command"]
    ssh = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectionAttempts=30"
    assert f"--mca plm_rsh_args '{ssh}' --hostfile" in line


def test_workers_install_again_and_save_when_their_node_is_drained() -> None:
    """The launcher waits for all workers: one failed download must not fail a worker."""
    sidecar = {"name": "sidecar", "image": "b"}
    patch = {"spec": {"containers": [sidecar], "initContainers": [sidecar]}}
    manifest = manifest_for("hpu", 16, nodes=2, install="a.whl", patch=patch)
    replicas = manifest["spec"]["mpiReplicaSpecs"]
    policies = {name: replica["restartPolicy"] for name, replica in replicas.items()}
    assert policies == {"Launcher": "Never", "Worker": "OnFailure"}
    for template in templates(manifest):
        assert "restartPolicy" not in template["spec"]  # the operator warns of a second policy
        assert len(template["spec"]["containers"]) == 2
    worker = containers(manifest)["worker"]
    asks, waits = worker["lifecycle"]["preStop"]["exec"]["command"][-1].split("; ", 1)
    assert asks == "pkill -USR1 -f '[-]m ssdctl train'"
    assert waits.startswith("while pgrep")
    assert worker["readinessProbe"]


@pytest.mark.parametrize("modules", ["", "4,5"])
def test_sshd_passes_the_cards_of_a_part_of_a_node_on(modules: str) -> None:
    """Its sessions have none of the container's variables."""
    manifest = manifest_for("hpu", 4, nodes=2, install="a.whl")
    (*shell, script) = containers(manifest)["worker"]["command"]
    script = script.partition(" && exec ")[2].replace("/usr/sbin/sshd", "printf '%s\\n'")
    environment = {**os.environ, **({"HABANA_VISIBLE_MODULES": modules} if modules else {})}
    done = subprocess.run([*shell, script], env=environment, capture_output=True, text=True)
    expected = ["-De", "-o", "StrictModes=no"]
    expected += ["-o", f"SetEnv=HABANA_VISIBLE_MODULES={modules}"] if modules else []
    assert done.stdout.split("\n")[:-1] == expected


def test_settings_of_shared_clusters(cli: Cli) -> None:
    Path("patch.yaml").write_text(
        "metadata: {annotations: {a/b: c d, on: 12:30, day: 2026-01-02}}\nspec:\n  hostNetwork: true\n  priorityClassName: high\n  tolerations: [{key: spot, operator: Exists}]\n"
        "  containers: [{name: main, securityContext: {runAsUser: 1e3}}]\n"
        "  volumes: [{name: v, configMap: {name: on, defaultMode: 0644}}]\n"
        "job: {ttlSecondsAfterFinished: 60}\n"
    )
    queue = "kueue.x-k8s.io/queue-name"
    more = [f"labels={queue}=gpus", "patch=patch.yaml"]
    words = [word for entry in more for word in ("--set", f"kubernetes.{entry}")]
    manifest = checked(planned(cli, "--gpus", 4, *IN_A_POD[2:], *words)["manifest"])
    (template,) = templates(manifest)
    assert manifest["metadata"]["labels"][queue] == template["metadata"]["labels"][queue] == "gpus"
    given = {"a/b": "c d", "on": "12:30", "day": "2026-01-02"}
    assert given.items() <= template["metadata"]["annotations"].items()
    pod = template["spec"]
    assert (pod["priorityClassName"], pod["hostNetwork"]) == ("high", True)
    assert [t["key"] for t in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    (container,) = pod["containers"]
    assert json.dumps(container["securityContext"]) == '{"runAsUser": 1000}'  # not 1000.0
    assert container["image"] == "a"
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 60
    arguments = ["launch", "--gpus", 4, *IN_A_POD[2:], *words, "--dry-run"]
    wrong = {"spec: [": "patch.yaml", "pod: {}": "patch.yaml", "spec: !!int a": "patch.yaml",
             "spec: {containers: }": "spec.containers", "spec: {volumes: {}}": "spec.volumes",
             "job: 3": "job", "spec: {containers: [{name: main, env: }]}": "spec.containers.main.env",
             "spec: {a: [.nan]}": "spec.a[0]", "spec: {1: b}": "spec.1", "spec: &a {a: *a}": "YAML",
             "metadata: {a: !!binary YQ==}": "metadata.a",
             "spec:\n  a: 1\n  a: 2": "a occurs again"}  # fmt: skip
    for text, place in wrong.items():
        Path("patch.yaml").write_text(text)
        cli(*arguments).expect(2, place)
    for text in ("", "metadata:\nspec:\n"):
        Path("patch.yaml").write_text(text)
        cli(*arguments).expect(0)


def test_only_crashes_are_tried_again() -> None:
    manifest = manifest_for("cuda", 4, nodes=2, install="a.whl", restarts=3)
    spec = manifest["items"][-1]["spec"]
    assert spec["backoffLimit"] == 6  # both pods fail with one
    fails, ignores = spec["podFailurePolicy"]["rules"]
    codes = fails.pop("onExitCodes")
    assert fails == {"action": "FailJob"}
    # pip's exit codes are not ssdctl's: the container that installs may try again.
    assert codes == {"containerName": "main", "operator": "In", "values": [2, 3, 4, 5, 6, 7]}
    condition = {"type": "DisruptionTarget", "status": "True"}
    assert ignores == {"action": "Ignore", "onPodConditions": [condition]}
    assert "podFailurePolicy" not in manifest_for("cuda", 4)["spec"]


@pytest.mark.parametrize(
    ("command", "settings", "words"),
    [
        (("train",), {"volumes": ()}, "persistent volume .*NAME_OF_A_CLAIM"),
        (("train",), {"volumes": ("runs:/runs:ro",)}, "persistent volume"),
        (("download",), {}, "--dest .* persistent volume"),
        (("demo",), {}, "--out .* persistent volume.* --out /runs/demo"),
        (("fetch-weights",), {}, "--dest .* persistent volume"),
        (("download", "--dest=/runs/../tmp"), {}, "persistent volume"),
        (("prepare", "--store=/tmp/a"), {}, "--store /tmp/a .*persistent volume"),
        (("evaluate", "/runs/a", "--suspects", "/tmp/a"), {}, "--suspects .*persistent volume"),
        (("train",), {"env": ("A=\udcff",)}, "UTF-8"),
        # A pod that is started again must resume by itself.
        (("train",), {"restarts": 1, "resume": "/runs/a.pt"}, "--resume /runs/a.pt"),
        (("train",), {"image": None}, "kubernetes.image"),
        (("train",), {"install": None}, "kubernetes.install is not set"),
        (("train",), {"volumes": ("runs:/runs", "a:/b/../c")}, "SOURCE:/PATH"),
        (("train",), {"env": ("A",)}, "kubernetes.env"),
    ],
)
def test_what_is_refused(command: tuple[str, ...], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan_for("cpu", 1, *command, **settings)
    assert re.search(words, f"{refused.value} {refused.value.hint}")
