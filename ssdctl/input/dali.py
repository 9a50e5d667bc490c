"""`--pipeline dali`: the same samples, crops and flips, decoded and resized by nvidia-dali.

What a batch holds is decided as in samples.py, a function of (seed, place in the stream), so a
resume goes on with the same samples, crops, boxes and colours at any step, thread count and world
size. Only the pixels are DALI's: a few levels from the native pipeline's, the same ones each time
with the same version of DALI on the same machine. A run's checkpoint remembers its pipeline, and
another one is a changed setting to a resume. DALI decodes and resizes on the GPU where the run has
one (not run on hardware yet), and the pictures stay there; else on the CPU.
A batch in which DALI meets a bad image is decoded by the native pipeline, which replaces it.
"""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.data.image_decode import ImageError, Pixels, plain_jpeg_size
from ssdctl.data.store import Split
from ssdctl.device.base import Decoder
from ssdctl.errors import DataError
from ssdctl.input.loader import BATCHES_AHEAD, Batch, TrainLoader, as_batch
from ssdctl.input.sample_stream import SampleStream
from ssdctl.input.samples import LoaderConfig, Samples, draw_samples


class DaliLoader:
    """Training batches of one rank, decoded by DALI."""

    def __init__(
        self, split: Split, order: SampleStream, plan: LoaderConfig, decoder: Decoder | None = None
    ) -> None:
        self._split = split
        self._order = order
        self._plan = plan
        self._native = TrainLoader(split, order, plan)
        self._decoder = decoder
        self._open = _opener(plan, decoder)

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """The micro-batches of steps start to end, `accumulate` for each step.

        Raises:
            DataError: Too many images in a row cannot be decoded.
        """
        places = self._plan.places(start_step, end_step)
        feed = _Feed(self._split, map(self._draw, places))
        pipeline = self._open(feed)
        for _ in places:
            try:
                images = _run(pipeline, self._decoder)
            except RuntimeError:  # of DALI: it cannot go on after one bad image
                yield from self._native.decode([feed.fed.popleft()])
                feed.start_again()
                pipeline = self._open(feed)
            else:
                yield as_batch(feed.fed.popleft(), images)

    def _draw(self, start: int) -> Samples:
        plan = self._plan
        return draw_samples(self._split, self._order, plan, start, plan.batch_size)


class _Feed:
    """What DALI asks for the next micro-batch, some ahead of their use."""

    def __init__(self, split: Split, work: Iterator[Samples]) -> None:
        self._split = split
        self._work = work
        self.fed: deque[Samples] = deque()  # to the pipeline, not used yet

    def start_again(self) -> None:
        """Give a new pipeline what the broken one had not finished."""
        self._work = itertools.chain(self.fed, self._work)
        self.fed = deque()

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> tuple[Any, ...]:
        """Encoded images, left-top corners, sizes and flips."""
        samples = next(self._work)
        self.fed.append(samples)
        sizes = self._split.pixel_sizes[samples.rows]
        edges = np.rint(samples.crops.rect * np.tile(sizes, 2)).astype(np.int32)
        return (
            [self._read(int(row)) for row in samples.rows],
            np.ascontiguousarray(edges[:, :2]),
            edges[:, 2:] - edges[:, :2],
            samples.flip.astype(np.int32),
        )

    def _read(self, row: int) -> NDArray[np.uint8]:
        """The encoded image; one that DALI might decode differently is decoded here."""
        try:
            content = self._split.read(row)
            width, height = (int(n) for n in self._split.pixel_sizes[row])
            if plain_jpeg_size(content) == (width, height):
                return np.frombuffer(content, np.uint8)
            return _as_bmp(self._split.decode(row))
        except (DataError, ImageError):  # DALI fails on it as on any bad image
            return np.zeros(1, np.uint8)


def _as_bmp(pixels: Pixels) -> NDArray[np.uint8]:
    """Encode pixels without loss and at little cost."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "BMP")
    return np.frombuffer(buffer.getvalue(), np.uint8)


def _opener(plan: LoaderConfig, decoder: Decoder | None) -> Any:
    """What builds the pipeline."""
    from nvidia.dali import fn, pipeline_def, types

    # DALI's decorator has no types.
    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=plan.batch_size,
        num_threads=plan.threads,
        device_id=None if decoder is None else decoder.ordinal,
        prefetch_queue_depth=BATCHES_AHEAD + 1,
    )
    def build(feed: _Feed) -> Any:
        encoded, start, shape, flip = fn.external_source(source=feed, num_outputs=4)
        images = fn.decoders.image_slice(
            encoded,
            device="cpu" if decoder is None else "mixed",
            start=start,
            shape=shape,
            axis_names="WH",
            output_type=types.RGB,
            adjust_orientation=False,  # boxes refer to the pixels as they are stored
        )
        images = fn.resize(images, size=[IMAGE_SIZE, IMAGE_SIZE], antialias=True)
        return fn.flip(images, horizontal=flip)

    def opened(feed: _Feed) -> Any:
        pipeline = build(feed)
        pipeline.build()
        return pipeline

    return opened


def _run(pipeline: Any, decoder: Decoder | None) -> torch.Tensor:
    """The next batch's pixels, copied out of DALI's memory."""
    (images,) = pipeline.run()
    dense = images.as_tensor()
    if decoder is None:
        return torch.from_numpy(np.array(dense))
    from nvidia.dali.plugin.pytorch import feed_ndarray

    return decoder.receive(
        tuple(dense.shape()),
        lambda pixels, stream: feed_ndarray(dense, pixels, cuda_stream=stream),
    )
