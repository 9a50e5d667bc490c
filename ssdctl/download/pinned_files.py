"""Pinned files to fetch: COCO 2017, torchvision's weights, detectors, and users' own manifests.

Sizes and hashes are from the publishers. If only the start of a SHA-256 is known
(torchvision puts its first 8 digits into the file name), that start is pinned and checked. Of
NVIDIA's detector nothing is known: fetch.py has what is checked instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from ssdctl.errors import UsageError
from ssdctl.files import msgspec_type, read_toml, safe_join
from ssdctl.runtime.safe_text import redact_url

# The official host, http://images.cocodataset.org/, has no certificate of its own; this is the
# same bucket over HTTPS.
MAX_MANIFEST_BYTES = 16 << 20
COCO_URL = "https://s3.amazonaws.com/images.cocodataset.org"
OTHER_ARCHIVES = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
OWN_SUFFIXES = (".lock", ".corrupt")  # of files next to a target (fetch.py)
PART_SUFFIX = ".ssdctl-part"  # of a download that is not complete
WEIGHTS_URL = "https://download.pytorch.org/models"


class PinnedFile(NamedTuple):
    """A file with its size and hash, which are known before it is fetched."""

    name: str  # its path below the destination; untrusted in a manifest (`safe_join`)
    url: str  # http or https
    sha256: str  # in lower-case hex, or the first digits of it
    bytes: int | None = None  # None if unknown: the server's size is used and the hash decides
    unpack: bool = False  # whether it is a zip archive to unpack
    unpacked_bytes: int | None = None  # about the size of the content on the disk
    note: str = ""  # what the user should know about it

    def urls(self, mirror: str | None = None) -> list[str]:
        """Return the URLs to try in order; the next one is used if one does not have the file.

        A mirror may have the files in one folder, or in the layout of the official host.
        """
        if mirror is None:
            return [self.url]
        base = urlsplit(check_url(mirror, "--mirror"))  # its query stays behind the path
        path = urlsplit(self.url).path.lstrip("/")
        tails = [quote(self.name), "/".join(path.split("/")[-2:]), path.rpartition("/")[2], path]
        paths = [f"{base.path.rstrip('/')}/{tail}" for tail in dict.fromkeys(tails)]
        return [base._replace(path=path).geturl() for path in paths]


COCO2017 = {
    "train": PinnedFile(
        "train2017.zip",
        f"{COCO_URL}/zips/train2017.zip",
        "69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929",
        19_336_861_798,
        unpack=True,
        unpacked_bytes=19_700_000_000,
    ),
    "val": PinnedFile(
        "val2017.zip",
        f"{COCO_URL}/zips/val2017.zip",
        "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05",
        815_585_330,
        unpack=True,
        unpacked_bytes=840_000_000,
    ),
    "annotations": PinnedFile(
        "annotations_trainval2017.zip",
        f"{COCO_URL}/annotations/annotations_trainval2017.zip",
        "113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268",
        252_907_541,
        unpack=True,
        unpacked_bytes=850_000_000,
    ),
}


class DetectorSource(NamedTuple):
    name: str  # what the user types
    file: PinnedFile  # an empty `sha256` if the publisher gives none
    network: str
    backbone: str
    extra_norm: str
    ap: float | None  # on COCO val2017 as published; None if the publisher gives none for this file
    license: str  # the weights', as their publisher states it
    page: str  # where the publisher describes it

    @property
    def trust(self) -> Literal["prefix", "first use"]:
        """Whether the first digits of the SHA-256 are known, or none of it."""
        return "prefix" if self.file.sha256 else "first use"


def torchvision_weights(
    stem: str, note: str = "", sha256: str | None = None, num_bytes: int | None = None
) -> PinnedFile:
    """Return a file of torchvision's weights; its name ends with the start of its SHA-256."""
    pin = sha256 or stem.rpartition("-")[2]
    return PinnedFile(f"{stem}.pth", f"{WEIGHTS_URL}/{stem}.pth", pin, num_bytes, note=note)


DETECTORS = (
    DetectorSource(
        "ssd300-vgg16-coco",
        torchvision_weights("ssd300_vgg16_coco-b556d3b4"),
        network="SSD300, VGG16",
        backbone="vgg16",
        extra_norm="none",
        ap=0.251,
        license="BSD-3-Clause",
        page="https://docs.pytorch.org/vision/stable/models/ssd.html",
    ),
    DetectorSource(
        "nvidia-ssd300-coco",
        PinnedFile(
            "nvidia_ssdpyt_amp_200703.pt",
            "https://api.ngc.nvidia.com/v2/models/nvidia/ssd_pyt_ckpt_amp/versions/20.06.0/files/"
            "nvidia_ssdpyt_amp_200703.pt",
            "",
        ),
        network="SSD300 v1.1, ResNet-50",
        backbone="resnet50",
        extra_norm="batch",
        ap=None,
        license="see its page",
        page="https://catalog.ngc.nvidia.com/orgs/nvidia/models/ssd_pyt_ckpt_amp",
    ),
)


def find_detector(name: str) -> DetectorSource | None:
    return next((d for d in DETECTORS if d.name == name), None)


def check_url(url: str, where: str) -> str:
    """Return `url` if it can be fetched: http or https, with a host."""
    try:
        parts = urlsplit(url)
        fetchable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        fetchable = False
    if not fetchable:
        raise UsageError(f"{where}: {redact_url(url)!r} is not an http:// or https:// URL")
    return url


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    url: str
    bytes: Annotated[int, msgspec.Meta(ge=1)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    unpack: bool = False


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: Annotated[list[_Entry], msgspec.Meta(min_length=1)]


def read_manifest(path: Path) -> list[PinnedFile]:
    """Read the files of a download manifest (TOML), in its order.

    Raises:
        UsageError: It does not exist, is not TOML, has no pin, names a file twice, or names a file
            that the download of another one writes.
        IntegrityError: A name would leave the destination.
        DiskError: The file system refuses to read it.
    """
    try:
        _, tables = read_toml(path, MAX_MANIFEST_BYTES, "manifest")
        entries = msgspec.convert(tables, msgspec_type(_Manifest)).file
    except msgspec.ValidationError as error:
        hint = "each [[file]] has name, url, bytes, sha256 (64 hex digits), and unpack for zips"
        raise UsageError(f"{path}: {error}", hint=hint) from None
    seen: dict[Path, _Entry] = {}
    for entry in entries:
        check_url(entry.url, f"{path}: {entry.name}")
        target = safe_join(Path(), entry.name)
        if target in seen or target == Path():
            raise UsageError(f"{path}: {entry.name!r} is not a unique file name")
        seen[target] = entry
        if entry.unpack and target.suffix.lower() in OTHER_ARCHIVES:
            raise UsageError(
                f"{path}: {entry.name!r} cannot be unpacked: only zip archives are",
                hint="leave unpack out and unpack it by hand, or pack it as a zip",
            )
    for target in seen:
        is_next_to_it = target.suffix in OWN_SUFFIXES and target.with_suffix("") in seen
        if is_next_to_it or target.suffix == PART_SUFFIX:
            raise UsageError(f"{path}: {str(target)!r} is a name that the download itself uses")
    return [
        PinnedFile(target.as_posix(), e.url, e.sha256.lower(), e.bytes, e.unpack)
        for target, e in seen.items()
    ]
