"""Manifests: checked against the MPI operator's own schema, and read back as Kubernetes reads them.

There is no cluster: `kubectl` is a small program that records its calls.
golden/mpijob-v2beta1.json is the schema of kubeflow.org/v2beta1 MPIJobs, golden/kubernetes-jobs.json
that of TrainJobs (Kubeflow Trainer 2.3) and of batch/v1's JobSpec, as its runtimes embed it: without
descriptions, and without the parts of pods that the first one has.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from conftest import Result
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.config.sections.launch import LaunchConfig
from ssdctl.errors import UsageError
from ssdctl.launch._pod_values import PLAIN
from ssdctl.launch.base import LaunchPlan, LaunchRequest, Node, make_plan
from ssdctl.launch.kubernetes import Settings

Cli = Callable[..., Result]


GOLDEN = Path(__file__).parent.parent / "golden"


JOBS = json.loads((GOLDEN / "kubernetes-jobs.json").read_text())


ARGUMENTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))


VOYAGER = """
[launch]
cluster = "voyager"
[kubernetes]
namespace = "me"
volumes = ["/ceph/me:/work", "coco:/data/coco:ro"]
install = "/work/ssdctl-0.1.0-py3-none-any.whl"
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


@pytest.fixture(scope="module")
def crd() -> Any:
    schema = json.loads((GOLDEN / "mpijob-v2beta1.json").read_text())
    del schema["properties"]["metadata"]  # a plain object there: Kubernetes has its own rules
    return strict(schema)


def validator(schema: Any) -> Any:
    """A validator; unlike `jsonschema.validate`, it does not check the large schema itself."""
    return jsonschema.validators.validator_for(schema)(schema)


def check(manifest: Any, crd: Any) -> None:
    """A Job's pods are checked as those of an MPIJob: the schema contains all fields of a pod."""
    if manifest["kind"] == "List":
        service, manifest = manifest["items"]
        assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
        name = manifest["metadata"]["name"]
        assert service["metadata"]["name"] == name
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": name}
        assert manifest["spec"]["template"]["spec"]["subdomain"] == name
        assert manifest["spec"]["completionMode"] == "Indexed"
    rest = {key: value for key, value in manifest.items() if key != "metadata"}
    pod = crd["properties"]["spec"]["properties"]["mpiReplicaSpecs"]["additionalProperties"]
    pod = pod["properties"]["template"]
    if manifest["kind"] == "MPIJob":
        validator(crd).validate(rest)
    elif manifest["kind"] == "TrainJob":
        assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        validator(strict(JOBS["trainjob"])).validate(rest)
        validator(pod).validate(templates(manifest)[0])
    else:
        assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
        validator(strict(JOBS["job_spec"])).validate(manifest["spec"])
        # Job controllers accept a podFailurePolicy only with pods that are never restarted.
        assert manifest["spec"]["template"]["spec"]["restartPolicy"] == "Never"
        validator(pod).validate(manifest["spec"]["template"])


def plan_for(
    device: str, count: int, *command: str, nodes: int = 1, restarts: int = 0, **settings: Any
) -> LaunchPlan:
    settings = {"image": "image:1", "install": "image", "volumes": ("runs:/runs",), **settings}
    request = LaunchRequest(
        device=device,
        count=count,
        command=command or ("train",),
        config=LaunchConfig(launcher="kubernetes", nodes=nodes, restarts=restarts),
        python="/home/me/venv/bin/python",
        table=Settings(**settings),
        run_folder="/runs/first",
    )
    return make_plan(request, Node(2, 1))


