"""Turn steps into batches: decode threads fill reused uint8 buffers, some steps ahead.

    source = open_input("native", split, LoaderConfig.of(config, split, ...))
    for batch in source.batches(start_step, end_step): ...

JPEG decoding and resizing release the GIL, so threads suffice: no worker processes, no pickling,
no shared memory. Pixels stay uint8; color and normalization happen on the device.
An image that cannot be read or decoded in training is replaced by the next good sample of the
stream. That depends only on the position in the stream, so every rank, thread count and resume
does the same. Batches list replaced images in `bad`. Shapes: B batch, G boxes (padded).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ssdctl.boxes import IMAGE_SIZE
from ssdctl.data.image_decode import ImageError, Pixels, thread_buffer
from ssdctl.data.index import repair_command
from ssdctl.data.store import ImageFiles, Split
from ssdctl.device import pageable_buffer
from ssdctl.errors import DataError, DiskError
from ssdctl.input.batch import BadImage, Batch, LoaderConfig
from ssdctl.input.sampler import Samples, SampleStream, draw_samples, whole_samples
from ssdctl.runtime.system import take_ahead, thread_pool

BATCHES_AHEAD = 2
MAX_IMAGES_PER_TASK = 4  # a task has an overhead of some 20 us
FILL_RGB = (123, 117, 104)  # the mean of ImageNet, around images that are zoomed out
MAX_BAD_IN_A_ROW = 100  # bad images of the stream, one after another, before the run fails
Edges = tuple[int, int, int, int]  # left, top, right, bottom in pixels
# A batch, its pixels, and what is still decoded: which slots fail, and why.
Started = tuple[Samples, Pixels, list[Future[list[tuple[int, str]]]]]
Buffer = Callable[[tuple[int, ...]], Tensor]
Decode = Callable[..., Pixels]  # of a row, and how many of its pixel rows are needed
# Called for a slot whose image is bad, with the pixels of the whole batch.
Replace = Callable[[Samples, int, str, Pixels], BadImage]


class TrainLoader:
    """Training batches of one rank, from the stream of a split's images."""

    def __init__(
        self, split: Split, config: LoaderConfig, buffer: Buffer = pageable_buffer
    ) -> None:
        self._split = split
        self._stream = SampleStream(
            split.trainable, config.seed, split.background, config.background
        )
        self._config = config
        self._buffer = buffer

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """Yield the micro-batches of steps start to end, `accumulate` for each step.

        Steps count from the config's `first_sample`.

        Raises:
            DataError: Too many images in a row cannot be decoded.
        """
        return self.decode(map(self.draw, self._config.positions(start_step, end_step)))

    def decode(self, work: Iterable[Samples]) -> Iterator[Batch]:
        config = self._config
        size, threads, held = config.batch_size, config.threads, config.accumulate
        return _decoded(self._split, work, size, threads, held, self._replace, self._buffer)

    def draw(self, start: int, count: int | None = None) -> Samples:
        """Draw a micro-batch, or `count` samples, from the stream's sample `start` on."""
        rows, epochs = self._stream.samples(start, count or self._config.batch_size)
        return draw_samples(self._split, self._config, rows, epochs, start)

    def _replace(self, samples: Samples, slot: int, problem: str, pixels: Pixels) -> BadImage:
        """Put the next good sample of the stream into a slot of a batch."""
        split, position = self._split, samples.start + slot
        bad = int(samples.rows[slot])
        tried, step = {bad}, 0
        while len(tried) < min(MAX_BAD_IN_A_ROW, self._stream.num_images):
            step += 1
            other = self.draw(position + step, 1)
            row = int(other.rows[0])
            if row not in tried and decode_sample(split, other, 0, pixels[slot]) is None:
                _put(other, samples, slot)
                bad_id, image_id = split.image_ids[[bad, row]].tolist()
                return BadImage(bad_id, split.location(bad), problem, position, image_id)
            tried.add(row)
        raise DataError(
            f"{len(tried)} images in a row cannot be decoded, the first {split.location(bad)}: "
            f"{problem}",
            hint="check that the dataset's disk is mounted; `"
            f"{repair_command(split.index_file.parent)}` checks every image",
        )


