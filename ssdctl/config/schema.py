"""Every setting of ssdctl, once: its type, its bounds, its default and what it is for.

The command line's options, their help, the JSON schema, `config init` and the docs are made from
this file. A field without a default belongs to the recipe: every preset names it.
"""

import typing
from typing import Annotated, Literal

import msgspec

Precision = Literal["auto", "bf16", "fp16", "fp32"]
DeviceName = Literal["auto", "cpu", "cuda", "hpu", "xla"]
BackboneName = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]

ClusterName = Literal["voyager"]
PresetName = Literal["mlperf-r34", "nvidia-r50", "habana-tf-r34", "stable-r34"]


def setting(
    help: str,
    *,
    flag: str | None = None,
    panel: str = "Options",
    metavar: str | None = None,
    choice_flags: bool = False,
    replaces: tuple[str, ...] = (),
    maths: bool = False,
) -> msgspec.Meta:
    """Describe one field.

    Args:
        help: One sentence, units included.
        flag: The option's name where it is not the field's.
        panel: The heading under which `--help` lists it.
        metavar: What stands for the value in `--help`.
        choice_flags: Give each choice a flag of its own (`--bf16`), besides none for the field.
        maths: Another value changes what a run computes, so a resume refuses it.
        replaces: Options of the systems that ssdctl replaces; using one names this one.
    """
    extra = {
        "flag": flag,
        "panel": panel,
        "metavar": metavar,
        "choice_flags": choice_flags,
        "replaces": replaces,
        "maths": maths,
    }
    return msgspec.Meta(description=help, extra=extra)


