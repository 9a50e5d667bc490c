"""The mathematics a second time: plain loops in float64, written from the paper and the replaced
systems only. Nothing of ssdctl is imported here, so that errors cannot be shared.

Boxes are (left, top, right, bottom) tuples in fractions of the image, or (cx, cy, w, h) where
the name shows it. Arrays keep ssdctl's layouts: offsets (B, 4, N), logits (B, C, N).
"""

import colorsys
import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Box = Sequence[float]

# --- default boxes ---------------------------------------------------------------------------


def default_boxes() -> list[tuple[float, float, float, float]]:
    """The 8732 (cx, cy, w, h), clamped: feature map -> shape -> row -> column."""
    maps = [38, 19, 10, 5, 3, 1]
    steps = [8, 16, 32, 64, 100, 300]
    scales = [21, 45, 99, 153, 207, 261, 315]
    ratios = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
    result = []
    for k in range(6):
        small, large = scales[k] / 300, scales[k + 1] / 300
        shapes = [(small, small), (math.sqrt(small * large), math.sqrt(small * large))]
        for a in ratios[k]:
            shapes.append((small * math.sqrt(a), small / math.sqrt(a)))
            shapes.append((small / math.sqrt(a), small * math.sqrt(a)))
        for w, h in shapes:
            for row in range(maps[k]):
                for column in range(maps[k]):
                    box = ((column + 0.5) * steps[k] / 300, (row + 0.5) * steps[k] / 300, w, h)
                    result.append(tuple(min(max(v, 0.0), 1.0) for v in box))
    return result


def ltrb(box_cxcywh: Box) -> tuple[float, float, float, float]:
    cx, cy, w, h = box_cxcywh
    return (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)


def cxcywh(box: Box) -> tuple[float, float, float, float]:
    left, top, right, bottom = box
    return ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)


def iou(a: Box, b: Box) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    overlap = width * height
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap
    return overlap / union if union > 0 else 0.0


# --- matching, coding ------------------------------------------------------------------------


def match(
    truths: Sequence[Box], labels: Sequence[int], defaults: Sequence[Box]
) -> tuple[list[int], list[int]]:
    """For each default box (ltrb) its ground truth, -1 where it has none, and its label."""
    assigned, label = [], []
    favorite, favorite_iou = [-1] * len(truths), [-1.0] * len(truths)
    for n, default in enumerate(defaults):
        best, best_iou = -1, -1.0
        for g, truth in enumerate(truths):
            overlap = iou(truth, default)
            if overlap > best_iou:
                best, best_iou = g, overlap
            if overlap > favorite_iou[g]:
                favorite[g], favorite_iou[g] = n, overlap
        is_positive = best_iou > 0.5
        assigned.append(best if is_positive else -1)
        label.append(labels[best] if is_positive else 0)
    for g, n in enumerate(favorite):  # in order, so the last ground truth wins
        if labels[g] > 0:  # -1: to be ignored
            assigned[n], label[n] = g, labels[g]
    return assigned, label


def encode(box: Box, default: Box) -> list[float]:
    """Offsets of a box from a default box, both cxcywh."""
    return [
        (box[0] - default[0]) / default[2] / 0.1,
        (box[1] - default[1]) / default[3] / 0.1,
        math.log(box[2] / default[2]) / 0.2,
        math.log(box[3] / default[3]) / 0.2,
    ]


def decode(offset: Sequence[float], default: Box) -> tuple[float, float, float, float]:
    """The cxcywh box of offsets from a default box (cxcywh)."""
    return (
        offset[0] * 0.1 * default[2] + default[0],
        offset[1] * 0.1 * default[3] + default[1],
        math.exp(offset[2] * 0.2) * default[2],
        math.exp(offset[3] * 0.2) * default[3],
    )


# --- loss ------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """Means over the batch."""

    total: float
    box: float
    classification: float


def cross_entropy(logits: np.ndarray, label: int) -> float:
    """Of one default box: (C,) logits."""
    most = float(logits.max())
    return most + math.log(float(np.exp(logits - most).sum())) - float(logits[label])


def smooth_l1(difference: float) -> float:
    size = abs(difference)
    return 0.5 * size * size if size < 1 else size - 0.5


