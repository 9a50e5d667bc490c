"""The functions of `import ssdctl`. Importing this module does not import torch.

The functions and the commands of the same names share their code, their settings and their errors.
Keywords are the settings that most calls need; `config` has the others. Nothing else is read: no
`ssdctl.toml` of the working folder and no `SSDCTL_*` variable, unlike on the command line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ssdctl.config.call import (
    ConfigLike,
    EvaluateSettings,
    PathLike,
    TrainSettings,
    hints_in_messages,
    named_path,
    override_of,
    overrides_of,
    public_call,
    resolve_call,
    takes_settings,
)
from ssdctl.config.resolve import refuse_twice
from ssdctl.config.settings import TABLES, Config
from ssdctl.errors import UsageError
from ssdctl.exporting import FORMATS, NMS
from ssdctl.runs.folder import make_report_dir
from ssdctl.runs.run import Run
from ssdctl.runtime.hardware import cores_kept
from ssdctl.runtime.progress import Progress, progress_bar, without_progress

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ssdctl.config.fields import Precision
    from ssdctl.data.report import Outcome
    from ssdctl.inference.predict import Predictor
    from ssdctl.runs.evaluation import Evaluation
    from ssdctl.training.observers import Observer

    CheckpointLike = PathLike | torch.nn.Module  # SSD300, also averaged, compiled or in DDP


@hints_in_messages()
def configure(config: ConfigLike | None = None, **tables: Mapping[str, Any]) -> Config:
    """Return a config with all settings, for the `config` of other functions.

    Args:
        config: A config or a config file; None uses the defaults.
        tables: Settings by table: `train={"augment": "none"}, model={"extra_norm": "batch"}`.
            `ssdctl config show` lists them.

    Raises:
        ssdctl.errors.UsageError: A setting does not exist, or has a wrong value.
    """
    for table, settings in tables.items():
        if table not in TABLES or not isinstance(settings, Mapping):
            raise UsageError(
                f"configure: {table} is not a table with its settings",
                hint=f'write train={{"lr": 0.01}}; the tables are {", ".join(TABLES)}',
            )
    given = [
        override_of(f"{table}.{key}", value, f"{table}.{key}")
        for table, settings in tables.items()
        for key, value in settings.items()
    ]
    names = dict[str, tuple[str, Any]]()
    for override in given:
        refuse_twice(override.path, override.path, override.value, names)
    return resolve_call(config, given)


@public_call()
def load(
    checkpoint: CheckpointLike,
    *,
    device: str = "auto",
    score: float | Literal["best"] | None = None,
    nms_iou: float | None = None,
    precision: Precision = "fp32",
    classes: Sequence[str] = (),
    max_detections: int | None = None,
    tile: int | None = None,
    tile_overlap: float | None = None,
) -> Predictor:
    """Load a detector from a checkpoint, ready to predict.

    Args:
        checkpoint: A checkpoint of ssdctl or a third-party one (MLPerf, Habana, NVIDIA,
            torchvision); a `.safetensors` or `.onnx` file of `ssdctl export`; a run or its folder:
            its best checkpoint, else its last; a detector's name, such as `ssd300-vgg16-coco`; a
            model on the Hugging Face Hub, such as `hf://org/name@v1`; or an `SSD300`, whose weights
            are copied.
        device: `auto` is the accelerator of this machine, else the CPU; under torchrun, that of
            this rank.
        score: Return only detections with a score above this, 0 to 1. `best` uses the score of
            each class's best F1 in the checkpoint's evaluation, or else the last one before it.
            None is `best` if the checkpoint has these, else 0.3.
        nms_iou: Drop a box if its IoU with a better one of its class is above this, 0 to 1.
            None uses the network's default (0.5; VGG16 0.45).
        precision: `fp32` or `bf16`.
        classes: Names of the classes to return; empty returns all.
        max_detections: Keep at most this many detections per image, best first; None keeps all.
        tile: Also detect in tiles of this size in pixels, for small objects; 0: only on the whole
            image. None: as the checkpoint was trained.
        tile_overlap: Overlap of neighboring tiles, as a fraction of a tile, 0 to 0.9. None: as the
            checkpoint was trained, else 0.2.

    Raises:
        ssdctl.errors.UsageError: The file, device, precision or a class does not exist, or a value
            is out of bounds.
        ssdctl.errors.NetworkError: The detector or model cannot be fetched.
        ssdctl.errors.IntegrityError: The file is damaged, not a checkpoint, or would run code.
    """
    given = {
        "device": device,
        "score": score,
        "nms_iou": nms_iou,
        "precision": precision,
        "classes": classes,
        "max_detections": max_detections,
    }
    tiles = {"tile": tile, "tile_overlap": tile_overlap}
    config = resolve_call(None, [*overrides_of("predict", given), *overrides_of("data", tiles)])
    from ssdctl.inference.predict import Predictor, load_detector  # late: torch takes seconds

    with cores_kept():
        return Predictor(*load_detector(checkpoint, config))


@hints_in_messages()
def prepare(
    data: PathLike | None = None,
    *,
    store: PathLike | None = None,
    split: float | None = None,
    classes: Sequence[str] | None = None,
    pack: bool | None = None,
    shrink: int | None = None,
    jobs: int | None = None,
    config: ConfigLike | None = None,
    force: bool = False,
    progress: bool = True,
) -> Outcome:
    """Check every annotation and every image's header, and pack them for training.

    Args:
        data: The dataset folder or file; the format is detected.
        store: Folder of the prepared data; None is `prepared/` in the dataset folder.
        split: Fraction of the images for training, 0 to 1; the others are for validation.
        classes: Keep only these classes.
        pack: Pack images for fast training (the default), else only index them.
        shrink: Downscale images whose shorter side exceeds this, in pixels.
        jobs: Threads that check images; None starts one per core.
        config: A config, or a config file, with other settings.
        force: Write the store again even if nothing changed.
        progress: Show a progress bar, on a terminal and in a notebook.

    Returns:
        The folders, and for each split its numbers and what was dropped or repaired.

    Raises:
        ssdctl.errors.UsageError: A setting does not exist, or has a wrong value.
        ssdctl.errors.DataError: The dataset cannot be used.
        ssdctl.errors.DiskError: The store cannot be written.
    """
    given = {
        "data": data,
        "store": store,
        "split": split,
        "classes": classes,
        "pack": pack,
        "shrink": shrink,
        "jobs": jobs,
    }
    config = resolve_call(config, overrides_of("prepare", given), "data", "prepare")
    from ssdctl.data.open_dataset import prepare_dataset

    return prepare_dataset(config, force=force, progress=_progress(progress))


@takes_settings(TrainSettings)
@public_call()
def train(
    data: PathLike | None = None,
    *,
    config: ConfigLike | None = None,
    observers: Iterable[Observer] = (),
    progress: bool = True,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Train a detector, or resume the stopped run in the folder `out`.

    The same settings as of `ssdctl train` give the same weights, bit by bit. Under torchrun every
    rank calls it. None leaves a setting to `config`, else to the preset.

    Args:
        data: The dataset folder or file.
        config: A config, or a config file, with other settings.
        observers: Are told about the run, on the first rank: see `ssdctl.Observer`.
        progress: Show a progress bar, on a terminal and in a notebook.
        out: The run folder; None is `runs/DATASET-BACKBONE`, with `init` `runs/DATASET-NAME`.
        init: Start from the weights of this checkpoint; other classes get new class heads.
        preset: The recipe, such as `stable-r34` or `nvidia-r50`.
        backbone: Such as `resnet18`, `resnet34`, `resnet50` or `vgg16`.
        backbone_weights: A name of `ssdctl fetch-weights --list`, a file, or `none`.
        epochs: Length of the schedule.
        steps: Stop after this many optimizer steps.
        batch_size: Batch size per device; `auto`: the largest that fits in memory.
        lr: Learning rate at a global batch of 32; it is scaled linearly with the global batch.
        warmup: Length of the warm-up: `"300st"` in steps, `3` or `"3ep"` in epochs.
        optimizer: `sgd` or `adamw`.
        precision: Network precision: `fp32`, `bf16`, `fp16`, or `auto`, the device's fastest.
        device: `auto` is the accelerator of this machine, else the CPU.
        workers: Threads that decode images.
        seed: Seed of the weights, the data order and the augmentation.

    Returns:
        The run.

    Raises:
        ssdctl.errors.UsageError: A setting, the device or the run folder cannot be used.
        ssdctl.errors.DataError: The dataset cannot be used.
        ssdctl.errors.NonFiniteError: Too many steps had a NaN or infinite loss or gradient.
        ssdctl.errors.Stopped: Interrupted, as by a notebook's stop button; everything is saved, and
            the same call continues.
    """
    from ssdctl.training.trainer import Trainer  # late: torch takes seconds

    with Trainer(
        data, config=config, observers=observers, progress=progress, **settings
    ) as trainer:
        return trainer.run()


