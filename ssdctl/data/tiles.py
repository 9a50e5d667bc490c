"""Cut images into tiles, in which small objects are large enough for SSD300.

    split = tiled(split, Tiling(640, 0.2))      # its rows: all images, then their tiles

An image that is larger than a tile is trained on and detected on as a whole and in tiles. A tile is
a row of the split like an image, so sampling, decoding, resuming and ranks need no other code.
Nothing is stored: tiles follow from the sizes of the images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.config.fields import Tiling
from ssdctl.data.default_boxes import IMAGE_SIZE
from ssdctl.data.store import Split, Tiles
from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from ssdctl.config.settings import Config

MIN_VISIBLE = 0.5  # an object of which less is in a tile is neither learned nor background there
ROUNDING = 1e-3  # pixels, and shares of an area, that fractions in fp32 may be off
IGNORED = -1  # the label of such an object
TILES_PER_WHOLE = 4  # of an image in an epoch: objects larger than a tile need the whole image
WELL_VISIBLE = 40  # pixels of an object, after resizing, that SSD300 detects well
STEP = 32  # of the sizes that are recommended


class Window(NamedTuple):
    """Part of an image in its pixels."""

    left: int
    top: int
    right: int
    bottom: int


class TileObjects(NamedTuple):
    """The objects of K tiles."""

    counts: NDArray[np.int64]  # K
    boxes: NDArray[np.float32]  # M x 4, ltrb in fractions of the tile, clipped
    labels: NDArray[np.int32]  # M; IGNORED for objects that are mostly outside

    def learned(self) -> NDArray[np.bool_]:
        """Return whether each tile has an object to learn from, (K,)."""
        ends = np.cumsum(self.counts)
        learned = np.concatenate([[0], np.cumsum(self.labels != IGNORED)])
        return np.asarray(learned[ends] > learned[ends - self.counts])


def tiling_of(config: Config, trained: Tiling | None = None) -> Tiling | None:
    """Return the tiles that a user chose, else those that a detector was trained in.

    Raises:
        UsageError: An overlap of tiles, but there are none.
    """
    size, overlap = config.data.tile, config.data.tile_overlap
    if trained is not None and size != 0:
        is_chosen = config.is_chosen("data.tile_overlap")
        return Tiling(size or trained.size, overlap if is_chosen else trained.overlap)
    if not size and "data.tile_overlap" in config.explicit_settings():
        raise UsageError(
            f"--tile-overlap {overlap:g}: there are no tiles",
            hint="add the size of the tiles: --tile PX",
        )
    return Tiling(size, overlap) if size else None


def tile_windows(width: int, height: int, tiling: Tiling | None) -> list[Window]:
    """Return the whole image, and tiles that cover it if it is larger than one."""
    windows = [Window(0, 0, width, height)]
    if tiling is not None and max(width, height) > tiling.size:
        size, overlap = tiling
        windows += [
            Window(left, top, min(left + size, width), min(top + size, height))
            for top in _starts(height, size, overlap)
            for left in _starts(width, size, overlap)
        ]
    return windows


def _starts(length: int, size: int, overlap: float) -> list[int]:
    """Return evenly spaced starts of tiles, from 0 to the last one that fits."""
    if length <= size:
        return [0]
    stride = max(int(size * (1 - overlap)), 1)
    count = -(-(length - size) // stride) + 1
    return [round(i * (length - size) / (count - 1)) for i in range(count)]


def tiled(split: Split, tiling: Tiling | None) -> Split:
    """Return a split whose rows are the images, then the tiles of all images.

    An image is trained on as a whole once, or once for every four of its tiles that show objects.
    A tile that touches no object is an image without objects, unless all boxes of its image were
    dropped: it may show what they were drawn around.
    """
    if tiling is None:
        return split
    tiles = cut(split.sizes, tiling)
    rows, first = tiles.rows, split.num_images
    found = objects_in_tiles(tiles, split.sizes, split.starts, split.boxes, split.labels)
    is_known = np.diff(split.starts) > 0
    is_known[split.background] = True
    is_usable, shown = split.usable[rows], tiles.in_pixels_of(split)
    is_trainable = is_usable & found.learned()
    views = whole_views(rows[is_trainable], first)[split.trainable]
    counts = np.concatenate([np.diff(split.starts), found.counts])
    return split._replace(
        image_ids=np.concatenate([split.image_ids, split.image_ids[rows]]),
        sizes=np.concatenate([split.sizes, tiles.windows[:, 2:] - tiles.windows[:, :2]]),
        pixel_sizes=np.concatenate([split.pixel_sizes, shown[:, 2:] - shown[:, :2]]),
        starts=np.concatenate([[0], np.cumsum(counts)]),
        boxes=np.concatenate([split.boxes, found.boxes]),
        labels=np.concatenate([split.labels, found.labels]),
        usable=np.concatenate([split.usable, is_usable]),
        trainable=_joined(split.trainable, is_trainable, rows, first, views),
        background=_joined(
            split.background, is_usable & is_known[rows] & (found.counts == 0), rows, first
        ),
        most_boxes=int(counts.max(initial=0)),
        tiles=tiles,
    )


def whole_views(rows: NDArray[np.int64], num_images: int) -> NDArray[np.int64]:
    """Return how often an epoch shows each image as a whole; `rows`: the images of its tiles."""
    tiles = np.bincount(rows, minlength=num_images)
    return np.asarray((tiles // TILES_PER_WHOLE).clip(1))


def _joined(
    images: NDArray[np.int64],
    is_chosen: NDArray[np.bool_],
    rows: NDArray[np.int64],
    first: int,
    views: NDArray[np.int64] | int = 1,
) -> NDArray[np.int64]:
    """Return the rows of images and of chosen tiles, each image's together: --limit-train cuts."""
    chosen = np.flatnonzero(is_chosen)
    again = np.repeat(images, views - 1)
    owners = np.concatenate([images, rows[chosen], again])
    return np.concatenate([images, first + chosen, again])[np.argsort(owners, kind="stable")]


