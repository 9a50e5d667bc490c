"""The Python API: what `import ssdctl` offers. Importing this module does not import torch.

The functions and the commands of the same names share their code, their settings and their errors.
A keyword is the name of an option without dashes (`batch_size` or `bs`, `lr`, `backbone_weights`).
A setting of another command is given by its table: `train(..., evaluate={"batch_size": 4})`.
Defaults come from the same sources as on the command line: preset, `ssdctl.toml` or `config`,
`SSDCTL_*` variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdctl.config.render import values
from ssdctl.config.resolve import Override, Resolved, nearest_key, resolve, sources_of
from ssdctl.config.schema import Config
from ssdctl.config.settings import all_settings, select
from ssdctl.config.sources import Kind, of_call
from ssdctl.errors import UsageError
from ssdctl.runs.layout import RunDir, find_checkpoint
from ssdctl.runs.metrics import Record, read_metrics
from ssdctl.runs.progress import TrainingBar
from ssdctl.runtime.progress import progress_bar, without_progress

if TYPE_CHECKING:
    from ssdctl.data.prepare import Outcome
    from ssdctl.inference.predict import Predictor
    from ssdctl.runs.evaluation import Evaluation

PathLike = str | os.PathLike[str]


def configure(config: Config | PathLike | None = None, **tables: Mapping[str, Any]) -> Config:
    """Return the typed config that a call of another function would use.

    Args:
        config: A config, or a config file; None: `ssdctl.toml` in the working folder if it exists.
        tables: Settings by table: `train={"lr": 1e-3}, model={"backbone": "resnet18"}`.

    Raises:
        ssdctl.errors.UsageError: A setting does not exist, or has a wrong value.
    """
    return _resolved(config, [], tables).config


def load(
    checkpoint: PathLike,
    *,
    device: str = "auto",
    score: float = 0.3,
    nms_iou: float | None = None,
    precision: str = "fp32",
    classes: Sequence[str] = (),
    max_detections: int | None = None,
    tile: int | None = None,
    tile_overlap: float = 0.2,
) -> Predictor:
    """Load a detector from a checkpoint, ready to predict.

    Args:
        checkpoint: A checkpoint of ssdctl or a third-party one (MLPerf, Habana, NVIDIA,
            torchvision); a `.safetensors` or `.onnx` file of `ssdctl export`; a run or its folder:
            its best checkpoint, else its last; a detector's name, as `ssd300-vgg16-coco`; or a
            model on the Hugging Face Hub, as `hf://org/name@v1`.
        device: `auto` is the accelerator of this machine, else the CPU.
        score: Return only detections with a score above this, 0 to 1.
        nms_iou: Drop a box if its IoU with a better one of its class is above this, 0 to 1.
            None: the network's own (0.5; VGG16 0.45).
        precision: `fp32` or `bf16`.
        classes: The names of the classes to return; empty: all.
        max_detections: How many detections of a picture are returned, the best; None: all.
        tile: Detect on tiles of so many pixels and on the whole picture, and merge; for pictures
            of which the objects are small. None: only the whole picture.
        tile_overlap: Overlap of neighbouring tiles, as a fraction of a tile, 0 to 0.9.

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
        "classes": classes if isinstance(classes, str) else list(classes),
        "max_detections": max_detections,
        "tile": tile,
        "tile_overlap": tile_overlap,
    }
    overrides = [_override(f"predict.{name}", value) for name, value in given.items()]
    # Only to check the values: the defaults are those of this function.
    settings = resolve(overrides=overrides, environment={}, default_file=False).config.predict
    from ssdctl.inference.detector import DetectorConfig  # late: torch takes seconds
    from ssdctl.inference.predict import Options, Predictor, load_detector

    detector, name = load_detector(
        checkpoint,
        device=settings.device,
        config=DetectorConfig(precision, settings.score, settings.nms_iou),
        options=Options(
            settings.classes, settings.max_detections, settings.tile, settings.tile_overlap
        ),
    )
    return Predictor(detector, name)


