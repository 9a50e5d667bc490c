"""The settings of ssdctl, a class for each table of the config."""

import functools
from typing import Annotated, Final, Literal

import msgspec

from ssdctl.config.fields import (
    BatchSize,
    ClusterName,
    Count,
    Duration,
    Fraction,
    Interval,
    IntervalOrTime,
    NonNegative,
    NonNegativeInt,
    Positive,
    Precision,
    PresetName,
    Section,
    setting,
)
from ssdctl.runtime.plugins import (
    AUGMENTATION_LISTS,
    BACKBONES,
    DEVICES,
    FORMATS,
    LAUNCHERS,
)

DEFAULT_PRESET: Final = "stable-r34"
TpuVersion = Literal["v2", "v3", "v4", "v5e", "v5p", "v6e", "v7"]
SaveFormat = Literal["json", "coco", "yolo", "labelstudio"]

# Settings under a heading of `--help`.
_network = functools.partial(setting, panel="Network")
_recipe = functools.partial(setting, panel="Recipe")
_run = functools.partial(setting, panel="Run")
_device = functools.partial(setting, panel="Device")
_input = functools.partial(setting, panel="Input")
_evaluation = functools.partial(setting, panel="Evaluation")
_saving = functools.partial(setting, panel="Saving")
_launch = functools.partial(setting, panel="Launch")
_data = functools.partial(setting, panel="Data")
_shapes = functools.partial(setting, panel="Shapes dataset")
_conversion = functools.partial(setting, panel="Conversion")

Words = tuple[str, ...]
_name = functools.partial(setting, metavar="NAME")
_pairs = functools.partial(setting, metavar="KEY=VALUE,...")
_amounts = functools.partial(setting, metavar="NAME=AMOUNT,...")
_options = functools.partial(setting, metavar="--OPTION,...")


class DataConfig(Section, frozen=True):
    """The locations of the dataset and its store."""

    root: Annotated[
        str | None,
        _data(
            "Dataset folder or file, in any supported format [default: data/coco or /data/coco]",
            flag="--data",
            metavar="DIR",
            aliases=("--data-dir", "-d"),
        ),
    ] = None
    store: Annotated[
        str | None,
        _data("Folder of the prepared data [default: DATA/prepared]", metavar="DIR"),
    ] = None
    tile: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        _data(
            "Also use tiles of PX pixels, for small objects (0: off) [default: as the detector, or "
            "that of --init, was trained; else off]",
            metavar="PX",
        ),
    ] = None
    tile_overlap: Annotated[
        float, _data("Overlap of neighboring tiles, as a fraction", ge=0, le=0.9)
    ] = 0.2


class DownloadConfig(Section, frozen=True):
    """The files that `ssdctl download` fetches, and how it fetches them."""

    dataset: Annotated[
        Literal["coco2017", "shapes"], setting("Dataset to download (shapes: generated locally)")
    ] = "coco2017"
    part: Annotated[
        Literal["train", "val", "annotations"] | None,
        setting("Download only this part of COCO [default: all]"),
    ] = None
    manifest: Annotated[
        str | None, setting("Download the files in this TOML manifest", metavar="FILE")
    ] = None
    mirror: Annotated[
        str | None, setting("Base URL instead of the official hosts", metavar="URL")
    ] = None
    connections: Annotated[int, setting("Connections per file", ge=1, le=64)] = 8
    timeout: Annotated[
        float, setting("Give up after S seconds below 1 KB/s", metavar="S", ge=1)
    ] = 30.0
    keep_archives: Annotated[bool, setting("Keep the zip files after unpacking")] = False
    images: Annotated[Count, _shapes("Number of training images")] = 800
    val_images: Annotated[NonNegativeInt, _shapes("Number of validation images")] = 100
    seed: Annotated[NonNegativeInt, _shapes("Seed of the generated images")] = 0


class PrepareConfig(Section, frozen=True):
    """How `ssdctl prepare` checks a dataset and packs it."""

    source: Annotated[
        str,
        _conversion(
            "Dataset format, auto-detected by default; plugins can add formats",
            flag="--from",
            kind=FORMATS,
        ),
    ] = "auto"
    split: Annotated[
        Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
        _conversion(
            "Fraction of images for training; the rest is for validation", metavar="FRACTION"
        ),
    ] = None
    group: Annotated[
        str | None,
        _conversion("Keep names with equal matches in one part of --split", metavar="REGEX"),
    ] = None
    classes: Annotated[
        tuple[str, ...],
        _conversion("Keep only these classes [default: all]", metavar="A,B"),
    ] = ()
    image_dir: Annotated[
        str | None,
        _conversion("Folder of the images, if several files fit a name", metavar="DIR"),
    ] = None
    pack: Annotated[bool, setting("Pack images for fast training (else index only)")] = True
    shrink: Annotated[
        Annotated[int, msgspec.Meta(ge=300)] | None,
        setting("Downscale images whose shorter side exceeds PX", metavar="PX"),
    ] = None
    encoding: Annotated[
        Literal["jpeg", "raw"],
        setting("Store image files (jpeg) or decoded pixels (raw, much larger)"),
    ] = "jpeg"
    verify_images: Annotated[bool, setting("Decode every image completely")] = False
    keep_damaged: Annotated[
        bool, setting("Use partly decodable images that --verify-images finds")
    ] = False
    allow_dropped: Annotated[
        bool, setting("Continue even if more than 5% of images or boxes are dropped")
    ] = False
    jobs: Annotated[NonNegativeInt, setting("Threads that check images (0 = one per core)")] = 0


class ModelConfig(Section, frozen=True):
    """The network."""

    backbone: Annotated[str, _network("Backbone of the detector", kind=BACKBONES)]
    weights: Annotated[
        str,
        _network(
            "Backbone weights: a name (`ssdctl fetch-weights --list`), a file, or none",
            flag="--backbone-weights",
            metavar="NAME|FILE|none",
        ),
    ]
    extra_norm: Annotated[
        Literal["none", "batch"], _network("Normalization in the extra blocks (batch: NVIDIA's)")
    ]

    @property
    def weights_name(self) -> str | None:
        """The full name or the file of the weights, `resnet34-imagenet-v1`; None: random."""
        if self.weights == "none":
            return None
        is_short = self.weights.startswith("imagenet-")
        return f"{self.backbone}-{self.weights}" if is_short else self.weights


class TrainConfig(Section, frozen=True):
    """One training run. Fields without a default belong to the recipe: the preset sets them."""

    # Recipe
    epochs: Annotated[Count, setting("Length of the run in epochs", aliases=("-e",))]
    batch_size: Annotated[
        BatchSize | Literal["auto"],
        setting(
            "Batch size per device (auto: the largest that fits in memory)",
            flag="--bs",
            metavar="N|auto",
            aliases=("-b",),
        ),
    ]
    lr: Annotated[
        Positive,
        setting(
            "Learning rate for a global batch of 32, scaled linearly", aliases=("--learning-rate",)
        ),
    ]
    warmup: Annotated[
        Duration, setting("Linear warm-up in epochs (3ep) or steps (300st)", metavar="DURATION")
    ]
    decay_epochs: Annotated[
        tuple[Positive, ...], setting("Epochs at which the learning rate decays", metavar="E,E")
    ]
    lr_decay: Annotated[Literal["step", "cosine"], setting("Decay by factors of 10, or cosine")]
    momentum: Annotated[float, setting("SGD momentum, or AdamW's beta1", ge=0, lt=1)]
    weight_decay: Annotated[NonNegative, setting("Weight decay", aliases=("--wd",))]
    decay_bias: Annotated[bool, setting("Apply weight decay to convolution biases")]
    decay_norm: Annotated[bool, setting("Apply weight decay to batch norm parameters")]
    optimizer: Annotated[Literal["sgd", "adamw"], setting("Optimizer")]
    clip_grad: Annotated[NonNegative, setting("Clip the gradient norm (0 = off)", metavar="NORM")]
    freeze_stem: Annotated[bool, setting("Freeze conv1 and the first block's first convolution")]
    hue_degrees: Annotated[
        float, setting("Hue jitter of the augmentation, in degrees", metavar="DEG", ge=0, le=180)
    ]
    precision: Annotated[
        Precision, _device("Precision (auto: the best that the device supports)", choice_flags=True)
    ]

    # Run
    preset: Annotated[PresetName, _recipe("Recipe to start from")] = DEFAULT_PRESET
    out: Annotated[
        str | None,
        _run(
            "Run folder; resumes a run in it [default: runs/DATASET-BACKBONE; --init: "
            "runs/DATASET-NAME]",
            metavar="RUN",
            aliases=("--output-dir",),
        ),
    ] = None
    steps: Annotated[Count | None, _run("Stop after N optimizer steps [default: all epochs]")] = (
        None
    )
    init: Annotated[
        str | None,
        _run("Start from this checkpoint, detector, or hf://org/name", metavar="CKPT|NAME"),
    ] = None
    resume: Annotated[
        str, _run("Resume the newest checkpoint (auto), never, or FILE", metavar="auto|never|FILE")
    ] = "auto"
    resume_changed: Annotated[bool, _run("Resume even if settings that affect results changed")] = (
        False
    )
    seed: Annotated[NonNegativeInt, _run("Seed of data order, augmentation and weights")] = 0
    accumulate: Annotated[  # a step's batches are in memory together
        int, _recipe("Batches per optimizer step; multiplies the global batch", ge=1, le=1024)
    ] = 1
    ema: Annotated[
        float,
        _recipe(
            "Keep an EMA of the weights and evaluate it (try 0.999)", metavar="DECAY", ge=0, lt=1
        ),
    ] = 0.0
    background: Annotated[
        float,
        _recipe("Fraction of training images without objects", metavar="FRACTION", ge=0, lt=1),
    ] = 0.0
    background_negatives: Annotated[
        Count, _recipe("Hardest default boxes trained on per image without objects")
    ] = 30
    freeze: Annotated[int, _recipe("Freeze the backbone's first N stages (of 4)", ge=0, le=4)] = 0
    freeze_norm: Annotated[
        bool, _recipe("Freeze batch norm statistics (fine-tuning with small batches)")
    ] = False
    sync_bn: Annotated[bool, _recipe("Synchronize batch norm over all ranks")] = False
    deterministic: Annotated[bool, _run("Use only deterministic kernels (slower)")] = False
    rank_timeout: Annotated[
        Positive, _run("Seconds to wait for an unresponsive rank", metavar="S")
    ] = 600.0
    on_nonfinite: Annotated[
        Literal["skip", "rollback", "stop"], _run("What to do on a NaN/Inf loss or gradient")
    ] = "skip"

    # Device
    device: Annotated[
        str, _device("Device to train on (auto: accelerator, else CPU)", kind=DEVICES)
    ] = "auto"
    execution: Annotated[
        Literal["eager", "compile", "lazy"] | None,
        _device("Eager, torch.compile, or lazily traced graphs [default: the fastest]"),
    ] = None
    overlap_gradients: Annotated[
        bool, _device("Exchange gradients during a compiled backward pass")
    ] = False
    tf32: Annotated[bool, _device("Allow TF32 matmuls")] = False
    profile: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d{0,17},[1-9]\d{0,17}$")] | None,
        _run("Profile these steps into RUN/profile", metavar="FIRST,LAST"),
    ] = None

    fold: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d{0,2}/[1-9]\d{0,2}$")] | None,
        _run("Train on all but part I of K; validate on part I", metavar="I/K"),
    ] = None
    group: Annotated[
        str | None,
        _run("Keep images of equal matches in one fold [default: prepare's]", metavar="REGEX"),
    ] = None

    # Input
    workers: Annotated[
        NonNegativeInt, _input("Decoder threads per rank (0 = auto)", aliases=("--num-workers",))
    ] = 0
    pipeline: Annotated[
        Literal["native", "dali"], _input("Image decoder: built-in, or NVIDIA DALI")
    ] = "native"
    fake_data: Annotated[bool, _input("Train on random batches to measure the device")] = False
    augment: Annotated[
        str,
        _input(
            "Crops, flips, colors (ssd), also zoom (ssd-zoom); or a list",
            metavar="ssd|ssd-zoom|none|A,B",
            choices=tuple(AUGMENTATION_LISTS),
        ),
    ] = "ssd"
    limit_train: Annotated[Count | None, _input("Train only on the first N images")] = None
    overfit: Annotated[Count | None, _input("Train and evaluate on the same N images")] = None

    # Evaluation, saving, logging
    eval_every: Annotated[
        Interval | None,
        _evaluation(
            "Evaluate every N epochs, or steps (500st) [default: at the end; "
            "10 times below 2,500 images]",
            metavar="DURATION",
        ),
    ] = None
    eval_at: Annotated[
        tuple[Positive, ...], _evaluation("Also evaluate after these epochs", metavar="E,E")
    ] = ()
    patience: Annotated[
        Count | None, _evaluation("Stop after N evaluations without a better AP")
    ] = None
    target_ap: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1)] | None,
        _evaluation("Stop when AP reaches this", metavar="AP"),
    ] = None
    save_every: Annotated[
        IntervalOrTime,
        _saving("Save every N epochs, steps (500st) or minutes (10min)", metavar="DURATION"),
    ] = "1ep"
    keep: Annotated[Count, _saving("Newest checkpoints to keep, besides the best")] = 2
    log_every: Annotated[
        NonNegativeInt,
        _saving("Log metrics every N steps (0 = after the last)", aliases=("--log-interval",)),
    ] = 20
    tensorboard: Annotated[bool, _saving("Write TensorBoard events to RUN/tensorboard")] = False
    tracker: Annotated[
        tuple[str, ...], _saving("Log to tensorboard, wandb or mlflow", metavar="A,B")
    ] = ()
    upload_checkpoints: Annotated[bool, _saving("Upload the best and last checkpoints")] = False
    mllog: Annotated[
        str | None, _saving("Append MLPerf log lines to this file", metavar="FILE")
    ] = None