def loss_from_targets(
    offsets: np.ndarray,
    logits: np.ndarray,
    targets: np.ndarray,
    labels: np.ndarray,
    flavor: str,
    background_negatives: int = 0,
    divisor: str = "image",
) -> Loss:
    """(B, 4, N) offsets and targets, (B, C, N) logits, (B, N) labels -> the loss. Boxes
    with the label -1 are neither positives nor negatives.

    A box that is a positive and among the hardest negatives at once weighs 2 in `mlperf` (the
    masks are added) and 1 in `nvidia` (they are ORed). An image without positives has its K hardest
    negatives (`background_negatives`) and counts as one with K / 3 positives.
    """
    box_sum, class_sum = 0.0, 0.0
    weights = [int((image > 0).sum()) or background_negatives / 3 for image in labels]
    size = len(labels) if divisor == "image" else sum(weights)
    for image in range(len(labels)):
        n_range = range(labels.shape[1])
        positives = [n for n in n_range if labels[image, n] > 0]
        if not (positives or background_negatives):
            continue  # counts as 0, and in the mean
        entropy = [
            cross_entropy(logits[image, :, n].astype(np.float64), max(int(labels[image, n]), 0))
            for n in n_range
        ]
        hardness = [0.0 if labels[image, n] > 0 else entropy[n] for n in n_range]
        hardest = sorted((n for n in n_range if labels[image, n] >= 0), key=lambda n: -hardness[n])[
            : 3 * len(positives) or background_negatives
        ]
        weight = dict.fromkeys(positives, 1)
        for n in hardest:
            weight[n] = weight.get(n, 0) + 1 if flavor == "mlperf" else 1
        share = weights[image] if divisor == "image" else 1
        class_sum += sum(w * entropy[n] for n, w in weight.items()) / share
        difference = offsets[image].astype(np.float64) - targets[image].astype(np.float64)
        distance = sum(smooth_l1(float(d)) for n in positives for d in difference[:, n])
        box_sum += distance / share
    return Loss((box_sum + class_sum) / size, box_sum / size, class_sum / size)


def multibox_loss(
    offsets: np.ndarray,
    logits: np.ndarray,
    truths: Sequence[Sequence[Box]],
    truth_labels: Sequence[Sequence[int]],
    defaults_cxcywh: Sequence[Box],
    flavor: str,
) -> Loss:
    """The loss of a batch: each image's ground truth as lists, without padding."""
    defaults = [ltrb(d) for d in defaults_cxcywh]
    targets = np.zeros(offsets.shape)
    labels = np.zeros((len(truths), len(defaults)), np.int64)
    for image, (boxes, names) in enumerate(zip(truths, truth_labels, strict=True)):
        assigned, labels[image] = match(boxes, names, defaults)
        for n, g in enumerate(assigned):
            if g >= 0:
                targets[image, :, n] = encode(cxcywh(boxes[g]), defaults_cxcywh[n])
    return loss_from_targets(offsets, logits, targets, labels, flavor)


# --- detections ------------------------------------------------------------------------------


class Detection(NamedTuple):
    """One detection."""

    score: float
    label: int
    box: tuple[float, float, float, float]  # ltrb


def detect(
    offsets: np.ndarray,
    logits: np.ndarray,
    defaults_cxcywh: Sequence[Box],
    score_threshold: float = 0.05,
    nms_iou: float = 0.5,
) -> list[Detection]:
    """The detections of one image, best first: (4, N) offsets, (C, N) logits."""
    exponential = np.exp(logits - logits.max(axis=0))
    scores = exponential / exponential.sum(axis=0)
    detections = []
    for label in range(1, len(scores)):
        candidates = [n for n in range(len(defaults_cxcywh)) if scores[label, n] > score_threshold]
        candidates.sort(key=lambda n: -scores[label, n])
        kept: list[Detection] = []
        for n in candidates[:200]:
            box = ltrb(decode([float(v) for v in offsets[:, n]], defaults_cxcywh[n]))
            if all(iou(box, better.box) <= nms_iou for better in kept):
                kept.append(Detection(float(scores[label, n]), label, box))
        detections += kept
    return sorted(detections, key=lambda d: -d.score)[:200]


# --- crops -----------------------------------------------------------------------------------


class Crop(NamedTuple):
    """A crop and the boxes it keeps, in fractions of the crop."""

    rect: tuple[float, float, float, float]
    kept: list[int]
    boxes: list[tuple[float, float, float, float]]


