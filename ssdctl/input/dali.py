"""`--pipeline dali`: the same samples, crops and flips, decoded and resized by nvidia-dali.

The samples of a batch are drawn as in sampler.py, a function of (seed, position in the stream): a
resume continues with the same samples, crops, boxes and colors at any step, thread count and world
size. Only the pixels are DALI's: a few levels from the native pipeline's, and reproducible
with the same version of DALI on the same machine. A checkpoint records its run's pipeline;
another one is a changed setting for a resume. DALI decodes and resizes on the run's GPU if there is
one (not run on hardware yet), and the images stay there; otherwise on the CPU.
A batch in which DALI fails on an image is decoded by the native pipeline, which replaces the image.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssdctl.boxes import IMAGE_SIZE
from ssdctl.data.image_decode import ImageError, encode, plain_jpeg_size
from ssdctl.data.store import Split
from ssdctl.device import Decoder
from ssdctl.errors import DataError, DiskError
from ssdctl.input.batch import Batch, LoaderConfig
from ssdctl.input.loader import BATCHES_AHEAD, TrainLoader, as_batch
from ssdctl.input.sampler import Samples


class DaliLoader:
    """Training batches of one rank, decoded by DALI."""

    def __init__(self, split: Split, config: LoaderConfig, decoder: Decoder | None = None) -> None:
        self._split = split
        self._config = config
        self._native = TrainLoader(split, config)
        self._decoder = decoder

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        positions = self._config.positions(start_step, end_step)
        feed = _Feed(self._split, map(self._native.draw, positions))
        pipeline = self._open(feed)
        for _ in positions:
            try:
                images = self._run(pipeline)
            except RuntimeError:  # DALI cannot continue after a bad image
                yield from self._native.decode([feed.fed.popleft()])
                feed.start_again()
                pipeline = self._open(feed)
            else:
                yield as_batch(feed.fed.popleft(), images)

    def _open(self, feed: _Feed) -> Any:
        from nvidia.dali import Pipeline, fn, types

        pipeline = Pipeline(
            batch_size=self._config.batch_size,
            num_threads=self._config.threads,
            device_id=None if self._decoder is None else self._decoder.ordinal,
            prefetch_queue_depth=BATCHES_AHEAD + 1,
        )
        with pipeline:
            encoded, start, shape, flip = fn.external_source(source=feed, num_outputs=4)
            images = fn.decoders.image_slice(
                encoded,
                device="cpu" if self._decoder is None else "mixed",
                start=start,
                shape=shape,
                axis_names="WH",
                output_type=types.RGB,
                adjust_orientation=False,  # boxes refer to the pixels as they are stored
            )
            images = fn.resize(images, size=[IMAGE_SIZE, IMAGE_SIZE], antialias=True)
            pipeline.set_outputs(fn.flip(images, horizontal=flip))
        pipeline.build()
        return pipeline

    def _run(self, pipeline: Any) -> Tensor:
        (images,) = pipeline.run()
        dense = images.as_tensor()
        if self._decoder is None:
            return torch.from_numpy(np.array(dense))
        from nvidia.dali.plugin.pytorch import feed_ndarray

        return self._decoder.receive(
            tuple(dense.shape()),
            lambda pixels, stream: feed_ndarray(dense, pixels, cuda_stream=stream),
        )


class _Feed:
    def __init__(self, split: Split, work: Iterator[Samples]) -> None:
        self._split = split
        self._work = work
        self.fed: deque[Samples] = deque()  # to the pipeline, not used yet

    def start_again(self) -> None:
        """Restart the pipeline with the samples that the broken one had not finished."""
        self._work = itertools.chain(self.fed, self._work)
        self.fed = deque()

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> tuple[Any, ...]:
        """Encoded images, left-top corners, sizes and flips."""
        samples = next(self._work)
        self.fed.append(samples)
        sizes = self._split.pixel_sizes[samples.rows]
        edges = np.rint(samples.view.rect * np.tile(sizes, 2)).astype(np.int32)
        return (
            [self._read(int(row)) for row in samples.rows],
            np.ascontiguousarray(edges[:, :2]),
            edges[:, 2:] - edges[:, :2],
            samples.view.flip.astype(np.int32),
        )

    def _read(self, row: int) -> NDArray[np.uint8]:
        """Return the encoded image, or its pixels if DALI might decode it differently."""
        try:
            if not (self._split.is_raw or self._split.upright):
                content, size = self._split.read(row), self._split.pixel_sizes[row].tolist()
                if plain_jpeg_size(content) == tuple(size):
                    return np.frombuffer(content, np.uint8)
            return np.frombuffer(encode(self._split.decode(row), "BMP"), np.uint8)
        except (DataError, DiskError, ImageError):  # DALI fails on it as on any bad image
            return np.zeros(1, np.uint8)
