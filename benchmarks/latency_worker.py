"""Time one detector for `benchmarks/predict.py --only latency`, which runs several in turn.

    python benchmarks/latency_worker.py KIND FOLDER

A time is that from an RGB image of 640 x 480 in memory to its boxes: resizing, network and NMS.
Each line of standard input asks for a number of calls; the answer is a line of JSON with their
seconds.
This script also runs where only KIND's own packages are installed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Detect = Callable[[Image.Image], Any]


def with_ssdctl(file: Path, precision: str) -> Detect:
    import ssdctl

    detector = ssdctl.load(file, device="cpu", precision=precision)
    return lambda image: detector.predict(image)


def with_openvino(file: Path, precision: str) -> Detect:
    import openvino

    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": precision})

    def detect(image: Image.Image) -> Any:
        resized = image.resize((300, 300), Image.Resampling.BILINEAR)
        return compiled(np.asarray(resized)[None])["count"]

    return detect


def with_torchvision() -> Detect:
    import torch
    from torchvision.models.detection import ssd300_vgg16
    from torchvision.transforms.functional import to_tensor

    # At the default of 0.01 random weights detect thousands of objects, and NMS takes seconds.
    model = ssd300_vgg16(weights=None, weights_backbone=None, score_thresh=0.3).eval()

    def detect(image: Image.Image) -> Any:
        with torch.inference_mode():
            return model([to_tensor(image)])

    return detect


def with_ultralytics() -> Detect:
    from ultralytics import YOLO

    model = YOLO("yolo11n.yaml")
    return lambda image: model.predict(image, device="cpu", verbose=False)


def open_detector(kind: str, folder: Path) -> Detect:
    if kind == "yolo11n":
        return with_ultralytics()
    if kind == "ssd300_vgg16":
        return with_torchvision()
    if kind.startswith("openvino"):
        return with_openvino(folder / "ssd.xml", kind.rpartition("-")[2])
    file = {"onnx": "ssd.onnx", "int8": "int8.onnx"}.get(kind, "weights.pt")
    return with_ssdctl(folder / file, "bf16" if kind == "bf16" else "fp32")


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    detect = open_detector(kind, folder)
    image = Image.open(folder / "photo.jpg").convert("RGB")
    for _ in range(3):
        detect(image)
    print("[]", flush=True)  # ready
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            detect(image)
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