def center_inside(rect: Box, box: Box) -> bool:
    cx, cy = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return rect[0] < cx < rect[2] and rect[1] < cy < rect[3]


def sample_crop(boxes: Sequence[Box], rng: random.Random) -> Crop:
    """MLPerf's SSDCropping with one attempt a mode."""
    modes: list[float | str | None] = ["whole", 0.1, 0.3, 0.5, 0.7, 0.9, None]
    while True:
        mode = rng.choice(modes)
        if mode == "whole":
            return Crop((0.0, 0.0, 1.0, 1.0), list(range(len(boxes))), [tuple(b) for b in boxes])
        width, height = rng.uniform(0.3, 1.0), rng.uniform(0.3, 1.0)
        if width / height < 0.5 or width / height > 2:
            continue
        left, top = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
        rect = (left, top, left + width, top + height)
        if mode is not None and not all(iou(rect, box) > float(mode) for box in boxes):
            continue
        kept = [i for i, box in enumerate(boxes) if center_inside(rect, box)]
        if kept:
            return Crop(rect, kept, [_clipped(boxes[i], rect) for i in kept])


def _clipped(box: Box, rect: Box) -> tuple[float, float, float, float]:
    width, height = rect[2] - rect[0], rect[3] - rect[1]
    return (
        (max(box[0], rect[0]) - rect[0]) / width,
        (max(box[1], rect[1]) - rect[1]) / height,
        (min(box[2], rect[2]) - rect[0]) / width,
        (min(box[3], rect[3]) - rect[1]) / height,
    )


# --- color ----------------------------------------------------------------------------------


def gray_of(rgb: Sequence[float]) -> float:
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


def jitter_colors(
    image: np.ndarray, brightness: float, contrast: float, saturation: float, hue_turns: float
) -> np.ndarray:
    """Sequential jitter of an (H, W, 3) image in 0 to 1, clamped after every step.

    The hue turns in HSV by a fraction of a full turn: red goes toward yellow where positive.
    """
    height, width, _ = image.shape
    pixels = [[float(v) for v in rgb] for row in image for rgb in row]
    pixels = [[_clamp(v * brightness) for v in rgb] for rgb in pixels]
    mean_gray = sum(gray_of(rgb) for rgb in pixels) / len(pixels)
    pixels = [[_clamp(contrast * v + (1 - contrast) * mean_gray) for v in rgb] for rgb in pixels]
    pixels = [
        [_clamp(saturation * v + (1 - saturation) * gray_of(rgb)) for v in rgb] for rgb in pixels
    ]
    turned = []
    for rgb in pixels:
        h, s, v = colorsys.rgb_to_hsv(*rgb)
        turned.append(colorsys.hsv_to_rgb((h + hue_turns) % 1.0, s, v))
    return np.array(turned, np.float64).reshape(height, width, 3)


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)


# --- the network -----------------------------------------------------------------------------

# Where each layout has the parts of the backbone.
PARTS = ("conv1", "bn1", "layer1", "layer2", "layer3")
PLACES = {
    "mlperf": ("model", ("layer1.0", "layer1.1", "layer1.4", "layer1.5", "layer2.0")),
    "nvidia": ("feature_extractor.feature_extractor", (0, 1, 4, 5, 6)),
}


