"""Write the files of a model for the Hugging Face Hub, and upload them as one commit.

README.md            the model card
model.safetensors    the weights under ssdctl's names
config.json          architecture, classes, preprocessing, post-processing
model.onnx           the network with NMS, for onnxruntime
samples/1.jpg ...    images of the dataset with detections
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from ssdctl._version import __version__
from ssdctl.boxes import IMAGE_SIZE
from ssdctl.checkpoint.exported import describe_network
from ssdctl.checkpoint.format import Checkpoint, NetworkWeights
from ssdctl.config.render import toml_value
from ssdctl.config.resolve import preset_overrides
from ssdctl.data.drawing import one_line, write_image
from ssdctl.data.image_files import files_below
from ssdctl.data.store_folder import dataset_folders
from ssdctl.device import open_device
from ssdctl.download.hub import (
    CONFIG,
    WEIGHTS,
    HubReference,
    endpoint,
    hub_error,
    hub_package,
    no_progress_bars,
)
from ssdctl.errors import NetworkError, UsageError
from ssdctl.evaluation.choices import trained_on
from ssdctl.evaluation.coco_ap import COCO_METRICS
from ssdctl.exporting import safetensors_bytes
from ssdctl.exporting.deployed import Deployment, dataset_images, images_of
from ssdctl.exporting.graphs import onnx_model, require_onnx
from ssdctl.files import write_bytes, write_text
from ssdctl.inference.detector import DetectorConfig
from ssdctl.inference.image_detector import ImageDetector
from ssdctl.inference.predict import Predictor, class_names, open_detector
from ssdctl.model.backbones import find_backbone
from ssdctl.model.postprocess import DETECTIONS_PER_IMAGE
from ssdctl.runs.folder import data_name, run_of
from ssdctl.runs.run import Run
from ssdctl.runtime.safe_text import counted, listed, open_template, redact_url

MAX_CLASSES = 100  # in the card
MAX_TRIED = 50  # images of the dataset in which detections are looked for
SAMPLE_PIXELS = 800  # the longer side
SAMPLE_SCORE = 0.3
CARD, ONNX, SAMPLE = "README.md", "model.onnx", "samples/{}.jpg"
MODEL_TYPE = "ssd300"
SEAL = "<!-- written by ssdctl, SHA-256 "


def write_model_folder(
    checkpoint: NetworkWeights,
    folder: Path,
    *,
    repo: str,
    license_id: str,
    data_license: str | None,
    samples: int,
) -> list[str]:
    """Write the files into a folder; return their names.

    The card has the metrics of the checkpoint's run folder, if it is in one, and `samples` images
    of the dataset with detections.
    """
    config = model_config(checkpoint)
    require_onnx()
    own = _own_files(folder, samples)
    dataset = dataset_folders(trained_on(checkpoint))
    graph, _ = onnx_model(Deployment(checkpoint), images_of(*dataset)[0])  # it may be refused
    images = _draw(checkpoint, folder, dataset_images(*dataset, MAX_TRIED), samples)
    write_bytes(folder / WEIGHTS, safetensors_bytes(checkpoint.model, {"format": "pt"}))
    write_text(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=True) + "\n")
    write_bytes(folder / ONNX, graph)
    licenses = {"license": license_id, "data_license": data_license}
    card = model_card(checkpoint, repo=repo, samples=images, **licenses)
    write_text(folder / CARD, _sealed(card))
    written = [CARD, WEIGHTS, CONFIG, ONNX, *images]
    for name in own.difference(written):
        (folder / name).unlink(missing_ok=True)
    return written


def model_files(folder: Path) -> list[str]:
    """Return the names of all files of a model's folder that are not hidden."""
    files = (PurePosixPath(name) for name in files_below(folder))
    return sorted(str(file) for file in files if not any(p.startswith(".") for p in file.parts))


def _own_files(folder: Path, samples: int) -> set[str]:
    """Return the files that an earlier push wrote; others are not replaced."""
    names, own = [WEIGHTS, CONFIG, ONNX], set[str]()
    names += [SAMPLE.format(n + 1) for n in range(samples)]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / CONFIG).read_bytes()).get("model_type") == MODEL_TYPE:
            own.update(names)
    with contextlib.suppress(OSError, ValueError):
        text = (folder / CARD).read_text(encoding="utf-8")
        content = text.rpartition(SEAL)[0]
        if text == _sealed(content):
            own |= {CARD, *re.findall(r"\]\((samples/\d+\.jpg)\)", content)}
    if found := [name for name in (CARD, *names) if name not in own and (folder / name).exists()]:
        raise UsageError(
            f"{folder / found[0]} exists, and is not as this version of ssdctl writes it",
            hint="give another folder, or remove the file",
        )
    return own


def _sealed(content: str) -> str:
    """Return a card with the hash by which a later push sees whether it was edited."""
    return f"{content}{SEAL}{hashlib.sha256(content.encode()).hexdigest()} -->\n"


