"""Settings of the network and of a training run."""

from typing import Annotated, Final, Literal

import msgspec

from ssdctl.config.augmentations import LISTS
from ssdctl.config.devices import DeviceName
from ssdctl.config.fields import (
    BackboneName,
    Count,
    Duration,
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

DEFAULT_PRESET: Final = "stable-r34"


class ModelConfig(Section, frozen=True):
    """The network."""

    backbone: Annotated[
        BackboneName,
        setting(
            "Backbone of the detector",
            panel="Network",
        ),
    ]
    weights: Annotated[
        str,
        setting(
            "Backbone weights: a name (`ssdctl fetch-weights --list`), a file, or none",
            flag="--backbone-weights",
            metavar="NAME|FILE|none",
            panel="Network",
            aliases=("--backbone-path", "--pretrained-backbone"),
        ),
    ]
    extra_norm: Annotated[
        Literal["none", "batch"],
        setting(
            "Normalization in the extra blocks (batch: NVIDIA's)",
            panel="Network",
        ),
    ]


class TrainConfig(Section, frozen=True):
    """One training run. Fields without a default belong to the recipe: the preset sets them."""

    # Recipe
    epochs: Annotated[
        Count,
        setting("Length of the run in epochs", metavar="N", aliases=("-e",)),
    ]
    batch_size: Annotated[
        Count | Literal["auto"],
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
            "Learning rate for a global batch of 32, scaled linearly",
            metavar="X",
            aliases=("--learning-rate", "--base-lr"),
        ),
    ]
    warmup: Annotated[
        Duration,
        setting(
            "Linear warm-up in epochs (3ep) or steps (300st)",
            metavar="DURATION",
            aliases=("--lr-warmup-epoch",),
        ),
    ]
    decay_epochs: Annotated[
        tuple[Positive, ...],
        setting(
            "Epochs at which the learning rate decays",
            metavar="E,E",
        ),
    ]
    lr_decay: Annotated[
        Literal["step", "cosine"],
        setting(
            "Decay by factors of 10, or cosine",
        ),
    ]
    momentum: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)],
        setting(
            "SGD momentum, or AdamW's beta1",
            metavar="X",
            aliases=("-m",),
        ),
    ]
    weight_decay: Annotated[
        NonNegative,
        setting(
            "Weight decay",
            metavar="X",
            aliases=("--wd",),
        ),
    ]
    decay_bias: Annotated[
        bool,
        setting("Apply weight decay to convolution biases"),
    ]
    decay_norm: Annotated[
        bool,
        setting(
            "Apply weight decay to batch norm parameters",
        ),
    ]
    optimizer: Annotated[Literal["sgd", "adamw"], setting("Optimizer")]
    clip_grad: Annotated[
        NonNegative,
        setting(
            "Clip the gradient norm (0 = off)",
            metavar="NORM",
        ),
    ]
    freeze_stem: Annotated[
        bool,
        setting(
            "Freeze conv1 and the first block's first convolution",
        ),
    ]
    hue_degrees: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=180)],
        setting(
            "Hue jitter of the augmentation, in degrees",
            metavar="DEG",
        ),
    ]
    precision: Annotated[
        Precision,
        setting(
            "Precision (auto: the best that the device supports)",
            panel="Device",
            choice_flags=True,
            aliases=("--dtype", "--data-type", "--autocast=bf16", "--no-amp=fp32"),
        ),
    ]

    # Run
    preset: Annotated[
        PresetName,
        setting("Recipe to start from", panel="Recipe"),
    ] = DEFAULT_PRESET
    out: Annotated[
        str | None,
        setting(
            "Run folder; resumes a run in it [default: runs/DATASET-BACKBONE]",
            metavar="RUN",
            panel="Run",
            aliases=(
                "--output-dir",
                "--output",
                "--save",
                "--model-dir",
                "--save-path",
                "--checkpoint-dir",
            ),
        ),
    ] = None
    steps: Annotated[
        Count | None,
        setting(
            "Stop after N optimizer steps [default: all epochs]",
            metavar="N",
            panel="Run",
            aliases=("--end-iteration", "--num-steps", "--max-steps"),
        ),
    ] = None
    init: Annotated[
        str | None,
        setting(
            "Start from this checkpoint, detector, or hf://org/name",
            metavar="CKPT|NAME",
            panel="Run",
        ),
    ] = None
    resume: Annotated[
        str,
        setting(
            "Resume the newest checkpoint (auto), never, or FILE",
            metavar="auto|never|FILE",
            panel="Run",
        ),
    ] = "auto"
    resume_changed: Annotated[
        bool,
        setting("Resume even if settings that affect results changed", panel="Run"),
    ] = False
    seed: Annotated[
        NonNegativeInt,
        setting(
            "Seed of data order, augmentation and weights",
            metavar="N",
            panel="Run",
        ),
    ] = 0
    accumulate: Annotated[
        Count,
        setting(
            "Batches per optimizer step; multiplies the global batch",
            metavar="N",
            panel="Recipe",
            aliases=("--accumulation",),
        ),
    ] = 1
    ema: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)],
        setting(
            "Keep an EMA of the weights and evaluate it (try 0.999)",
            metavar="DECAY",
            panel="Recipe",
        ),
    ] = 0.0
    freeze: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=4)],
        setting(
            "Freeze the backbone's first N stages (of 4)",
            metavar="N",
            panel="Recipe",
        ),
    ] = 0
    freeze_norm: Annotated[
        bool,
        setting(
            "Freeze batch norm statistics (fine-tuning with small batches)",
            panel="Recipe",
        ),
    ] = False
    sync_bn: Annotated[
        bool,
        setting(
            "Synchronize batch norm over all ranks",
            panel="Recipe",
            aliases=("--distributed-bn",),
        ),
    ] = False
    deterministic: Annotated[
        bool,
        setting(
            "Use only deterministic kernels (slower)",
            panel="Run",
            aliases=("--det",),
        ),
    ] = False
    rank_timeout: Annotated[
        Positive,
        setting(
            "Seconds to wait for an unresponsive rank",
            metavar="S",
            panel="Run",
        ),
    ] = 600.0
    on_nonfinite: Annotated[
        Literal["skip", "rollback", "stop"],
        setting(
            "What to do on a NaN/Inf loss or gradient",
            panel="Run",
        ),
    ] = "skip"

    # Device
    device: Annotated[
        DeviceName,
        setting(
            "Device to train on (auto: accelerator, else CPU)",
            panel="Device",
            aliases=("--use-hpu=hpu", "--hpu=hpu", "--no-hpu=cpu"),
        ),
    ] = "auto"
    execution: Annotated[
        Literal["eager", "compile", "lazy"] | None,
        setting(
            "Eager, torch.compile, or lazily traced graphs [default: the fastest]",
            panel="Device",
            aliases=("--hpu-lazy-mode=lazy", "--use-torch-compile=compile", "--compile=compile"),
        ),
    ] = None
    tf32: Annotated[
        bool,
        setting(
            "Allow TF32 matmuls",
            panel="Device",
            aliases=("--allow-tf32=true", "--no-allow-tf32=false"),
        ),
    ] = False
    profile: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d{0,17},[1-9]\d{0,17}$")] | None,
        setting(
            "Profile these steps into RUN/profile",
            metavar="FIRST,LAST",
            panel="Run",
        ),
    ] = None

    # Input
    workers: Annotated[
        NonNegativeInt,
        setting(
            "Decoder threads per rank (0 = auto)",
            metavar="N",
            panel="Input",
            aliases=("--num-workers",),
        ),
    ] = 0
    pipeline: Annotated[
        Literal["native", "dali"],
        setting(
            "Image decoder: built-in, or NVIDIA DALI",
            panel="Input",
        ),
    ] = "native"
    fake_data: Annotated[
        bool,
        setting(
            "Train on random batches to measure the device",
            panel="Input",
            aliases=("--use-fake-data", "--synthetic-data", "-f"),
        ),
    ] = False
    augment: Annotated[
        str,
        setting(
            "Crops, flips, colors (ssd), also zoom (ssd-zoom); or a list",
            metavar="ssd|ssd-zoom|none|A,B",
            panel="Input",
            choices=tuple(LISTS),
        ),
    ] = "ssd"
    limit_train: Annotated[
        Count | None,
        setting("Train only on the first N images", metavar="N", panel="Input"),
    ] = None
    overfit: Annotated[
        Count | None,
        setting(
            "Train and evaluate on N images, to check",
            metavar="N",
            panel="Input",
        ),
    ] = None

    # Evaluation, saving, logging
    eval_every: Annotated[
        Interval | None,
        setting(
            "Evaluate every N epochs, or steps (500st) [default: at the end]",
            metavar="DURATION",
            panel="Evaluation",
            aliases=("--val-interval",),  # of Habana's program, in epochs
        ),
    ] = None
    eval_at: Annotated[
        tuple[Positive, ...],
        setting(
            "Also evaluate after these epochs",
            metavar="E,E",
            panel="Evaluation",
        ),
    ] = ()
    patience: Annotated[
        Count | None,
        setting("Stop after N evaluations without a better AP", metavar="N", panel="Evaluation"),
    ] = None
    target_ap: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1)] | None,
        setting(
            "Stop when AP reaches this",
            metavar="AP",
            panel="Evaluation",
            aliases=("--threshold", "-t"),
        ),
    ] = None
    save_every: Annotated[
        IntervalOrTime,
        setting(
            "Save every N epochs, steps (500st) or minutes (10min)",
            metavar="DURATION",
            panel="Saving",
            aliases=("--save-checkpoints-epochs", "-c"),
        ),
    ] = "1ep"
    keep: Annotated[
        Count,
        setting(
            "Newest checkpoints to keep, besides the best",
            metavar="N",
            panel="Saving",
            aliases=("--keep-ckpt-max",),
        ),
    ] = 2
    log_every: Annotated[
        Count,
        setting(
            "Log metrics every N steps",
            metavar="N",
            panel="Saving",
            aliases=("--log-interval", "--log-step-count-steps", "--save-summary-steps"),
        ),
    ] = 20
    tensorboard: Annotated[
        bool,
        setting(
            "Write TensorBoard events to RUN/tensorboard",
            panel="Saving",
        ),
    ] = False
    tracker: Annotated[
        tuple[str, ...],
        setting(
            "Log to tensorboard, wandb or mlflow",
            metavar="A,B",
            panel="Saving",
        ),
    ] = ()
    upload_checkpoints: Annotated[
        bool,
        setting("Upload the best and last checkpoints", panel="Saving"),
    ] = False
    mllog: Annotated[
        str | None,
        setting("Append MLPerf log lines to this file", metavar="FILE", panel="Saving"),
    ] = None