def prepare(
    data: PathLike | None = None,
    *,
    config: Config | PathLike | None = None,
    force: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Outcome:
    """Check every annotation and every image's header, and write the store that training reads.

    Args:
        data: The dataset folder or file; the layout is detected.
        config: A config, or a config file.
        force: Write the store again even if nothing changed.
        progress: Show a progress bar, on a terminal and in a notebook.
        settings: Settings of `ssdctl prepare`: `pack`, `shrink`, `split`, `classes`, `store`, ...

    Returns:
        The folders, and for each split its numbers and what was dropped or repaired.

    Raises:
        ssdctl.errors.UsageError: A setting does not exist, or has a wrong value.
        ssdctl.errors.DataError: The dataset cannot be used.
        ssdctl.errors.DiskError: The store cannot be written.
    """
    from ssdctl.data.open_dataset import prepare_dataset

    resolved = _resolved(config, ["data.*", "prepare.*"], {"data": data, **settings})
    show = progress_bar if progress else without_progress
    return prepare_dataset(resolved.config, force=force, progress=show)


def train(
    data: PathLike | None = None,
    *,
    config: Config | PathLike | None = None,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train SSD300, or continue the run in the folder `out` that was stopped.

    Args:
        data: The dataset folder or file.
        config: A config, or a config file.
        progress: Show a progress bar, on a terminal and in a notebook.
        settings: Settings of `ssdctl train`: `out`, `epochs`, `steps`, `bs`, `lr`, `backbone`, ...

    Returns:
        The run; its folder is `out`, else `runs/DATASET-BACKBONE`.

    Raises:
        ssdctl.errors.UsageError: A setting, the device or the run folder cannot be used.
        ssdctl.errors.DataError: The dataset cannot be used.
        ssdctl.errors.NonFiniteError: Too many steps had a NaN or infinite loss or gradient.
        ssdctl.errors.Stopped: Interrupted, as by a notebook's stop button; everything is saved, and
            the same call continues.
    """
    from ssdctl.data.store_folder import with_absolute_data
    from ssdctl.runtime import signals

    resolved = _resolved(config, ["data.*", "model.*", "train.*"], {"data": data, **settings})
    with signals.handled():
        from ssdctl.training.setup import run_training

        with closing(TrainingBar(is_shown=progress)) as bar:
            summary = run_training(
                with_absolute_data(resolved),
                emit=bar.show,
                progress=progress_bar if progress else without_progress,
            )
    return Run(summary.out)


def evaluate(
    what: PathLike,
    data: PathLike | None = None,
    *,
    config: Config | PathLike | None = None,
    detections: PathLike | None = None,
    report: PathLike | None = None,
    progress: bool = True,
    **settings: Any,
) -> Evaluation:
    """Score a checkpoint or a file of detections by COCO AP.

    Args:
        what: A checkpoint as `load` takes it, or a file in COCO's results format, which is scored
            without torch.
        data: The dataset; None: the one that the checkpoint was trained on.
        config: A config, or a config file.
        detections: Write the detections in COCO's results format to this file.
        report: Write report.html and evaluation.json to this folder.
        progress: Show a progress bar, on a terminal and in a notebook.
        settings: Settings of `ssdctl evaluate`: `split`, `limit`, `bs`, `device`, ...

    Returns:
        `figures` (AP, AP50, ...), `per_class`, `errors` and more.

    Raises:
        ssdctl.errors.UsageError: A setting, the checkpoint or the device does not exist.
        ssdctl.errors.DataError: The dataset or the detections cannot be read.
        ssdctl.errors.IntegrityError: The checkpoint is damaged, or has other classes.
    """
    from ssdctl.distributed.ranks import find_ranks
    from ssdctl.evaluation.sources import evaluate_files, locate_source

    resolved = _resolved(config, ["data.*", "evaluate.*"], {"data": data, **settings})
    path = locate_source(what, mirror=resolved.config.download.mirror)
    (evaluation,) = evaluate_files(
        [find_checkpoint(path)],
        resolved,
        progress=progress_bar if progress else without_progress,
        detections_file=None if detections is None else Path(detections),
    )
    if report is not None and find_ranks().is_main:
        from ssdctl.reporting.page import write_evaluation_report

        write_evaluation_report(evaluation, Path(report))
    return evaluation


def export(
    checkpoint: PathLike,
    out: PathLike,
    *,
    format: str = "onnx",
    nms: str | None = None,
    raw: bool = False,
    batch: int | None = None,
    fp16: bool = False,
    int8: bool = False,
    calibrate: int | None = None,
    max_ap_loss: float | None = None,
    config: Config | PathLike | None = None,
    progress: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Write a checkpoint for another runtime or program.

    Before a file for another runtime is written, its output is compared with PyTorch's.

    Args:
        checkpoint: As `load` takes it.
        out: The file to write.
        format: `onnx`, `openvino`, `pt2`, `safetensors`, `mlperf` or `nvidia`.
        nms: `onnx`: detections; `efficientnms`: TensorRT's plugin; `none`: all boxes and scores.
        raw: The raw heads, without decoding and NMS.
        batch: Pictures of a call; None: any number.
        fp16: Weights in half precision; the arithmetic is fp32.
        int8: ONNX: quantize, and score the result.
        calibrate: Pictures for the ranges of int8.
        max_ap_loss: Write no int8 file that loses more AP.
        config: A config, or a config file.
        progress: Show a progress bar, on a terminal and in a notebook.
        settings: Settings of `ssdctl export`: `data`, `score_threshold`, `nms_iou`, `limit`.

    Returns:
        What `ssdctl export --json` prints: the file, and what was compared or measured.

    Raises:
        ssdctl.errors.UsageError: The options do not fit the format, or a package is missing.
        ssdctl.errors.IntegrityError: The checkpoint is damaged, or the outputs differ.
        ssdctl.errors.DiskError: The file cannot be written.
    """
    from ssdctl.exporting.request import ExportRequest, export_checkpoint

    names = ["score_threshold", "nms_iou", "limit"]
    return export_checkpoint(
        os.fspath(checkpoint),
        ExportRequest(format, Path(out), nms, raw, batch, fp16, int8, calibrate, max_ap_loss),
        _resolved(config, ["data.root", *(f"evaluate.{name}" for name in names)], settings),
        progress=progress_bar if progress else without_progress,
    )


class Run:
    """A run folder of `train` or `ssdctl train`. Functions that take a checkpoint take a run too.

    Args:
        path: The run folder.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def metrics(self) -> list[Record]:
        """The records of metrics.jsonl, one dictionary each; `pandas.DataFrame(run.metrics)`."""
        return read_metrics(RunDir(self.path).metrics)[0]

    @property
    def best(self) -> Path:
        """The checkpoint with the best AP, else the last one."""
        return find_checkpoint(self.path)

    @property
    def figures(self) -> dict[str, Any] | None:
        """The figures of the best evaluation: AP, AP50, ...; None if there was none."""
        from ssdctl.runs.reader import read_run

        return read_run(self.path).best

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return resolve(file=str(RunDir(self.path).config), environment={}).config

    def report(self, out: PathLike | None = None) -> Path:
        """Write the report, a self-contained HTML page, and return its path.

        Args:
            out: The file; None: report.html in the run folder.
        """
        from ssdctl.reporting.page import write_report
        from ssdctl.runs.reader import read_run

        target = RunDir(self.path).report if out is None else Path(out)
        write_report([read_run(self.path)], target)
        return target


def _resolved(
    config: Config | PathLike | None, patterns: Sequence[str], settings: Mapping[str, Any]
) -> Resolved:
    """Resolve the config of a call.

    Args:
        patterns: The settings that keywords may name without their table (`train.*`).
        settings: Values by the name of a setting, or tables of them; None for a dataset is unset.
    """
    overrides = []
    if isinstance(config, Config):
        sources = sources_of(config)
        overrides = [
            Override(path, value, sources[path])
            for path, value in values(config).items()
            if sources[path].kind >= Kind.FILE  # the call may name another preset
        ]
        config = None
    for name, value in settings.items():
        if isinstance(value, Mapping):
            overrides += [_override(f"{name}.{key}", v) for key, v in value.items()]
        elif value is not None or name != "data":
            overrides.append(_override(_path_of(name, patterns), value))
    file = None if config is None else os.fspath(config)
    return resolve(file=file, overrides=overrides)


def _path_of(name: str, patterns: Sequence[str]) -> str:
    """Return the path of a setting that a keyword names, by its own name or its option's."""
    for setting in select(*patterns) if patterns else []:
        if name in (setting.name, *setting.key_aliases):
            return setting.path
    section = patterns[-1].partition(".")[0] if patterns else ""
    raise UsageError(f"{name}: no such setting", hint=nearest_key(f"{section}.{name}"))


def _override(path: str, value: Any) -> Override:
    """Return a value with the option that it stands for as its source, as on the command line."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # a number or an array of numpy, or a tensor
        value = value.tolist()
    setting = all_settings().get(path)
    flag = f"--{path}" if setting is None else setting.flags[0]
    return Override(path, value, of_call(flag))
