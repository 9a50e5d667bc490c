"""Settings of the dataset: where it lies, how it is fetched and prepared."""

from typing import Annotated, Literal

import msgspec

from ssdctl.config.fields import Count, NonNegativeInt, Section, setting


class DataConfig(Section, frozen=True):
    """Where the dataset and its store lie."""

    root: Annotated[
        str | None,
        setting(
            "Dataset folder in COCO's layout, or with a dataset.toml "
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
    """What `ssdctl download` fetches, and how."""

    dataset: Annotated[
        Literal["coco2017", "shapes"],
        setting("Dataset to get; shapes is generated on this machine, without network"),
    ] = "coco2017"
    part: Annotated[
        Literal["train", "val", "annotations"] | None,
        setting("Fetch this part of COCO alone [default: all]"),
    ] = None
    manifest: Annotated[
        str | None,
        setting("Fetch the files of this TOML manifest instead", metavar="FILE"),
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
        setting("Give up after this many seconds at less than 1 KB/s", metavar="S"),
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
        Literal["voc", "yolo"] | None,
        setting(
            "Convert this layout to COCO's format in the same folder, with a dataset.toml",
            flag="--from",
            panel="Other people's data",
        ),
    ] = None
    split: Annotated[
        Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
        setting(
            "Keep this share of the images to train on, validate on the others",
            metavar="SHARE",
            panel="Other people's data",
        ),
    ] = None
    classes: Annotated[
        tuple[str, ...],
        setting(
            "Keep these classes alone [default: all]", metavar="A,B", panel="Other people's data"
        ),
    ] = ()
    pack: Annotated[
        bool,
        setting("Pack the images into the store; --no-pack writes the index alone"),
    ] = True
    shrink: Annotated[
        Annotated[int, msgspec.Meta(ge=300)] | None,
        setting(
            "Re-encode images whose shorter side is above this, in pixels",
            metavar="PX",
        ),
    ] = None
    verify_images: Annotated[
        bool, setting("Decode every image; else those alone that look cut")
    ] = False
    jobs: Annotated[
        NonNegativeInt, setting("Threads that check images; 0 = one per core", metavar="N")
    ] = 0
