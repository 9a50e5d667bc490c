"""SSD300 (Liu et al. 2016): backbone, five extra blocks, six pairs of heads.

Shapes: B batch, C classes with background, N = 8732 default boxes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ssdctl.boxes import BOXES_PER_CELL, IMAGE_SIZE, box_cxcywh_to_ltrb
from ssdctl.checkpoint.file import (
    OTHER_SUFFIXES,
    load_checkpoint,
    load_state,
    read_payload,
    save_checkpoint,
    shapes_of,
    weights_in_memory,
    with_counters,
)
from ssdctl.checkpoint.format import (
    BEGINNING,
    Architecture,
    NetworkWeights,
    Threshold,
    TilingFields,
    compare_shapes,
    is_state,
)
from ssdctl.checkpoint.third_party import has_own_weights, state_of
from ssdctl.config.call import hints_in_messages, named_path, public_call
from ssdctl.config.fields import Tiling
from ssdctl.data.annotations import ClassName, numbered_classes
from ssdctl.data.image_decode import read_rgb, resized
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.files import msgspec_type, require_own_file
from ssdctl.model.backbone import build_parts, check_parameters, own_random_numbers
from ssdctl.model.backbones import ModelConstants, load_backbone_file
from ssdctl.model.loss import Losses, MultiboxLoss
from ssdctl.model.postprocess import (
    DEFAULT_SCORE,
    TILES_PER_PASS,
    ImageDetections,
    Window,
    detect,
    evaluating,
    merge_views,
    refuse_non_finite,
)
from ssdctl.model.results import Result
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import BACKBONES
from ssdctl.runtime.safe_text import counted

T = TypeVar("T")
OVERSHOOT = 1e-3  # beyond 0 to 1, by rounding
# RGB, float in 0 to 1 or uint8: a list of (3, H, W) tensors, or (B, 3, H, W).
Images = Tensor | Sequence[Tensor]
# `boxes`, (G, 4) left, top, right, bottom in pixels, and `labels`, (G,), 1 and up; or empty.
Target = Mapping[str, Tensor]


class SSD300(nn.Module):
    """The network, with random weights.

    Args:
        backbone: A name of `ssdctl/model/backbones/`, or of an installed plugin.
        num_classes: Classes with background, at least 2; 81 on COCO.
        extra_norm: `none` (biased convolutions, as MLPerf) or `batch` (batch norm, as NVIDIA). A
            ResNet's; VGG16 has its own extra blocks.

    Raises:
        ssdctl.errors.UsageError: There is no such backbone, or it is a plugin that fails; it has no
            such `extra_norm`; or there are fewer than two classes.

    Attributes:
        num_classes: Classes with background.
        classes: The classes without the background; empty if they have no names.
        thresholds: Scores of the best F1 of the classes in the run's last evaluation so far; empty
            if they are not known. `save` keeps them, as well as the next.
        tiling: Size in pixels and overlap of the tiles in which the run saw images, such as
            `(300, 0.2)`; None: as a whole.
    """

    @hints_in_messages()
    def __init__(self, backbone: str, num_classes: int, extra_norm: str = "none") -> None:
        super().__init__()
        file, plugin = load_backbone_file(backbone)
        num_classes = operator.index(num_classes)  # not numpy's, which `save` could not write
        if num_classes < 2:
            raise UsageError(f"num_classes {num_classes}: expected 2 or more, with the background")
        if extra_norm not in file.EXTRA_NORMS:
            expected = " or ".join(file.EXTRA_NORMS)
            raise UsageError(f"extra_norm {extra_norm!r}: {backbone} has {expected}")
        self.architecture = Architecture(backbone, extra_norm, num_classes)
        self.num_classes = num_classes
        self.classes: list[ClassName] = []
        self.thresholds = []
        self.tiling = None
        # One for each device and precision, in a dictionary so that `bfloat16()` rounds no buffer.
        self._losses: dict[tuple[str, torch.dtype], MultiboxLoss] = {}
        self._frozen_stages = 0
        self._frozen_names: list[str] = []  # of parameters, by `freeze`
        self._is_norm_frozen = False
        self.constants = file.CONSTANTS
        built, self.first_map_norm, extra = build_parts(file.build, plugin, extra_norm)
        self.backbone = built
        self.extra = nn.ModuleList(extra)
        pairs = list(zip(built.channels, BOXES_PER_CELL, strict=True))
        self.box_heads = nn.ModuleList(nn.Conv2d(c, n * 4, 3, padding=1) for c, n in pairs)
        self.class_heads = nn.ModuleList(
            nn.Conv2d(c, n * num_classes, 3, padding=1) for c, n in pairs
        )
        for part in (self.extra, self.box_heads, self.class_heads):
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
        if plugin is not None and extra_norm == file.EXTRA_NORMS[0]:
            check_parameters(self, num_classes, file.PARAMETERS, plugin)

    def forward(self, images_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, 4, N) offsets and (B, C, N) logits of normalized (B, 3, 300, 300) images.

        Raises:
            ssdctl.errors.UsageError: The images have another size.
        """
        if images_B3HW.shape[2:] != (IMAGE_SIZE, IMAGE_SIZE):
            raise UsageError(
                f"images of shape {tuple(images_B3HW.shape)}: expected (B, 3, 300, 300)",
                hint="`loss` takes images of any size",
            )
        features = [self.backbone(images_B3HW)]
        for block in self.extra:
            features.append(block(features[-1]))
        features[0] = self.first_map_norm(features[0])
        offsets, logits = [], []
        for level, feature in enumerate(features):
            offset_map, logit_map = self.predict(level, feature)
            # Channels are coordinate-major (class-major): (4, shapes) x rows x columns.
            offsets.append(offset_map.flatten(1).unflatten(1, (4, -1)))
            logits.append(logit_map.flatten(1).unflatten(1, (self.num_classes, -1)))
        return torch.cat(offsets, dim=2), torch.cat(logits, dim=2)

    def predict(self, level: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        return self.box_heads[level](feature), self.class_heads[level](feature)

    @property
    def class_names(self) -> list[str]:
        """Class names without the background; empty if they have no names."""
        return [c.name for c in self.classes]

    @class_names.setter
    @hints_in_messages()
    def class_names(self, names: Sequence[str | ClassName]) -> None:
        self.classes = self._one_per_class("class_names", self._classes_of(names))

    @property
    def thresholds(self) -> list[float | None]:
        return self._thresholds

    @thresholds.setter
    @hints_in_messages()
    def thresholds(self, scores: Sequence[float | None]) -> None:
        values = [None if score is None else float(score) for score in scores]
        try:
            msgspec.convert(values, msgspec_type(list[Threshold]))
        except msgspec.ValidationError as error:
            raise UsageError(f"thresholds: {error}") from None
        self._thresholds = self._one_per_class("thresholds", values)

    @property
    def tiling(self) -> Tiling | None:
        return self._tiling

    @tiling.setter
    @hints_in_messages()
    def tiling(self, tiling: tuple[int, float] | None) -> None:
        self._tiling = None if tiling is None else _tiling_of(tiling)

    def _one_per_class(self, name: str, values: list[T]) -> list[T]:
        if len(values) not in (0, self.num_classes - 1):
            raise UsageError(
                f"{name}: of length {len(values)}, the network has {self.num_classes - 1} classes "
                "and the background"
            )
        return values

    def _classes_of(self, names: Sequence[str | ClassName]) -> list[ClassName]:
        if isinstance(names, (str, Mapping, set, frozenset)):  # not in the order of the labels
            raise UsageError(f"class_names: {names!r}", hint="write class_names=[...]")
        classes = [n if isinstance(n, ClassName) else ClassName(None, str(n)) for n in names]
        if not all(entry.name.strip() for entry in classes):
            raise UsageError("class_names: one is empty", hint="give each class a name")
        is_own = [*names] == self.class_names  # whose category ids are known
        return self.classes if is_own else classes

    @classmethod
    @public_call()
    def from_checkpoint(cls, checkpoint: str | os.PathLike[str] | nn.Module) -> SSD300:
        """Return the network of a checkpoint with its weights, on the CPU, in evaluation mode.

        Args:
            checkpoint: A file, run folder, detector's name, `hf://org/name` or network, as
                `ssdctl.load` takes it, except for ONNX files.

        Raises:
            ssdctl.errors.UsageError: There is no such file, folder or name.
            ssdctl.errors.NetworkError: The detector cannot be fetched.
            ssdctl.errors.IntegrityError: The file is damaged, or not a checkpoint.
        """
        from ssdctl.checkpoint.locate import locate_checkpoint  # late: a run needs no downloads

        return load_network(load_checkpoint(locate_checkpoint(checkpoint))).eval()

    @hints_in_messages()
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        class_names: Sequence[str | ClassName] | None = None,
    ) -> Path:
        """Write the network as a checkpoint, atomically, in fp32; return its path.

        `ssdctl.load`, `evaluate`, `export` and `from_checkpoint` read it, and `train` starts from
        it with `init`.

        Args:
            path: The file, such as `model.pt`.
            class_names: Names of the labels 1 and up, or the `classes` of a `Dataset`, which have
                its category ids, too; None writes the network's own.

        Raises:
            ssdctl.errors.UsageError: There is not one name for each class, the suffix is one of
                another format, or the file exists and is no network that `save` wrote.
            ssdctl.errors.DiskError: The file cannot be written.
        """
        file, classes = named_path("path", path), self.classes
        if class_names is not None:
            classes = self._classes_of(class_names)
        if len(classes) != self.num_classes - 1:
            raise UsageError(
                f"{file}: {len(classes)} class names, the network has {self.num_classes - 1} "
                "classes and the background",
                hint="write model.save(path, class_names=[...]), in the order of the labels",
            )
        if file.suffix in OTHER_SUFFIXES:
            raise UsageError(f"{file}: not a name for a checkpoint", hint="such as model.pt")
        require_own_file(file, "model.save", BEGINNING)
        weights = weights_in_memory(self)
        compare_shapes(shapes_of_network(self.architecture), shapes_of(weights.model), file)
        weights = dataclasses.replace(weights, classes=classes)
        try:
            NetworkWeights.read(file, weights.payload())
        except ValueError as error:  # not an error of a checkpoint: nothing could read it
            raise UsageError(f"{file}: not written: {error}") from None
        save_checkpoint(file, weights)
        return file

    @hints_in_messages()
    def detect(
        self, images: Images, *, score: float | None = None, nms_iou: float | None = None
    ) -> list[Result]:
        """Return the objects on each image, in evaluation mode and without gradients.

        A network with `tiling` also detects in tiles of each image, as `ssdctl.load` does.

        Args:
            images: As `loss` takes them. They are resized on the CPU, as `ssdctl.evaluate` does.
            score: Return only detections with a score above this, 0 to 1. None uses `thresholds`,
                and 0.3 for classes without one.
            nms_iou: Drop a box if its IoU with a better one of its class is above this, 0 to 1.
                None uses the network's default.

        Returns:
            A result for each image, in pixels of the image.

        Raises:
            ssdctl.errors.UsageError: A shape, type or value is wrong.
            ssdctl.errors.NonFiniteError: The network's output is NaN or infinite.
        """
        for name, value in (("score", score), ("nms_iou", nms_iou)):
            if isinstance(value, str) or (value is not None and not 0 <= value <= 1):
                raise UsageError(f"{name} {value}: expected a number from 0 to 1")
        from ssdctl.data.tiles import tile_windows  # late: a step needs no tiles

        images = [*images]
        opened = [_as_image(_checked(image, torch.device("cpu"))) for image in images]
        windows = [tile_windows(*image.size, self.tiling) for image in opened]
        views = [(n, window) for n, of_image in enumerate(windows) for window in of_image]
        best = self.thresholds or [None] * (self.num_classes - 1)
        limits = [DEFAULT_SCORE if limit is None else limit for limit in best]
        limits = limits if score is None else [score] * len(limits)
        _, iou = self.constants.thresholds(score, nms_iou)
        rules = self.constants._replace(score_threshold=min(limits), nms_iou=iou)
        found: list[list[tuple[Window, ImageDetections]]] = [[] for _ in opened]
        size = len(opened) if self.tiling is None else TILES_PER_PASS
        for start in range(0, len(views), max(size, 1)):
            batch = views[start : start + size]
            pixels = [torch.from_numpy(resized(opened[n], w).copy()) for n, w in batch]
            for (n, window), objects in zip(batch, self._detect(pixels, rules), strict=True):
                found[n].append((window, objects))
        return [
            self._result(*triple, limits, iou) for triple in zip(found, opened, images, strict=True)
        ]

    def _detect(self, views: Sequence[Tensor], rules: ModelConstants) -> list[ImageDetections]:
        """Return the detections on (300, 300, 3) uint8 views, in fractions of each."""
        with torch.no_grad(), evaluating(self):
            pixels = [view.permute(2, 0, 1) for view in views]
            offsets, logits = self(_normalized_batch(pixels, self.constants, self._weight))
            refuse_non_finite((offsets, logits))
            return detect(offsets, logits, self._loss_on_device().targets.defaults_cxcywh, rules)

    def _result(
        self,
        found: Sequence[tuple[Window, ImageDetections]],
        opened: Image.Image,
        image: Tensor,
        limits: Sequence[float],
        nms_iou: float,
    ) -> Result:
        boxes, scores, labels = merge_views(found, opened.size, nms_iou, limits)
        return Result(
            boxes,
            scores,
            labels,
            classes=self.classes or numbered_classes(self.num_classes - 1),
            size=opened.size,
            image=image,
            open_image=_as_image,
        )

    def loss(
        self, images: Images, targets: Sequence[Target], *, background_negatives: int = 0
    ) -> Tensor:
        """Return the multibox loss of a batch, a scalar to be minimized.

        Args:
            images: (3, H, W) tensors of any sizes, or (B, 3, H, W): RGB, float in 0 to 1 or uint8.
                They are resized to 300 x 300 and normalized here.
            targets: As torchvision's detectors take them: for each image `boxes`, (G, 4) left, top,
                right, bottom in pixels, or `tv_tensors.BoundingBoxes` in their format; and
                `labels`, (G,), 1 to `num_classes - 1`.
            background_negatives: Hardest default boxes trained on per image without boxes.

        Raises:
            ssdctl.errors.UsageError: A shape, type, value, box or label is wrong. A compiled
                `loss` checks only shapes and types.
        """
        weight = self._weight
        with hints_in_messages():
            batch = _normalized_batch(images, self.constants, weight)
            boxes, labels = _padded_targets(images, targets, self.num_classes, weight.device)
        loss = self._loss_on_device()
        loss.background_negatives = background_negatives
        boxes = boxes.to(loss.targets.defaults_cxcywh.dtype)
        losses: Losses = loss(*self(batch), boxes, labels)
        return losses.total

    @property
    def _weight(self) -> Tensor:
        """A tensor whose device and precision images get."""
        return next(itertools.chain(self.parameters(), self.buffers()))  # FSDP 1 takes the first

    def _loss_on_device(self) -> MultiboxLoss:
        weight = self._weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        key = str(weight.device), dtype
        if key not in self._losses:
            self._losses[key] = MultiboxLoss(dtype, constants=self.constants).to(weight.device)
        return self._losses[key]

    def freeze_stem(self) -> None:
        """Stop training the first layers; batch norm's statistics are still updated."""
        for name in self.backbone.stem:
            self.backbone.get_submodule(name).requires_grad_(False)

    def freeze(self, stages: int) -> None:
        """Stop training the first stages of the backbone, statistics of batch norm included.

        Parameters that an earlier call froze are trained again, unless they are in these stages.

        Args:
            stages: 0 to 4: stem, layer1, layer2, layer3 of a ResNet; blocks of VGG16.

        Raises:
            ssdctl.errors.UsageError: It has not that many.
        """
        if not 0 <= stages <= len(self.backbone.stages):
            raise UsageError(f"freeze: {stages} is not 0 to {len(self.backbone.stages)} stages")
        parameters = dict(self.named_parameters())
        for name in self._frozen_names:
            if name in parameters:  # else its module was replaced
                parameters[name].requires_grad_(True)
        self._frozen_stages = stages
        frozen = {p for module in self._frozen_modules() for p in module.parameters()}
        self._frozen_names = [n for n, p in parameters.items() if p in frozen and p.requires_grad]
        for name in self._frozen_names:
            parameters[name].requires_grad_(False)
        self.train(self.training)

    def freeze_norm(self) -> None:
        """Normalize with the stored statistics of batch norm, in training too."""
        self._is_norm_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> SSD300:
        """Set the mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        for module in self._frozen_modules():
            module.eval()
        for module in self.modules() if self._is_norm_frozen else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def _frozen_modules(self) -> list[nn.Module]:
        names = [name for stage in self.backbone.stages[: self._frozen_stages] for name in stage]
        return [self.backbone.get_submodule(name) for name in names]


def _tiling_of(tiling: tuple[int, float]) -> Tiling:
    try:
        return msgspec.convert(Tiling(*tiling)._asdict(), msgspec_type(TilingFields)).value
    except (TypeError, msgspec.ValidationError) as error:
        hint = "give the size in pixels and the overlap, such as (300, 0.2)"
        raise UsageError(f"tiling {tiling!r}: {error}", hint=hint) from None


def network_of(architecture: Architecture, seed: int = 0, device: str = "cpu") -> SSD300:
    """Return the network with random weights that depend only on the seed.

    On the device `meta` it has shapes, but no weights.
    """
    with own_random_numbers(seed, device):
        return SSD300(architecture.backbone, architecture.num_classes, architecture.extra_norm)


def shapes_of_network(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    return shapes_of(network_of(architecture, device="meta").state_dict())


def load_network(checkpoint: NetworkWeights) -> SSD300:
    """Return the network of a checkpoint with its weights."""
    # A file of some bytes may state any number of classes: the heads are compared before they are
    # allocated. The rest of the network has a fixed size: `load_state` compares it.
    expected = shapes_of_network(checkpoint.architecture)
    heads = {name: shape for name, shape in expected.items() if name.startswith("class_heads.")}
    own = {name: tensor for name, tensor in checkpoint.model.items() if name in heads}
    compare_shapes(heads, shapes_of(own), checkpoint.path)
    model = network_of(checkpoint.architecture)
    load_state(model, with_counters(checkpoint.model, model), checkpoint.path)
    model.classes, model.tiling = checkpoint.classes, checkpoint.tiling
    model.thresholds = checkpoint.thresholds
    return model


def load_backbone(model: SSD300, path: Path) -> None:
    """Load pretrained weights into the backbone.

    Raises:
        IntegrityError: The file is damaged, or contains another network.
    """
    payload = read_payload(path)
    state = state_of(payload)
    if not is_state(state) or not state or has_own_weights(payload):
        raise IntegrityError(
            f"{path}: not backbone weights",
            hint="expected torchvision's ResNet weights (ssdctl fetch-weights --list); "
            "--init takes a whole detector",
        )
    plugin = plugins.find(BACKBONES, model.architecture.backbone)
    with contextlib.nullcontext() if plugin is None else plugin.errors("pretrained_parts()"):
        parts = model.backbone.pretrained_parts(state, model.extra)
        if not (parts and all(isinstance(m, nn.Module) and is_state(part) for m, part in parts)):
            raise TypeError("expected a list of modules with their state dicts")
    for module, part in parts:
        load_state(module, with_counters(part, module), path)


def _normalized_batch(images: Images, constants: ModelConstants, like: Tensor) -> Tensor:
    """Return images resized (antialiased bilinear) and normalized: (B, 3, 300, 300).

    Args:
        images: (3, H, W) tensors of any sizes, or (B, 3, H, W).
        like: The batch gets the device and precision of this tensor.

    Raises:
        UsageError: A shape or type is wrong, or a value is not in 0 to 1.
    """
    if not len(images):
        raise UsageError("images: the batch is empty")
    pixels = torch.stack([_resized(image, like.device) for image in images])
    mean, std = (pixels.new_tensor(v).view(3, 1, 1) for v in (constants.mean, constants.std))
    return ((pixels - mean) / std).to(like.dtype)


def _resized(image: Tensor, device: torch.device) -> Tensor:
    pixels, size = _checked(image, device), (IMAGE_SIZE, IMAGE_SIZE)
    if pixels.shape[1:] == size:
        return pixels
    return F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]


def _checked(image: Tensor, device: torch.device) -> Tensor:
    """Return an image on the device, as floating point from 0 to 1."""
    if not isinstance(image, Tensor):
        raise UsageError(f"images: a {type(image).__name__}, not a tensor")
    is_number = image.is_floating_point() or image.dtype == torch.uint8
    if image.dim() != 3 or image.shape[0] != 3 or not is_number or not image.numel():
        raise UsageError(
            f"images: {image.dtype} of shape {tuple(image.shape)}",
            hint="expected (3, H, W), float in 0 to 1 or uint8",
        )
    pixels = image.to(device)
    if pixels.dtype == torch.uint8:
        pixels = pixels / 255
    else:
        pixels = pixels if pixels.dtype == torch.float64 else pixels.float()
        _check_range(pixels)
    return pixels


def _check_range(pixels: Tensor) -> None:
    if torch.compiler.is_compiling():  # a compiled graph branches on no value
        return
    low, high = (float(value) for value in pixels.aminmax())
    if not (low >= -OVERSHOOT and high <= 1 + OVERSHOOT):  # NaN, too
        raise UsageError(
            f"images: values from {low:g} to {high:g}",
            hint="expected 0 to 1, or uint8; the network normalizes them itself",
        )


def _as_image(pixels: Tensor) -> Image.Image:
    in_range = pixels.clamp(0, 1) if pixels.is_floating_point() else pixels
    return Image.fromarray(read_rgb(in_range))


def _padded_targets(
    images: Images, targets: Sequence[Target], num_classes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return boxes (B, G, 4) in fractions of each image, and labels (B, G), 0 for padding."""
    if len(images) != len(targets):
        raise UsageError(f"{counted(len(images), 'image')}, but {counted(len(targets), 'target')}")
    boxes, labels = [], []
    for number, (image, target) in enumerate(zip(images, targets, strict=True)):
        if not isinstance(target, Mapping):
            raise UsageError(f"target {number}: a {type(target).__name__}, not a dictionary")
        is_other = "boxes" not in target and "labels" not in target
        if is_other and (others := _arrays_in(target)):
            raise UsageError(
                f"target {number}: {', '.join(others)}, but neither boxes nor labels",
                hint="expected boxes (G, 4) and labels (G,)",
            )
        height, width = image.shape[-2:]
        box = _as_ltrb(target.get("boxes", ()), (height, width), number, device)
        label = torch.as_tensor(target.get("labels", ()), device=device)
        is_empty = not (box.numel() or label.numel())
        if not is_empty and (label.dim() != 1 or box.shape != (len(label), 4)):
            raise UsageError(
                f"target {number}: boxes {tuple(box.shape)}, labels {tuple(label.shape)}",
                hint="expected boxes (G, 4) and labels (G,)",
            )
        if label.numel() and label.is_floating_point():
            raise UsageError(f"target {number}: labels of type {label.dtype}", hint="give integers")
        box, label = box.reshape(-1, 4), label.reshape(-1).long()
        if not torch.compiler.is_compiling():
            _check_objects(box, label, (width, height), num_classes, number)
        boxes.append(box / box.new_tensor([width, height, width, height]))
        labels.append(label)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(boxes, batch_first=True), pad(labels, batch_first=True)


