"""Draw boxes on a picture. Torch-free."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

# Okabe and Ito's palette, also for colour-blind readers.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
BRIGHT = 0.45  # luma of a background above which text is black, else white
NOT_PRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories
MAX_LABEL = 40  # characters of a name in a picture or plot


class BoxLabel(NamedTuple):
    """One box to draw."""

    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    text: str
    number: int  # of the class; selects the colour


def one_line(name: str, limit: int = MAX_LABEL) -> str:
    """Return a name that fits one line of a picture or plot.

    Control characters, line breaks, direction overrides and surrogates become a replacement
    character; a longer name is cut.
    """
    clean = "".join(
        "\ufffd" if unicodedata.category(c) in NOT_PRINTABLE else c for c in name[: limit + 1]
    )
    return clean if len(clean) <= limit else clean[: limit - 1] + "\u2026"


@functools.cache
def label_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return a font for class names.

    matplotlib's own covers more than Pillow's (Greek, Cyrillic, every accent; not Chinese or
    Japanese).
    """
    import matplotlib as mpl

    try:
        return ImageFont.truetype(Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
    except OSError:  # some distributions remove it from matplotlib
        return ImageFont.load_default(size)


def draw(picture: Image.Image, boxes: Sequence[BoxLabel]) -> Image.Image:
    """Return a copy of the picture with its boxes; the first one is drawn on top."""
    result = picture.convert("RGB")
    pen = ImageDraw.Draw(result)
    size = max(12, min(picture.size) // 30)
    font = label_font(size)
    for label in reversed(boxes):
        colour = PALETTE[label.number % len(PALETTE)]
        pen.rectangle(label.box, outline=colour, width=max(2, size // 6))
        text = one_line(label.text, MAX_LABEL + 8)  # with a score
        width = pen.textlength(text, font=font)
        left = max(min(label.box[0], picture.width - width - 6), 0)
        top = max(label.box[1] - size - 4, 0)
        pen.rectangle((left, top, left + width + 6, top + size + 4), fill=colour)
        ink = "black" if _luma(colour) > BRIGHT else "white"
        pen.text((left + 3, top + 1), text, fill=ink, font=font)
    return result


def _luma(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue
