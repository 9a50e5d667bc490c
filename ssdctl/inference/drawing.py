"""Draw detections on a picture. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

# Okabe and Ito's palette: told apart by colour-blind eyes too.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
BRIGHT = 0.45  # of a colour's luma, above which black letters are read on it, else white


class BoxLabel(NamedTuple):
    """One box to draw."""

    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    text: str
    number: int  # chooses the colour: the same class, the same colour


@functools.cache
def letters(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A font for class names: matplotlib's own knows more than Pillow's plain Latin (Greek,
    Cyrillic, every accent; not Chinese or Japanese)."""
    import matplotlib as mpl

    try:
        return ImageFont.truetype(Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
    except OSError:  # a distribution's matplotlib may leave it out
        return ImageFont.load_default(size)


def draw(picture: Image.Image, marks: Sequence[BoxLabel]) -> Image.Image:
    """A copy of the picture with its boxes, in its own resolution; the first mark lies on top."""
    result = picture.convert("RGB")
    pen = ImageDraw.Draw(result)
    size = max(12, min(picture.size) // 30)
    font = letters(size)
    for mark in reversed(marks):
        colour = PALETTE[mark.number % len(PALETTE)]
        pen.rectangle(mark.box, outline=colour, width=max(2, size // 6))
        width = pen.textlength(mark.text, font=font)
        left = max(min(mark.box[0], picture.width - width - 6), 0)
        top = max(mark.box[1] - size - 4, 0)
        pen.rectangle((left, top, left + width + 6, top + size + 4), fill=colour)
        ink = "black" if _luma(colour) > BRIGHT else "white"
        pen.text((left + 3, top + 1), mark.text, fill=ink, font=font)
    return result


def _luma(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue
