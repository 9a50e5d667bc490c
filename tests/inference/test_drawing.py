"""Boxes and labels on images: their colors, places and sizes."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor, ImageDraw

from ssdctl.data.drawing import class_color, draw

GRAY = (127, 127, 127)
BOX_ONLY: dict[str, Any] = {"names": None, "scores": None}


class Labeled(NamedTuple):
    box: tuple[float, float, float, float]
    name: str = "cat"
    label: int = 1
    score: float = 0.5


def drawn(
    size: tuple[int, int],
    boxes: list[Labeled],
    background: str | tuple[int, int, int] = GRAY,
    **style: Any,
) -> Image.Image:
    corners, names, labels, scores = zip(*boxes, strict=True) if boxes else ((), (), (), ())
    image = Image.new("RGB", size, background)
    return draw(image, corners, labels, **{"names": names, "scores": scores, **style})


def pixels_of(image: Image.Image, label: int) -> int:
    return int((np.asarray(image) == ImageColor.getrgb(class_color(label))).all(axis=2).sum())


def test_labels_of_a_crowd_do_not_cover_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve boxes almost in the same place."""
    places: list[tuple[float, ...]] = []  # rectangles that are filled
    original = ImageDraw.ImageDraw.rectangle

    def rectangle(self: ImageDraw.ImageDraw, place: tuple[float, ...], **options: object) -> None:
        if options.get("fill"):
            places.append(place)
        original(self, place, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageDraw.ImageDraw, "rectangle", rectangle)
    boxes = [
        Labeled((200 + 3 * n, 150 + 3 * n, 420 + 3 * n, 380 + 3 * n), "traffic light", n + 1)
        for n in range(12)
    ]
    pixels = np.asarray(drawn((640, 480), boxes))
    assert len(places) == 12
    for left, top, right, bottom in places:  # the text is in it
        inside = pixels[int(top) + 2 : int(bottom) - 1, int(left) + 2 : int(right) - 1]
        assert len(np.unique(inside.reshape(-1, 3), axis=0)) > 5
    for a, b in itertools.combinations(places, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


def test_style_hides_names_and_scores_and_sets_the_line() -> None:
    styles = ({}, {"scores": None}, BOX_ONLY, {**BOX_ONLY, "line_width": 9})
    box = [Labeled((50, 50, 250, 250))]
    both, name, neither, thick = (pixels_of(drawn((300, 300), box, **style), 1) for style in styles)
    assert both > name > neither
    assert thick > 3 * neither


@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.lists(st.tuples(*[st.floats(-20, 120)] * 4), max_size=6),
)
def test_any_box_on_any_image(size: tuple[int, int], corners: list[tuple[float, ...]]) -> None:
    boxes = [
        Labeled((min(a, c), min(b, d), max(a, c), max(b, d)), "long name", n + 1)
        for n, (a, b, c, d) in enumerate(corners)
    ]
    assert drawn(size, boxes).size == size
