"""Measure loss and detection of ssdctl and of third-party implementations on the CPU.

    python benchmarks/boxes.py [--seconds 5]

The input imitates a trained network on COCO: 8 images, 81 classes, 20 objects each; the default
boxes near an object have a high score for its class, the others are background. "third-party" is a
re-implementation of MLPerf's reference: Python loops over images and classes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import batched_nms

from ssdctl.boxes import (
    Matcher,
    box_cxcywh_to_ltrb,
    box_ltrb_to_cxcywh,
    decode,
    default_boxes_cxcywh,
    encode,
    pairwise_iou,
)
from ssdctl.model import postprocess
from ssdctl.model.backbones import RESNET
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.postprocess import detect

BATCH, CLASSES, OBJECTS, PADDED = 8, 81, 20, 96
FEW = 8  # COCO's images have 7.3 boxes on average


def network_output() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return offsets, logits, boxes and labels of a batch."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size = 0.05 + 0.4 * torch.rand(BATCH, OBJECTS, 2, generator=generator)
    low = torch.rand(BATCH, OBJECTS, 2, generator=generator) * (1 - size)
    boxes = torch.cat([low, low + size], dim=-1)
    labels = torch.randint(1, CLASSES, (BATCH, OBJECTS), generator=generator)
    defaults = default_boxes_cxcywh()
    iou = pairwise_iou(boxes, box_cxcywh_to_ltrb(defaults))  # B x objects x N
    best, owner = iou.max(dim=1)
    logits = noise(BATCH, CLASSES, len(defaults))
    logits[:, 0] += 9 - 14 * (best - 0.3).clamp(min=0)
    lift = (14 * (best - 0.3)).clamp(min=0)
    logits.scatter_add_(1, labels.gather(1, owner).unsqueeze(1), lift.unsqueeze(1))
    owned = boxes.gather(1, owner.unsqueeze(-1).expand(-1, -1, 4))
    offsets = encode(box_ltrb_to_cxcywh(owned), defaults).clamp(-5, 5).transpose(1, 2)
    return offsets + 0.1 * noise(BATCH, 4, len(defaults)), logits, boxes, labels


def mlperf_detect(offsets: Tensor, logits: Tensor, defaults: Tensor) -> list[tuple[Tensor, ...]]:
    """Detect with loops over images and classes, and a greedy NMS in Python."""
    boxes = box_cxcywh_to_ltrb(decode(offsets.transpose(1, 2), defaults))
    scores = logits.softmax(dim=1)
    detections = []
    for image in range(len(boxes)):
        kept: list[tuple[Tensor, ...]] = []
        for label in range(1, CLASSES):
            mask = scores[image, label] > 0.05
            score, box = scores[image, label][mask], boxes[image][mask]
            if not len(score):
                continue
            order = score.sort().indices[-200:]
            while len(order):
                best = order[-1]
                kept.append((box[best], score[best], torch.tensor(label)))
                overlap = pairwise_iou(box[order], box[best].unsqueeze(0)).squeeze(1)
                order = order[overlap < 0.5]
        kept.sort(key=lambda entry: -float(entry[1]))
        detections.append(tuple(map(torch.stack, zip(*kept[:200], strict=True))))
    return detections


def torchvision_detect(offsets: Tensor, logits: Tensor, defaults: Tensor) -> list[Tensor]:
    """Detect with a threshold and torchvision's batched_nms, as most users would."""
    boxes = box_cxcywh_to_ltrb(decode(offsets.transpose(1, 2), defaults))
    scores = logits.softmax(dim=1)[:, 1:]
    detections = []
    for image in range(len(boxes)):
        label, index = (scores[image] > 0.05).nonzero(as_tuple=True)
        score, box = scores[image][label, index], boxes[image][index]
        detections.append(box[batched_nms(box, score, label, 0.5)[:200]])
    return detections


