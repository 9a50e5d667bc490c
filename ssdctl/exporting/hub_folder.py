"""Write the files of a model for the Hugging Face Hub.

README.md            the model card
model.safetensors    the weights under ssdctl's names
config.json          architecture, classes, preprocessing, post-processing
model.onnx           the network with NMS, for onnxruntime
samples/1.jpg ...    images of the dataset with detections
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ssdctl._version import __version__
from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.checkpoint.format import FORMAT
from ssdctl.checkpoint.reader import Checkpoint
from ssdctl.data.store import open_splits
from ssdctl.device import open_device
from ssdctl.download.hub import CONFIG, WEIGHTS
from ssdctl.errors import DataError, SsdctlError
from ssdctl.evaluation.checkpoint import data_of
from ssdctl.exporting.deployed import ExportOptions
from ssdctl.exporting.formats import pictures_of, safetensors_bytes
from ssdctl.exporting.model_card import CardFacts, model_card
from ssdctl.exporting.onnx import onnx_model, require_onnx
from ssdctl.files import atomic_write, write_bytes, write_text
from ssdctl.inference.detector import DetectorConfig
from ssdctl.inference.drawing import draw
from ssdctl.inference.predict import (
    ImageDetector,
    Predictor,
    class_names,
    open_detector,
    open_image,
)
from ssdctl.model.backbones import find_backbone
from ssdctl.model.postprocess import DETECTIONS_PER_IMAGE
from ssdctl.runs.layout import RunDir
from ssdctl.runs.reader import RunData, read_run

MAX_TRIED = 50  # images of the dataset in which detections are looked for
SAMPLE_PIXELS = 800  # the longer side
SAMPLE_SCORE = 0.3
CARD, ONNX = "README.md", "model.onnx"


def write_model_folder(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    repo: str,
    license_id: str,
    data_license: str | None,
    samples: int,
) -> list[str]:
    """Write the files into a folder; return their names.

    Args:
        checkpoint: Of a run folder, if the card is to have its figures.
        folder: Created if it does not exist.
        repo: org/name on the Hub.
        license_id: Of the weights, as `apache-2.0`.
        data_license: Of the dataset, in words.
        samples: How many images of the dataset are drawn.

    Raises:
        IntegrityError: The weights do not fit the network.
        UsageError: safetensors or a package of the extra `onnx` is not installed.
        DiskError: A file cannot be written.
    """
    config = model_config(checkpoint)
    require_onnx()
    images = [f"samples/{n}.jpg" for n, _ in enumerate(_draw(checkpoint, folder, samples), 1)]
    run = _run_of(checkpoint.path)
    evaluated = _figures(checkpoint, run)
    root = checkpoint.config.get("data.root")
    facts = CardFacts(
        repo=repo,
        config=config,
        figures=evaluated,
        class_ap=run.class_ap if run is not None and evaluated is not None else {},
        dataset=Path(root).name if root else None,
        images=checkpoint.images,
        settings=checkpoint.config,
        license=license_id,
        data_license=data_license,
        samples=images,
    )
    write_bytes(folder / WEIGHTS, safetensors_bytes(checkpoint.model, {"format": "pt"}))
    write_text(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=True) + "\n")
    graph, _ = onnx_model(checkpoint, pictures_of(*data_of(checkpoint))[0], ExportOptions())
    write_bytes(folder / ONNX, graph)
    write_text(folder / CARD, model_card(facts))
    return [CARD, WEIGHTS, CONFIG, ONNX, *images]


def model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of config.json: what the reader needs, and what other programs need."""
    constants = find_backbone(checkpoint.architecture.backbone).CONSTANTS
    return {
        "model_type": "ssd300",
        "ssdctl_version": __version__,
        "format": FORMAT,
        "architecture": checkpoint.architecture._asdict(),
        "classes": msgspec.to_builtins(class_names(checkpoint)),
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "preprocessing": {"size": IMAGE_SIZE, "mean": constants.mean, "std": constants.std},
        "detection": {
            "nms_iou": constants.nms_iou,
            "candidates_per_class": constants.candidates_per_class,
            "detections_per_image": DETECTIONS_PER_IMAGE,
            "clips_boxes": constants.clips_boxes,
        },
    }


def _run_of(path: Path) -> RunData | None:
    """Return the run of a checkpoint; None if it is not in a run folder."""
    folder = path.parent.parent
    if not RunDir(folder).metrics.is_file():
        return None
    try:
        return read_run(folder)
    except SsdctlError:  # of a broken run the weights are pushed, without figures
        return None


def _figures(checkpoint: Checkpoint, run: RunData | None) -> dict[str, float] | None:
    """Return the figures of the evaluation at the checkpoint's step."""
    if run is None:
        return None
    best = run.best
    if best is None or best.get("step") != checkpoint.step:
        evals = [record for record in run.evals if record.get("step") == checkpoint.step]
        best = dict(evals[-1]) if evals else None
    return best


def _draw(checkpoint: Checkpoint, folder: Path, count: int) -> Iterator[Path]:
    """Draw detections on images of the dataset; yield the files."""
    if not count:
        return
    device = open_device("cpu")
    detector = open_detector(checkpoint, device, DetectorConfig(score_threshold=SAMPLE_SCORE))
    predictor = Predictor(ImageDetector(detector, class_names(checkpoint)), checkpoint.path.name)
    drawn = 0
    for content in itertools.islice(_images(checkpoint), MAX_TRIED):
        try:
            image = open_image(content)
        except DataError:
            continue
        found = predictor.predict(image)
        if not found:
            continue
        drawn += 1
        target = folder / "samples" / f"{drawn}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        result = draw(image, list(found))
        result.thumbnail((SAMPLE_PIXELS, SAMPLE_PIXELS))
        with atomic_write(target) as file:
            result.save(file, "JPEG", quality=85)
        yield target
        if drawn == count:
            return


def _images(checkpoint: Checkpoint) -> Iterator[io.BytesIO]:
    """Yield the encoded images of the validation split that the checkpoint names."""
    if not checkpoint.is_of_run:
        return
    try:
        root, store = data_of(checkpoint)
        splits = open_splits(root, store)
        split = splits.get("val") or next(iter(splits.values()))
        for row in range(len(split.image_ids)):
            yield io.BytesIO(split.read(row))
    except (DataError, OSError):
        return
