"""Settings of the dataset: its location, download and preparation."""

from typing import Annotated, Literal

import msgspec

from ssdctl.config.fields import Count, NonNegativeInt, Section, setting


class DataConfig(Section, frozen=True):
    """The locations of the dataset and its store."""

    root: Annotated[
        str | None,
        setting(
            "Dataset folder or file; the layout is detected: COCO, YOLO, VOC, CVAT, Open Images "
            "[default: data/coco if it exists, else /data/coco]",
            flag="--data",
            metavar="DIR",
            panel="Data",
            aliases=("--data-dir", "-d"),
        ),
    ] = None
    store: Annotated[
        str | None,
        setting(
            "Folder of the prepared store [default: prepared/ in the dataset folder]",
            flag="--store",
            metavar="DIR",
            panel="Data",
        ),
    ] = None


class DownloadConfig(Section, frozen=True):
    """The files that `ssdctl download` fetches, and how it fetches them."""

    dataset: Annotated[
        Literal["coco2017", "shapes"],
        setting("Dataset to get; shapes is generated on this machine, without network"),
    ] = "coco2017"
    part: Annotated[
        Literal["train", "val", "annotations"] | None,
        setting("Fetch only this part of COCO [default: all]"),
    ] = None
    manifest: Annotated[
        str | None,
        setting("Fetch the files that this TOML manifest lists instead", metavar="FILE"),
    ] = None
    mirror: Annotated[
        str | None,
        setting("Fetch from this base URL instead of the official hosts", metavar="URL"),
    ] = None
    connections: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=64)], setting("Connections per file", metavar="N")
    ] = 8
    timeout: Annotated[
        Annotated[float, msgspec.Meta(ge=1)],
        setting("Fail after this many seconds at less than 1 KB/s", metavar="S"),
    ] = 30.0
    keep_archives: Annotated[bool, setting("Keep the zip files after unpacking")] = False
    images: Annotated[
        Count, setting("Training images to generate", metavar="N", panel="Shapes dataset")
    ] = 800
    val_images: Annotated[
        NonNegativeInt,
        setting("Validation images to generate", metavar="N", panel="Shapes dataset"),
    ] = 100
    seed: Annotated[
        NonNegativeInt, setting("Seed of the generated images", metavar="N", panel="Shapes dataset")
    ] = 0


class PrepareConfig(Section, frozen=True):
    """How `ssdctl prepare` checks a dataset and packs it."""

    source: Annotated[
        str,
        setting(
            "Layout of the dataset; auto detects it, and other packages may add more",
            flag="--from",
            panel="Conversion",
            choices=("auto", "coco", "voc", "yolo", "openimages", "cvat-xml"),
        ),
    ] = "auto"
    split: Annotated[
        Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
        setting(
            "Train on this fraction of the images, validate on the others",
            metavar="SHARE",
            panel="Conversion",
        ),
    ] = None
    classes: Annotated[
        tuple[str, ...],
        setting("Keep only these classes [default: all]", metavar="A,B", panel="Conversion"),
    ] = ()
    pack: Annotated[
        bool,
        setting("Pack the images into the store; --no-pack writes only the index"),
    ] = True
    shrink: Annotated[
        Annotated[int, msgspec.Meta(ge=300)] | None,
        setting(
            "Re-encode images whose shorter side is above this, in pixels",
            metavar="PX",
        ),
    ] = None
    encoding: Annotated[
        Literal["jpeg", "raw"],
        setting(
            "Pack image files (jpeg), or decoded pixels (raw): several times the space, and no "
            "decoding in training"
        ),
    ] = "jpeg"
    verify_images: Annotated[
        bool, setting("Decode every image, not only those that look truncated")
    ] = False
    keep_damaged: Annotated[
        bool, setting("Use what can be decoded of images that --verify-images finds damaged")
    ] = False
    allow_dropped: Annotated[
        bool,
        setting(
            "Continue although more than 5% of the images or boxes are dropped, or no training "
            "image is left"
        ),
    ] = False
    jobs: Annotated[
        NonNegativeInt, setting("Threads that check images; 0 = one per core", metavar="N")
    ] = 0
