"""Results of detection on pictures. Torch-free."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.errors import SsdctlError, missing_package
from ssdctl.inference.drawing import BoxLabel, DrawingStyle, draw
from ssdctl.inference.sources import Source

if TYPE_CHECKING:
    import supervision

NOTEBOOK_PIXELS = 1024  # longer side of a picture that a notebook shows


class LabelledClass(NamedTuple):
    """A class that results may have."""

    label: int  # the network's, 1 and up
    category_id: int  # the dataset's; the label if a third-party file names none
    name: str


class Detection(NamedTuple):
    """One detection on a picture."""

    name: str
    label: int  # 1 and up
    category_id: int | None  # None for third-party checkpoints
    score: float
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels, clipped

    def as_json(self) -> dict[str, Any]:
        """Return it as `ssdctl predict --json` prints it."""
        return {**self._asdict(), "box": list(self.box)}

    def as_box_label(self) -> BoxLabel:
        """Return it as `ssdctl.inference.drawing.draw` takes it."""
        return BoxLabel(self.box, self.name, self.label, self.score)


class Result(list[Detection]):
    """The detections on one picture, the highest score first: a list, and arrays of its columns.

    Args:
        detections: The detections.
        size: Width and height of the picture in pixels, upright.
        picture: What was detected on.
        open_picture: Opens it in RGB, to plot the result.
    """

    def __init__(
        self,
        detections: Iterable[Detection],
        size: tuple[int, int],
        picture: Any,
        open_picture: Callable[[Any], Image.Image],
    ) -> None:
        super().__init__(detections)
        self.size = size
        self.picture = picture
        self._open_picture = open_picture

    @property
    def boxes(self) -> NDArray[np.float64]:
        """The boxes, (N, 4): left, top, right, bottom in pixels, clipped to the picture."""
        return np.array([d.box for d in self], np.float64).reshape(-1, 4)

    @property
    def scores(self) -> NDArray[np.float64]:
        """The scores, (N,), 0 to 1."""
        return np.array([d.score for d in self], np.float64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The network's class labels, (N,), 1 and up."""
        return np.array([d.label for d in self], np.int64)

    @property
    def names(self) -> list[str]:
        """The N class names."""
        return [d.name for d in self]

    def plot(
        self, *, line_width: int | None = None, labels: bool = True, scores: bool = True
    ) -> Image.Image:
        """Return the image with its boxes; a path is opened again.

        Args:
            line_width: Of the boxes in pixels; the text follows. None: from the size of the image.
            labels: Write the names of the classes.
            scores: Write the scores.

        Raises:
            DataError: The file does not exist any more.
        """
        style = DrawingStyle(line_width, labels, scores)
        return draw(self._open_picture(self.picture), [d.as_box_label() for d in self], style)

    def _repr_png_(self) -> bytes:
        """Return what a notebook shows: the plot, reduced if it is large."""
        image = self.plot()
        image.thumbnail((NOTEBOOK_PIXELS, NOTEBOOK_PIXELS))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    def to_coco(self, image_id: int = 0) -> list[dict[str, Any]]:
        """Return COCO's results format: one object per detection.

        The category id is the dataset's, or the label if a third-party file names none.
        """
        results = []
        for d in self:
            left, top, right, bottom = d.box
            box = [left, top, round(right - left, 2), round(bottom - top, 2)]
            category = d.label if d.category_id is None else d.category_id
            results.append(
                {"image_id": image_id, "category_id": category, "bbox": box, "score": d.score}
            )
        return results

    def to_supervision(self) -> supervision.Detections:
        """Return `supervision.Detections`; the class id is the index into `class_names`.

        Raises:
            UsageError: supervision is not installed.
        """
        try:
            from supervision import Detections
        except ImportError:
            raise missing_package("supervision", "supervision") from None
        return Detections(
            xyxy=self.boxes.astype(np.float32),
            confidence=self.scores.astype(np.float32),
            class_id=self.labels - 1,
            data={"class_name": np.array(self.names, str)},
        )


def counted(found: Sequence[Detection]) -> str:
    """Return the detections by class, the most frequent first: `3 ring, 1 star`."""
    counts = Counter(d.name for d in found)
    return ", ".join(f"{n} {name}" for name, n in counts.most_common()) or "no objects"


class Prediction(NamedTuple):
    """The result of one picture."""

    source: Source
    content: Path | io.BytesIO  # the encoded picture: a file, or what was fetched
    size: tuple[int, int]  # width and height in pixels, upright
    found: Sequence[Detection]
    seconds: float  # in the network and NMS; its share of the batch

    def as_json(self) -> dict[str, Any]:
        """Return it as `ssdctl predict --json` prints it."""
        return {
            "image": self.source.name,
            "width": self.size[0],
            "height": self.size[1],
            "detections": [d.as_json() for d in self.found],
        }


class UnreadablePicture(NamedTuple):
    """A picture that could not be fetched or read."""

    source: Source
    error: SsdctlError
