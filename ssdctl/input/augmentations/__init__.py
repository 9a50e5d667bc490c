"""Augmentations: those of SSD in ssd.py, others as plugins. `--augment` names them: `crop,flip`.

One has two functions. `draw(keys, boxes, sizes)` returns random parameters of a batch of images,
`apply(view, params)` what the network sees of these images then. Neither sees pixels: the loader
cuts and mirrors them while it decodes, and the device maps the colors (ssdctl/input/normalize.py).
The functions run in the order of the list. Other packages add modules as entry points
`ssdctl.augmentations`, with these two functions, or `pixels(image, random)`, or all three. It
returns another (300, 300, 3) uint8 RGB image, and runs in the decode threads. The random numbers of
its `numpy.random.Generator` depend only on the seed, the epoch and the image.
Shapes: B batch, G boxes (padded).

Random numbers are drawn by counter: a number is a function of its key, drawn in any order, by any
thread. The generator is SplitMix64 (Steele, Lea, Flood 2014) used as a hash, written in numpy so
that a whole batch is drawn at once and the numbers never change with a library's version.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssdctl.config.fields import augmentation_names
from ssdctl.input.batch import LoaderConfig
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import AUGMENTATIONS

Image = NDArray[np.uint8]
Floats = NDArray[np.float64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Streams of random numbers that resumed runs continue; other names hash to theirs. 1 and 6 are of
# sampler.py.
STREAMS = {"crop": 2, "flip": 3, "color": 4, "zoom": 5}
FARTHEST = 100  # a box of a plugin, in fractions of the view; pixels are farther
PIXELS = 1 << 32  # keeps the random numbers of `pixels` apart from those of `draw`


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed(*keys: ArrayLike) -> NDArray[np.uint64]:
    """Return 64 random bits for each element of the (broadcast, non-negative) integer keys."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):  # wrapping around is the point
        for key in keys:
            state = _mix((state + GOLDEN) ^ _mix(np.asarray(key).astype(np.uint64) + GOLDEN))
    return state


