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
        Count,
        setting(
            "Images per device and step",
            flag="--bs",
            metavar="N",
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
    """What `ssdctl predict` draws."""

    score: Annotated[Fraction, setting("Draw boxes with at least this score", metavar="X")] = 0.3
    device: Annotated[DeviceName, setting("Device to run on")] = "auto"


class LaunchConfig(Section, frozen=True):
    """How many devices, and what starts them."""

    launcher: Annotated[
        Literal["auto", "torchrun", "mpirun", "slurm", "kubernetes"],
        setting(
            "What starts the ranks; auto = mpirun for HPUs, torchrun for GPUs and CPUs",
            panel="Launch",
        ),
    ] = "auto"
    nodes: Annotated[
        Count, setting("Machines; the devices are divided among them", metavar="N", panel="Launch")
    ] = 1
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
    return found