Natural = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
# "3" or "3ep": epochs; "300st": optimizer steps; "10min": wall time (for saving).
Passes = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)?(ep|st)?$")]
# The same for what is repeated, which needs a length.
Interval = Annotated[str, msgspec.Meta(pattern=r"^(?![0.]+(ep|st|min)?$)\d+(\.\d+)?(ep|st)?$")]
IntervalOrTime = Annotated[
    str, msgspec.Meta(pattern=r"^(?![0.]+(ep|st|min)?$)\d+(\.\d+)?(ep|st|min)?$")
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the config file."""


class DataConfig(Section, frozen=True):
    """Where the dataset and its store lie."""

    root: Annotated[
        str | None,
        setting(
            "Dataset folder in COCO's layout, or with a dataset.toml "
            "[default: data/coco if it exists, else /data/coco]",
            flag="--data",
            metavar="DIR",
            panel="Data",
            replaces=("--data-dir", "--data_dir"),
        ),
    ] = None
    store: Annotated[
        str | None,
        setting(
            "Folder of the prepared store [default: prepared/ in the dataset folder]",
            flag="--store",
            metavar="DIR",
            panel="Data",
        ),
    ] = None


class DownloadConfig(Section, frozen=True):
    """What `ssdctl download` fetches, and how."""

    dataset: Annotated[
        Literal["coco2017", "shapes"],
        setting("Dataset to get; shapes is generated on this machine, without network"),
    ] = "coco2017"
    part: Annotated[
        Literal["train", "val", "annotations"] | None,
        setting("Fetch this part of COCO alone [default: all]"),
    ] = None
    manifest: Annotated[
        str | None,
        setting("Fetch the files of this TOML manifest instead", metavar="FILE"),
    ] = None
    mirror: Annotated[
        str | None,
        setting("Fetch from this base URL instead of the official hosts", metavar="URL"),
    ] = None
    connections: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=64)], setting("Connections per file", metavar="N")
    ] = 8
    timeout: Annotated[
        Annotated[float, msgspec.Meta(ge=1)],
        setting("Give up after this many seconds at less than 1 KB/s", metavar="S"),
    ] = 30.0
    keep_archives: Annotated[bool, setting("Keep the zip files after unpacking")] = False
    images: Annotated[
        Count, setting("Training images to generate", metavar="N", panel="Shapes dataset")
    ] = 800
    val_images: Annotated[
        Natural, setting("Validation images to generate", metavar="N", panel="Shapes dataset")
    ] = 100
    seed: Annotated[
        Natural, setting("Seed of the generated images", metavar="N", panel="Shapes dataset")
    ] = 0


class PrepareConfig(Section, frozen=True):
    """How `ssdctl prepare` checks a dataset and packs it."""

    source: Annotated[
        Literal["voc", "yolo"] | None,
        setting(
            "Convert this layout to COCO's format beside the originals, with a dataset.toml",
            flag="--from",
            panel="Other people's data",
        ),
    ] = None
    split: Annotated[
        Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
        setting(
            "Keep this share of the images to train on, validate on the others",
            metavar="SHARE",
            panel="Other people's data",
        ),
    ] = None
    classes: Annotated[
        tuple[str, ...],
        setting(
            "Keep these classes alone [default: all]", metavar="A,B", panel="Other people's data"
        ),
    ] = ()
    pack: Annotated[
        bool,
        setting("Pack the images into the store; --no-pack writes the index alone"),
    ] = True
    shrink: Annotated[
        Annotated[int, msgspec.Meta(ge=300)] | None,
        setting(
            "Re-encode images whose shorter side is above this, in pixels",
            metavar="PX",
        ),
    ] = None
    verify_images: Annotated[
        bool, setting("Decode every image; else those alone that look cut")
    ] = False
    jobs: Annotated[
        Natural, setting("Threads that check images; 0 = one per core", metavar="N")
    ] = 0


class ModelConfig(Section, frozen=True):
    """The network."""

    backbone: Annotated[
        BackboneName, setting("ResNet that is cut after conv4_x", panel="Network", maths=True)
    ]
    weights: Annotated[
        str,
        setting(
            "Backbone weights: a name (ssdctl fetch-weights --list; imagenet-v1 is the backbone's "
            "own), a file, or none",
            flag="--backbone-weights",
            metavar="NAME|FILE|none",
            panel="Network",
            replaces=("--backbone-path", "--pretrained-backbone", "--resnet_checkpoint"),
        ),
    ]
    extra_norm: Annotated[
        Literal["none", "batch"],
        setting(
            "Normalisation in the extra blocks: none (MLPerf) or batch (NVIDIA)",
            panel="Network",
            maths=True,
        ),
    ]


class TrainConfig(Section, frozen=True):
    """One training run. Fields without a default are the recipe's: the preset names them."""

    # Recipe
    epochs: Annotated[Count, setting("Length of the run, in epochs", metavar="N", panel="Recipe")]
    batch_size: Annotated[
        Count | Literal["auto"],
        setting(
            "Images per device and step; auto = as many as the device's memory holds",
            flag="--bs",
            metavar="N|auto",
            panel="Recipe",
            replaces=("--batch-size", "--batch_size", "--eval-batch-size"),
        ),
    ]
    lr: Annotated[
        Positive,
        setting(
            "Learning rate at global batch 32; scaled by global batch / 32",
            metavar="X",
            panel="Recipe",
            replaces=("--learning-rate", "--base-lr"),
            maths=True,
        ),
    ]
    warmup: Annotated[
        Passes,
        setting(
            "Linear warm-up: 3 or 3ep = epochs, 300st = optimizer steps",
            metavar="DURATION",
            panel="Recipe",
            maths=True,
        ),
    ]
    decay_epochs: Annotated[
        tuple[Positive, ...],
        setting(
            "Epochs at which the learning rate falls (see --lr-decay)",
            metavar="E,E",
            panel="Recipe",
            replaces=("--multistep", "--lr-decay-epochs", "--lr-decay-schedule"),
            maths=True,
        ),
    ]
    lr_decay: Annotated[
        Literal["step", "cosine"],
        setting(
            "step = to a tenth at each decay epoch; cosine = from the first of two decay epochs "
            "to the second",
            panel="Recipe",
            maths=True,
        ),
    ]
    momentum: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)],
        setting("SGD momentum (AdamW: beta1)", metavar="X", panel="Recipe", maths=True),
    ]
    weight_decay: Annotated[
        NonNegative,
        setting("Weight decay", metavar="X", panel="Recipe", replaces=("--wd",), maths=True),
    ]
    decay_bias_and_norm: Annotated[
        bool, setting("Apply weight decay to biases and batch norm too", panel="Recipe", maths=True)
    ]
    optimizer: Annotated[Literal["sgd", "adamw"], setting("Optimizer", panel="Recipe", maths=True)]
    clip_grad: Annotated[
        NonNegative,
        setting(
            "Clip the gradient's global L2 norm to this; 0 = off",
            metavar="NORM",
            panel="Recipe",
            maths=True,
        ),
    ]
    freeze_stem: Annotated[
        bool,
        setting(
            "Keep conv1 and the first block's first 3x3 convolution, and their batch norm's scale "
            "and bias, as they are",
            panel="Recipe",
            maths=True,
        ),
    ]
    hue_degrees: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=180)],
        setting(
            "Hue jitter of the augmentation, +- degrees", metavar="DEG", panel="Recipe", maths=True
        ),
    ]
    precision: Annotated[
        Precision,
        setting(
            "Arithmetic of the network: auto = bf16 where the device has it natively, else fp32",
            panel="Device",
            choice_flags=True,
            replaces=("--autocast", "--amp", "--use-fp16", "--dtype", "--data-type"),
            maths=True,
        ),
    ]

    # Run
    preset: Annotated[
        PresetName,
        setting("Recipe to start from (ssdctl config presets)", panel="Recipe"),
    ] = "stable-r34"
    out: Annotated[
        str | None,
        setting(
            "Run folder; the same folder again resumes [default: runs/PRESET]",
            metavar="RUN",
            panel="Run",
            replaces=("--save", "--model_dir", "--save-path", "--checkpoint-dir"),
        ),
    ] = None
    steps: Annotated[
        Count | None,
        setting(
            "Stop after this many optimizer steps [default: all epochs]",
            metavar="N",
            panel="Run",
            replaces=("--num-steps", "--max-steps", "--iteration"),
        ),
    ] = None
    init: Annotated[
        str | None,
        setting("Start from the weights of this checkpoint", metavar="FILE", panel="Run"),
    ] = None
    resume: Annotated[
        str,
        setting(
            "auto = from the newest intact checkpoint of RUN, never, or a file",
            metavar="auto|never|FILE",
            panel="Run",
            replaces=("--checkpoint",),
        ),
    ] = "auto"
    resume_changed: Annotated[
        bool, setting("Resume although a setting that changes the maths differs", panel="Run")
    ] = False
    seed: Annotated[
        Natural,
        setting(
            "Seed of order, crops, colours and initial weights",
            metavar="N",
            panel="Run",
            maths=True,
        ),
    ] = 0
    accumulate: Annotated[
        Count,
        setting(
            "Micro-batches per optimizer step; the global batch grows with it",
            metavar="N",
            panel="Recipe",
            replaces=("--accumulation", "--batch-splits"),
        ),
    ] = 1
    ema: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)],
        setting(
            "Evaluate and deploy a moving average of the weights with this decay (0.999 is usual); "
            "0 = off",
            metavar="DECAY",
            panel="Recipe",
            maths=True,
        ),
    ] = 0.0
    sync_bn: Annotated[
        bool,
        setting(
            "Batch norm over the images of all ranks, where the device can",
            panel="Recipe",
            maths=True,
        ),
    ] = False
    deterministic: Annotated[
        bool,
        setting("Use kernels alone that give the same bits every time; slower", panel="Run"),
    ] = False
    rank_timeout: Annotated[
        Positive,
        setting(
            "Seconds that a rank waits for another before it gives it up (exit 8)",
            metavar="S",
            panel="Run",
        ),
    ] = 600.0
    on_nonfinite: Annotated[
        Literal["skip", "rollback", "stop"],
        setting(
            "What a NaN or infinite loss or gradient leads to: leave the step out, go back to "
            "the last checkpoint past its images, or exit 7",
            panel="Run",
        ),
    ] = "skip"

    # Device
    device: Annotated[
        DeviceName,
        setting(
            "Device to train on; auto = the accelerator this machine has, else cpu",
            panel="Device",
            replaces=("--use-hpu", "--hpu-lazy-mode", "--no-cuda", "--hpu"),
        ),
    ] = "auto"
    execution: Annotated[
        Literal["eager", "compile", "lazy"] | None,
        setting(
            "How a step runs: operation by operation, by torch.compile, or as graphs gathered by "
            "the device [default: the device's fastest]",
            panel="Device",
            replaces=("--use-torch-compile", "--compile", "--use-lazy-mode"),
        ),
    ] = None
    tf32: Annotated[
        bool,
        setting(
            "Round the factors of fp32 products to TF32, where a GPU can",
            panel="Device",
            replaces=("--allow-tf32",),
            maths=True,
        ),
    ] = False
    profile: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d*,[1-9]\d*$")] | None,
        setting(
            "Profile these optimizer steps, both included: a Chrome trace and a table of the "
            "slowest kernels and waits, in RUN/profile",
            metavar="FIRST,LAST",
            panel="Run",
            replaces=("--profiling", "--profile-steps", "--profiler"),
        ),
    ] = None

    # Input
    workers: Annotated[
        Natural,
        setting(
            "Decode threads; 0 = this process's share of the cores",
            metavar="N",
            panel="Input",
            replaces=("--num-workers", "--num_workers"),
        ),
    ] = 0
    pipeline: Annotated[
        Literal["native", "dali"],
        setting(
            "What decodes the images: ssdctl itself, or nvidia-dali (the dali extra): the same "
            "samples, crops and colours, pixels that differ by a few levels",
            panel="Input",
            replaces=("--data-pipeline", "--use-dali"),
            maths=True,
        ),
    ] = "native"
    fake_data: Annotated[
        bool,
        setting(
            "Random batches instead of images, for the device's ceiling: no dataset is needed, "
            "nothing is evaluated",
            panel="Input",
            replaces=("--synthetic-data", "--use-fake-data"),
            maths=True,
        ),
    ] = False
    augment: Annotated[
        Literal["ssd", "none"],
        setting("SSD crops, flips and colours, or plain resized images", panel="Input", maths=True),
    ] = "ssd"
    limit_train: Annotated[
        Count | None,
        setting("Train on the first N images alone", metavar="N", panel="Input", maths=True),
    ] = None
    overfit: Annotated[
        Count | None,
        setting(
            "Train on the first N images, without augmentation, and score on the same ones: AP "
            "near 1 shows that data and settings fit together",
            metavar="N",
            panel="Input",
            maths=True,
        ),
    ] = None

    # Evaluation, saving, logging
    eval_every: Annotated[
        Interval | None,
        setting(
            "Evaluate this often (epochs, or steps with st) [default: at the end]",
            metavar="DURATION",
            panel="Evaluation",
            replaces=("--val-interval", "--val-epochs", "--evaluation"),
        ),
    ] = None
    eval_at: Annotated[
        tuple[Positive, ...],
        setting(
            "Evaluate after these epochs, besides --eval-every", metavar="E,E", panel="Evaluation"
        ),
    ] = ()
    patience: Annotated[
        Count | None,
        setting(
            "Stop after this many evaluations without a better AP", metavar="N", panel="Evaluation"
        ),
    ] = None
    target_ap: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1)] | None,
        setting(
            "Stop once AP reaches this",
            metavar="AP",
            panel="Evaluation",
            replaces=("--threshold", "--target"),
        ),
    ] = None
    save_every: Annotated[
        IntervalOrTime,
        setting(
            "Save a checkpoint this often: epochs, steps (st) or minutes (min)",
            metavar="DURATION",
            panel="Saving",
            replaces=("--save_checkpoints_epochs", "--save_checkpoints_steps"),
        ),
    ] = "1ep"
    keep: Annotated[
        Count, setting("Newest checkpoints to keep, besides the best", metavar="N", panel="Saving")
    ] = 2
    log_every: Annotated[
        Count,
        setting(
            "Steps between two lines of metrics",
            metavar="N",
            panel="Saving",
            replaces=("--log-interval", "--save_summary_steps", "--log_step_count_steps"),
        ),
    ] = 20
    tensorboard: Annotated[
        bool,
        setting("Write RUN/tensorboard: figures, and pictures with their boxes", panel="Saving"),
    ] = False
    mllog: Annotated[
        str | None,
        setting("Append MLPerf's log lines to this file", metavar="FILE", panel="Saving"),
    ] = None


