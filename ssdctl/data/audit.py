"""Find near-duplicates between splits: an image that was encoded again, the next frame of a video.

    audit(root, store, without_progress)      # {"val": [Duplicates("train", 12, [...])], ...}

Images are compared by a perceptual hash: the signs of the lowest frequencies (DCT) of a 32 x 32
thumbnail. Equal files are not near-duplicates; `prepare` counts them (duplicates.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.data import index
from ssdctl.data.annotations import MAX_NAMED
from ssdctl.data.duplicates import Duplicates, ImageVersions
from ssdctl.data.image_decode import ImageError
from ssdctl.data.store import Split, image_folder, open_splits
from ssdctl.errors import DataError
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.system import map_ahead, thread_pool, usable_cores

THUMBNAIL = 32  # pixels
FREQUENCIES = 10  # along each axis: 99 bits without the mean
MAX_DISTANCE = 0.15  # share of the bits; of unrelated images a third or more differ
MIN_CONTRAST = 2.0  # standard deviation of the thumbnail; the hash of a blank image is noise
BLOCK = 512  # images that are compared with all of another split at a time


def audit(root: Path, store: Path, progress: Progress) -> dict[str, list[Duplicates]]:
    """Return which images of each split look like one of an earlier split."""
    result: dict[str, list[Duplicates]] = {}
    earlier: dict[str, tuple[ImageVersions, NDArray[np.float32]]] = {}
    for split, opened in open_splits(root, store).items():
        metadata = index.require_metadata(opened.index_file)
        images = index.read_images(store, split)
        versions = ImageVersions(image_folder(root, metadata), images.names, images.fingerprints)
        hashes = _hashes(split, opened, progress)
        found = ((s, _near(versions, hashes, *other)) for s, other in earlier.items())
        result[split] = [Duplicates(s, len(p), p[:MAX_NAMED]) for s, p in found if p]
        earlier[split] = versions, hashes
    return result


def _hashes(split: str, opened: Split, progress: Progress) -> NDArray[np.float32]:
    """Return the hash of each image (N, 99) as -1 and 1; zeros if it is blank or unusable."""

    def hashed(row: int) -> NDArray[np.float32]:
        try:
            return perceptual_hash(Image.fromarray(opened.decode(row)))
        except (ImageError, DataError):  # `prepare` names it
            return np.zeros(FREQUENCIES**2 - 1, np.float32)

    rows, threads = range(len(opened.image_ids)), usable_cores()
    with thread_pool(threads, "audit") as pool:
        images = map_ahead(pool, hashed, rows, threads + 2)
        shown = progress(images, total=len(rows), label=f"auditing {split}", unit="img")
        return np.array(list(shown), np.float32).reshape(len(rows), FREQUENCIES**2 - 1)


def perceptual_hash(image: Image.Image) -> NDArray[np.float32]:
    small = image.convert("L").resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    pixels = np.asarray(small, np.float32)
    if pixels.std() < MIN_CONTRAST:
        return np.zeros(FREQUENCIES**2 - 1, np.float32)
    angles = np.outer(np.arange(FREQUENCIES), np.arange(THUMBNAIL) + 0.5) * np.pi / THUMBNAIL
    basis = np.cos(angles).astype(np.float32)
    coefficients = (basis @ pixels @ basis.T).reshape(-1)[1:]
    return np.where(coefficients > np.median(coefficients), 1, -1).astype(np.float32)


def _near(
    images: ImageVersions,
    hashes: NDArray[np.float32],
    others: ImageVersions,
    other_hashes: NDArray[np.float32],
) -> list[tuple[str, str]]:
    """Return the images whose hash is near to that of another one, with the nearest."""
    num_bits, pairs = hashes.shape[1], []
    is_equal = np.isin(images.keys(), others.keys())
    for start in range(0, len(hashes), BLOCK):
        agreement = hashes[start : start + BLOCK] @ other_hashes.T  # bits equal - different
        nearest = agreement.argmax(axis=1)
        most = agreement[np.arange(len(nearest)), nearest]
        for offset in np.flatnonzero(most >= num_bits * (1 - 2 * MAX_DISTANCE)):
            if not is_equal[start + offset]:
                row = int(start + offset)
                pairs.append((images.names[row], others.names[int(nearest[offset])]))
    return pairs
