"""Settings of evaluation and prediction."""

from typing import Annotated, Literal

import msgspec

from ssdctl.config.devices import DeviceName
from ssdctl.config.fields import Count, Fraction, NonNegativeInt, Section, setting

SCORE_ALIASES = ("--threshold", "--confidence", "--conf", "--conf-thres")  # of other detectors
IOU_ALIASES = ("--iou", "--iou-thres")


class EvaluateConfig(Section, frozen=True):
    """The evaluation of a checkpoint."""

    split: Annotated[Literal["train", "val", "test"], setting("Split to score")] = "val"
    batch_size: Annotated[
        Count,
        setting(
            "Images per batch",
            flag="--bs",
            metavar="N",
            aliases=("--val-batch-size", "--eval-batch-size", "--ebs"),
        ),
    ] = 16
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        setting("Precision of the network (auto: the run's, else fp32)", choice_flags=True),
    ] = "auto"
    device: Annotated[DeviceName, setting("Device to run on")] = "auto"
    workers: Annotated[
        NonNegativeInt,
        setting("Decode threads; 0 = all cores", metavar="N", aliases=("--num-workers",)),
    ] = 0
    limit: Annotated[
        Count | None,
        setting("Score only the first N images", metavar="N", aliases=("--eval-samples",)),
    ] = None
    score_threshold: Annotated[
        Fraction | None,
        setting(
            "Drop detections below this score [default: the network's own, 0.05; vgg16 0.01]",
            metavar="X",
            aliases=("--nms-valid-thresh", "--score", *SCORE_ALIASES),
        ),
    ] = None
    nms_iou: Annotated[
        Fraction | None,
        setting(
            "NMS IoU threshold [default: the network's own, 0.5; vgg16 0.45]",
            metavar="X",
            aliases=IOU_ALIASES,
        ),
    ] = None
    annotated_only: Annotated[
        bool, setting("Score only images with annotations, as NVIDIA's and MLPerf's scripts do")
    ] = False
    verify: Annotated[
        bool, setting("Also score with pycocotools; fail on a difference above 1e-12")
    ] = False


SaveFormat = Literal["json", "coco", "yolo", "labelstudio"]


class PredictConfig(Section, frozen=True):
    """How `ssdctl predict` detects objects."""

    score: Annotated[
        Fraction,
        setting(
            "Keep boxes with at least this score",
            metavar="X",
            aliases=("--score-threshold", *SCORE_ALIASES),
        ),
    ] = 0.3
    classes: Annotated[
        tuple[str, ...],
        setting("Keep only these classes, by name [default: all]", metavar="A,B"),
    ] = ()
    nms_iou: Annotated[
        Fraction | None,
        setting(
            "NMS IoU threshold [default: evaluate.nms_iou, else the network's own]",
            metavar="X",
            aliases=IOU_ALIASES,
        ),
    ] = None
    max_detections: Annotated[
        Count | None,
        setting("Keep at most N boxes per image", metavar="N", aliases=("--max-det",)),
    ] = None
    tile: Annotated[
        Annotated[int, msgspec.Meta(ge=32)] | None,
        setting("Also detect on tiles of N pixels, for small objects", metavar="N"),
    ] = None
    tile_overlap: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=0.9)],
        setting("Overlap of neighboring tiles, as a fraction of a tile", metavar="X"),
    ] = 0.2
    every: Annotated[
        Count, setting("Videos and cameras: detect on every Nth frame", metavar="N")
    ] = 1
    max_frames: Annotated[
        Count | None,
        setting("Videos and cameras: stop after N frames [default: at the end]", metavar="N"),
    ] = None
    recursive: Annotated[bool, setting("Also search subfolders")] = False
    save: Annotated[
        SaveFormat | None,
        setting("Write detections in this format into --out, for labelling tools"),
    ] = None
    batch_size: Annotated[Count, setting("Images per batch", flag="--bs", metavar="N")] = 8
    precision: Annotated[
        Literal["bf16", "fp32"], setting("Precision of the network", choice_flags=True)
    ] = "fp32"
    device: Annotated[DeviceName, setting("Device to run on")] = "auto"