@takes_settings(EvaluateSettings)
@public_call()
def evaluate(
    checkpoint: CheckpointLike,
    data: PathLike | None = None,
    *,
    config: ConfigLike | None = None,
    detections: PathLike | None = None,
    report: PathLike | None = None,
    distributed: bool = True,
    progress: bool = True,
    **settings: Unpack[EvaluateSettings],
) -> Evaluation:
    """Compute COCO AP for a checkpoint or a file of detections.

    Under torchrun, or in a process group of your own, every rank calls it and gets the result;
    the network is the first rank's.

    Args:
        checkpoint: As `load` takes it, or a file in COCO's results format, which is scored without
            torch.
        data: The dataset; None uses the one that the checkpoint was trained on.
        split: `val` (the default), `train` or `test`.
        batch_size: Images per pass through the network.
        device: `auto` is the accelerator of this machine, else the CPU.
        precision: Network precision; None uses the run's, else fp32.
        workers: Threads that decode images.
        limit: Score only the first images.
        score_threshold: Drop detections below this score, 0 to 1; None: the network's own.
        nms_iou: See `load`.
        config: A config, or a config file, with other settings.
        detections: Write the detections in COCO's results format to this file.
        report: Write report.html and evaluation.json to this folder.
        distributed: Share the images among the ranks; False: only this rank scores, all images.
        progress: Show a progress bar, on a terminal and in a notebook.

    Returns:
        `metrics` (AP, AP50, ... 0 to 1, -1 if undefined), `per_class`, `errors` and more.

    Raises:
        ssdctl.errors.UsageError: A setting, the checkpoint or the device does not exist.
        ssdctl.errors.DataError: The dataset or the detections cannot be read.
        ssdctl.errors.IntegrityError: The checkpoint is damaged, or has other classes.
    """
    from ssdctl.checkpoint.locate import locate_checkpoint
    from ssdctl.evaluation.evaluate import evaluate_files

    with _failing_together(distributed):
        given = overrides_of("evaluate", {"data": data, **settings})
        config = resolve_call(config, given, "data", "evaluate")
        file = locate_checkpoint(checkpoint, mirror=config.download.mirror)
        if report is not None:
            make_report_dir(named_path("report", report))

    def write(evaluation: Evaluation) -> None:
        if report is not None:
            from ssdctl.reporting.page import write_evaluation_report

            write_evaluation_report(evaluation, Path(report))

    (evaluation,) = evaluate_files(
        [file],
        config,
        progress=_progress(progress),
        detections_file=None if detections is None else Path(detections),
        is_distributed=distributed,
        on_scored=write,
    )
    return evaluation


