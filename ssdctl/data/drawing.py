"""Draw boxes with labels on an image.

All boxes are drawn before the labels. A label takes the first free position around or in its box,
in the order of the boxes: the best detections keep the usual one. Colors have a dark outline, so
that they are visible on any background.
"""

from __future__ import annotations

import contextlib
import functools
import io
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from ssdctl.config.call import whole_number
from ssdctl.errors import DataError, UsageError
from ssdctl.files import has_content, refuse_other_file, write_bytes

# Okabe and Ito's palette, also for color-blind readers, then the colors farthest from all before
# them, in CIELAB and as color-blind readers see them.
PALETTE = (
    *("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"),
    *("#6611FF", "#00FF88", "#8877FF", "#FF0055", "#00FFFF", "#775522", "#AA0088", "#99DD55"),
    *("#AAEEBB", "#9911CC", "#EE6677", "#FF77DD", "#FF00FF", "#EE9966", "#229911", "#994455"),
    "#11CC11",
)
OUTLINE = "#1A1A1A"
BRIGHT = 0.45  # luma of a background above which text is black, else white
# Of the geometric mean of width and height: 2 and 14 pixels of an image of 640 x 480.
LINE_WIDTH, TEXT_SIZE = 0.0036, 0.025
MAX_LINE_WIDTH = 200  # pixels
MIN_TEXT_SIZE = 10  # pixels; smaller letters are not readable
NOT_PRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories
MAX_LABEL = 40  # characters of a name in an image or plot

# Formats in which drawn images are written. Those without EXIF data, which hold a mark, are absent.
DRAWN_FORMATS = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".tif": "TIFF", ".tiff": "TIFF"
}  # fmt: skip
SOFTWARE = 0x0131  # EXIF's tag of the program
MARK = "ssdctl"
SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 92, "subsampling": 0},  # halved colors would blur lines and text
    "PNG": {"compress_level": 1},
    "WEBP": {"quality": 92},
    "TIFF": {"compression": "tiff_lzw"},
}

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom in pixels


def class_color(label: int) -> str:
    """Return the color of a class (label 1 and up), `#RRGGBB`."""
    return PALETTE[(label - 1) % len(PALETTE)]


