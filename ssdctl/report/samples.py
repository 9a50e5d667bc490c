"""Sample pictures of an evaluation, with their ground truth and their detections. Torch-free."""

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
from ssdctl.inference.drawing import BoxLabel, draw, one_line
from ssdctl.runs.evaluation import Box, Evaluation, SampleImage

WIDTH = 300  # pixels of one picture, as embedded


class SamplePicture(NamedTuple):
    """One sample: the picture with its ground truth, and with its detections."""

    image_id: int
    file_name: str
    truth_url: str
    detections_url: str
    num_truth: int
    num_detections: int


def sample_pictures(evaluation: Evaluation | None) -> tuple[list[SamplePicture], str]:
    """Return the samples of an evaluation, or the reason why there are none."""
    if evaluation is None:
        return [], "the run was not evaluated yet; ssdctl evaluate CKPT --report RUN does it"
    try:
        read = _reader(evaluation)
    except (SsdctlError, OSError) as error:
        return [], str(error)
    pictures, problem = [], "no image was scored"
    for sample in evaluation.samples:
        try:
            pictures.append(_pair(evaluation, sample, read(sample)))
        except (SsdctlError, OSError, SyntaxError, ValueError) as error:
            problem = f"image {sample.image_id} cannot be shown: {error}"
    return pictures, problem


def _reader(evaluation: Evaluation) -> Callable[[SampleImage], Pixels]:
    """Return a function that decodes an image: from the store if there is one, else its file."""
    about = evaluation.about
    root, store = Path(about.data), Path(about.store)
    files = require_split(find_splits(root, store), about.split, root)
    try:
        split = open_split(Path(about.store), about.split, files)
    except DataError:
        sizes = {i.id: (i.width or 0, i.height or 0) for i in coco.read(files.annotations).images}

        def read_file(sample: SampleImage) -> Pixels:
            if sample.image_id not in sizes:
                raise DataError("it is no longer in the dataset")
            content = safe_join(files.images, sample.file_name).read_bytes()
            return decode(content, sizes[sample.image_id])

        return read_file
    rows = {int(image_id): row for row, image_id in enumerate(split.image_ids)}

    def read(sample: SampleImage) -> Pixels:
        if sample.image_id not in rows:
            raise DataError("it is no longer in the dataset")
        return split.decode(rows[sample.image_id])

    return read


def _pair(evaluation: Evaluation, sample: SampleImage, pixels: Pixels) -> SamplePicture:
    picture = Image.fromarray(pixels)
    scale = min(WIDTH / picture.width, 1.0)
    size = (max(round(picture.width * scale), 1), max(round(picture.height * scale), 1))
    small = picture.resize(size, Image.Resampling.LANCZOS)
    order = [c.category_id for c in evaluation.per_class]
    names = {c.category_id: c.name for c in evaluation.per_class}

    def box_label(category_id: int, box: Box, score: float | None = None) -> BoxLabel:
        corners = _corners(box, scale, small)
        name = one_line(names.get(category_id, str(category_id)))
        number = order.index(category_id) + 1 if category_id in order else 0
        return BoxLabel(corners, name if score is None else f"{name} {score:.2f}", number)

    truth = [box_label(t.category_id, t.box) for t in sample.truth]
    detections = [box_label(d.category_id, d.box, d.score) for d in sample.found]
    return SamplePicture(
        image_id=sample.image_id,
        file_name=sample.file_name,
        truth_url=_url(draw(small, truth)),
        detections_url=_url(draw(small, detections)),
        num_truth=len(truth),
        num_detections=len(detections),
    )


def _corners(box: Box, scale: float, picture: Image.Image) -> tuple[float, float, float, float]:
    left, top, width, height = (v * scale for v in box)
    return (
        min(max(left, 0), picture.width),
        min(max(top, 0), picture.height),
        max(min(left + width, picture.width), 0),
        max(min(top + height, picture.height), 0),
    )


def _url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
