"""Score a checkpoint: find its data, detect, score."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ssdctl.config import Config, DataConfig
from ssdctl.data.coco import ClassName
from ssdctl.data.dataset import dataset_folders
from ssdctl.data.prepare import open_dataset
from ssdctl.data.store import Split
from ssdctl.device import open_device
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluate.coco_ap import Scores, score
from ssdctl.evaluate.detect import DetectOptions, detect_split
from ssdctl.files import write_bytes
from ssdctl.model.weights import Checkpoint, load_network, read_checkpoint, same_classes

Speak = Callable[[str], None]


class Answer(NamedTuple):
    """What a checkpoint scored."""

    scores: Scores
    step: int
    epoch: float
    images: int
    detections: int

    def as_json(self) -> dict[str, Any]:
        """The keys of the contract."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            **self.scores.figures,
            "images": self.images,
            "detections": self.detections,
            "per_class": [c._asdict() for c in self.scores.per_class],
        }


def evaluate_checkpoint(
    path: Path,
    config: Config,
    *,
    given: set[str],
    say: Speak,
    warn: Speak,
    progress: Callable[..., Iterable[Any]],
    detections_file: Path | None = None,
) -> Answer:
    """Score one checkpoint on a split.

    Args:
        path: The checkpoint.
        config: The call's config; its data gives way to the checkpoint's unless `given`.
        given: The settings that the user named.
        say, warn, progress: Ways to talk.
        detections_file: Where to write the detections in COCO's results format.

    Raises:
        UsageError, DataError, IntegrityError, NonFiniteError: See the modules that are asked.
    """
    wishes = config.evaluate
    device = open_device(wishes.device)
    checkpoint = read_checkpoint(path)
    data = _choose_data(checkpoint, config.data, given, say)
    root, folder = dataset_folders(data)
    splits = open_dataset(root, folder, say=say, progress=progress)
    if wishes.split not in splits:
        raise DataError(f"{root}: has no split {wishes.split}")
    split = splits[wishes.split]
    refuse_other_classes(checkpoint, split.classes, root)

    rows = _chosen_rows(split, wishes.annotated_only, wishes.limit)
    say(f"{path}: step {checkpoint.step}, on {len(rows)} images of {root} ({wishes.split})")
    if not split.usable[rows].all():
        bad = split.image_ids[rows[~split.usable[rows]]].tolist()
        warn(f"{len(bad)} images do not open and count as seen without detections: {bad[:5]}")
    model = device.place(load_network(checkpoint))
    options = DetectOptions(
        batch_size=wishes.batch_size,
        precision=wishes.precision,
        threads=wishes.workers or len(os.sched_getaffinity(0)),
        score_threshold=wishes.score_threshold,
        nms_iou=wishes.nms_iou,
    )
    found = detect_split(model, split, rows, device, options, progress)
    if not len(found.scores):
        warn(f"no detection scores over {wishes.score_threshold:g}: AP is 0")
    if detections_file is not None:
        write_bytes(detections_file, msgspec.json.encode(found.to_coco()))
        say(f"{len(found.scores)} detections written to {detections_file}")
    scores = score(split.annotations, found, image_ids=split.image_ids[rows], verify=wishes.verify)
    return Answer(
        scores,
        checkpoint.step,
        round(checkpoint.epoch, 4),
        len(rows),
        len(found.scores),
    )


def refuse_other_classes(checkpoint: Checkpoint, classes: list[ClassName], root: Path) -> None:
    """Raise IntegrityError where a checkpoint and a dataset do not speak of the same classes."""
    if not same_classes(checkpoint, classes):
        raise IntegrityError(
            f"{checkpoint.path} knows {checkpoint.architecture.num_classes - 1} classes "
            f"({_names(checkpoint.classes)}), {root} has {len(classes)} ({_names(classes)})",
            hint="name the dataset that it was trained on: --data DIR",
        )


def _names(classes: list[ClassName]) -> str:
    return ", ".join(c.name for c in classes[:4]) + (", ..." if len(classes) > 4 else "")


def data_of(checkpoint: Checkpoint) -> tuple[Path, Path]:
    """The dataset and store folders that a checkpoint remembers."""
    return dataset_folders(_remembered(checkpoint))


def _remembered(checkpoint: Checkpoint) -> DataConfig:
    return DataConfig(
        root=checkpoint.config.get("data.root"), store=checkpoint.config.get("data.store")
    )


def _choose_data(
    checkpoint: Checkpoint, data: DataConfig, given: set[str], say: Speak
) -> DataConfig:
    """The dataset to score on: the one the user names, else the one the checkpoint remembers."""
    if "data.root" in given or checkpoint.peer is not None:
        return data
    if "data.store" in given:
        return msgspec.structs.replace(_remembered(checkpoint), store=data.store)
    root, _ = data_of(checkpoint)
    if root.is_dir():
        return _remembered(checkpoint)
    fallback, _ = dataset_folders(data)
    say(f"the dataset that {checkpoint.path} was trained on ({root}) is gone: using {fallback}")
    return data


def _chosen_rows(split: Split, annotated_only: bool, limit: int | None) -> np.ndarray[Any, Any]:
    rows = np.arange(len(split.image_ids))
    if annotated_only:
        rows = rows[np.diff(split.starts) > 0]
    return rows[:limit]
