"""Sample pictures of an evaluation, with the boxes that the page draws. Torch-free."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ssdctl.data.dataset import find_splits, require_split
from ssdctl.data.formats import coco
from ssdctl.data.image_decode import Pixels, decode
from ssdctl.data.store import open_split
from ssdctl.errors import DataError, SsdctlError
from ssdctl.files import safe_join
from ssdctl.runs.evaluation import SHOWN_SCORE, Box, Evaluation, SampleImage

WIDTH = 300  # pixels of one picture, as embedded
Reader = Callable[[SampleImage], tuple[Pixels, int]]


class SamplePicture(NamedTuple):
    """One sample: the picture, its ground truth and its detections in pixels of the picture."""

    image_id: int
    file_name: str
    url: str
    width: int
    height: int
    truth: list[list[float]]  # number of the class, left, top, right, bottom
    detections: list[list[float]]  # the same and the score, in descending order of it
    num_detections: int  # with a score of 0.3 or more


def sample_pictures(evaluation: Evaluation | None, limit: int) -> tuple[list[SamplePicture], str]:
    """Return at most `limit` samples of an evaluation, or the reason why there are none."""
    if evaluation is None:
        return [], "the run was not evaluated yet; ssdctl evaluate CKPT --report RUN does it"
    try:
        read = _reader(evaluation)
    except (SsdctlError, OSError) as error:
        return [], str(error)
    pictures, problem = [], "no image was scored"
    for sample in evaluation.samples[:limit]:
        try:
            pictures.append(_picture(evaluation, sample, read))
        except (SsdctlError, OSError, SyntaxError, ValueError) as error:
            problem = f"image {sample.image_id} cannot be shown: {error}"
    return pictures, problem


def _reader(evaluation: Evaluation) -> Reader:
    """Return a function that decodes an image: from the store if there is one, else its file.

    The function returns the pixels and the width of the image in the annotations.
    """
    about = evaluation.about
    root, store = Path(about.data), Path(about.store)
    files = require_split(find_splits(root, store), about.split, root)
    try:
        split = open_split(Path(about.store), about.split, files)
    except DataError:
        sizes = {i.id: (i.width or 0, i.height or 0) for i in coco.read(files.annotations).images}

        def read_file(sample: SampleImage) -> tuple[Pixels, int]:
            if sample.image_id not in sizes:
                raise DataError("it is no longer in the dataset")
            content = safe_join(files.images, sample.file_name).read_bytes()
            pixels = decode(content, sizes[sample.image_id])
            return pixels, sizes[sample.image_id][0] or pixels.shape[1]

        return read_file
    rows = {int(image_id): row for row, image_id in enumerate(split.image_ids)}

    def read(sample: SampleImage) -> tuple[Pixels, int]:
        if sample.image_id not in rows:
            raise DataError("it is no longer in the dataset")
        row = rows[sample.image_id]
        return split.decode(row), int(split.sizes[row][0])

    return read


def _picture(evaluation: Evaluation, sample: SampleImage, read: Reader) -> SamplePicture:
    pixels, original_width = read(sample)
    picture = Image.fromarray(pixels)
    factor = min(WIDTH / picture.width, 1.0)
    size = (max(round(picture.width * factor), 1), max(round(picture.height * factor), 1))
    small = picture.resize(size, Image.Resampling.LANCZOS)
    scale = small.width / original_width  # a store may have smaller images than the boxes
    numbers = {c.category_id: number for number, c in enumerate(evaluation.per_class)}

    def scaled(category_id: int, box: Box) -> list[float]:
        return [numbers.get(category_id, -1), *_corners(box, scale, small)]

    return SamplePicture(
        image_id=sample.image_id,
        file_name=sample.file_name,
        url=_url(small),
        width=small.width,
        height=small.height,
        truth=[scaled(t.category_id, t.box) for t in sample.truth],
        detections=[[*scaled(d.category_id, d.box), d.score] for d in sample.found],
        num_detections=sum(d.score >= SHOWN_SCORE for d in sample.found),
    )


def _corners(box: Box, scale: float, picture: Image.Image) -> list[float]:
    left, top, width, height = (v * scale for v in box)
    corners = (
        min(max(left, 0), picture.width),
        min(max(top, 0), picture.height),
        max(min(left + width, picture.width), 0),
        max(min(top + height, picture.height), 0),
    )
    return [round(v, 1) for v in corners]


def _url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
