"""Sample images of an evaluation, with the boxes that the page draws. Torch-free."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ssdctl.data.dataset import require_split
from ssdctl.data.image_decode import Pixels, decode
from ssdctl.data.index import is_prepared
from ssdctl.data.open_dataset import annotations_of
from ssdctl.data.store import open_split
from ssdctl.errors import DataError, SsdctlError
from ssdctl.files import safe_join
from ssdctl.runs.evaluation import Box, Evaluation, SampleImage

MAX_SIDE = 480  # pixels of an embedded image
QUALITY = 78  # of its JPEG
Reader = Callable[[SampleImage], tuple[Pixels, int]]


class EmbeddedImage(NamedTuple):
    """One sample: the image, its objects and its detections in pixels of the embedded image."""

    name: str
    url: str
    width: int
    height: int
    is_worst: bool
    truth: list[list[float]]  # number of the class, left, top, right, bottom, 1 if a crowd
    detections: list[list[float]]  # the first five and the score, in descending order of it


def embed_samples(evaluation: Evaluation | None, limit: int) -> tuple[list[EmbeddedImage], str]:
    """Return at most `limit` samples of an evaluation, or the reason why there are none.

    Half of the limit is for the worst images, half for random ones.
    """
    if evaluation is None:
        return [], "the run was not evaluated yet; ssdctl evaluate CKPT --report RUN does it"
    try:
        read = _reader(evaluation)
    except (SsdctlError, OSError) as error:
        return [], str(error)
    images, problem = [], "no image was scored"
    worst = [s for s in evaluation.samples if s.is_worst]
    others = [s for s in evaluation.samples if not s.is_worst]
    num_worst = min(len(worst), max(limit - len(others), limit // 2))
    for sample in worst[:num_worst] + others[: limit - num_worst]:
        try:
            images.append(_embed(evaluation, sample, read))
        except (SsdctlError, OSError, SyntaxError, ValueError) as error:
            problem = f"image {sample.image_id} cannot be shown: {error}"
    return images, problem


def _reader(evaluation: Evaluation) -> Reader:
    """Return a function that decodes an image: of the store if there is one, else its file.

    The function returns the pixels and the width of the image in the annotations.

    Raises:
        DataError: There is no such dataset or split any more.
    """
    about = evaluation.about
    root, store = Path(about.data), Path(about.store)
    annotations = require_split(annotations_of(root, store), about.split, root)
    split = open_split(root, store, about.split) if is_prepared(root, store) else None
    rows = {int(image_id): row for row, image_id in enumerate(annotations.image_ids)}

    def read(sample: SampleImage) -> tuple[Pixels, int]:
        row = rows.get(sample.image_id)
        if row is None:
            raise DataError("it is no longer in the dataset")
        if split is not None:
            return split.decode(row), int(split.sizes[row][0])
        width, height = annotations.sizes[row].tolist()
        content = safe_join(annotations.folder, annotations.file_names[row]).read_bytes()
        pixels = decode(content, (width, height))
        return pixels, width or pixels.shape[1]

    return read


def _embed(evaluation: Evaluation, sample: SampleImage, read: Reader) -> EmbeddedImage:
    pixels, original_width = read(sample)
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    scale = image.width / original_width  # a store may have smaller images than the boxes
    numbers = {c.category_id: number for number, c in enumerate(evaluation.per_class)}

    def scaled(category_id: int, box: Box) -> list[float]:
        return [numbers.get(category_id, -1), *_corners(box, scale, image)]

    return EmbeddedImage(
        name=sample.file_name,
        url=_url(image),
        width=image.width,
        height=image.height,
        is_worst=sample.is_worst,
        truth=[[*scaled(t.category_id, t.box), int(t.is_crowd)] for t in sample.truth],
        detections=[[*scaled(d.category_id, d.box), d.score] for d in sample.found],
    )


def _corners(box: Box, scale: float, image: Image.Image) -> list[float]:
    left, top, width, height = (v * scale for v in box)
    corners = (
        min(max(left, 0), image.width),
        min(max(top, 0), image.height),
        max(min(left + width, image.width), 0),
        max(min(top + height, image.height), 0),
    )
    return [round(v, 1) for v in corners]


def _url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
