"""Settings of the dataset: its location, download and preparation."""

from typing import Annotated, Literal

import msgspec

from ssdctl.config.fields import Count, NonNegativeInt, Section, setting
from ssdctl.runtime.packages import plugin_names

FORMATS = ("ssdctl.data.formats", "ssdctl.datasets")  # package, group of entry points


class DataConfig(Section, frozen=True):
    """The locations of the dataset and its store."""

    root: Annotated[
        str | None,
        setting(
            "Dataset folder or file, in any supported format [default: data/coco or /data/coco]",
            flag="--data",
            metavar="DIR",
            panel="Data",
            aliases=("--data-dir", "-d"),
        ),
    ] = None
    store: Annotated[
        str | None,
        setting(
            "Folder of the prepared data [default: DATA/prepared]",
            flag="--store",
            metavar="DIR",
            panel="Data",
        ),
    ] = None


class DownloadConfig(Section, frozen=True):
    """The files that `ssdctl download` fetches, and how it fetches them."""

    dataset: Annotated[
        Literal["coco2017", "shapes"], setting("Dataset to download (shapes: generated locally)")
    ] = "coco2017"
    part: Annotated[
        Literal["train", "val", "annotations"] | None,
        setting("Download only this part of COCO [default: all]"),
    ] = None
    manifest: Annotated[
        str | None, setting("Download the files in this TOML manifest", metavar="FILE")
    ] = None
    mirror: Annotated[
        str | None, setting("Base URL instead of the official hosts", metavar="URL")
    ] = None
    connections: Annotated[int, setting("Connections per file", ge=1, le=64)] = 8
    timeout: Annotated[
        float, setting("Give up after S seconds below 1 KB/s", metavar="S", ge=1)
    ] = 30.0
    keep_archives: Annotated[bool, setting("Keep the zip files after unpacking")] = False
    images: Annotated[Count, setting("Number of training images", panel="Shapes dataset")] = 800
    val_images: Annotated[
        NonNegativeInt, setting("Number of validation images", panel="Shapes dataset")
    ] = 100
    seed: Annotated[
        NonNegativeInt, setting("Seed of the generated images", panel="Shapes dataset")
    ] = 0


class PrepareConfig(Section, frozen=True):
    """How `ssdctl prepare` checks a dataset and packs it."""

    source: Annotated[
        str,
        setting(
            "Dataset format, auto-detected by default; plugins can add formats",
            flag="--from",
            panel="Conversion",
            choices=("auto", *(name.replace("_", "-") for name in plugin_names(*FORMATS))),
        ),
    ] = "auto"
    split: Annotated[
        Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
        setting(
            "Fraction of images for training; the rest is for validation",
            metavar="FRACTION",
            panel="Conversion",
        ),
    ] = None
    classes: Annotated[
        tuple[str, ...],
        setting("Keep only these classes [default: all]", metavar="A,B", panel="Conversion"),
    ] = ()
    pack: Annotated[bool, setting("Pack images for fast training (else index only)")] = True
    shrink: Annotated[
        Annotated[int, msgspec.Meta(ge=300)] | None,
        setting("Downscale images whose shorter side exceeds PX", metavar="PX"),
    ] = None
    encoding: Annotated[
        Literal["jpeg", "raw"],
        setting("Store image files (jpeg) or decoded pixels (raw, much larger)"),
    ] = "jpeg"
    verify_images: Annotated[bool, setting("Decode every image completely")] = False
    keep_damaged: Annotated[
        bool, setting("Use partly decodable images that --verify-images finds")
    ] = False
    allow_dropped: Annotated[
        bool, setting("Continue even if more than 5% of images or boxes are dropped")
    ] = False
    jobs: Annotated[NonNegativeInt, setting("Threads that check images (0 = one per core)")] = 0
