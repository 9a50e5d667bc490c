"""Detect on many pictures in batches, and open the next ones in the meantime."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from PIL import Image

from ssdctl.errors import DataError, NetworkError
from ssdctl.inference.predict import Predictor, open_picture, view_of
from ssdctl.inference.results import Prediction, UnreadablePicture
from ssdctl.inference.sources import Source
from ssdctl.runtime.map_ahead import map_ahead

T = TypeVar("T")


@dataclass(frozen=True)
class _Opened(Generic[T]):
    """A picture that was opened in a thread."""

    source: Source
    content: Path | io.BytesIO
    picture: T


def predict_sources(
    predictor: Predictor, sources: Iterable[Source], *, batch_size: int, threads: int
) -> Iterator[Prediction | UnreadablePicture]:
    """Detect on many pictures, in their order; one that cannot be read gives a `UnreadablePicture`.

    Threads open the pictures of the next batches and keep only what the network gets. With tiles,
    one whole picture is opened in advance.
    """
    if predictor.options.tile is not None:
        return _predict_tiled(predictor, sources, batch_size)
    return _predict_views(predictor, sources, batch_size, threads)


def _predict_views(
    predictor: Predictor, sources: Iterable[Source], batch_size: int, threads: int
) -> Iterator[Prediction | UnreadablePicture]:
    with ThreadPoolExecutor(threads, thread_name_prefix="open") as pool:
        views = _open_ahead(pool, view_of, sources, 2 * batch_size)
        while batch := list(itertools.islice(views, batch_size)):
            good = [item.picture for item in batch if not isinstance(item, UnreadablePicture)]
            detections = iter(predictor.predict_views(good))
            for item in batch:
                if isinstance(item, UnreadablePicture):
                    yield item
                else:
                    size = item.picture.size
                    yield Prediction(item.source, item.content, size, next(detections))


def _predict_tiled(
    predictor: Predictor, sources: Iterable[Source], batch_size: int
) -> Iterator[Prediction | UnreadablePicture]:
    with ThreadPoolExecutor(1, thread_name_prefix="open") as pool:
        for item in _open_ahead(pool, _unchanged, sources, 1):
            if isinstance(item, UnreadablePicture):
                yield item
            else:
                found = predictor.predict_tiled(item.picture, batch_size)
                yield Prediction(item.source, item.content, item.picture.size, found)


def _unchanged(image: Image.Image) -> Image.Image:
    return image


def _open_ahead(
    pool: ThreadPoolExecutor,
    convert: Callable[[Image.Image], T],
    sources: Iterable[Source],
    count: int,
) -> Iterator[_Opened[T] | UnreadablePicture]:
    """Yield the opened and converted pictures in their order; up to `count` are opened ahead."""

    def opened(source: Source) -> _Opened[T] | UnreadablePicture:
        try:
            content = source.open()
            return _Opened(source, content, convert(open_picture(content)))
        except (DataError, NetworkError) as error:
            return UnreadablePicture(source, error)

    return map_ahead(pool, opened, sources, count)