class EvaluateConfig(Section, frozen=True):
    """How a checkpoint is scored."""

    split: Annotated[Literal["train", "val"], setting("Split to score")] = "val"
    batch_size: Annotated[Count, setting("Images per batch", flag="--bs", metavar="N")] = 16
    precision: Annotated[
        Literal["bf16", "fp32"], setting("Arithmetic of the network", choice_flags=True)
    ] = "fp32"
    device: Annotated[DeviceName, setting("Device to run on")] = "auto"
    workers: Annotated[Natural, setting("Decode threads; 0 = all cores", metavar="N")] = 0
    limit: Annotated[Count | None, setting("Score the first N images alone", metavar="N")] = None
    score_threshold: Annotated[
        Fraction, setting("Drop detections below this score", metavar="X")
    ] = 0.05
    nms_iou: Annotated[
        Fraction, setting("Suppress a box that overlaps a better one by more", metavar="X")
    ] = 0.5
    annotated_only: Annotated[
        bool, setting("Score images with annotations alone, as the peers do")
    ] = False
    verify: Annotated[
        bool, setting("Score with pycocotools too and fail on a difference over 1e-12")
    ] = False


class PredictConfig(Section, frozen=True):
    """How `ssdctl predict` looks at pictures."""

    score: Annotated[Fraction, setting("Keep boxes with at least this score", metavar="X")] = 0.3
    batch_size: Annotated[Count, setting("Images per batch", flag="--bs", metavar="N")] = 8
    device: Annotated[DeviceName, setting("Device to run on")] = "auto"


