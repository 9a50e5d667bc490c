"""Detect on many pictures in batches, and open the next ones in the meantime."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ssdctl.errors import DataError, NetworkError
from ssdctl.inference.predict import Predictor, open_picture
from ssdctl.inference.results import Prediction, UnreadablePicture
from ssdctl.inference.sources import Source
from ssdctl.runtime.map_ahead import map_ahead


class _Opened(NamedTuple):
    """A picture that was opened in a thread."""

    source: Source
    content: Path | io.BytesIO
    prepared: Any  # see Predictor.prepared


def predict_sources(
    predictor: Predictor, sources: Iterable[Source], *, batch_size: int, threads: int
) -> Iterator[Prediction | UnreadablePicture]:
    """Detect on many pictures, in their order; one that cannot be read gives a `UnreadablePicture`.

    Threads open the pictures of the next batches and keep only what the network gets. With tiles,
    one whole picture is opened in advance. Closing the iterator ends downloads.
    """
    at_once, ahead = batch_size, 2 * batch_size
    if predictor.options.tile is not None:
        threads = at_once = ahead = 1

    cancelled = threading.Event()

    def opened(source: Source) -> _Opened | UnreadablePicture:
        try:
            content = source.open(cancelled)
            return _Opened(source, content, predictor.prepared(open_picture(content)))
        except (DataError, NetworkError) as error:
            return UnreadablePicture(source, error)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="open")
    try:
        items = map_ahead(pool, opened, sources, ahead)
        while batch := list(itertools.islice(items, at_once)):
            good = [item.prepared for item in batch if isinstance(item, _Opened)]
            start = time.perf_counter()
            detections = iter(predictor.predict_prepared(good, batch_size))
            seconds = (time.perf_counter() - start) / max(len(good), 1)
            for item in batch:
                if isinstance(item, UnreadablePicture):
                    yield item
                else:
                    size = item.prepared.size
                    yield Prediction(item.source, item.content, size, next(detections), seconds)
    finally:  # also after Ctrl-C
        cancelled.set()
        pool.shutdown(cancel_futures=True)