def _arrays_in(target: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors and lists that may describe objects: they are not empty."""
    values = [(name, value) for name, value in target.items() if name != "image_id"]
    return [n for n, v in values if getattr(v, "ndim", isinstance(v, list)) and len(v)]


def _as_ltrb(boxes: Any, size: tuple[int, int], number: int, device: torch.device) -> Tensor:
    """Return boxes as left, top, right, bottom; torchvision's `BoundingBoxes` know their format."""
    plain = torch.as_tensor(boxes, device=device)
    plain = plain if plain.dtype == torch.float64 else plain.float()
    if (kind := getattr(boxes, "format", None)) is None:
        return plain
    if tuple(boxes.canvas_size) != size:
        raise UsageError(
            f"target {number}: boxes of an image of {tuple(boxes.canvas_size)} pixels (height, "
            f"width), the image has {size}"
        )
    plain = plain.as_subclass(Tensor)
    if kind.value == "XYXY":
        return plain
    first, extent = plain[..., :2], plain[..., 2:]
    if kind.value == "XYWH":
        return torch.cat([first, first + extent], dim=-1)
    if kind.value == "CXCYWH":
        return box_cxcywh_to_ltrb(plain)
    raise UsageError(f"target {number}: boxes of the format {kind.value}", hint="give XYXY")


def _check_objects(
    box: Tensor, label: Tensor, size: tuple[int, int], num_classes: int, number: int
) -> None:
    wrong = label[(label < 1) | (label >= num_classes)]
    if len(wrong):
        raise UsageError(
            f"target {number}: label {int(wrong[0])} is out of range",
            hint=f"the network has the labels 1 to {num_classes - 1}; 0 is the background",
        )
    is_box = (box[:, 2:] > box[:, :2]).all(dim=1) & box.isfinite().all(dim=1)
    if not bool(is_box.all()):
        raise UsageError(
            f"target {number}: the box {box[~is_box][0].tolist()} has no area",
            hint="expected left, top, right, bottom in pixels, right > left and bottom > top",
        )
    is_inside = ((box[:, :2] < box.new_tensor(size)) & (box[:, 2:] > 0)).all(dim=1)
    if not bool(is_inside.all()):
        raise UsageError(
            f"target {number}: the box {box[~is_inside][0].tolist()} is outside its image of "
            f"{size[0]} x {size[1]} pixels",
            hint="scale boxes with their image; transforms end with SanitizeBoundingBoxes()",
        )
    if len(box) > 1 and bool((box <= 1).all()):
        raise UsageError(
            f"target {number}: all boxes are within the first pixel, as fractions are",
            hint="multiply them by the image's width and height",
        )