def ink_on(color: str) -> str:
    """Return the color of text on a background: black or white."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > BRIGHT else "white"


def one_line(name: str, limit: int = MAX_LABEL) -> str:
    """Return a name that fits one line of an image or plot.

    Control characters, line breaks, direction overrides and surrogates become a replacement
    character; a longer name is cut.
    """
    clean = "".join(
        "\ufffd" if unicodedata.category(c) in NOT_PRINTABLE else c for c in name[: limit + 1]
    )
    return clean if len(clean) <= limit else clean[: limit - 1] + "\u2026"


@functools.cache
def label_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return a font for class names: matplotlib's has Greek, Cyrillic and every accent."""
    import matplotlib as mpl

    try:
        return ImageFont.truetype(Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
    except OSError:  # some distributions remove it from matplotlib
        return ImageFont.load_default(size)


def draw(
    image: Image.Image,
    boxes: ArrayLike,
    labels: Sequence[int] | NDArray[Any],
    names: Sequence[str] | NDArray[np.str_] | None,
    scores: Sequence[float] | NDArray[Any] | None = None,
    *,
    line_width: int | None = None,
) -> Image.Image:
    """Return a copy of the image in RGB with N boxes and their names and scores, if given.

    Boxes are (N, 4): left, top, right, bottom in pixels, the most important first: it is drawn on
    top, and its label is placed first. Labels, 1 and up, select the colors. The text follows the
    width of the lines, in pixels; None fits it to the image.
    """
    if line_width is not None:
        line_width = whole_number("line_width", line_width, MAX_LINE_WIDTH)
    result = image.convert("RGB")
    pen = ImageDraw.Draw(result)
    scale = (image.width * image.height) ** 0.5
    line = line_width or max(round(LINE_WIDTH * scale), 2)
    text_size = TEXT_SIZE * scale if line_width is None else line * TEXT_SIZE / LINE_WIDTH
    font = label_font(max(round(text_size), MIN_TEXT_SIZE))
    corners: list[Any] = np.asarray(boxes, np.float64).reshape(-1, 4).tolist()
    colors = [class_color(int(label)) for label in labels]
    halo = max(line // 3, 1)
    drawn = [_grown(box, line // 2 + halo) for box in corners]
    for box, outline, color in reversed(list(zip(corners, drawn, colors, strict=True))):
        pen.rectangle(outline, outline=OUTLINE, width=line + 2 * halo)
        pen.rectangle(_grown(box, line // 2), outline=color, width=line)
    texts = _texts(len(corners), names, scores)
    height = font.getbbox("Ag|")[3] + line  # the same for all labels
    sizes = [(font.getlength(text) + 2 * (line + 1), height) if text else (0, 0) for text in texts]
    rectangles = _free_rectangles(drawn, sizes, image.size)
    for color, text, rectangle in reversed(list(zip(colors, texts, rectangles, strict=True))):
        if text:
            pen.rectangle(rectangle, fill=color, outline=OUTLINE, width=halo)
            start = (rectangle[0] + line + 1, (rectangle[1] + rectangle[3]) / 2)
            pen.text(start, text, fill=ink_on(color), font=font, anchor="lm")
    return result


def save_image(image: Image.Image, path: Path) -> None:
    """Write an image atomically, in the format that the suffix names.

    Raises:
        UsageError: The suffix is none of `DRAWN_FORMATS`.
        DataError: The format has no images of that size.
        DiskError: The file cannot be written.
    """
    kind = DRAWN_FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"{path}: give a name that ends in {', '.join(DRAWN_FORMATS)}")
    exif = Image.Exif()
    exif[SOFTWARE] = MARK
    try:
        write_image(image, path, kind, exif=exif, **SAVE_OPTIONS[kind])
    except (OSError, ValueError) as error:
        width, height = image.size
        problem = f"{path}: {width} x {height} pixels cannot be written as {kind}: {error}"
        raise DataError(problem, hint="name a file of another format") from None


def write_image(image: Image.Image, path: Path, kind: str, **options: Any) -> None:
    """Write an image atomically.

    It is encoded first: Pillow does not notice that the last block of a file was written in part.
    """
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    write_bytes(path, buffer.getvalue())


def require_drawn(path: Path, option: str) -> None:
    """Refuse to replace a file, unless it is an image that `save_image` wrote, or empty."""
    if has_content(path, option) and not is_drawn(path):
        refuse_other_file(path, option)


def is_drawn(path: Path) -> bool:
    """Return whether `save_image` wrote an image."""
    if path.suffix.lower() not in DRAWN_FORMATS or not path.is_file():
        return False
    with contextlib.suppress(Exception), Image.open(path) as image:
        # A PNG's own method would decode the pixels.
        return Image.Image.getexif(image).get(SOFTWARE) == MARK
    return False


def _texts(
    count: int,
    names: Sequence[str] | NDArray[np.str_] | None,
    scores: Sequence[float] | NDArray[Any] | None,
) -> list[str]:
    texts = [""] * count if names is None else [one_line(str(name)) for name in names]
    if scores is None:
        return texts
    return [f"{text} {score:.2f}".strip() for text, score in zip(texts, scores, strict=True)]


def _grown(box: Rectangle, distance: int) -> Rectangle:
    left, top, right, bottom = box
    return left - distance, top - distance, right + distance, bottom + distance


def _free_rectangles(
    boxes: Sequence[Rectangle], sizes: Sequence[tuple[float, float]], image: tuple[int, int]
) -> list[Rectangle]:
    """Return the rectangle of each label: the first candidate that overlaps no label before it.

    If there is none, the one that hides the least of other labels. All are inside the image.
    """
    taken = np.zeros((len(boxes), 4))
    chosen: list[Rectangle] = []
    for number, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        best, least = box, np.inf
        for candidate in _candidates(box, size, image) if size[0] else ():
            left, top, right, bottom = candidate
            earlier = taken[:number]
            width = np.minimum(earlier[:, 2], right) - np.maximum(earlier[:, 0], left)
            height = np.minimum(earlier[:, 3], bottom) - np.maximum(earlier[:, 1], top)
            hidden = float((width.clip(0) * height.clip(0)).sum())
            if hidden < least:
                best, least = candidate, hidden
            if not hidden:
                break
        if size[0]:
            taken[number] = best
        chosen.append(best)
    return chosen


def _candidates(
    box: Rectangle, size: tuple[float, float], image: tuple[int, int]
) -> Iterator[Rectangle]:
    (left, top, right, bottom), (width, height) = box, size
    corners = [
        (left, top - height),  # above
        (right - width, top - height),
        (left, bottom),  # below
        (right - width, bottom),
        (left, top),  # inside
        (right - width, top),
        (left, bottom - height),
        (right - width, bottom - height),
        (right, top),  # beside
        (left - width, top),
        (right, bottom - height),
        (left - width, bottom - height),
    ]
    rows = int(min(max((bottom - top) // max(height, 1), 0), 12))
    corners += [(left, top + row * height) for row in range(1, rows)]  # further down
    for x, y in corners:
        x = max(min(x, image[0] - 1 - width), 0)
        y = max(min(y, image[1] - 1 - height), 0)
        yield (x, y, x + width, y + height)
