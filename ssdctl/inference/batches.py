"""Detect on many pictures in batches, and open the next ones in the meantime."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ssdctl.errors import DataError, NetworkError
from ssdctl.inference.predict import Predictor, open_picture
from ssdctl.inference.results import Prediction, UnreadablePicture
from ssdctl.inference.sources import Source


class _Opened(NamedTuple):
    """A picture that was opened in a thread."""

    source: Source
    content: Path | io.BytesIO
    prepared: Any  # see Predictor.prepared


def predict_sources(
    predictor: Predictor, sources: Iterable[Source], *, batch_size: int, threads: int
) -> Iterator[Prediction | UnreadablePicture]:
    """Detect on many pictures, in their order; one that cannot be read gives a `UnreadablePicture`.

    Closing the iterator ends downloads.
    """

    def opened(source: Source, cancelled: threading.Event) -> _Opened | UnreadablePicture:
        try:
            content = source.open(cancelled)
            return _Opened(source, content, predictor.prepared(open_picture(content)))
        except (DataError, NetworkError) as error:
            return UnreadablePicture(source, error)

    found = predictor.detect_ahead(sources, opened, batch_size=batch_size, threads=threads)
    with contextlib.closing(found):
        for item, detections, seconds in found:
            if isinstance(item, UnreadablePicture):
                yield item
            else:
                size = item.prepared.size
                yield Prediction(item.source, item.content, size, detections, seconds)
