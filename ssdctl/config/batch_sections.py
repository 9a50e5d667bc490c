"""The tables `slurm` and `kubernetes` of the config: the jobs of batch engines."""

import functools
from typing import Annotated, Literal

from ssdctl.config.fields import Count, Section, setting

Words = tuple[str, ...]
_name = functools.partial(setting, metavar="NAME")
_pairs = functools.partial(setting, metavar="KEY=VALUE,...")
_amounts = functools.partial(setting, metavar="NAME=AMOUNT,...")
_options = functools.partial(setting, metavar="--OPTION,...")


class KubernetesConfig(Section, frozen=True):
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


class SlurmConfig(Section, frozen=True):
    """The job that `launch --launcher slurm` submits."""

    job_name: Annotated[str, _name("Job name")] = "ssdctl"
    partition: Annotated[str | None, _name("Partition")] = None
    account: Annotated[str | None, _name("Account to charge")] = None
    qos: Annotated[str | None, _name("Quality of service")] = None
    constraint: Annotated[str | None, setting("Features of the nodes", metavar="LIST")] = None
    time: Annotated[
        str | None,
        setting(
            "Time limit: minutes, H:MM:SS or D-HH:MM:SS [default: the partition's]", metavar="TIME"
        ),
    ] = None
    memory: Annotated[str | None, setting("Memory per node (400G)", metavar="SIZE")] = None
    gres: Annotated[
        str | None, setting("Slurm's name of the devices, or none [default: gpu or hpu]")
    ] = None
    signal_before: Annotated[
        Count, setting("Seconds before the time limit to stop", metavar="S")
    ] = 300
    requeue: Annotated[bool, setting("Requeue a job that reached its time limit")] = True
    options: Annotated[Words, _options("More options for sbatch (--exclusive)")] = ()
    srun_options: Annotated[Words, _options("More options for srun (--mpi=none)")] = ()
