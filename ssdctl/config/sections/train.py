"""Settings of the network and of a training run."""

from typing import Annotated, Final, Literal

import msgspec

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
            "Backbone of the detector; a ResNet is cut after conv4_x",
            panel="Network",
            affects_results=True,
        ),
    ]
    weights: Annotated[
        str,
        setting(
            "Backbone weights: a name (ssdctl fetch-weights --list; imagenet-v1 is the backbone's "
            "own), a file, or none",
            flag="--backbone-weights",
            metavar="NAME|FILE|none",
            panel="Network",
            aliases=("--backbone-path", "--pretrained-backbone"),
            removed_flags={
                "--weights": "--backbone-weights for a backbone, --init FILE for a whole detector",
                "--resnet-checkpoint": "--backbone-weights; TensorFlow checkpoints are not read",
                "--torchvision-weights-version": "--backbone-weights imagenet-v1 or imagenet-v2",
            },
        ),
    ]
    extra_norm: Annotated[
        Literal["none", "batch"],
        setting(
            "Normalisation in the extra blocks: none (MLPerf) or batch (NVIDIA)",
            panel="Network",
            affects_results=True,
        ),
    ]


class TrainConfig(Section, frozen=True):
    """One training run. Fields without a default belong to the recipe: the preset sets them."""

    # Recipe
    epochs: Annotated[
        Count,
        setting("Length of the run, in epochs", metavar="N", panel="Recipe", aliases=("-e",)),
    ]
    batch_size: Annotated[
        Count | Literal["auto"],
        setting(
            "Images per device and step; auto = as many as the device's memory holds",
            flag="--bs",
            metavar="N|auto",
            panel="Recipe",
            aliases=("-b",),
        ),
    ]
    lr: Annotated[
        Positive,
        setting(
            "Learning rate at global batch 32; scaled by global batch / 32",
            metavar="X",
            panel="Recipe",
            aliases=("--learning-rate", "--base-lr"),
            affects_results=True,
        ),
    ]
    warmup: Annotated[
        Duration,
        setting(
            "Linear warm-up: 3 or 3ep = epochs, 300st = optimizer steps",
            metavar="DURATION",
            panel="Recipe",
            aliases=("--lr-warmup-epoch",),
            affects_results=True,
        ),
    ]
    decay_epochs: Annotated[
        tuple[Positive, ...],
        setting(
            "Epochs at which the learning rate decays (see --lr-decay)",
            metavar="E,E",
            panel="Recipe",
            removed_flags={
                "--multistep": "--decay-epochs 43,54, with commas (42,53 for DALI's example)",
                "--lr-decay-schedule": "--decay-epochs 40,50, with commas",
                "--lr-decay-epochs": "--decay-epochs 40,50, with commas",
                "--k": "--decay-epochs 15,55, the two ends of the cosine",
            },
            affects_results=True,
        ),
    ]
    lr_decay: Annotated[
        Literal["step", "cosine"],
        setting(
            "step = divide by 10 at each decay epoch; cosine = decay from the first to the second "
            "of two decay epochs",
            panel="Recipe",
            affects_results=True,
        ),
    ]
    momentum: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)],
        setting(
            "SGD momentum (AdamW: beta1)",
            metavar="X",
            panel="Recipe",
            aliases=("-m",),
            affects_results=True,
        ),
    ]
    weight_decay: Annotated[
        NonNegative,
        setting(
            "Weight decay",
            metavar="X",
            panel="Recipe",
            aliases=("--wd",),
            affects_results=True,
        ),
    ]
    decay_bias: Annotated[
        bool,
        setting(
            "Apply weight decay to the biases of convolutions", panel="Recipe", affects_results=True
        ),
    ]
    decay_norm: Annotated[
        bool,
        setting(
            "Apply weight decay to batch norm's scale and bias",
            panel="Recipe",
            affects_results=True,
        ),
    ]
    optimizer: Annotated[
        Literal["sgd", "adamw"], setting("Optimizer", panel="Recipe", affects_results=True)
    ]
    clip_grad: Annotated[
        NonNegative,
        setting(
            "Clip the gradient's global L2 norm to this; 0 = off",
            metavar="NORM",
            panel="Recipe",
            affects_results=True,
        ),
    ]
    freeze_stem: Annotated[
        bool,
        setting(
            "Do not train conv1 and the first block's first 3x3 convolution, and the scale and "
            "bias of their batch norms",
            panel="Recipe",
            affects_results=True,
        ),
    ]
    hue_degrees: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=180)],
        setting(
            "Hue jitter of the augmentation, +- degrees",
            metavar="DEG",
            panel="Recipe",
            affects_results=True,
        ),
    ]
    precision: Annotated[
        Precision,
        setting(
            "Arithmetic of the network: auto = bf16 if the device supports it natively, else fp32",
            panel="Device",
            choice_flags=True,
            aliases=("--dtype", "--data-type", "--autocast=bf16", "--no-amp=fp32"),
            removed_flags={
                "--amp": "--bf16, or --fp16 (GPUs only, the type of NVIDIA's --amp)",
                "--fp16-mode": "--fp16, --bf16 or --fp32",
                "--use-fp16": "--fp16 or --bf16",
                "--hmp": "--bf16: autocast chooses the operators, without lists",
                "--lowp": "--bf16",
                "--BF16": "--bf16",
            },
            affects_results=True,
        ),
    ]

    # Run
    preset: Annotated[
        PresetName,
        setting("Recipe to start from (ssdctl config presets)", panel="Recipe"),
    ] = DEFAULT_PRESET
    out: Annotated[
        str | None,
        setting(
            "Run folder; training resumes if it contains a run [default: runs/DATASET-BACKBONE]",
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
            "Stop after this many optimizer steps [default: all epochs]",
            metavar="N",
            panel="Run",
            aliases=("--end-iteration", "--num-steps", "--max-steps"),
        ),
    ] = None
    init: Annotated[
        str | None,
        setting(
            "Start a new run from the weights of this checkpoint, detector, or hf://org/name",
            metavar="CKPT|NAME",
            panel="Run",
        ),
    ] = None
    resume: Annotated[
        str,
        setting(
            "Resume from: auto = the newest intact checkpoint of RUN if any; never = start a new "
            "run; or a checkpoint",
            metavar="auto|never|FILE",
            panel="Run",
            removed_flags={
                "--checkpoint": "--init FILE to start from the weights of a checkpoint (of any "
                "system), or --resume FILE to continue a run of ssdctl with its optimizer",
                "--iteration": "--resume: a checkpoint of ssdctl contains its step",
            },
        ),
    ] = "auto"
    resume_changed: Annotated[
        bool,
        setting("Resume even if a setting that affects the results differs", panel="Run"),
    ] = False
    seed: Annotated[
        NonNegativeInt,
        setting(
            "Seed of image order, crops, colours and initial weights",
            metavar="N",
            panel="Run",
            affects_results=True,
        ),
    ] = 0
    accumulate: Annotated[
        Count,
        setting(
            "Micro-batches per optimizer step; multiplies the global batch",
            metavar="N",
            panel="Recipe",
            aliases=("--accumulation",),
            removed_flags={
                "--batch-splits": "--accumulate, which multiplies the batch instead of dividing "
                "it: a batch of 128 in 4 splits is --bs 32 --accumulate 4",
            },
        ),
    ] = 1
    ema: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)],
        setting(
            "Evaluate and deploy a moving average of the weights with this decay (0.999 is usual); "
            "0 = off",
            metavar="DECAY",
            panel="Recipe",
            affects_results=True,
        ),
    ] = 0.0
    freeze: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=4)],
        setting(
            "Do not train the first N of the backbone's 4 stages (a ResNet's stem, layer1, layer2, "
            "layer3; VGG16's first 4 blocks), nor update the statistics of their batch norms",
            metavar="N",
            panel="Recipe",
            affects_results=True,
        ),
    ] = 0
    freeze_norm: Annotated[
        bool,
        setting(
            "Normalise with the stored statistics of batch norm and do not update them: for "
            "fine-tuning with small batches",
            panel="Recipe",
            affects_results=True,
        ),
    ] = False
    sync_bn: Annotated[
        bool,
        setting(
            "Compute batch norm over the images of all ranks",
            panel="Recipe",
            aliases=("--distributed-bn",),
            affects_results=True,
        ),
    ] = False
    deterministic: Annotated[
        bool,
        setting(
            "Use only kernels that give bit-identical results each time; slower",
            panel="Run",
            aliases=("--det",),
        ),
    ] = False
    rank_timeout: Annotated[
        Positive,
        setting(
            "Seconds that a rank waits for another one before it fails (exit 8)",
            metavar="S",
            panel="Run",
        ),
    ] = 600.0
    on_nonfinite: Annotated[
        Literal["skip", "rollback", "stop"],
        setting(
            "Action on a NaN or infinite loss or gradient: skip the step, return to the last "
            "checkpoint and skip the images since then, or exit 7",
            panel="Run",
        ),
    ] = "skip"

    # Device
    device: Annotated[
        DeviceName,
        setting(
            "Device to train on; auto = the accelerator of this machine, else cpu",
            panel="Device",
            aliases=("--use-hpu=hpu", "--hpu=hpu", "--no-hpu=cpu"),
            removed_flags={"--no-cuda": "--device cpu, or --device xla for a TPU"},
        ),
    ] = "auto"
    execution: Annotated[
        Literal["eager", "compile", "lazy"] | None,
        setting(
            "How a step runs: operation by operation, with torch.compile, or as graphs that the "
            "device's software collects [default: the device's fastest]",
            panel="Device",
            aliases=("--hpu-lazy-mode=lazy", "--use-torch-compile=compile", "--compile=compile"),
            removed_flags={"--use-lazy-mode": "--execution lazy, or compile"},
        ),
    ] = None
    tf32: Annotated[
        bool,
        setting(
            "Round the factors of fp32 products to TF32, if the GPU supports it",
            panel="Device",
            aliases=("--allow-tf32=true", "--no-allow-tf32=false"),
            affects_results=True,
        ),
    ] = False
    profile: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d{0,17},[1-9]\d{0,17}$")] | None,
        setting(
            "Profile these optimizer steps (inclusive): write a Chrome trace and a table of the "
            "slowest kernels and waits to RUN/profile",
            metavar="FIRST,LAST",
            panel="Run",
            removed_flags={
                "--profiling": "--profile 50,53, the first and the last step",
                "--profile-steps": "--profile 50,53, the first and the last step",
                "--profiler": "--profile 50,53, the first and the last step",
            },
        ),
    ] = None

    # Input
    workers: Annotated[
        NonNegativeInt,
        setting(
            "Decode threads per rank; 0 = this process's share of the cores",
            metavar="N",
            panel="Input",
            aliases=("--num-workers",),
            removed_flags={
                "--num-parallel-calls": "--workers, all decode threads of a rank",
                "--threadpool-size": "--workers, all decode threads of a rank",
                "--max-cpus": "--workers, all decode threads of a rank",
            },
        ),
    ] = 0
    pipeline: Annotated[
        Literal["native", "dali"],
        setting(
            "Image decoder: ssdctl's own, or nvidia-dali (the dali extra) with the same samples, "
            "crops and colours; pixels differ by a few levels",
            panel="Input",
            removed_flags={
                "--data-pipeline": "--pipeline native or --pipeline dali",
                "--dl-worker-type": "--pipeline native or --pipeline dali",
                "--use-dali": "--pipeline dali",
            },
            affects_results=True,
        ),
    ] = "native"
    fake_data: Annotated[
        bool,
        setting(
            "Train on random batches to measure the device: no dataset is needed, nothing is "
            "evaluated",
            panel="Input",
            aliases=("--use-fake-data", "--synthetic-data", "-f"),
            affects_results=True,
        ),
    ] = False
    augment: Annotated[
        Literal["ssd", "ssd-zoom", "none"],
        setting(
            "ssd = random crops, flips and colours; ssd-zoom = also zoom out; none = only resize "
            "the images",
            panel="Input",
            affects_results=True,
        ),
    ] = "ssd"
    limit_train: Annotated[
        Count | None,
        setting(
            "Train only on the first N images", metavar="N", panel="Input", affects_results=True
        ),
    ] = None
    overfit: Annotated[
        Count | None,
        setting(
            "Train on the first N images, without augmentation, and evaluate on the same ones: AP "
            "near 1 shows that data and settings are correct",
            metavar="N",
            panel="Input",
            affects_results=True,
        ),
    ] = None

    # Evaluation, saving, logging
    eval_every: Annotated[
        Interval | None,
        setting(
            "Evaluate this often (epochs, or steps with st) [default: at the end]",
            metavar="DURATION",
            panel="Evaluation",
            removed_flags={
                "--val-interval": "--eval-every 10, epochs; fractions and steps (500st) too",
            },
        ),
    ] = None
    eval_at: Annotated[
        tuple[Positive, ...],
        setting(
            "Also evaluate after these epochs; those of a preset only without --eval-every",
            metavar="E,E",
            panel="Evaluation",
            removed_flags={
                "--evaluation": "--eval-at 22,32, with commas and counted from 1, not from 0",
                "--val-epochs": "--eval-at 40,50, with commas",
            },
        ),
    ] = ()
    patience: Annotated[
        Count | None,
        setting(
            "Stop after N evaluations in a row without a better AP", metavar="N", panel="Evaluation"
        ),
    ] = None
    target_ap: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1)] | None,
        setting(
            "Stop once AP reaches this",
            metavar="AP",
            panel="Evaluation",
            aliases=("--threshold", "-t"),
            removed_flags={
                "--target": "--target-ap, which stops the run instead of rating it at its end",
            },
        ),
    ] = None
    save_every: Annotated[
        IntervalOrTime,
        setting(
            "Save a checkpoint this often: epochs, steps (st) or minutes (min)",
            metavar="DURATION",
            panel="Saving",
            aliases=("--save-checkpoints-epochs", "-c"),
            removed_flags={"--save-checkpoints-steps": "--save-every 500st, with the unit"},
        ),
    ] = "1ep"
    keep: Annotated[
        Count,
        setting(
            "Number of newest checkpoints to keep, in addition to the best",
            metavar="N",
            panel="Saving",
            aliases=("--keep-ckpt-max",),
        ),
    ] = 2
    log_every: Annotated[
        Count,
        setting(
            "Optimizer steps between two records of metrics",
            metavar="N",
            panel="Saving",
            aliases=("--log-interval", "--log-step-count-steps", "--save-summary-steps"),
            removed_flags={
                "--suppress-loss-report": "--log-every N: between two records nothing is read "
                "from the device",
            },
        ),
    ] = 20
    tensorboard: Annotated[
        bool,
        setting(
            "Write TensorBoard events to RUN/tensorboard: metrics, and images with their boxes",
            panel="Saving",
        ),
    ] = False
    tracker: Annotated[
        tuple[str, ...],
        setting(
            "Send metrics, settings and images to these trackers: tensorboard, wandb, mlflow, or "
            "one that another package adds",
            metavar="A,B",
            panel="Saving",
        ),
    ] = ()
    upload_checkpoints: Annotated[
        bool,
        setting("Upload the best checkpoints and the last one to the trackers", panel="Saving"),
    ] = False
    mllog: Annotated[
        str | None,
        setting("Append MLPerf log lines to this file", metavar="FILE", panel="Saving"),
    ] = None
