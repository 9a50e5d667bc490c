"""Results of detection on pictures. Torch-free."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssdctl.errors import SsdctlError
from ssdctl.inference.drawing import BoxLabel, one_line
from ssdctl.inference.sources import Source


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
        return BoxLabel(self.box, f"{one_line(self.name)} {self.score:.2f}", self.label)


class Prediction(NamedTuple):
    """The result of one picture."""

    source: Source
    content: Path | io.BytesIO  # the encoded picture: a file, or what was fetched
    size: tuple[int, int]  # width and height in pixels, upright
    found: Sequence[Detection]

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
