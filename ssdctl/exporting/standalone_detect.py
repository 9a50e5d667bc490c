"""Run this SSD300 without ssdctl: needs torch, torchvision, safetensors and Pillow.

python detect.py street.jpg
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

MAPS = ((38, 8), (19, 16), (10, 32), (5, 64), (3, 100), (1, 300))  # cells, pixels of a cell
SCALES = (21, 45, 99, 153, 207, 261, 315)  # pixels
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
Weights = dict[str, Tensor]


def load(folder: str) -> tuple[Weights, dict[str, Any]]:
    """Return the weights and the description of the model in a folder."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return load_file(Path(folder) / "model.safetensors"), config


def conv(x: Tensor, weights: Weights, name: str, **options: int) -> Tensor:
    weight = weights[f"{name}.weight"]
    padding = options.pop("padding", weight.shape[-1] // 2)
    return F.conv2d(x, weight, weights.get(f"{name}.bias"), padding=padding, **options)


def norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    if f"{name}.running_mean" not in weights:
        return x
    mean, var = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
    return F.batch_norm(x, mean, var, weights[f"{name}.weight"], weights[f"{name}.bias"])


def resnet(x: Tensor, weights: Weights) -> Tensor:
    """Return the map of 38 x 38 cells: layer3 does not stride."""
    x = norm(conv(x, weights, "backbone.conv1", stride=2), weights, "backbone.bn1").relu()
    x = F.max_pool2d(x, 3, stride=2, padding=1)
    for layer, block in itertools.product((1, 2, 3), range(100)):
        name = f"backbone.layer{layer}.{block}"
        if f"{name}.conv1.weight" not in weights:
            continue
        convs = [i for i in (1, 2, 3) if f"{name}.conv{i}.weight" in weights]
        strided = len(convs) - 1 if layer == 2 and block == 0 else None  # the first, or the 3x3
        y = x
        for i in convs:
            y = conv(y, weights, f"{name}.conv{i}", stride=2 if i == strided else 1)
            y = norm(y, weights, f"{name}.bn{i}")
            y = y.relu() if i != convs[-1] else y
        if f"{name}.downsample.0.weight" in weights:
            x = conv(x, weights, f"{name}.downsample.0", stride=2 if strided else 1)
            x = norm(x, weights, f"{name}.downsample.1")
        x = (x + y).relu()
    return x


def vgg16(x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return the maps of 38 x 38 and 19 x 19 cells."""
    for number in (0, 2, None, 5, 7, None, 10, 12, 14, None, 17, 19, 21):
        if number is None:
            x = F.max_pool2d(x, 2, ceil_mode=True)
        else:
            x = conv(x, weights, f"backbone.{number}").relu()
    y = F.max_pool2d(x, 2)
    for number in (1, 3, 5):
        y = conv(y, weights, f"extra.0.{number}").relu()
    y = F.max_pool2d(y, 3, stride=1, padding=1)
    y = conv(y, weights, "extra.0.7.1", padding=6, dilation=6).relu()
    y = conv(y, weights, "extra.0.7.3").relu()
    return F.normalize(x, dim=1) * weights["first_map_norm.scale"].view(1, -1, 1, 1), y


def heads(images: Tensor, weights: Weights, classes: int) -> tuple[Tensor, Tensor]:
    """Return (B, 4, 8732) offsets and (B, classes, 8732) logits of normalised images."""
    is_vgg = "first_map_norm.scale" in weights
    maps = list(vgg16(images, weights)) if is_vgg else [resnet(images, weights)]
    for number in range(len(maps) - 1, 5):
        second = 3 if f"extra.{number}.3.weight" in weights else 2  # with batch norm, or without
        x = conv(maps[-1], weights, f"extra.{number}.0")
        x = norm(x, weights, f"extra.{number}.1").relu()
        stride = 2 if number < 3 else 1
        x = conv(x, weights, f"extra.{number}.{second}", stride=stride, padding=stride - 1)
        maps.append(norm(x, weights, f"extra.{number}.{second + 1}").relu())
    offsets = [conv(m, weights, f"box_heads.{i}").flatten(1) for i, m in enumerate(maps)]
    logits = [conv(m, weights, f"class_heads.{i}").flatten(1) for i, m in enumerate(maps)]
    return (
        torch.cat([o.unflatten(1, (4, -1)) for o in offsets], dim=2),
        torch.cat([x.unflatten(1, (classes, -1)) for x in logits], dim=2),
    )


def default_boxes() -> Tensor:
    """Return (8732, 4) centres and sizes as fractions of the image."""
    boxes = []
    for level, (cells, pixels) in enumerate(MAPS):
        scale, between = SCALES[level], math.sqrt(SCALES[level] * SCALES[level + 1])
        shapes = [(scale, scale), (between, between)]
        for ratio in RATIOS[level]:
            long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            shapes += [(long, short), (short, long)]
        for (width, height), row, column in itertools.product(shapes, range(cells), range(cells)):
            boxes.append(((column + 0.5) * pixels, (row + 0.5) * pixels, width, height))
    return (torch.tensor(boxes, dtype=torch.float64) / 300).clamp(0, 1).float()


@torch.no_grad()
def detect(
    model: tuple[Weights, dict[str, Any]], picture: str, score: float = 0.3
) -> list[tuple[str, float, list[float]]]:
    """Return name, score and box (left, top, right, bottom in pixels), the best first."""
    weights, config = model
    rules = config["detection"]
    image = ImageOps.exif_transpose(Image.open(picture)).convert("RGB")
    pixels = torchvision.transforms.functional.pil_to_tensor(
        image.resize((300, 300), Image.Resampling.BILINEAR)
    )
    mean, std = (torch.tensor(config["preprocessing"][k]).view(3, 1, 1) for k in ("mean", "std"))
    images = ((pixels / 255 - mean) / std)[None]
    offsets, logits = heads(images, weights, config["architecture"]["num_classes"])
    defaults = default_boxes()
    centre = offsets[0, :2].T * 0.1 * defaults[:, 2:] + defaults[:, :2]
    size = (offsets[0, 2:].T * 0.2).clamp(max=10).exp() * defaults[:, 2:]
    boxes = torch.cat([centre - size / 2, centre + size / 2], dim=1)
    boxes = boxes.clamp(0, 1) if rules["clips_boxes"] else boxes
    scores = logits[0].softmax(dim=0)[1:]
    found = []
    for label, class_scores in enumerate(scores):
        best = class_scores.topk(min(rules["candidates_per_class"], len(class_scores))).indices
        best = best[class_scores[best] > score]
        kept = torchvision.ops.nms(boxes[best], class_scores[best], rules["nms_iou"])
        found += [(float(class_scores[i]), label, boxes[i]) for i in best[kept]]
    found.sort(key=lambda item: -item[0])
    edges = torch.tensor([image.width, image.height] * 2)
    return [
        (config["classes"][label]["name"], value, (box.clamp(0, 1) * edges).tolist())
        for value, label, box in found[:200]
    ]


if __name__ == "__main__":
    for name, value, box in detect(load(str(Path(__file__).parent)), sys.argv[1]):
        print(name, round(value, 3), [round(v) for v in box])