def mlperf_loss(offsets: Tensor, logits: Tensor, target: Tensor, label: Tensor) -> Tensor:
    """Return MLPerf's loss: multiplied masks, two sorts for the rank, precomputed targets."""
    mask = label > 0
    positives = mask.sum(dim=1)
    box = (F.smooth_l1_loss(offsets, target, reduction="none").sum(dim=1) * mask.float()).sum(dim=1)
    entropy = F.cross_entropy(logits, label, reduction="none")
    hardness = entropy.clone()
    hardness[mask] = 0
    rank = hardness.sort(dim=1, descending=True).indices.sort(dim=1).indices
    negative = rank < torch.clamp(3 * positives, max=mask.size(1)).unsqueeze(-1)
    classification = (entropy * (mask.float() + negative.float())).sum(dim=1)
    return ((box + classification) / positives.float().clamp(min=1e-6)).mean()


def median_seconds(functions: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return median seconds per call; calls alternate, so that a slow period affects all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds * len(functions):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each implementation")
    seconds = parser.parse_args().seconds
    offsets, logits, boxes, labels = network_output()
    defaults = default_boxes_cxcywh()

    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    candidates = (logits.softmax(dim=1)[:, 1:] > 0.05).sum().item() / BATCH
    print(f"\ndetection: {candidates:.0f} candidates an image")
    detection = {
        "third-party loop": lambda: mlperf_detect(offsets, logits, defaults),
        "torchvision": lambda: torchvision_detect(offsets, logits, defaults),
        "ssdctl": lambda: detect(offsets, logits, defaults),
    }
    for name, median in median_seconds(detection, seconds).items():
        print(f"  {name:<34}{BATCH / median:8.1f} img/s")

    print("\ndetection of an untrained network: 200 candidates of each class")
    untrained = offsets[:1], 0.1 * logits[:1].roll(1, dims=1), defaults
    rules = RESNET._replace(score_threshold=0.01)

    def at_once() -> None:
        with patch.object(postprocess, "MANY_BOXES", 10**9):
            detect(*untrained, rules)

    ways = {"one NMS": at_once, "an NMS per class": lambda: detect(*untrained, rules)}
    for name, median in median_seconds(ways, seconds).items():
        print(f"  {name:<34}{1000 * median:8.1f} ms/img")

    few = boxes[:, :FEW], labels[:, :FEW]
    padded = torch.zeros(BATCH, PADDED, 4), torch.zeros(BATCH, PADDED, dtype=torch.long)
    padded[0][:, :OBJECTS], padded[1][:, :OBJECTS] = boxes, labels
    owner, matched_label = Matcher()(boxes, labels, box_cxcywh_to_ltrb(defaults))
    matched = boxes.gather(1, owner.unsqueeze(-1).expand(-1, -1, 4))
    target = encode(box_ltrb_to_cxcywh(matched), defaults).transpose(1, 2)
    leaves = offsets.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = MultiboxLoss()

    def backward(compute: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def work() -> None:
            leaves[0].grad = leaves[1].grad = None
            compute(*leaves).backward()

        return work

    losses = {
        "third-party, targets given": lambda o, c: mlperf_loss(o, c, target, matched_label),
        "ssdctl, targets given": lambda o, c: (
            MultiboxLoss().compare(o, c, target, matched_label).total
        ),
        f"ssdctl, {FEW} boxes matched": lambda o, c: loss(o, c, *few).total,
        f"ssdctl, {OBJECTS} boxes matched": lambda o, c: loss(o, c, boxes, labels).total,
        f"ssdctl, padded to {PADDED} boxes": lambda o, c: loss(o, c, *padded).total,
    }
    print("\nloss, forward and backward")
    works = {name: backward(compute) for name, compute in losses.items()}
    for name, median in median_seconds(works, seconds).items():
        print(f"  {name:<34}{1000 * median / BATCH:8.2f} ms/img")


if __name__ == "__main__":
    main()