def uniform(*keys: ArrayLike) -> Floats:
    """Numbers in [0, 1), one for each element of the broadcast keys."""
    return (hashed(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Keys(NamedTuple):
    """The keys of the random numbers of samples."""

    stream: int  # separates the augmentation from others
    config: LoaderConfig
    epochs: NDArray[np.int64]  # B: the pass over the dataset
    rows: NDArray[np.int64]  # B: the image

    def uniform(self, *index: ArrayLike) -> Floats:
        """Return numbers in [0, 1), (B, ...) for indices that broadcast to (...)."""
        shape = (-1,) + (1,) * max(map(np.ndim, index), default=0)
        epochs, rows = self.epochs.reshape(shape), self.rows.reshape(shape)
        return uniform(self.stream, self.config.seed, epochs, rows, *index)


class Boxes(NamedTuple):
    ltrb: NDArray[np.floating]  # B x G x 4, fractions
    labels: NDArray[np.int64]  # B x G; 0 marks padding, -1 an object to ignore


class View(NamedTuple):
    """The part of each image that the network gets."""

    rect: Floats  # B x 4, ltrb in fractions of the image; may leave it, and is filled there
    boxes: Boxes  # in fractions of rect
    sizes: NDArray[np.int32]  # B x 2, width and height of rect in pixels
    flip: NDArray[np.bool_]  # B: mirrored left to right
    jitter: NDArray[np.float32] | None = None  # B x 4: see ssdctl.input.normalize

    def part(self, rect: Floats, boxes: Boxes) -> View:
        """Return the view of (B, 4) rectangles, in fractions of this one, with their boxes."""
        mirrored = np.stack([1 - rect[:, 2], rect[:, 1], 1 - rect[:, 0], rect[:, 3]], axis=1)
        rect = np.where(self.flip[:, None], mirrored, rect)
        extent = self.rect[:, 2:] - self.rect[:, :2]
        sizes = np.rint(self.sizes * (rect[:, 2:] - rect[:, :2])).astype(np.int32)
        inside = np.tile(self.rect[:, :2], 2) + rect * np.tile(extent, 2)
        return self._replace(rect=inside, boxes=boxes, sizes=sizes)


def whole(boxes: Boxes, sizes: NDArray[np.int32]) -> View:
    rect = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (len(sizes), 1))
    return View(rect, boxes, sizes, np.zeros(len(sizes), np.bool_))


Draw = Callable[[Keys, Boxes, NDArray[np.int32]], Any]
Apply = Callable[[View, Any], View]


class Augmentation(NamedTuple):
    stream: int
    draw: Draw
    apply: Apply
    pixels: Callable[[Image, np.random.Generator], Image] | None = None


@functools.cache
def load(augment: str) -> tuple[Augmentation, ...]:
    """Import the augmentations that a value of `--augment` names.

    Raises:
        UsageError: There is none of a name, or it is a plugin that cannot be used.
    """
    return tuple(map(load_one, augmentation_names(augment)))


def load_one(name: str) -> Augmentation:
    """Import an augmentation; raise UsageError if there is none, or its plugin cannot be used."""
    module, plugin = plugins.load(AUGMENTATIONS, name)
    stream = STREAMS.get(name, zlib.crc32(name.encode()))
    if plugin is None:
        return Augmentation(stream, module.draw, module.apply)
    functions = {n: getattr(module, n, None) for n in ("draw", "apply", "pixels")}
    draw, apply, pixels = functions.values()
    plugin.require(all(f is None or callable(f) for f in functions.values()), "functions")
    plugin.require((draw is None) == (apply is None), "both draw and apply")
    plugin.require(draw or pixels, "functions draw and apply, or a function pixels")

    def draw_named(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> Any:
        with plugin.errors("draw()"):
            return draw and draw(keys, boxes, sizes)

    def apply_named(view: View, drawn: Any) -> View:
        with plugin.errors("apply()"):
            after = apply(view, drawn) if apply else view
            plugin.require(_is_right(after, view), "apply() to return a View of these images")
            return after

    def pixels_named(image: Image, random: np.random.Generator) -> Image:
        with plugin.errors("pixels()"):
            after = pixels(image, random) if pixels else image
            is_right = getattr(after, "shape", None) == image.shape and after.dtype == np.uint8
            plugin.require(is_right, f"pixels() to return a uint8 array of shape {image.shape}")
            return after

    return Augmentation(stream, draw_named, apply_named, pixels_named if pixels else None)


def _is_right(view: object, before: View) -> bool:
    """Return whether a plugin's view has the shapes, and numbers, that the loader expects."""
    if not (isinstance(view, View) and isinstance(view.boxes, Boxes)):
        return False
    (rect, (ltrb, labels), sizes, flip, jitter), count = view, len(before.rect)
    arrays = [rect, ltrb, labels, sizes, flip, *([] if jitter is None else [jitter])]
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return False
    shapes = [(count, 4), (*labels.shape, 4), before.boxes.labels.shape, (count, 2), (count,)]
    kinds = "".join(array.dtype.kind for array in arrays)
    return (
        [array.shape for array in arrays] == [*shapes, (count, 4)][: len(arrays)]
        and kinds == "ffiibf"[: len(arrays)]
        and all(bool(np.isfinite(array).all()) for array in arrays)
        and bool((rect[:, 2:] > np.maximum(rect[:, :2], 0)).all() and (rect[:, :2] < 1).all())
        and _are_boxes(view.boxes, before.boxes)
        and (jitter is None or jitter.dtype == np.float32)
    )


def _are_boxes(boxes: Boxes, before: Boxes) -> bool:
    """Return whether labels are known ones, and boxes are in fractions, right of their left."""
    labels, ltrb = boxes.labels, boxes.ltrb[boxes.labels > 0]
    if not labels.size:
        return True
    is_label = labels.min() >= -1 and labels.max() <= max(before.labels.max(), 0)
    is_box = (ltrb[:, 2:] >= ltrb[:, :2]).all() and (np.abs(ltrb) <= FARTHEST).all()
    return bool(is_label and is_box)


def change_pixels(steps: Sequence[Augmentation], keys: Keys, slot: int, image: Image) -> None:
    """Change the decoded (300, 300, 3) image of a slot in place, by the steps that see pixels."""
    epoch, row = keys.epochs[slot], keys.rows[slot]
    for step in steps:
        assert step.pixels is not None
        key = hashed(step.stream, keys.config.seed, epoch, row, PIXELS, np.arange(2))
        random = np.random.Generator(np.random.Philox(key=key))
        image[...] = step.pixels(image, random)