class LaunchConfig(Section, frozen=True):
    """How many devices, and what starts them."""

    launcher: Annotated[
        Literal["auto", "torchrun", "mpirun", "slurm", "kubernetes"],
        setting(
            "What starts the ranks; auto = mpirun for HPUs, torchrun for GPUs, TPUs and CPUs",
            panel="Launch",
        ),
    ] = "auto"
    cluster: Annotated[
        ClusterName | None,
        setting("Settings of a known cluster to start from (docs/clusters.md)", panel="Launch"),
    ] = None
    nodes: Annotated[
        Count, setting("Machines; the devices are divided among them", metavar="N", panel="Launch")
    ] = 1
    restarts: Annotated[
        Natural,
        setting(
            "Start the job again this often after a crash; it resumes", metavar="N", panel="Launch"
        ),
    ] = 0
    hostfile: Annotated[
        str | None, setting("Open MPI host file, one host a line", metavar="FILE", panel="Launch")
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        setting(
            "Where torchrun's nodes meet [default: the first host of --hostfile]",
            metavar="HOST:PORT",
            panel="Launch",
        ),
    ] = None
    rank_by: Annotated[
        Literal["core", "slot"],
        setting(
            "Order of mpirun's ranks; newer Gaudi releases and Open MPI 5 want slot", panel="Launch"
        ),
    ] = "core"
    bind_to: Annotated[
        Literal["core", "none"],
        setting("Whether mpirun gives each rank cores of its own", panel="Launch"),
    ] = "core"
    carry: Annotated[
        tuple[str, ...],
        setting(
            "More variables that mpirun takes along to other nodes",
            metavar="NAME,NAME",
            panel="Launch",
        ),
    ] = ()
    cores_per_node: Annotated[
        Count | None,
        setting(
            "Physical cores of a node, for binding ranks [default: this machine's]",
            metavar="N",
            panel="Launch",
        ),
    ] = None
    devices_per_node: Annotated[
        Count | None,
        setting(
            "Cards a node has, for sharing its cores [default: those used]",
            metavar="N",
            panel="Launch",
        ),
    ] = None