def templates(manifest: Any) -> list[Any]:
    if manifest["kind"] == "List":
        manifest = manifest["items"][-1]
    spec = manifest["spec"]
    if manifest["kind"] == "Job":
        return [spec["template"]]
    if manifest["kind"] == "TrainJob":
        (patch,) = spec["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return [job["template"]["spec"]["template"]]
    return [r["template"] for r in spec["mpiReplicaSpecs"].values()]


def containers(manifest: Any) -> dict[str, Any]:
    return {c["name"]: c for t in templates(manifest) for c in t["spec"]["containers"]}


def planned(cli: Cli, *arguments: object) -> Any:
    result = cli("launch", *arguments[:2], "--dry-run", "--json", *arguments[2:])
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_voyager(cli: Cli, crd: Any) -> None:
    """The values of the cluster's own example, in both pods, from two short tables."""
    Path("ssdctl.toml").write_text(VOYAGER)
    manifest = planned(cli, "--hpus", 16, "--nodes", 2, "--bs", 128, "--bf16")["manifest"]
    check(manifest, crd)
    spec = manifest["spec"]
    assert manifest["metadata"]["namespace"] == "me"
    assert spec["slotsPerWorker"] == 8
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    replicas = spec["mpiReplicaSpecs"]
    assert [replicas[name]["replicas"] for name in ("Launcher", "Worker")] == [1, 2]
    worker = replicas["Worker"]["template"]["spec"]
    amounts = {
        "habana.ai/gaudi": "8",
        "cpu": "95",
        "memory": "409Gi",
        "hugepages-2Mi": "95000Mi",
    }
    pods = containers(manifest)
    assert pods["worker"]["resources"] == {"limits": amounts, "requests": amounts}
    assert worker["hostIPC"] is True
    # Quotas, and the Guaranteed class, look at the container that installs too.
    (install,) = worker["initContainers"]
    kept = {"cpu": "95", "memory": "409Gi"}
    assert install["resources"] == {"limits": kept, "requests": kept}
    # Workers leave one core of a node, and mpirun only waits.
    assert pods["launcher"]["resources"]["requests"] == {"cpu": "250m", "memory": "4Gi"}
    assert pods["launcher"]["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}
    (install,) = replicas["Launcher"]["template"]["spec"]["initContainers"]
    assert install["resources"] == pods["launcher"]["resources"]
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        selector = {"brightcomputing.com/node-category": "compute"}
        assert pod["nodeSelector"] == selector
        assert pod["volumes"][:2] == [
            {"name": "volume-0", "hostPath": {"path": "/ceph/me", "type": "Directory"}},
            {"name": "volume-1", "persistentVolumeClaim": {"claimName": "coco"}},
        ]
    assert pods["launcher"]["volumeMounts"] == pods["worker"]["volumeMounts"]
    words = pods["launcher"]["command"]
    assert words[:4] == ["/opt/ssdctl/bin/python", "-m", "ssdctl", "launch"]
    assert {"--hpus=16", "--nodes=2", "--cores-per-node=48", "--bs=128", "--bf16"} <= set(words)
    # The file with the setting is on this machine, not in the pod.
    environment = {entry["name"]: entry["value"] for entry in pods["launcher"]["env"]}
    assert environment["SSDCTL_TRAIN__DECAY_EPOCHS"] == "40.0,50.0"
    assert environment["SSDCTL_TRAIN__OUT"] == "/work/runs/first"


def test_what_the_launcher_pod_runs_is_a_launch(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the operator's host file it becomes the mpirun line of two Gaudi nodes."""
    Path("ssdctl.toml").write_text(VOYAGER)
    manifest = planned(cli, "--hpus", 16, "--nodes", 2, "--bs", 128)["manifest"]
    Path("ssdctl.toml").unlink()
    words = containers(manifest)["launcher"]["command"][3:]
    hosts = tmp_path / "hostfile"
    hosts.write_text("job-worker-0.job.me.svc slots=8\njob-worker-1.job.me.svc slots=8\n")
    words = [w.replace("/etc/mpi/hostfile", str(hosts)) for w in words]
    line = planned(cli, *words[1:])["command"]
    assert "--map-by ppr:8:node:PE=6 --rank-by slot" in line
    assert "-x MASTER_ADDR=job-worker-0.job.me.svc" in line
    assert "StrictHostKeyChecking" not in line
    assert line.endswith("-m ssdctl train --bs=128 --device=hpu")
    monkeypatch.setenv("K_MPI_JOB_ROLE", "launcher")  # the operator's word for "in its pod"
    argv = planned(cli, *words[1:])["argv"]
    ssh = argv[argv.index("--mca") : argv.index("--hostfile")]
    assert ssh[:2] == ["--mca", "plm_rsh_args"]
    assert ssh[2:] == [
        "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectionAttempts=30"
    ]


def test_one_pod_for_a_download(cli: Cli, crd: Any) -> None:
    Path("ssdctl.toml").write_text(VOYAGER + "[download]\nconnections = 16\n")
    manifest = planned(cli, "--cpus", 1, "--", "download", "--dest", "/work/coco")["manifest"]
    check(manifest, crd)
    (container,) = containers(manifest).values()
    assert container["command"][1:] == ["-m", "ssdctl", "download", "--dest", "/work/coco"]
    assert {"name": "SSDCTL_DOWNLOAD__CONNECTIONS", "value": "16"} in container["env"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}


@pytest.mark.parametrize(
    ("device", "count", "nodes", "kind", "resource"),
    [
        ("hpu", 8, 1, "Job", "habana.ai/gaudi"),
        ("hpu", 16, 2, "MPIJob", "habana.ai/gaudi"),
        ("hpu", 1, 1, "Job", "habana.ai/gaudi"),
        ("cuda", 4, 1, "Job", "nvidia.com/gpu"),
        ("cuda", 16, 2, "List", "nvidia.com/gpu"),
        ("xla", 4, 1, "Job", "google.com/tpu"),
        ("xla", 8, 2, "List", "google.com/tpu"),
        ("cpu", 2, 1, "Job", None),
    ],
)
def test_kinds(
    device: str, count: int, nodes: int, kind: str, resource: str | None, crd: Any
) -> None:
    plan = plan_for(device, count, nodes=nodes, install="a.whl", host_ipc=True, pull_secret="s")
    manifest = plan.manifest
    assert manifest is not None
    check(manifest, crd)
    assert manifest["kind"] == kind
    limits = list(containers(manifest).values())[-1]["resources"].get("limits", {})
    assert limits == ({resource: str(count // nodes)} if resource else {})
    with_devices = templates(manifest)[-1]
    expected = [{"key": resource, "operator": "Exists"}] if resource else None
    assert with_devices["spec"].get("tolerations") == expected
    for template in templates(manifest):
        for marks in (template["metadata"]["labels"], template["metadata"]["annotations"]):
            assert marks["sidecar.istio.io/inject"] == "false"


def test_workers_install_again_and_save_when_their_node_is_drained() -> None:
    """The launcher waits for all workers: one failed download must not fail a worker."""
    manifest = plan_for("hpu", 16, nodes=2, install="a.whl").manifest
    assert manifest is not None
    replicas = manifest["spec"]["mpiReplicaSpecs"]
    policies = {name: replica["restartPolicy"] for name, replica in replicas.items()}
    assert policies == {"Launcher": "Never", "Worker": "OnFailure"}
    # The operator warns of a second policy in the template.
    assert all("restartPolicy" not in template["spec"] for template in templates(manifest))
    worker = containers(manifest)["worker"]
    asks, waits = worker["lifecycle"]["preStop"]["exec"]["command"][-1].split("; ", 1)
    assert asks == "pkill -USR1 -f '[-]m ssdctl train'"
    assert waits.startswith("while pgrep")


@pytest.mark.parametrize("modules", ["", "4,5"])
def test_sshd_passes_the_cards_of_a_part_of_a_node_on(modules: str) -> None:
    """Its sessions have none of the container's variables."""
    manifest = plan_for("hpu", 4, nodes=2, install="a.whl").manifest
    assert manifest is not None
    (*shell, script) = containers(manifest)["worker"]["command"]
    script = script.partition(" && exec ")[2].replace("/usr/sbin/sshd", "printf '%s\\n'")
    environment = {**os.environ, **({"HABANA_VISIBLE_MODULES": modules} if modules else {})}
    done = subprocess.run([*shell, script], env=environment, capture_output=True, text=True)
    expected = ["-De", "-o", "StrictModes=no"]
    expected += ["-o", f"SetEnv=HABANA_VISIBLE_MODULES={modules}"] if modules else []
    assert done.stdout.split("\n")[:-1] == expected


def test_the_pods_of_several_nodes_meet_at_pod_0(crd: Any) -> None:
    manifest = plan_for("cuda", 16, nodes=2, name="mine", restarts=1).manifest
    check(manifest, crd)
    spec = manifest["items"][-1]["spec"]  # type: ignore[index]
    assert [spec[n] for n in ("completions", "parallelism", "backoffLimit")] == [2, 2, 2]
    command = containers(manifest)["main"]["command"]
    assert command[3:6] == ["launch", "--gpus=16", "--launcher=torchrun"]
    assert {"--nodes=2", "--rdzv-endpoint=mine-0.mine:29400"} <= set(command)


def test_gaudi_cards_of_one_node_are_started_by_mpirun_in_the_pod() -> None:
    command = containers(plan_for("hpu", 8).manifest)["main"]["command"]
    assert {"--hpus=8", "--launcher=mpirun", "--rank-by=slot"} <= set(command)
    assert not any(word.startswith("--hostfile") for word in command)


def test_a_train_job(crd: Any) -> None:
    settings = {"kind": "TrainJob", "resources": ("cpu=8",), "service_account": "me"}
    manifest = plan_for("cuda", 16, nodes=2, install="a.whl", **settings).manifest
    assert manifest is not None
    check(manifest, crd)
    spec = manifest["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "8"}
    # No init container: the installation becomes the launch.
    assert trainer["command"][:2] == ["python3", "-c"]
    after = trainer["command"].index("a.whl") + 1
    assert trainer["command"][after : after + 4] == [
        "/opt/ssdctl/bin/python",
        "-m",
        "ssdctl",
        "launch",
    ]
    assert containers(manifest)["node"]["volumeMounts"][0]["mountPath"] == "/runs"


def test_settings_of_shared_clusters(cli: Cli, crd: Any) -> None:
    Path("patch.yaml").write_text(
        "spec:\n  hostNetwork: true\n  tolerations: [{key: spot, operator: Exists}]\n"
        "  containers: [{name: main, securityContext: {runAsUser: 1000}}]\n"
        "job: {ttlSecondsAfterFinished: 60}\n"
    )
    queue = "kueue.x-k8s.io/queue-name"
    more = [
        f"labels={queue}=gpus",
        "annotations=a/b=c d",
        "priority_class=high",
        "patch=patch.yaml",
    ]
    words = [word for entry in more for word in ("--set", f"kubernetes.{entry}")]
    manifest = planned(cli, "--gpus", 4, *IN_A_POD[2:], *words)["manifest"]
    check(manifest, crd)
    (template,) = templates(manifest)
    for metadata in (manifest["metadata"], template["metadata"]):
        assert metadata["labels"][queue] == "gpus"
        assert metadata["annotations"]["a/b"] == "c d"
    pod = template["spec"]
    assert (pod["priorityClassName"], pod["hostNetwork"]) == ("high", True)
    assert [t["key"] for t in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {"runAsUser": 1000}
    assert container["image"] == "a"
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 60
    refused = cli("launch", "--gpus", 4, *IN_A_POD[2:], *words, "--set", "kubernetes.kind=TrainJob")
    assert refused.code == 2
    assert "hostNetwork, priority_class" in " ".join(refused.err.split())


@pytest.mark.parametrize("text", ["spec: [", "[]", "pod: {}", "spec: 1"])
def test_patches_that_are_refused(cli: Cli, text: str) -> None:
    Path("patch.yaml").write_text(text)
    result = cli("launch", *IN_A_POD, "--dry-run", "--set", "kubernetes.patch=patch.yaml")
    assert result.code == 2
    assert "patch.yaml" in result.err


def test_a_dry_run_shows_the_manifest_with_what_is_missing(cli: Cli) -> None:
    result = cli("launch", "--hpus", 8, "--cluster", "voyager", "--dry-run")
    assert result.code == 0
    assert yaml.safe_load(result.out)["kind"] == "Job"
    for word in ("kubernetes.install", "--out", "--data"):
        assert word in result.err
    assert cli("launch", "--hpus", 8, "--cluster", "voyager", "--write", "job.yaml").code == 2


def test_an_image_of_an_old_torch() -> None:
    image = "vault.habana.ai/gaudi-docker/1.13.0/habanalabs/pytorch-installer-2.1.0:latest"
    (warning, *_) = plan_for("hpu", 8, image=image).warnings
    assert "torch 2.1" in warning
    assert not any(
        "torch" in w for w in plan_for("hpu", 8, image=image.replace("2.1", "2.6")).warnings
    )


def test_only_crashes_are_tried_again() -> None:
    spec = plan_for("cuda", 4, install="a.whl", restarts=3).manifest["spec"]  # type: ignore[index]
    assert spec["backoffLimit"] == 3
    fails, ignores = spec["podFailurePolicy"]["rules"]
    codes = fails.pop("onExitCodes")
    assert fails == {"action": "FailJob"}
    # pip's exit codes are not ssdctl's: the container that installs may try again.
    assert codes == {"containerName": "main", "operator": "In", "values": [2, 3, 4, 5, 6, 7]}
    condition = {"type": "DisruptionTarget", "status": "True"}
    assert ignores == {"action": "Ignore", "onPodConditions": [condition]}
    assert "podFailurePolicy" not in plan_for("cuda", 4).manifest["spec"]  # type: ignore[index]


def test_tpus_take_labels(cli: Cli) -> None:
    arguments = ["launch", "--tpus", 4, *IN_A_POD[2:], "--dry-run"]
    result = cli(*arguments)
    assert result.code == 0
    assert "gke-tpu-accelerator and cloud.google.com/gke-tpu-topology" in " ".join(
        result.err.split()
    )
    labels = "accelerator=tpu-v5-lite-podslice", "topology=2x2"
    labels = [f"cloud.google.com/gke-tpu-{label}" for label in labels]
    result = cli(*arguments, "--set", f"kubernetes.node_selector={','.join(labels)}")
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(
    ("command", "settings", "words"),
    [
        (("train",), {"volumes": ()}, "persistent volume"),
        (("train",), {"volumes": ("runs:/run",)}, "persistent volume"),
        (("train",), {"volumes": ("runs:/runs:ro",)}, "persistent volume"),
        (("download",), {}, "--dest .* persistent volume"),
        (("download", "--dest=/runs/../tmp"), {}, "persistent volume"),
        (("predict", "--out", "/tmp/x"), {}, "persistent volume"),
        (("train",), {"image": None}, "kubernetes.image"),
        (("train",), {"install": None}, "kubernetes.install is not set"),
        (("train",), {"volumes": ("runs",)}, "SOURCE:/PATH"),
        (("train",), {"volumes": ("runs:/runs", "a:/b/../c")}, "SOURCE:/PATH"),
        (("train",), {"resources": ("cpu=a lot",)}, "kubernetes.resources"),
        (("train",), {"env": ("1=2",)}, "kubernetes.env"),
        (("train",), {"namespace": "a\nb"}, "kubernetes.namespace"),
        (("train",), {"name": "-a"}, "kubernetes.name"),
        (("train",), {"node_selector": ("a=$(b)",)}, "kubernetes.node_selector"),
        (("train",), {"image": "a; b"}, "kubernetes.image"),
        (("train",), {"service_account": "A"}, "kubernetes.service_account"),
    ],
)
def test_what_is_refused(command: tuple[str, ...], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_for("cpu", 1, *command, **settings)


def test_ranks_of_a_pod_have_shared_memory_and_variables_travel() -> None:
    """Container runtimes give 64 MB; mpirun passes on variables only by name."""
    (single,) = containers(plan_for("cuda", 1).manifest).values()
    (several,) = containers(plan_for("cuda", 2).manifest).values()
    assert "/dev/shm" not in [m["mountPath"] for m in single["volumeMounts"]]
    assert "/dev/shm" in [m["mountPath"] for m in several["volumeMounts"]]
    plan = plan_for("hpu", 16, nodes=2, env=("TOKEN=1",))
    assert "--export-env=TOKEN" in containers(plan.manifest)["launcher"]["command"]


def test_a_pod_that_is_started_again_must_resume_by_itself(cli: Cli) -> None:
    resumed = ["--restarts", 1, "--resume", "/runs/a.pt", "--dry-run"]
    result = cli("launch", *IN_A_POD, *resumed)
    assert result.code == 2
    assert "--resume /runs/a.pt and --restarts" in " ".join(result.err.split())
    assert cli("launch", *IN_A_POD, *resumed[2:]).code == 0


@given(ARGUMENTS, st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_text_survives_yaml_and_kubernetes(arguments: list[str], value: str) -> None:
    """Kubernetes replaces $(NAME) and turns $$ into $; YAML readers guess numbers and dates."""
    arguments = ["a" + argument for argument in arguments]
    plan = plan_for("cpu", 1, "evaluate", *arguments, env=(f"NAME={value}",))
    assert plan.text is not None
    read = yaml.safe_load(plan.text)
    assert read == plan.manifest
    (container,) = containers(read).values()
    passed = [word.replace("$$", "$") for word in container["command"]]
    assert passed[4:] == arguments
    assert container["env"][-1]["value"].replace("$$", "$") == value
    assert all("$" not in word.replace("$$", "") for word in container["command"])
    for token in yaml.scan(plan.text):
        if isinstance(token, yaml.ScalarToken) and token.plain and not token.value.isdigit():
            assert PLAIN.fullmatch(token.value)


NAMES = {  # a value that is accepted, and the settings' other form: a list
    "name": ("job", False),
    "namespace": ("me", False),
    "image": ("host:5000/image:1", False),
    "service_account": ("trainer", False),
    "pull_secret": ("secret", False),
    "node_selector": ("kind=gpu", True),
    "resources": ("memory=8Gi", True),
    "env": ("A=b", True),
    "volumes": ("claim:/data:ro", True),
    "install": ("/runs/x.whl", False),
    "python": ("python3", False),
}


HOSTILE = st.sampled_from(
    ["\n", "\n- ", ": ", " #", "'", '"', "{", "&a ", "*a", "!!", "%", "`", "$(A)", "\t", "\x85",
     "\u2028", "\u202e", "\x1b[2J", "\ufeff", "---\n", "...", "yes", "null", "1e3", "0x1f", "~"]
)  # fmt: skip


@given(
    st.sampled_from(sorted(NAMES)), st.lists(HOSTILE, min_size=1, max_size=3), st.integers(0, 20)
)
def test_hostile_names_are_refused_or_survive_yaml(name: str, parts: list[str], at: int) -> None:
    """Nothing but the value of that setting changes, whatever is in it."""
    good, is_list = NAMES[name]
    hostile = good[:at] + "".join(parts) + good[at:]
    volumes = ("runs:/runs",)

    def plan(value: str) -> LaunchPlan:
        settings: dict[str, Any] = {name: (value,) if is_list else value, "volumes": volumes}
        if name == "volumes":
            settings["volumes"] = (*volumes, value)
        return plan_for("cpu", 1, **{"install": "image", **settings})

    made: LaunchPlan | None = None
    with contextlib.suppress(UsageError):
        made = plan(hostile)
    if made is None:
        return
    assert made.text is not None
    assert made.text.isascii()
    read = yaml.safe_load(made.text)
    assert read == made.manifest
    assert list(yaml.safe_load_all(made.text)) == [read]
    assert _shape(read) == _shape(plan(good).manifest)


def _shape(value: Any) -> Any:
    """Return the keys and list lengths of a manifest; those of env, resources and labels differ."""
    if isinstance(value, dict):
        free = ("limits", "requests", "nodeSelector")
        return {k: len(v) if k in free else _shape(v) for k, v in value.items()}
    return [_shape(v) for v in value] if isinstance(value, list) else type(value)


def in_pods(
    cli: Cli,
    *options: object,
    install: str = "ssdctl==0.1.0",
    show: tuple[str, ...] = ("--dry-run",),
) -> Result:
    """Plan a training in pods that install ssdctl, with volumes at /runs and /data/coco."""
    return cli(
        *("launch", "--cpus", 1, "--launcher", "kubernetes", "--out", "/runs/first", *show),
        *("--set", "kubernetes.image=a", "--set", f"kubernetes.install={install}"),
        *("--set", 'kubernetes.volumes=["claim:/runs", "/nfs/coco:/data/coco:ro"]'),
        *options,
    )


def test_the_default_dataset_of_pods_is_on_its_volume(cli: Cli) -> None:
    result = in_pods(cli)
    assert result.code == 0, result.err
    mounts = yaml.safe_load(result.out)["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert [m["mountPath"] for m in mounts][:2] == ["/runs", "/data/coco"]
    assert in_pods(cli, "--init", "nvidia-ssd300-coco", "--store", "/runs/store").code == 0
    assert in_pods(cli, "--init", "hf://org/name", "--mllog", "/runs/log").code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "/elsewhere/parts"], ["--data /elsewhere/parts", "SOURCE:/elsewhere/parts"]),
        (["--init", "/weights/a.pt"], ["--init /weights/a.pt", "SOURCE:/weights"]),
        (["--init", "a.pt"], ["--init a.pt", "--init /runs/"]),
        (["--resume", "a.pt"], ["--resume a.pt"]),
        (["--store", "/fast"], ["--store /fast"]),
        (["--mllog", "/data/coco/log"], ["--mllog /data/coco/log"]),
        (["--backbone-weights", "/w/r.pth"], ["--backbone-weights /w/r.pth"]),
        ([], ["kubernetes.install=/w/a.whl"]),
    ],
)
def test_paths_that_the_pods_lack(cli: Cli, options: list[str], words: list[str]) -> None:
    install = "/w/a.whl" if "kubernetes.install" in words[0] else "ssdctl==0.1.0"
    shown = in_pods(cli, *options, install=install)
    refused = in_pods(cli, *options, install=install, show=("--write", "job.yaml"))
    assert (shown.code, refused.code) == (0, 2)
    assert not Path("job.yaml").exists()
    for word in words:
        assert word in " ".join(shown.err.split())
        assert word in " ".join(refused.err.split())


def test_a_list_of_volumes_as_config_show_prints_it(cli: Cli) -> None:
    shown = json.loads(
        cli("config", "show", "--json", "--set", "kubernetes.volumes=/a:/b,/c:/d").out
    )["kubernetes.volumes"]["value"]
    again = cli("config", "show", "--json", "--set", f"kubernetes.volumes={json.dumps(shown)}")
    assert json.loads(again.out)["kubernetes.volumes"]["value"] == ["/a:/b", "/c:/d"]
    result = in_pods(cli, "--set", "kubernetes.volumes=CLAIM:/x")
    assert result.code == 2
    assert "kubernetes.volumes" in result.err


def test_a_name_that_is_not_utf8(cli: Cli) -> None:
    """As a shell passes it: by surrogates, which YAML does not have."""
    result = cli("launch", *IN_A_POD, "--data", "/runs/a\udcff", "--dry-run")
    assert result.code == 2
    assert "UTF-8" in result.err


KUBECTL = """#!{python}
import json, os, sys
from pathlib import Path
here = Path({folder!r})
with (here / "asked").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
verb = sys.argv[1]
if verb == "create":
    (here / "manifest").write_text(sys.stdin.read())
    print("job.batch/ssdctl-1")
elif verb == "logs":
    print("step 1 of " + sys.argv[-1])
elif sys.argv[2] == "pods":
    end = {{"state": {{"terminated": {{"exitCode": {code}}}}}}}
    status = {{"phase": "Failed", "containerStatuses": [end]}}
    print(json.dumps({{"items": [{{"metadata": {{"name": "pod-1"}}, "status": status}}]}}))
else:
    done = "Complete" if {code} == 0 else "Failed"
    print(json.dumps({{"status": {{"conditions": [{{"type": done, "status": "True"}}]}}}}))
"""


IN_A_POD = ["--cpus", 1, "--launcher", "kubernetes", "--out", "/runs/first"]


IN_A_POD += ["--set", "kubernetes.image=a", "--set", "kubernetes.install=image"]


IN_A_POD += ["--set", "kubernetes.volumes=claim:/runs", "--set", "kubernetes.namespace=me"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (137, 8)])
def test_submit_and_follow(
    code: int, expected: int, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pod prints cannot control the terminal."""
    foreign = "loss 1.5\\tok\\r\\n\\x1b]0;title\\x07\\x1b[2J \u202e\\x9b2J"
    program = KUBECTL.format(python=sys.executable, folder=str(tmp_path), code=code)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(program.replace("step 1 of ", foreign), encoding="utf-8")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent))
    monkeypatch.setenv("PYTHONUTF8", "1")
    result = cli("launch", *IN_A_POD)
    assert (result.code, result.out) == (0, "job.batch/ssdctl-1\n")
    assert yaml.safe_load((tmp_path / "manifest").read_text())["kind"] == "Job"
    shown = "loss 1.5\tok\n\\x1b]0;title\\x07\\x1b[2J \\u202e\\x9b2Jpod-1\n"
    result = cli("launch", *IN_A_POD, "--wait")
    assert (result.code, result.out) == (expected, shown)
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert ["logs", "-n", "me", "--follow", "pod-1"] in asked
    result = cli("launch", *IN_A_POD, "--wait", "--json")
    assert json.loads(result.out)["exit_code"] == expected  # nothing else is on stdout
    assert shown in result.err


def test_the_written_manifest_equals_the_printed_one(cli: Cli) -> None:
    arguments = ["launch", *IN_A_POD, "--set", "kubernetes.name=mine"]
    output = cli(*arguments, "--dry-run").out
    assert cli(*arguments, "--write", "job.yaml").code == 0
    assert Path("job.yaml").read_text() == output
    assert not os.access("job.yaml", os.X_OK)