def model_card(checkpoint: NetworkWeights, **facts: Any) -> str:
    """Return the text of README.md; names of others are plain text in it."""
    settings, (metrics, class_ap) = checkpoint.run_settings or {}, _metrics(checkpoint)
    images = checkpoint.images if isinstance(checkpoint, Checkpoint) else None
    training = {
        "recipe": _recipe(settings),
        "initial weights": _without_folders(settings.get("train.init")),
        "step": checkpoint.step,
        "epoch": round(checkpoint.epoch, 2),
        "batch size per device": settings.get("train.batch_size"),
        "learning rate (at global batch 32)": settings.get("train.lr"),
        "optimizer": settings.get("train.optimizer"),
    }
    filters = {"one_line": one_line, "plain": _plain}
    template = open_template(Path(__file__).with_name("card.md"), filters)
    return template.render(
        version=__version__,
        architecture=checkpoint.architecture,
        step=checkpoint.step,
        metrics={name: v for name in COCO_METRICS if (v := metrics.get(name, -1)) >= 0},
        class_ap=[(name, ap) for name, ap in class_ap.items() if ap >= 0][:MAX_CLASSES],
        dataset=data_name(settings) or None,
        fold=settings.get("train.fold"),
        overfit=settings.get("train.overfit"),
        tiling=checkpoint.tiling,
        images=None if settings.get("train.fake_data") else images,
        classes=listed([_plain(c.name) for c in class_names(checkpoint)], MAX_CLASSES),
        training=settings and ", ".join(f"{k} {v}" for k, v in training.items() if v is not None),
        **facts,
    )


def _without_folders(init: str | None) -> str | None:
    return init if init is None or init.startswith("hf://") else Path(init).name


def _recipe(settings: Mapping[str, Any]) -> str | None:
    """Return the preset, and how many of its values a rule or the user changed."""
    if not (preset := settings.get("train.preset")):
        return None
    values = {o.path: o.value for o in preset_overrides(preset)}
    pairs = [(v, settings.get(path, v)) for path, v in values.items() if v != "auto"]
    changed = [own for value, own in pairs if toml_value(own) != toml_value(value)]
    return f"preset {preset}" + f" with {counted(len(changed), 'other value')}" * bool(changed)


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]()#|<>!&~])", r"\\\1", one_line(text, 200))


def model_config(checkpoint: NetworkWeights) -> dict[str, Any]:
    """Return the content of config.json, for ssdctl and other programs."""
    constants = find_backbone(checkpoint.architecture.backbone).CONSTANTS
    return {
        "model_type": MODEL_TYPE,
        "ssdctl_version": __version__,
        **describe_network(replace(checkpoint, classes=class_names(checkpoint))),
        "preprocessing": {"size": IMAGE_SIZE, "mean": constants.mean, "std": constants.std},
        "detection": {
            "nms_iou": constants.nms_iou,
            "candidates_per_class": constants.candidates_per_class,
            "detections_per_image": DETECTIONS_PER_IMAGE,
            "clips_boxes": constants.clips_boxes,
        },
    }


def _metrics(checkpoint: NetworkWeights) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of this step and the AP of each class, from the run folder."""
    run = Run(run_of(checkpoint.path).path)
    if not run.is_trained:
        return {}, {}
    records = [record for record in run.evals if record["step"] == checkpoint.step]
    return (records[-1], run.class_ap_at(checkpoint.step)) if records else ({}, {})


def _draw(
    checkpoint: NetworkWeights, folder: Path, images: Iterator[Image.Image], count: int
) -> list[str]:
    """Draw detections on the first images that have any; return the names of the files."""
    if not count or checkpoint.run_settings is None:
        return []
    config = DetectorConfig(score_threshold=SAMPLE_SCORE)
    detector = open_detector(checkpoint, open_device("cpu"), config)
    names_of, tiling = class_names(checkpoint), checkpoint.tiling
    predictor = Predictor(ImageDetector(detector, names_of, tiling=tiling), checkpoint.path.name)
    names: list[str] = []
    for found in map(predictor.predict, images):
        if found:
            names.append(SAMPLE.format(len(names) + 1))
            image = found.plot()
            image.thumbnail((SAMPLE_PIXELS, SAMPLE_PIXELS))
            write_image(image, folder / names[-1], "JPEG", quality=85)
        if len(names) == count:
            break
    return names


def upload_folder(
    reference: HubReference, folder: Path, names: Sequence[str], *, is_private: bool, message: str
) -> str:
    """Create the repository if it does not exist, and commit the files; return the commit's URL.

    Raises:
        UsageError: The Hub refuses the token, there is none, or a repository that is to be private
            exists and is public.
        NetworkError: The Hub cannot be reached, or failed; nothing was committed.
    """
    hub = hub_package()
    address = endpoint(hub)
    api = hub.HfApi(endpoint=address)
    try:
        with no_progress_bars(hub):
            api.create_repo(reference.repo, private=is_private or None, exist_ok=True)
            if is_private and not api.model_info(reference.repo).private:
                raise UsageError(
                    f"{reference}: exists and is public, so nothing was uploaded",
                    hint=f"make it private at {redact_url(address)}/{reference.repo}/settings, or "
                    "choose another name",
                )
            commit = api.create_commit(
                reference.repo,
                operations=[hub.CommitOperationAdd(name, str(folder / name)) for name in names],
                commit_message=message,
                revision=reference.revision,
            )
    except (hub.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__  # an upload that fails is a RuntimeError
        reason = cause if isinstance(cause, Exception) else error
        failure = hub_error(hub, reason, str(reference), f"{address}/{reference.repo}")
        if isinstance(failure, NetworkError):
            failure.hint = "nothing was committed; run it again"
        raise failure from None
    url: str = commit.commit_url
    return url
