"""Settings of evaluation and prediction."""

from typing import Annotated, Literal

import msgspec

from ssdctl.config.devices import DeviceName
from ssdctl.config.fields import Count, Fraction, NonNegativeInt, Section, setting


class EvaluateConfig(Section, frozen=True):
    """The evaluation of a checkpoint."""

    split: Annotated[Literal["train", "val", "test"], setting("Split to evaluate")] = "val"
    batch_size: Annotated[Count, setting("Batch size", flag="--bs")] = 16
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        setting("Precision [default: the run's, else fp32]", choice_flags=True),
    ] = "auto"
    device: Annotated[DeviceName, setting("Device to run on")] = "auto"
    workers: Annotated[
        NonNegativeInt, setting("Decoder threads (0 = all cores)", aliases=("--num-workers",))
    ] = 0
    limit: Annotated[Count | None, setting("Evaluate only the first N images")] = None
    score_threshold: Annotated[
        Fraction | None, setting("Drop detections below this score [default: 0.05, VGG16 0.01]")
    ] = None
    nms_iou: Annotated[Fraction | None, setting("NMS IoU threshold [default: 0.5, VGG16 0.45]")] = (
        None
    )
    annotated_only: Annotated[
        bool, setting("Skip images without objects, as NVIDIA's and MLPerf's scripts do")
    ] = False
    verify: Annotated[bool, setting("Check the result against pycocotools")] = False


SaveFormat = Literal["json", "coco", "yolo", "labelstudio"]


class PredictConfig(Section, frozen=True):
    """How `ssdctl predict` detects objects."""

    score: Annotated[Fraction, setting("Keep boxes with a score above this")] = 0.3
    classes: Annotated[
        tuple[str, ...], setting("Keep only these classes [default: all]", metavar="A,B")
    ] = ()
    nms_iou: Annotated[Fraction | None, setting("NMS IoU threshold [default: 0.5, VGG16 0.45]")] = (
        None
    )
    max_detections: Annotated[Count | None, setting("Keep at most N boxes per image")] = None
    tile: Annotated[
        Annotated[int, msgspec.Meta(ge=32)] | None, setting("Also detect on tiles of N pixels")
    ] = None
    tile_overlap: Annotated[
        float, setting("Overlap of neighboring tiles, as a fraction", ge=0, le=0.9)
    ] = 0.2
    every: Annotated[Count, setting("Videos: detect on every Nth frame")] = 1
    max_frames: Annotated[Count | None, setting("Videos: stop after N frames [default: all]")] = (
        None
    )
    recursive: Annotated[bool, setting("Also search subfolders")] = False
    save: Annotated[SaveFormat | None, setting("Write boxes to --out in this format")] = None
    batch_size: Annotated[Count, setting("Batch size", flag="--bs")] = 8
    precision: Annotated[Literal["bf16", "fp32"], setting("Precision", choice_flags=True)] = "fp32"
    device: Annotated[DeviceName, setting("Device to run on")] = "auto"
