"""Boxes and labels on images: their colors, places and sizes."""

import resource
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor

from ssdctl.data.drawing import class_color, draw, save_image
from ssdctl.errors import DiskError

BOX_ONLY: dict[str, Any] = {"names": None, "scores": None}


class Labeled(NamedTuple):
    box: tuple[float, float, float, float]
    name: str = "cat"
    label: int = 1
    score: float = 0.5


def drawn(size: tuple[int, int], boxes: list[Labeled], **style: Any) -> Image.Image:
    corners, names, labels, scores = zip(*boxes, strict=True) if boxes else ((), (), (), ())
    image = Image.new("RGB", size, "gray")
    return draw(image, corners, labels, **{"names": names, "scores": scores, **style})


def pixels_of(image: Image.Image, label: int) -> int:
    return int((np.asarray(image) == ImageColor.getrgb(class_color(label))).all(axis=2).sum())


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


def test_an_image_that_the_system_writes_in_part_is_an_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        with pytest.raises(DiskError):
            save_image(Image.effect_noise((120, 120), 90), tmp_path / "a.jpg")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())
