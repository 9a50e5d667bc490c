"""Settings of the network and of a training run."""

import functools
from typing import Annotated, Final, Literal

import msgspec

from ssdctl.config.devices import DeviceName
from ssdctl.config.fields import (
    AUGMENTATION_LISTS,
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
# Settings under a heading of `--help`.
_network = functools.partial(setting, panel="Network")
_recipe = functools.partial(setting, panel="Recipe")
_run = functools.partial(setting, panel="Run")
_device = functools.partial(setting, panel="Device")
_input = functools.partial(setting, panel="Input")
_evaluation = functools.partial(setting, panel="Evaluation")
_saving = functools.partial(setting, panel="Saving")


class ModelConfig(Section, frozen=True):
    """The network."""

    backbone: Annotated[BackboneName, _network("Backbone of the detector")]
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


class TrainConfig(Section, frozen=True):
    """One training run. Fields without a default belong to the recipe: the preset sets them."""

    # Recipe
    epochs: Annotated[Count, setting("Length of the run in epochs", aliases=("-e",))]
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
            "Run folder; resumes a run in it [default: runs/DATASET-BACKBONE]",
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
    accumulate: Annotated[
        Count, _recipe("Batches per optimizer step; multiplies the global batch")
    ] = 1
    ema: Annotated[
        float,
        _recipe(
            "Keep an EMA of the weights and evaluate it (try 0.999)", metavar="DECAY", ge=0, lt=1
        ),
    ] = 0.0
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
    device: Annotated[DeviceName, _device("Device to train on (auto: accelerator, else CPU)")] = (
        "auto"
    )
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
    overfit: Annotated[Count | None, _input("Train and evaluate on N images, to check")] = None

    # Evaluation, saving, logging
    eval_every: Annotated[
        Interval | None,
        _evaluation(
            "Evaluate every N epochs, or steps (500st) [default: at the end]", metavar="DURATION"
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
        Count, _saving("Log metrics every N steps", aliases=("--log-interval",))
    ] = 20
    tensorboard: Annotated[bool, _saving("Write TensorBoard events to RUN/tensorboard")] = False
    tracker: Annotated[
        tuple[str, ...], _saving("Log to tensorboard, wandb or mlflow", metavar="A,B")
    ] = ()
    upload_checkpoints: Annotated[bool, _saving("Upload the best and last checkpoints")] = False
    mllog: Annotated[
        str | None, _saving("Append MLPerf log lines to this file", metavar="FILE")
    ] = None


class SettledTrainConfig(TrainConfig, frozen=True):
    """A training run whose batch size is a number."""

    batch_size: Count
