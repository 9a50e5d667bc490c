"""Detections on images, as arrays."""

from __future__ import annotations

import base64
import io
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.config.call import hints_in_messages, named_path
from ssdctl.data.annotations import ClassName
from ssdctl.data.drawing import Rectangle, draw, save_image
from ssdctl.errors import SsdctlError, import_package
from ssdctl.runtime.safe_text import html_table

if TYPE_CHECKING:
    import pandas
    import supervision
    import torch

NOTEBOOK_PIXELS = 1024  # longer side of an image that a notebook shows
NOTEBOOK_ROWS = 10
Selection: TypeAlias = "slice | Sequence[int] | Sequence[bool] | NDArray[Any]"


class Detection(NamedTuple):
    """One detected object."""

    name: str
    label: int  # 1 and up
    category_id: int | None  # None for third-party checkpoints
    score: float
    box: Rectangle  # left, top, right, bottom in pixels, clipped to the image

    def as_json(self) -> dict[str, Any]:
        """Return it as `ssdctl predict --json` prints it."""
        return {**self._asdict(), "box": list(self.box)}


class Result:
    """The detections on one image as arrays, the highest score first.

    `len`, iteration and `result[0]` give single `Detection`s; a slice, a boolean mask or an array
    of indices selects some of them: `result[result.scores > 0.5]` is a `Result`.

    Args:
        boxes: (N, 4): left, top, right, bottom in pixels; they may exceed the image.
        scores: (N,) in descending order.
        labels: (N,).
        classes: The network's, starting with label 1.
        size: See below.
        image: See below.
        open_image: Returns `image` in RGB, to draw on it.

    Attributes:
        boxes: (N, 4) float64: left, top, right, bottom in pixels, clipped to the image.
        scores: (N,) float64, 0 to 1, in descending order.
        labels: (N,) int64: the network's labels, 1 and up.
        size: Width and height of the upright image in pixels.
        image: The input of the predictor, not a copy unless an iterator yielded it.
    """

    def __init__(
        self,
        boxes: NDArray[np.float64],
        scores: NDArray[np.float64],
        labels: NDArray[np.int64],
        *,
        classes: Sequence[ClassName],
        size: tuple[int, int],
        image: Any,
        open_image: Callable[[Any], Image.Image],
    ) -> None:
        self._raw = boxes, scores  # as `evaluate` scores them
        self.boxes = boxes.clip(0, [*size, *size]).round(2)
        self.scores = scores.round(5)
        self.labels = labels
        self.size = size
        self.image = image
        self._classes = classes
        self._open_image = open_image

    @property
    def names(self) -> NDArray[np.str_]:
        """The class names, (N,): `result[result.names == "cat"]`."""
        return np.array([self._classes[label - 1].name for label in self.labels], np.str_)

    @property
    def class_names(self) -> list[str]:
        """The names of all classes of the network, starting with label 1."""
        return [c.name for c in self._classes]

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Detection]:
        columns = (self.boxes.tolist(), self.scores.tolist(), self.labels.tolist())
        for (left, top, right, bottom), score, label in zip(*columns, strict=True):
            entry = self._classes[label - 1]
            yield Detection(entry.name, label, entry.id, score, (left, top, right, bottom))

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Detection: ...

    @overload
    def __getitem__(self, index: Selection) -> Result: ...

    def __getitem__(self, index: int | np.integer[Any] | Selection) -> Detection | Result:
        if isinstance(index, int | np.integer):
            at = range(len(self))[index]  # IndexError beyond the last one
            return next(iter(self[at : at + 1]))
        chosen: Any = index
        if not isinstance(index, slice):
            chosen = np.asarray(index)
            if chosen.ndim != 1 or (len(chosen) and chosen.dtype.kind not in "biu"):
                raise TypeError(
                    f"result[{index!r}]: expected an integer, a slice, a boolean mask or indices; "
                    "boxes, scores, labels and names are attributes"
                )
            chosen = chosen if len(chosen) else slice(0)
        boxes, scores = self._raw
        return Result(
            boxes[chosen],
            scores[chosen],
            self.labels[chosen],
            classes=self._classes,
            size=self.size,
            image=self.image,
            open_image=self._open_image,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Result({count_text(self)}; {self.size[0]} x {self.size[1]})"

    @hints_in_messages()
    def plot(
        self, *, line_width: int | None = None, labels: bool = True, scores: bool = True
    ) -> Image.Image:
        """Return the image with its boxes; a path is opened again.

        Args:
            line_width: Line width in pixels; the text scales with it. None fits it to the image.
            labels: Write the names of the classes.
            scores: Write the scores.

        Raises:
            DataError: The file no longer exists.
        """
        return draw(
            self._open_image(self.image),
            self.boxes,
            self.labels,
            self.names if labels else None,
            self.scores if scores else None,
            line_width=line_width,
        )

    @hints_in_messages()
    def save(
        self,
        path: str | Path,
        *,
        line_width: int | None = None,
        labels: bool = True,
        scores: bool = True,
    ) -> Path:
        """Draw the boxes and write the image; return its path.

        Args:
            path: Ends in .jpg, .png, .webp or .tif.
            line_width: See `plot`.
            labels: See `plot`.
            scores: See `plot`.

        Raises:
            UsageError: The suffix is another one.
            DataError: The image no longer exists, or is too large for the format.
            DiskError: The file cannot be written.
        """
        file = named_path("path", path)
        save_image(self.plot(line_width=line_width, labels=labels, scores=scores), file)
        return file

    def _repr_png_(self) -> bytes | None:
        """Return the plot for a notebook, reduced if it is large."""
        try:
            image = self.plot()
        except SsdctlError:  # the file is gone
            return None
        image.thumbnail((NOTEBOOK_PIXELS, NOTEBOOK_PIXELS))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        rows = [
            (d.name, f"{d.score:.3f}", *(f"{v:.0f}" for v in d.box)) for d in self[:NOTEBOOK_ROWS]
        ]
        png = self._repr_png_()
        drawn = "" if png is None else base64.b64encode(png).decode()
        image = f'<img src="data:image/png;base64,{drawn}"/>' if drawn else ""
        heads = ("class", "score", "left", "top", "right", "bottom")
        return image + html_table(heads, rows, repr(self))

    def to_coco(self, image_id: int = 0) -> list[dict[str, Any]]:
        """Return COCO's results format: one object per detection, boxes as x, y, width, height.

        They are what `evaluate` scores: boxes are not clipped to the image, and nothing is rounded.
        The category id is the dataset's, or the label if the checkpoint has none.
        """
        boxes, scores = self._raw
        extents = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
        rows = zip(self, extents.tolist(), scores.tolist(), strict=True)
        image_id = operator.index(image_id)  # of a tensor, too
        return [
            {
                "image_id": image_id,
                "category_id": d.label if d.category_id is None else d.category_id,
                "bbox": bbox,
                "score": score,
            }
            for d, bbox, score in rows
        ]

    def to_torch(self) -> dict[str, torch.Tensor]:
        """Return what torchvision's detectors return, and torchmetrics takes, on the CPU.

        Returns:
            `boxes`, (N, 4) float32: left, top, right, bottom in pixels, not clipped to the image;
            `scores`, (N,) float32; `labels`, (N,) int64.
        """
        import torch

        boxes, scores = (torch.tensor(array, dtype=torch.float32) for array in self._raw)
        return {"boxes": boxes, "scores": scores, "labels": torch.tensor(self.labels)}

    @hints_in_messages()
    def to_supervision(self) -> supervision.Detections:
        """Return `supervision.Detections`; the class id is the index into `class_names`.

        Raises:
            UsageError: supervision is not installed.
        """
        detections: supervision.Detections = import_package("supervision").Detections(
            xyxy=self.boxes.astype(np.float32),
            confidence=self.scores.astype(np.float32),
            class_id=self.labels - 1,
            data={"class_name": self.names},
        )
        return detections

    @hints_in_messages()
    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with a row per detection: name, label, score, left, top, right, bottom.

        Raises:
            UsageError: pandas is not installed.
        """
        package = import_package("pandas")
        names = package.Series(self.names.tolist(), dtype="str")  # also without detections
        sides = dict(zip(("left", "top", "right", "bottom"), self.boxes.T, strict=True))
        columns = {"name": names, "label": self.labels, "score": self.scores}
        table: pandas.DataFrame = package.DataFrame({**columns, **sides})
        return table


def count_text(result: Result) -> str:
    """Return the detections by class, the most frequent first: `3 ring, 1 star`."""
    counts = Counter(result.names.tolist())
    return ", ".join(f"{n} {name}" for name, n in counts.most_common()) or "no objects"