def _failing_together(is_distributed: bool) -> contextlib.AbstractContextManager[None]:
    """See `process_group.failing_together`; a single process does not import torch for it."""
    from ssdctl.distributed import find_ranks

    if not is_distributed or find_ranks().is_single_process:
        return contextlib.nullcontext()
    from ssdctl.distributed.process_group import failing_together

    return failing_together()


@public_call(format=FORMATS, nms=NMS)
def export(
    checkpoint: CheckpointLike,
    out: PathLike,
    *,
    format: Literal["onnx", "openvino", "pt2", "safetensors", "mlperf", "nvidia"] = "onnx",
    nms: Literal["onnx", "efficientnms", "none"] | None = None,
    raw: bool = False,
    batch: int | None = None,
    fp16: bool = False,
    int8: bool = False,
    calibrate: int | None = None,
    max_ap_loss: float | None = None,
    score_threshold: float | None = None,
    nms_iou: float | None = None,
    data: PathLike | None = None,
    limit: int | None = None,
    config: ConfigLike | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a checkpoint for another runtime or program.

    Before a file for another runtime is written, its output is compared with PyTorch's.

    Args:
        checkpoint: As `load` takes it.
        out: The file to write.
        format: The file's format.
        nms: `onnx`: detections; `efficientnms`: TensorRT's plugin; `none`: all boxes and scores.
        raw: The raw heads, without decoding and NMS.
        batch: Fixed batch size of the file; None allows any.
        fp16: Weights in half precision; the network computes in fp32.
        int8: ONNX: quantize, and score the result.
        calibrate: Images for the ranges of int8.
        max_ap_loss: Fail if int8 loses more AP than this.
        score_threshold: Score threshold of the NMS, 0 to 1; None uses the network's default.
        nms_iou: IoU threshold of the NMS, 0 to 1; None uses the network's default.
        data: Dataset to calibrate and score int8; None uses the one of the training.
        limit: Score int8 on the first images only.
        config: A config, or a config file, with other settings.
        progress: Show a progress bar, on a terminal and in a notebook.

    Returns:
        What `ssdctl export --json` prints: the file, and what was compared or measured.

    Raises:
        ssdctl.errors.UsageError: The options do not fit the format, a package is missing, or `out`
            is a file that is not an earlier export.
        ssdctl.errors.IntegrityError: The checkpoint is damaged, or the outputs differ.
        ssdctl.errors.DiskError: The file cannot be written.
    """
    thresholds = {"score_threshold": score_threshold, "nms_iou": nms_iou}
    given = overrides_of("evaluate", {"data": data, "limit": limit, **thresholds})
    config = resolve_call(config, given, "data", "evaluate")
    from ssdctl.exporting import ExportRequest, export_checkpoint

    return export_checkpoint(
        checkpoint,
        ExportRequest(
            format, named_path("out", out), nms, raw, batch, fp16, int8, calibrate, max_ap_loss
        ),
        config,
        progress=_progress(progress),
    )


@public_call()
def report(*runs: PathLike, out: PathLike | None = None) -> Path:
    """Write one self-contained HTML page about runs, side by side; return its path.

    Args:
        runs: Runs or run folders, or folders that `evaluate(report=...)` wrote.
        out: The file to write; None is report.html in the run folder, or, for several runs,
            comparison.html in the first one.

    Raises:
        ssdctl.errors.UsageError: None is named, one is not a run folder, or `out` is another file.
        ssdctl.errors.DataError: A file of a run is broken.
        ssdctl.errors.DiskError: The page cannot be written.
    """
    from ssdctl.reporting.page import write_report
    from ssdctl.runs.run import default_report, open_runs

    if not runs or isinstance(runs[0], list | tuple):
        hint = 'write ssdctl.report("runs/first", "runs/second")'
        raise UsageError("report: name one or more runs", hint=hint)
    target = default_report(runs) if out is None else named_path("out", out)
    write_report(open_runs([named_path("a run", run) for run in runs]), target)
    return target


def default_boxes(dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the default boxes of SSD300, (8732, 4): center x, center y, width, height.

    They are fractions of the image, 0 to 1, in the order of the network's outputs: feature map,
    shape, row, column.

    Args:
        dtype: Type of the tensor; None is float32.
    """
    import torch

    from ssdctl.boxes import default_boxes_cxcywh

    return default_boxes_cxcywh(torch.float32 if dtype is None else dtype)


def _progress(is_shown: bool) -> Progress:
    return progress_bar if is_shown else without_progress