def evaluation_batches(
    split: Split, rows: NDArray[np.int64], batch_size: int, threads: int, max_boxes: int = 1
) -> Iterator[Batch]:
    """Yield whole images in the order of `rows`; the last batch may be smaller.

    Each image has at most `max_boxes` boxes: detection needs none.

    Raises:
        DataError: An image cannot be decoded.
        DiskError: The file system refuses to read one.
    """

    def refuse(samples: Samples, slot: int, problem: str, pixels: Pixels) -> BadImage:
        row = int(samples.rows[slot])
        raise DataError(
            f"image {split.image_ids[row]} cannot be decoded: {split.location(row)}: {problem}",
            hint="replace the file, or take the image out of the annotations; then run it again",
        )

    work = (
        whole_samples(split, rows[i : i + batch_size], max_boxes)
        for i in range(0, len(rows), batch_size)
    )
    return _decoded(split, work, batch_size, threads, 1, refuse)


def _decoded(
    split: Split,
    work: Iterable[Samples],
    batch_size: int,
    threads: int,
    held: int,
    replace: Replace,
    buffer: Buffer = pageable_buffer,
) -> Iterator[Batch]:
    """Decode batches ahead of their use, into a ring of buffers; the caller uses `held` at a time.

    `replace` is called for each image that cannot be decoded.
    """
    shape = (batch_size, IMAGE_SIZE, IMAGE_SIZE, 3)
    free = deque(buffer(shape).numpy() for _ in range(held + BATCHES_AHEAD + 1))
    most = MAX_IMAGES_PER_TASK if split.tiles is None else batch_size
    share = min(max(batch_size // threads, 1), most)

    def decode(samples: Samples, slots: range, pixels: Pixels) -> list[tuple[int, str]]:
        of = split.decode if split.tiles is None else DecodedOnce(split).decode
        problems = ((slot, decode_sample(split, samples, slot, pixels[slot], of)) for slot in slots)
        return [(slot, problem) for slot, problem in problems if problem is not None]

    def start(samples: Samples) -> Started:
        pixels = free[0]
        free.rotate(-1)
        slots = range(len(samples.rows))
        shares = [slots[i : i + share] for i in range(0, len(slots), share)]
        return samples, pixels, [pool.submit(decode, samples, s, pixels) for s in shares]

    with thread_pool(threads, "decode") as pool:
        for samples, pixels, futures in take_ahead(map(start, work), BATCHES_AHEAD):
            problems = [problem for future in futures for problem in future.result()]
            bad = tuple(replace(samples, slot, text, pixels) for slot, text in problems)
            yield as_batch(samples, torch.from_numpy(pixels[: len(samples.rows)]), bad)


def as_batch(samples: Samples, images: Tensor, bad: tuple[BadImage, ...] = ()) -> Batch:
    view = samples.view
    return Batch(
        images=images,
        boxes=torch.from_numpy(view.boxes.ltrb),
        labels=torch.from_numpy(view.boxes.labels),
        jitter=None if view.jitter is None else torch.from_numpy(view.jitter),
        rows=samples.rows,
        bad=bad,
    )


class DecodedOnce:
    """Decodes rows of a split one after another; successive tiles of an image share its pixels."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._image = -1
        self._pixels: Pixels = np.empty((0, 0, 3), np.uint8)

    def decode(self, row: int, rows: int | None = None) -> Pixels:
        """Return the same as `Split.decode`."""
        image, window = self._split.image_of(row)
        if window is None:
            width, height = self._split.pixel_sizes[row].tolist()
            window = (0, 0, width, height)
        left, top, right, bottom = window
        bottom = bottom if rows is None else min(bottom, top + rows)
        if image != self._image or len(self._pixels) < bottom:
            self._image = -1  # decoding that fails may have overwritten the pixels
            self._pixels = self._split.decode(image, bottom)
            self._image = image
        return self._pixels[top:bottom, left:right]


def decode_sample(
    split: Split, samples: Samples, slot: int, out: Pixels, decode: Decode | None = None
) -> str | None:
    """Read, decode, crop and resize one image into `out`; return its problem, or None.

    `decode` is `split.decode` or does the same.

    Raises:
        DiskError: The file system refuses to read the store, or an image to evaluate. In training
            one image file less is a bad image.
    """
    row, decode = int(samples.rows[slot]), decode or split.decode
    try:
        if samples.is_whole:
            resize(decode(row), out)
            return None
        edges, rows = crop_edges(split, samples, slot)
        resize_crop(decode(row, rows), edges, bool(samples.view.flip[slot]), out)
    except (DataError, DiskError, ImageError) as error:
        is_replaced = isinstance(split.images, ImageFiles) and not samples.is_whole
        if isinstance(error, DiskError) and not is_replaced:
            raise
        return str(error)
    if samples.change is not None:
        samples.change(slot, out)
    return None


def crop_edges(split: Split, samples: Samples, slot: int) -> tuple[Edges, int]:
    """Return left, top, right and bottom of a crop in pixels, and how many pixel rows it needs."""
    width, height = split.pixel_sizes[samples.rows[slot]].tolist()
    left, top, right, bottom = samples.view.rect[slot].tolist()
    edges = round(left * width), round(top * height), round(right * width), round(bottom * height)
    return edges, max(min(edges[3], height), 1)


def _put(source: Samples, target: Samples, slot: int) -> None:
    """Copy the only sample of `source` into a slot of `target`, without its position."""
    target.rows[slot] = source.rows[0]
    for name in ("rect", "flip", "jitter"):
        if (values := getattr(target.view, name)) is not None:
            values[slot] = getattr(source.view, name)[0]
    for into, values in zip(target.view.boxes, source.view.boxes, strict=True):
        into[slot] = values[0]


def resize(pixels: Pixels, out: Pixels) -> None:
    """Resize a whole image into `out` (300, 300, 3), bit for bit as Pillow does."""
    small = Image.fromarray(pixels).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
    out[...] = np.asarray(small)


def resize_crop(pixels: Pixels, box: Edges, flip: bool, out: Pixels) -> None:
    """Resize the crop `box` (ltrb, pixels) into `out` (H, W, 3), mirrored if `flip` is set.

    Pixels outside the image get the mean color of ImageNet.
    PyTorch's kernel is Pillow's filter in 16-bit integers: at most one level from it.
    """
    left, top, right, bottom = box
    height, width = pixels.shape[:2]
    if left < 0 or top < 0 or right > width or bottom > height:
        _resize_padded(pixels, box, flip, out)
        return
    window = pixels[top:bottom, left:right]
    if not (window.flags.c_contiguous and window.flags.writeable):
        packed = thread_buffer("crop", window.size).reshape(window.shape)
        np.copyto(packed, window)
        window = packed
    target = small = _as_images(out)
    if flip:
        small = _as_images(thread_buffer("small", out.size).reshape(out.shape))
    torch.ops.aten._upsample_bilinear2d_aa.out(
        _as_images(window), list(out.shape[:2]), False, None, None, out=small
    )
    if flip:
        torch.ops.aten.flip.out(small, [3], out=target)


def _resize_padded(pixels: Pixels, box: Edges, flip: bool, out: Pixels) -> None:
    """Resize a crop that leaves the image; the part outside is filled."""
    out[...] = FILL_RGB
    low, high = np.array(box[:2]), np.array(box[2:])
    size = np.array(pixels.shape[1::-1])  # width, height
    inner_low, inner_high = low.clip(min=0), high.clip(max=size)
    if (inner_low >= inner_high).any():  # nothing but canvas
        return
    scale = np.array(out.shape[1::-1]) / (high - low)
    start = np.rint((inner_low - low) * scale).astype(int)
    end = np.maximum(np.rint((inner_high - low) * scale).astype(int), start + 1)
    small = np.empty((end[1] - start[1], end[0] - start[0], 3), np.uint8)
    inner = (int(inner_low[0]), int(inner_low[1]), int(inner_high[0]), int(inner_high[1]))
    resize_crop(pixels, inner, False, small)
    window = out[start[1] : end[1], start[0] : end[0]]
    window[...] = small[: window.shape[0], : window.shape[1]]
    if flip:
        out[...] = out[:, ::-1].copy()


def _as_images(pixels: Pixels) -> torch.Tensor:
    """(H, W, 3) -> a (1, 3, H, W) view, channels last."""
    return torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