def cut(sizes: NDArray[np.integer], tiling: Tiling) -> Tiles:
    """Return the tiles of images of (N, 2) `sizes`, width and height in pixels."""
    large = np.flatnonzero((sizes > tiling.size).any(axis=1)).tolist()
    windows = [tile_windows(int(sizes[row, 0]), int(sizes[row, 1]), tiling)[1:] for row in large]
    rows = np.repeat(np.array(large, np.int64), [len(tiles) for tiles in windows])
    return Tiles(rows, np.array([w for tiles in windows for w in tiles], np.int32).reshape(-1, 4))


def objects_in_tiles(
    tiles: Tiles,
    sizes: NDArray[np.integer],
    starts: NDArray[np.int64],
    boxes: NDArray[np.float32],
    labels: NDArray[np.int32],
) -> TileObjects:
    """Return the parts of objects in tiles; the objects of N images are as in `Split`."""
    counts = [np.empty(0, np.int64)]
    parts, kinds = [np.empty((0, 4), np.float32)], [np.empty(0, np.int32)]
    for row, first in zip(*np.unique(tiles.rows, return_index=True), strict=True):
        last = np.searchsorted(tiles.rows, row, side="right")
        windows = tiles.windows[first:last, None].astype(np.float64)  # K x 1 x 4
        span = slice(starts[row], starts[row + 1])
        ltrb = boxes[span].astype(np.float64) * np.tile(sizes[row], 2)
        low = np.maximum(windows[..., :2], ltrb[:, :2])
        high = np.minimum(windows[..., 2:], ltrb[:, 2:])
        visible = (high - low).clip(min=0).prod(axis=-1)  # K x M
        area = (ltrb[:, 2:] - ltrb[:, :2]).prod(axis=-1)
        touched = (high - low > ROUNDING).all(axis=-1)
        origin, scale = windows[..., [0, 1, 0, 1]], (windows[..., 2:] - windows[..., :2])
        cut_boxes = (np.concatenate([low, high], axis=-1) - origin) / np.tile(scale, 2)
        is_learned = visible >= (MIN_VISIBLE - ROUNDING) * area
        counts.append(touched.sum(axis=1))
        parts.append(cut_boxes[touched].astype(np.float32))
        kinds.append(np.where(is_learned, labels[span], IGNORED)[touched].astype(np.int32))
    return TileObjects(np.concatenate(counts), np.concatenate(parts), np.concatenate(kinds))


def fitting_tile(boxes: NDArray[np.float64]) -> int | None:
    """Return the tile size at which the median object has `WELL_VISIBLE` pixels after resizing.

    None if there are no objects. (M, 4) boxes: left, top, width, height in pixels of the image.
    """
    sides = np.sqrt(boxes[:, 2:].prod(axis=1))
    if not len(sides):
        return None
    return max(int(np.median(sides) * IMAGE_SIZE / WELL_VISIBLE) // STEP, 2) * STEP
