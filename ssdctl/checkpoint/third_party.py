"""Convert checkpoints of third-party systems from and to ssdctl's. Only the keys differ; heads and
blocks have the same order.

MLPerf and Habana: `{"model", "label_map"}`; NVIDIA and its TPU fork add epoch, iteration,
optimizer and scheduler. `module.` (distributed) and `_orig_mod.` (compiled) may precede the keys.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from torch import Tensor

from ssdctl.boxes import BOXES_PER_CELL
from ssdctl.checkpoint.format import (
    MAX_CLASSES,
    MAX_COUNT,
    Architecture,
    Count,
    NetworkWeights,
    is_state,
)
from ssdctl.data.annotations import ClassName
from ssdctl.data.coco_json import COCO_CLASSES, UNUSED
from ssdctl.errors import IntegrityError
from ssdctl.files import msgspec_type
from ssdctl.model.backbone import without_weights
from ssdctl.model.backbones import find_backbone
from ssdctl.runtime.plugins import BACKBONES, built_in, built_in_module

COMMON = {"additional_blocks.": "extra.", "loc.": "box_heads.", "conf.": "class_heads."}
PREFIXES: dict[str, dict[str, str]] = {  # third-party prefix -> ssdctl's
    "mlperf": {
        "model.layer1.0.": "backbone.conv1.",
        "model.layer1.1.": "backbone.bn1.",
        "model.layer1.4.": "backbone.layer1.",
        "model.layer1.5.": "backbone.layer2.",
        "model.layer2.0.": "backbone.layer3.",
        **COMMON,
    },
    "nvidia": {
        "feature_extractor.feature_extractor.0.": "backbone.conv1.",
        "feature_extractor.feature_extractor.1.": "backbone.bn1.",
        "feature_extractor.feature_extractor.4.": "backbone.layer1.",
        "feature_extractor.feature_extractor.5.": "backbone.layer2.",
        "feature_extractor.feature_extractor.6.": "backbone.layer3.",
        **COMMON,
    },
    "torchvision": {
        "backbone.scale_weight": "first_map_norm.scale",
        "backbone.features.": "backbone.",
        "backbone.extra.": "extra.",
        "head.regression_head.module_list.": "box_heads.",
        "head.classification_head.module_list.": "class_heads.",
    },
}
COCO_OUTPUTS = 81  # NVIDIA's and MLPerf's: the 80 classes without gaps
COCO_OUTPUTS_WITH_GAPS = 91  # torchvision's: a label is COCO's category id
STATES = ("model", "state_dict", "model_state_dict")  # keys of the weights in a file
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
# What the programs whose checkpoints are not read write: modules of their pickles, keys, and the
# beginnings of their weights' names; the most specific first.
OTHER_PROGRAMS: dict[str, tuple[str, ...]] = {
    "ultralytics": ("ultralytics.", "models.yolo.", "train_args", "model.model."),
    "mmdetection": ("mmengine.", "mmdet.", "mmcv.", "message_hub", "bbox_head.", "rpn_head."),
    "detectron2": ("detectron2.", "fvcore.", "__author__", "backbone.bottom_up.",
                   "proposal_generator."),
    "PyTorch Lightning": ("pytorch_lightning.", "lightning.", "pytorch-lightning_version"),
    "torchvision": ("torchvision.", "roi_heads.", "rpn.head.", "head.classification_head.",
                    "lr_scheduler"),
    "DETR": ("transformer.encoder.", "class_embed."),
    "Hugging Face transformers": ("transformers.", "model.encoder.layers."),
    "ssd.pytorch": ("vgg.0.", "L2Norm."),
    "pytorch-ssd": ("base_net.", "classification_headers."),
}  # fmt: skip


class _Facts(msgspec.Struct):
    """What a third-party checkpoint contains in addition to its weights."""

    label_map: dict[int, str] | None = None
    iteration: Count = 0
    epoch: Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0.0


def source_of(payload: Any) -> str | None:
    """Return the system that wrote a checkpoint: `mlperf`, `nvidia`, `torchvision` or None."""
    names = state_of(payload)
    for system in PREFIXES:
        prefix = next(iter(PREFIXES[system]))
        if any(name.startswith(prefix) for name in names):
            return system
    return None


def looks_like(payload: Any) -> str:
    """Return the program that wrote a file that is not read, by its keys, as a sentence's end.

    Args:
        payload: The content of the file, or the module of a class in it.
    """
    looks = "; it looks like a checkpoint of"
    names = [payload] if isinstance(payload, str) else []
    if isinstance(payload, Mapping):
        names = _names_in(payload)
        if "fc.weight" in names and "layer1.0.conv1.weight" in names:
            return f"{looks} torchvision's ResNet (a backbone: --backbone-weights FILE reads it)"
    for program, marks in OTHER_PROGRAMS.items():
        if any(name.startswith(marks) for name in names):
            return f"{looks} {program}"
    return ""


def has_own_weights(payload: Any) -> bool:
    """Return whether a file has the weights of an SSD300, but does not describe the network."""
    names = _names_in(payload) if isinstance(payload, Mapping) else [str(payload)]
    return any(name.startswith("ssdctl.") or "box_heads." in name for name in names)


def _names_in(payload: Mapping[Any, Any]) -> list[str]:
    states = (payload.get(key) for key in (*STATES, "ema"))
    keys = [*payload, *(key for s in states if isinstance(s, Mapping) for key in s)]
    return [WRAPPERS.sub("", str(key)) for key in keys]


def checkpoint_of(path: Path, payload: dict[str, Any], system: str) -> NetworkWeights:
    """Return a third-party checkpoint: the network by its shapes, the classes by `label_map`.

    Raises:
        IntegrityError: It is not of an SSD300, or a part is not what it should be.
    """
    weights = state_of(payload)
    if not is_state(weights):
        raise IntegrityError(f"{path}: looks like {system}'s, but its weights are not tensors")
    state = from_third_party(weights, system)
    backbone = backbone_of(state)
    head = state.get("class_heads.0.weight")
    if backbone is None or head is None or head.dim() != 4 or head.shape[0] % BOXES_PER_CELL[0]:
        raise IntegrityError(
            f"{path}: looks like {system}'s, but is not an SSD300 on a ResNet or VGG16"
        )
    num_classes = head.shape[0] // BOXES_PER_CELL[0]
    if not 2 <= num_classes <= MAX_CLASSES:
        raise IntegrityError(f"{path}: its network has {num_classes} classes")
    try:
        facts = msgspec.convert(payload, msgspec_type(_Facts), strict=False)
    except (msgspec.ValidationError, OverflowError) as error:
        raise IntegrityError(f"{path}: looks like {system}'s, but malformed: {error}") from None
    names = facts.label_map or {}
    if names and set(names) != set(range(num_classes)):
        raise IntegrityError(
            f"{path}: its label_map names {len(names)} classes, its network has {num_classes}"
        )
    has_norm = "batch" in find_backbone(backbone).EXTRA_NORMS and "extra.0.1.weight" in state
    return NetworkWeights(
        path=path,
        model=state,
        architecture=Architecture(backbone, "batch" if has_norm else "none", num_classes),
        classes=classes_of(names, num_classes),
        step=facts.iteration,
        epoch=facts.epoch,
        third_party=system,
    )


def state_of(payload: Any) -> dict[str, Any]:
    """Return the weights in a third-party file, or the file itself if it is a state dict."""
    own = payload if isinstance(payload, Mapping) else {}
    state = next((own[key] for key in STATES if isinstance(own.get(key), Mapping)), own)
    return {WRAPPERS.sub("", str(name)): value for name, value in state.items()}


def from_third_party(state: Mapping[str, Tensor], system: str) -> dict[str, Tensor]:
    """Return third-party weights under ssdctl's names; unknown names are kept and refused later."""
    named = {_renamed(k, PREFIXES[system]): v for k, v in state.items()}
    return _with_class_major_heads(named) if system == "torchvision" else named


