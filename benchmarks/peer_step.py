"""Measure the training step of torchvision's ssd300_vgg16, or of ultralytics' yolo11n, on the CPU.

    python benchmarks/peer_step.py torchvision|ultralytics --precision fp32 --batch 8

Random images (300 x 300, or 640 x 640) with 12 boxes each; SGD with momentum, bf16 by autocast.
`benchmarks/train.py --layers` runs it, in an environment that has the package. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

STEPS, BOXES = 5, 12


def torchvision_loss(batch: int) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    from torchvision.models.detection import ssd300_vgg16

    model = ssd300_vgg16(weights=None, weights_backbone=None, num_classes=81).train()
    images = list(torch.rand(batch, 3, 300, 300))
    corners = torch.rand(batch, BOXES, 2) * 150
    boxes = torch.cat([corners, corners + 20 + torch.rand(batch, BOXES, 2) * 120], dim=2)
    labels = torch.randint(1, 81, (batch, BOXES))
    targets = [{"boxes": b, "labels": n} for b, n in zip(boxes, labels, strict=True)]
    return model, lambda: sum(model(images, targets).values())


def ultralytics_loss(batch: int) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolo11n.yaml", nc=80, verbose=False).train()
    model.args = get_cfg()
    count = batch * BOXES
    given = {
        "img": torch.rand(batch, 3, 640, 640),
        "batch_idx": torch.arange(batch).repeat_interleave(BOXES).float(),
        "cls": torch.randint(0, 80, (count, 1)).float(),
        "bboxes": torch.cat(
            [0.3 + 0.4 * torch.rand(count, 2), 0.05 + 0.3 * torch.rand(count, 2)], 1
        ),
    }
    return model, lambda: model(given)[0].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", choices=["torchvision", "ultralytics"])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    make = torchvision_loss if options.peer == "torchvision" else ultralytics_loss
    model, loss = make(options.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            value = loss()
        value.backward()
        optimizer.step()

    step()
    with FlopCounterMode(display=False) as counter:
        step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    print(json.dumps({"step_s": statistics.median(times), "flops": counter.get_total_flops()}))


if __name__ == "__main__":
    main()