class EvaluateConfig(Section, frozen=True):
    """The evaluation of a checkpoint."""

    split: Annotated[Literal["train", "val", "test"], setting("Split to evaluate")] = "val"
    batch_size: Annotated[BatchSize, setting("Batch size", flag="--bs")] = 16
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        setting("Precision [default: the run's, else fp32]", choice_flags=True),
    ] = "auto"
    device: Annotated[str, setting("Device to run on", kind=DEVICES)] = "auto"
    workers: Annotated[
        NonNegativeInt, setting("Decoder threads (0 = all cores)", aliases=("--num-workers",))
    ] = 0
    limit: Annotated[Count | None, setting("Evaluate only the first N images")] = None
    score_threshold: Annotated[
        Fraction | None, setting("Drop detections below this score [default: 0.05, VGG16 0.01]")
    ] = None
    nms_iou: Annotated[Fraction | None, setting("NMS IoU threshold [default: 0.5, VGG16 0.45]")] = (
        None
    )
    annotated_only: Annotated[
        bool, setting("Skip images without objects, as NVIDIA's and MLPerf's scripts do")
    ] = False
    verify: Annotated[bool, setting("Check the result against pycocotools")] = False


class PredictConfig(Section, frozen=True):
    """How `ssdctl predict` detects objects."""

    score: Annotated[
        Fraction | Literal["best"] | None,
        setting(
            "Keep boxes with a score above this; best: each class's best F1 [default: best if "
            "the checkpoint has it, else 0.3]",
            metavar="X|best",
        ),
    ] = None
    classes: Annotated[
        tuple[str, ...], setting("Keep only these classes [default: all]", metavar="A,B")
    ] = ()
    nms_iou: Annotated[Fraction | None, setting("NMS IoU threshold [default: 0.5, VGG16 0.45]")] = (
        None
    )
    max_detections: Annotated[Count | None, setting("Keep at most N boxes per image")] = None
    every: Annotated[Count, setting("Videos: detect on every Nth frame")] = 1
    max_frames: Annotated[Count | None, setting("Videos: stop after N frames [default: all]")] = (
        None
    )
    recursive: Annotated[bool, setting("Also search subfolders")] = False
    save: Annotated[SaveFormat | None, setting("Write boxes to --out in this format")] = None
    batch_size: Annotated[BatchSize, setting("Batch size", flag="--bs")] = 8
    precision: Annotated[Literal["bf16", "fp32"], setting("Precision", choice_flags=True)] = "fp32"
    device: Annotated[str, setting("Device to run on", kind=DEVICES)] = "auto"


