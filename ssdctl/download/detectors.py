"""COCO detectors by name: where their files are, and how far a file is trusted.

A file of the PyTorch project is pinned by the start of its SHA-256, which is part of its name. For
NVIDIA's file no checksum is published: it is fetched over HTTPS, its contents are checked by the
reader of checkpoints, and its SHA-256 is kept in `FILE.sha256`; a later change is an error.
Torch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from ssdctl.download.fetch import fetch_one, is_whole, sha256_of, torch_cache_dir
from ssdctl.download.pinned_files import WEIGHTS_URL, PinnedFile
from ssdctl.errors import IntegrityError
from ssdctl.files import write_text


class DetectorSource(NamedTuple):
    """A published detector."""

    name: str  # what the user types
    file: PinnedFile  # an empty `sha256` if the publisher gives none
    network: str
    ap: float | None  # on COCO val2017 as published; None if the publisher gives none for this file
    license: str  # the weights', as their publisher states it
    page: str  # where the publisher describes it

    @property
    def trust(self) -> Literal["prefix", "first use"]:
        """Whether the first digits of the SHA-256 are known, or none of it."""
        return "prefix" if self.file.sha256 else "first use"


SHA256_DIGITS = 64
DETECTORS = (
    DetectorSource(
        "ssd300-vgg16-coco",
        PinnedFile(
            "ssd300_vgg16_coco-b556d3b4.pth",
            f"{WEIGHTS_URL}/ssd300_vgg16_coco-b556d3b4.pth",
            "b556d3b4",
        ),
        network="SSD300, VGG16",
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
        ap=None,
        license="see its page",
        page="https://catalog.ngc.nvidia.com/orgs/nvidia/models/ssd_pyt_ckpt_amp",
    ),
)


def find_detector(name: str) -> DetectorSource | None:
    """Return the detector called `name`, or None."""
    return next((d for d in DETECTORS if d.name == name), None)


def cached_path(detector: DetectorSource, dest: Path | None = None) -> Path | None:
    """Return the detector's verified file in `dest` (default: torch.hub's cache), or None.

    Raises:
        IntegrityError: A file without published checksum has changed since its first use.
    """
    path = (dest or torch_cache_dir()) / detector.file.name
    if detector.trust == "prefix":
        return path if is_whole(path, detector.file) else None
    if not path.is_file() or not _checksum_path(path).is_file():
        return None
    remember_checksum(path)
    return path


def fetch_detector(name: str, dest: Path | None = None, **how: Any) -> Path:
    """Return the file of the detector `name`, fetched if `dest` (default: the cache) has none.

    A file without published checksum still has to pass `remember_checksum` once it has been read.
    `how` are the options `mirror`, `retry_policy` and `progress` of `fetch`.

    Raises:
        NetworkError: It cannot be fetched; the hint names the file and its folder.
        IntegrityError: The server's file is another one, or a file changed since its first use.
        DiskError: No space or no permission.
    """
    detector = next(d for d in DETECTORS if d.name == name)
    folder = dest or torch_cache_dir()
    return cached_path(detector, folder) or fetch_one(name, detector.file, folder, **how)


def remember_checksum(path: Path) -> str:
    """Return the SHA-256 of a file that was read; write it next to the file at the first use.

    Raises:
        IntegrityError: Another one is written there already.
        DiskError: The folder cannot be written.
    """
    record, digest = _checksum_path(path), sha256_of(path, f"checking {path.name}")
    if not record.is_file():
        write_text(record, f"{digest}  {path.name}\n")
        return digest
    with record.open(encoding="utf-8", errors="replace") as file:
        recorded = file.read(SHA256_DIGITS)
    if digest != recorded:
        raise IntegrityError(
            f"{path}: changed since its first use: SHA-256 was {recorded}, is {digest}",
            hint=f"if you trust the new file, delete {record}; else delete both",
        )
    return digest


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