class SlurmConfig(Section, frozen=True):
    """What `launch --launcher slurm` asks Slurm for."""

    job_name: Annotated[str, setting("Name of the job", metavar="NAME")] = "ssdctl"
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
    memory: Annotated[str | None, setting("Memory per node, as 400G", metavar="SIZE")] = None
    gres: Annotated[
        str | None,
        setting("Slurm's name for the devices; none = ask for none [default: gpu or hpu]"),
    ] = None
    signal_before: Annotated[
        Count, setting("Seconds before the time limit at which the job saves", metavar="S")
    ] = 300
    requeue: Annotated[
        bool, setting("Queue the job again where the time limit stopped it; it resumes")
    ] = True
    options: Annotated[
        tuple[str, ...], setting("More options of sbatch (--exclusive)", metavar="--OPTION,...")
    ] = ()


class KubernetesConfig(Section, frozen=True):
    """The pods of `launch --launcher kubernetes`."""

    name: Annotated[
        str | None, setting("Name of the job [default: ssdctl-XXXXXX]", metavar="NAME")
    ] = None
    namespace: Annotated[str | None, setting("Namespace [default: kubectl's]", metavar="NAME")] = (
        None
    )
    image: Annotated[str | None, setting("Image of all pods", metavar="IMAGE")] = None
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], setting("When to pull the image")
    ] = "IfNotPresent"
    pull_secret: Annotated[
        str | None, setting("Secret that opens the image's registry", metavar="NAME")
    ] = None
    service_account: Annotated[str | None, setting("Service account", metavar="NAME")] = None
    install: Annotated[
        str | None,
        setting(
            "How ssdctl gets into the pods: image = it is in the image; else what pip installs "
            "there (a wheel or folder on a volume, a requirement), beside the image's own torch",
            metavar="image|SOURCE",
        ),
    ] = None
    python: Annotated[str, setting("The image's interpreter", metavar="PROGRAM")] = "python3"
    volumes: Annotated[
        tuple[str, ...],
        setting(
            "Folders that outlive the pods: a path of the nodes, or a claim's name, then where to "
            "mount it, then ro where nothing may be written",
            metavar="SOURCE:PATH[:ro],...",
        ),
    ] = ()
    resources: Annotated[
        tuple[str, ...],
        setting(
            "What a pod with devices gets besides them (cpu=95, memory=409Gi)",
            metavar="NAME=AMOUNT,...",
        ),
    ] = ()
    launcher_resources: Annotated[
        tuple[str, ...],
        setting("What the pod that runs mpirun gets", metavar="NAME=AMOUNT,..."),
    ] = ("cpu=2", "memory=4Gi")
    node_selector: Annotated[
        tuple[str, ...], setting("Labels of the nodes to run on", metavar="KEY=VALUE,...")
    ] = ()
    host_ipc: Annotated[bool, setting("Share the node's IPC namespace")] = False
    env: Annotated[
        tuple[str, ...], setting("Variables for all pods", metavar="NAME=VALUE,...")
    ] = ()


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, resolved."""

    data: DataConfig
    download: DownloadConfig
    prepare: PrepareConfig
    model: ModelConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    predict: PredictConfig
    launch: LaunchConfig
    slurm: SlurmConfig
    kubernetes: KubernetesConfig


def conflicts(config: Config) -> list[tuple[str, str]]:
    """The rules that bind several settings: (key, what is wrong) for each one broken."""
    found = []
    decays = config.train.decay_epochs
    if list(decays) != sorted(set(decays)):
        found.append(("train.decay_epochs", "the epochs must rise"))
    named = config.model.weights.partition("-")[0]
    if named in typing.get_args(BackboneName) and named != config.model.backbone:
        found.append(
            ("model.weights", f"{config.model.weights} do not fit {config.model.backbone}")
        )
    if config.train.lr_decay == "cosine" and len(decays) != 2:
        found.append(("train.decay_epochs", "a cosine needs two epochs, its start and its end"))
    if config.train.init is not None and config.train.resume not in ("auto", "never"):
        found.append(("train.init", "--init starts a new run and --resume FILE goes on with one"))
    if config.train.profile is not None:
        first, last = map(int, config.train.profile.split(","))
        if last < first:
            found.append(("train.profile", f"step {last} comes before step {first}"))
    return found