class LaunchConfig(Section, frozen=True):
    """Settings of `ssdctl launch`: the launcher and how ranks share nodes."""

    launcher: Annotated[
        str, _launch("Program that starts the ranks (auto: by device)", kind=LAUNCHERS)
    ] = "auto"
    cluster: Annotated[
        ClusterName | None, _launch("Start from the settings of a known cluster")
    ] = None
    nodes: Annotated[
        Count,
        _launch("Number of machines that share the devices", aliases=("--nnodes", "--num-nodes")),
    ] = 1
    restarts: Annotated[NonNegativeInt, _launch("Maximum automatic restarts after a crash")] = 0
    hostfile: Annotated[
        str | None, _launch("Open MPI host file, one host per line", metavar="FILE")
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        _launch(
            "torchrun's rendezvous address [default: first host of --hostfile]", metavar="HOST:PORT"
        ),
    ] = None
    tpu_version: Annotated[
        TpuVersion | None, _launch("TPU version, if this machine has no TPU")
    ] = None
    bind_to: Annotated[
        Literal["core", "none"], _launch("Bind mpirun's ranks to their own cores")
    ] = "core"
    export_env: Annotated[
        tuple[str, ...],
        _launch(
            "More environment variables for the other nodes",
            metavar="NAME,NAME",
            aliases=("--carry",),
        ),
    ] = ()
    cores_per_node: Annotated[
        Count | None, _launch("Physical cores per node [default: this machine's]")
    ] = None
    devices_per_node: Annotated[
        Count | None, _launch("Devices per node [default: those in use]")
    ] = None


class KubernetesConfig(Section, frozen=True):
    """The job and the pods of `launch --launcher kubernetes`."""

    labels: Annotated[Words, _pairs("Labels of job and pods (Kueue's queue)")] = ()
    patch: Annotated[
        str | None, setting("YAML file merged into pods (spec, metadata) and job", metavar="FILE")
    ] = None

    name: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[a-z]([a-z0-9-]{0,50}[a-z0-9])?$")] | None,
        _name("Job name of a-z, 0-9 and - [default: ssdctl-XXXXXX]"),
    ] = None
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
    requeue: Annotated[bool, setting("Requeue a training that reached its time limit")] = True
    options: Annotated[Words, _options("More options for sbatch (--exclusive)")] = ()
    srun_options: Annotated[Words, _options("More options for srun (--mpi=none)")] = ()