def to_third_party(state: Mapping[str, Tensor], system: str) -> dict[str, Tensor]:
    """Return ssdctl's weights under the names of a third-party system."""
    reverse = {own: other for other, own in PREFIXES[system].items()}
    return {_renamed(k, reverse): v for k, v in state.items()}


def _with_class_major_heads(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reorder head channels of torchvision, (box shape, value), to (value, box shape)."""
    for name, tensor in state.items():
        if name.startswith(("box_heads.", "class_heads.")):
            level = int(name.split(".")[1])
            if level < len(BOXES_PER_CELL) and tensor.shape[0] % BOXES_PER_CELL[level] == 0:
                by_shape = tensor.unflatten(0, (BOXES_PER_CELL[level], -1))
                state[name] = by_shape.transpose(0, 1).flatten(0, 1).contiguous()
    return state


def classes_of(names: Mapping[int, str], num_classes: int) -> list[ClassName]:
    """Return the classes of a file: those of its table of names, else COCO's if the number fits.

    Args:
        names: Names by label, 0 for the background; may be empty.
        num_classes: Outputs of the network, background included.
    """
    if names:
        return [ClassName(None, names[label]) for label in range(1, len(names))]
    if num_classes == COCO_OUTPUTS:
        return [ClassName(id_, name) for id_, name in COCO_CLASSES]
    if num_classes == COCO_OUTPUTS_WITH_GAPS:
        by_id = dict(COCO_CLASSES)
        return [
            ClassName(id_ if id_ in by_id else None, by_id.get(id_, UNUSED))
            for id_ in range(1, num_classes)
        ]
    return []


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def label_map(classes: list[ClassName]) -> dict[int, str]:
    """Return a third-party table of class names; 0 is the background. Empty if they are unknown."""
    names = ["background", *(c.name for c in classes)]
    return dict(enumerate(names)) if classes else {}


def backbone_of(state: Mapping[str, Tensor]) -> str | None:
    """Return our backbone whose modules have these names and shapes, or nearly; None if none has.

    Weights that are missing or have another shape are reported when they are loaded.
    """
    prefix, counter = "backbone.", "num_batches_tracked"
    shapes = {
        (name.removeprefix(prefix), tensor.shape)
        for name, tensor in state.items()
        if name.startswith(prefix) and not name.endswith(counter)
    }

    def difference(backbone: str) -> int:
        with without_weights():
            expected = built_in_module(BACKBONES, backbone).build().state_dict()
        return len(shapes ^ {(k, v.shape) for k, v in expected.items() if not k.endswith(counter)})

    difference_of = {name: difference(name) for name in sorted(built_in(BACKBONES))}
    nearest = min(difference_of, key=difference_of.__getitem__)
    return nearest if difference_of[nearest] < len(shapes) else None


def inert_globals() -> list[Any]:
    """Return what other programs' files may name, with what stands in for it: it runs no code.

    A Namespace has their options. Tensors of TPUs are saved as arrays of numpy 1 or 2.
    """
    numpy = {"numpy.ndarray": _Array, "numpy.dtype": _Kind, "_codecs.encode": _encode}
    numpy |= {f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")}
    return [argparse.Namespace, *((stand_in, name) for name, stand_in in numpy.items())]


class _Kind:
    """The type of an array of numbers: `f4`."""

    def __init__(self, name: str, *_: object) -> None:
        if not re.fullmatch("[fiub][1248]", name):
            raise ValueError(f"an array of {name:.40}")
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take nothing: fields and flags of numpy's types are not used."""
        if state[1] == ">":
            raise ValueError("an array of another byte order")


class _Array(np.ndarray[Any, Any]):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        if type(kind) is not _Kind:
            raise ValueError("an array without a type")
        super().__setstate__((1, shape, np.dtype(kind.name), is_fortran, content))


def _array(*_: object) -> _Array:
    return np.ndarray.__new__(_Array, (0,))


def _encode(text: str, _: str) -> bytes:
    return text.encode("latin1")