class Network:
    """SSD300 as functions of a third-party state dict; the backbone follows from its keys.

    Args:
        state: A state dict in MLPerf's (`mlperf`) or NVIDIA's (`nvidia`) layout.
        layout: Which.
        training: Batch norm takes the batch's statistics (and records none).
    """

    def __init__(self, state: Mapping[str, Tensor], layout: str, training: bool = False) -> None:
        self.state, self.layout, self.training = state, layout, training
        start, places = PLACES[layout]
        self.names = {part: f"{start}.{place}" for part, place in zip(PARTS, places, strict=True)}

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized (B, 3, 300, 300) images -> (B, 4, 8732) offsets, (B, C, 8732) logits."""
        offsets, logits = [], []
        for level, feature in enumerate(self.features(images)):
            boxes = self.conv(feature, f"loc.{level}", padding=1)
            classes = self.conv(feature, f"conf.{level}", padding=1)
            num_classes = classes.shape[1] // [4, 6, 6, 6, 4, 4][level]
            offsets.append(boxes.reshape(len(images), 4, -1))
            logits.append(classes.reshape(len(images), num_classes, -1))
        return torch.cat(offsets, 2), torch.cat(logits, 2)

    def features(self, images: Tensor) -> list[Tensor]:
        """The six feature maps."""
        x = self.conv(images, self.names["conv1"], stride=2, padding=3)
        x = F.max_pool2d(F.relu(self.norm(x, self.names["bn1"])), 3, stride=2, padding=1)
        for layer, stride in (("layer1", 1), ("layer2", 2), ("layer3", 1)):  # layer3: 1, not 2
            block = 0
            while f"{self.names[layer]}.{block}.conv1.weight" in self.state:
                x = self.residual(x, f"{self.names[layer]}.{block}", stride if block == 0 else 1)
                block += 1
        features = [x]
        for i in range(5):
            stride, padding = (2, 1) if i < 3 else (1, 0)
            features.append(self.extra(features[-1], f"additional_blocks.{i}", stride, padding))
        return features

    def residual(self, x: Tensor, name: str, stride: int) -> Tensor:
        if f"{name}.conv3.weight" in self.state:
            y = F.relu(self.norm(self.conv(x, f"{name}.conv1"), f"{name}.bn1"))
            y = self.conv(y, f"{name}.conv2", stride=stride, padding=1)
            y = F.relu(self.norm(y, f"{name}.bn2"))
            y = self.norm(self.conv(y, f"{name}.conv3"), f"{name}.bn3")
        else:
            y = self.conv(x, f"{name}.conv1", stride=stride, padding=1)
            y = F.relu(self.norm(y, f"{name}.bn1"))
            y = self.norm(self.conv(y, f"{name}.conv2", padding=1), f"{name}.bn2")
        if f"{name}.downsample.0.weight" in self.state:
            x = self.conv(x, f"{name}.downsample.0", stride=stride)
            x = self.norm(x, f"{name}.downsample.1")
        return F.relu(x + y)

    def extra(self, x: Tensor, name: str, stride: int, padding: int) -> Tensor:
        if self.layout == "mlperf":  # biased convolutions at 0 and 2
            x = F.relu(self.conv(x, f"{name}.0"))
            return F.relu(self.conv(x, f"{name}.2", stride=stride, padding=padding))
        x = F.relu(self.norm(self.conv(x, f"{name}.0"), f"{name}.1"))
        x = self.conv(x, f"{name}.3", stride=stride, padding=padding)
        return F.relu(self.norm(x, f"{name}.4"))

    def conv(self, x: Tensor, name: str, stride: int = 1, padding: int = 0) -> Tensor:
        bias = self.state.get(f"{name}.bias")
        return F.conv2d(x, self.state[f"{name}.weight"], bias, stride, padding)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        if self.training:
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=1e-5)
        mean, variance = self.state[f"{name}.running_mean"], self.state[f"{name}.running_var"]
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=1e-5)


# --- random numbers by counter ---------------------------------------------------------------


def hashed(*keys: int) -> int:
    """SplitMix64 over the keys, in Python's unbounded integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    state = 0
    for key in keys:
        state = mix(((state + golden) & mask) ^ mix((key + golden) & mask))
    return state


# --- a batch and its loss ---------------------------------------------------------------------

LOSS_TRUTHS = [
    [(0.1, 0.2, 0.6, 0.9), (0.5, 0.5, 0.55, 0.58), (0.0, 0.0, 1.0, 1.0)],
    [],
    [(0.3, 0.3, 0.7, 0.6), (0.31, 0.3, 0.7, 0.6)],  # two truths that claim one box
]
LOSS_LABELS = [[1, 80, 17], [], [44, 3]]
# In both flavors; it never changes.
LOSS = Loss(22.04728701899631, 1.8960918356287857, 20.151195183367523)


def loss_inputs(num_classes: int = 81) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (3, 4, 8732) and logits (3, C, 8732) in closed form, no generator involved."""
    b, n = np.arange(3.0)[:, None, None], np.arange(8732.0)[None, None]
    offsets = np.sin(0.37 * (b + 1) * (np.arange(4.0)[None, :, None] + 1) + 0.011 * n)
    k = np.arange(float(num_classes))[None, :, None]
    return 1.7 * offsets, 2.5 * np.sin(0.9 * b + 0.7 * k + 0.013 * (k + 1) * n)
