"""Settings of `ssdctl launch`: local launchers, Slurm and Kubernetes."""

from typing import Annotated, Literal

from ssdctl.config.fields import ClusterName, Count, NonNegativeInt, Section, setting


class LaunchConfig(Section, frozen=True):
    """Settings of `ssdctl launch`: the launcher and how ranks share nodes."""

    launcher: Annotated[
        Literal["auto", "torchrun", "mpirun", "slurm", "kubernetes"],
        setting(
            "Program that starts the ranks (auto: by device)",
            panel="Launch",
        ),
    ] = "auto"
    cluster: Annotated[
        ClusterName | None,
        setting("Start from the settings of a known cluster", panel="Launch"),
    ] = None
    nodes: Annotated[
        Count,
        setting(
            "Number of machines that share the devices",
            metavar="N",
            panel="Launch",
            aliases=("--nnodes", "--num-nodes"),
        ),
    ] = 1
    restarts: Annotated[
        NonNegativeInt,
        setting(
            "Maximum automatic restarts after a crash",
            metavar="N",
            panel="Launch",
        ),
    ] = 0
    hostfile: Annotated[
        str | None,
        setting("Open MPI host file, one host per line", metavar="FILE", panel="Launch"),
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        setting(
            "torchrun's rendezvous address [default: first host of --hostfile]",
            metavar="HOST:PORT",
            panel="Launch",
        ),
    ] = None
    rank_by: Annotated[
        Literal["core", "slot"],
        setting(
            "mpirun's placement of ranks (core: Open MPI 4)",
            panel="Launch",
        ),
    ] = "slot"
    bind_to: Annotated[
        Literal["core", "none"],
        setting("Bind mpirun's ranks to their own cores", panel="Launch"),
    ] = "core"
    export_env: Annotated[
        tuple[str, ...],
        setting(
            "More environment variables for the other nodes",
            metavar="NAME,NAME",
            panel="Launch",
            aliases=("--carry",),
        ),
    ] = ()
    cores_per_node: Annotated[
        Count | None,
        setting(
            "Physical cores per node [default: this machine's]",
            metavar="N",
            panel="Launch",
        ),
    ] = None
    devices_per_node: Annotated[
        Count | None,
        setting(
            "Devices per node [default: those in use]",
            metavar="N",
            panel="Launch",
        ),
    ] = None


class SlurmConfig(Section, frozen=True):
    """The job that `launch --launcher slurm` submits."""

    job_name: Annotated[str, setting("Job name", metavar="NAME")] = "ssdctl"
    partition: Annotated[str | None, setting("Partition", metavar="NAME")] = None
    account: Annotated[str | None, setting("Account to charge", metavar="NAME")] = None
    qos: Annotated[str | None, setting("Quality of service", metavar="NAME")] = None
    constraint: Annotated[str | None, setting("Features of the nodes", metavar="LIST")] = None
    time: Annotated[
        str | None,
        setting(
            "Time limit: minutes, H:MM:SS or D-HH:MM:SS [default: the partition's]", metavar="TIME"
        ),
    ] = None
    memory: Annotated[str | None, setting("Memory per node (400G)", metavar="SIZE")] = None
    gres: Annotated[
        str | None,
        setting("Slurm's name of the devices, or none [default: gpu or hpu]"),
    ] = None
    signal_before: Annotated[
        Count, setting("Seconds before the time limit to stop", metavar="S")
    ] = 300
    requeue: Annotated[bool, setting("Requeue a job that reached its time limit")] = True
    options: Annotated[
        tuple[str, ...], setting("More options for sbatch (--exclusive)", metavar="--OPTION,...")
    ] = ()
    srun_options: Annotated[
        tuple[str, ...],
        setting("More options for srun (--mpi=none)", metavar="--OPTION,..."),
    ] = ()


class KubernetesConfig(Section, frozen=True):
    """The job and the pods of `launch --launcher kubernetes`."""

    kind: Annotated[
        Literal["auto", "Job", "MPIJob", "TrainJob"],
        setting("Kind of job (auto: MPIJob for HPUs on several nodes, else Job)"),
    ] = "auto"
    runtime: Annotated[
        str, setting("Training runtime that a TrainJob refers to", metavar="NAME")
    ] = "torch-distributed"
    labels: Annotated[
        tuple[str, ...],
        setting("Labels of job and pods (Kueue's queue)", metavar="KEY=VALUE,..."),
    ] = ()
    annotations: Annotated[
        tuple[str, ...], setting("Annotations of job and pods", metavar="KEY=VALUE,...")
    ] = ()
    priority_class: Annotated[str | None, setting("Priority class of the pods", metavar="NAME")] = (
        None
    )
    patch: Annotated[
        str | None,
        setting("YAML file merged into pods (spec, metadata) and job", metavar="FILE"),
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
        str | None,
        setting(
            "How pods get ssdctl: image, or pip source",
            metavar="image|SOURCE",
        ),
    ] = None
    python: Annotated[str, setting("Python interpreter of the image", metavar="PROGRAM")] = (
        "python3"
    )
    volumes: Annotated[
        tuple[str, ...],
        setting(
            "Volumes to mount (node path or claim)",
            metavar="SOURCE:PATH[:ro],...",
        ),
    ] = ()
    resources: Annotated[
        tuple[str, ...],
        setting(
            "Resources per pod, besides devices (cpu=95, memory=409Gi)",
            metavar="NAME=AMOUNT,...",
        ),
    ] = ()
    launcher_resources: Annotated[
        tuple[str, ...],
        setting("Resources of the pod that runs mpirun", metavar="NAME=AMOUNT,..."),
    ] = ("cpu=2", "memory=4Gi")
    node_selector: Annotated[
        tuple[str, ...], setting("Labels of the nodes to run on", metavar="KEY=VALUE,...")
    ] = ()
    host_ipc: Annotated[bool, setting("Share the node's IPC namespace")] = False
    env: Annotated[
        tuple[str, ...],
        setting("Environment variables of all pods", metavar="NAME=VALUE,..."),
    ] = ()
