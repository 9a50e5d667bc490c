"""The embedded dataset: JPEG files of shapes on textured backgrounds, in COCO's layout.

Objects of 10 to 50% of the shorter side, at many aspect ratios and angles, with overlaps, a few
crowds and empty images; category ids have gaps, and each class has a typical hue. Every image is a
function of only (style, seed, split, index). benchmarks/small_data.py adds a style.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.data.annotations import ClassName, LabeledBox, LabeledImage, annotations_of_split
from ssdctl.data.coco_json import document_of
from ssdctl.data.image_decode import encode
from ssdctl.errors import UsageError
from ssdctl.files import (
    DECODE_ERRORS,
    disk_errors,
    make_dir,
    read_limited,
    remove_stale_temporaries,
    set_aside,
    write_bytes,
)
from ssdctl.runtime.progress import Progress, without_progress

log = logging.getLogger(__name__)
Pixels = NDArray[np.floating[Any]]  # height x width x 3, 0 to 255


class ShapeClass(NamedTuple):
    category_id: int
    name: str
    hue: float  # the typical one, in turns


class Style(NamedTuple):
    classes: tuple[ShapeClass, ...]
    background_value: tuple[float, float]  # brightness, 0 to 1
    stray_hue_share: float  # objects of any hue
    stripes: float  # contrast of the stripes on an object, 0 to 1


CLASSES = (
    ShapeClass(1, "ball", 0.00),
    ShapeClass(2, "brick", 0.10),
    ShapeClass(4, "cone", 0.33),
    ShapeClass(7, "star", 0.62),
    ShapeClass(8, "ring", 0.82),
)
STYLES = {"solid": Style(CLASSES, (0.25, 0.9), stray_hue_share=0.15, stripes=0.0)}
# How far the points (u, v) are inside a shape of half size 1; negative: outside.
OUTLINES: dict[str, Callable[[Pixels, Pixels], Pixels]] = {
    "ball": lambda u, v: 1 - np.hypot(u, v),
    "brick": lambda u, v: 1 - np.maximum(np.abs(u), np.abs(v)),
    "ring": lambda u, v: 0.25 - np.abs(np.hypot(u, v) - 0.75),
    # A triangle: apex at (0, -1), base at v = 1.
    "cone": lambda u, v: np.minimum(1 - v, (1 + v) * 0.45 - np.abs(u) * 0.9),
    # Five soft points.
    "star": lambda u, v: 0.72 + 0.28 * np.cos(5 * np.arctan2(v, u)) - np.hypot(u, v),
}
SIZES = ((400, 300), (300, 400), (360, 360), (448, 320))  # width, height
EMPTY_SHARE = 0.03  # images without an object
CROWD_SHARE = 0.05  # images with a crowd
JPEG_QUALITY = 90
DESCRIPTION = "ssdctl's embedded shapes dataset"
MAX_ANNOTATION_BYTES = 1 << 28
CRCS = "image_crc32"


def generate(
    dest: Path,
    *,
    num_train: int,
    num_val: int,
    seed: int = 0,
    style: str = "solid",
    progress: Progress = without_progress,
) -> bool:
    """Write the dataset to `dest`: images, annotations of both splits.

    A split that is complete is not drawn again. Its annotation file is without images until all
    are drawn. The same seed gives the same bytes, with the same numpy and Pillow. Annotations that
    the user changed, and images that the user changed or added, are kept as NAME.replaced. Returns
    whether anything was drawn.

    Raises:
        UsageError: The folder has annotations or images of others.
    """
    is_drawn = False
    refuse_others(dest)
    for split, count in (("train", num_train), ("val", num_val)):
        folder, annotations = _places(dest, split)
        remove_stale_temporaries(make_dir(folder))
        info = {"description": DESCRIPTION, "seed": seed, "style": style, "images": count}
        names = [f"{i + 1:012d}.jpg" for i in range(count)]
        if _is_complete(annotations, info, folder, names):
            continue
        is_drawn = True
        own_crcs, unfinished = _set_aside_changed(annotations)
        started = {"info": {**info, CRCS: own_crcs}}  # not other labels
        write_bytes(annotations, msgspec.json.encode(started))

        def draw(
            index: int,
            split: str = split,
            folder: Path = folder,
            names: list[str] = names,
            own_crcs: list[int] = own_crcs,
            unfinished: tuple[int, str] | None = unfinished,
        ) -> tuple[LabeledImage, int]:
            def is_ours(crc: int) -> bool:
                return crc in own_crcs[index : index + 1] or _is_of(unfinished, split, index, crc)

            image, boxes = draw_image(seed, split, index, style)
            crc = _write_image(folder / names[index], _content(image), is_ours)
            return LabeledImage(names[index], image.shape[1], image.shape[0], boxes), crc

        with ThreadPoolExecutor() as pool:
            drawn = pool.map(draw, range(count))
            done = list(progress(drawn, total=count, label=f"drawing {split}", unit="img"))
        classes = [ClassName(c.category_id, c.name) for c in STYLES[style].classes]
        images, crcs = [image for image, _ in done], [crc for _, crc in done]
        labels = annotations_of_split(images, [c.name for c in classes], folder, annotations)
        document = document_of(labels._replace(classes=classes), info)
        document["info"] = {**info, "crc32": _checksum(document), CRCS: crcs}
        write_bytes(annotations, msgspec.json.encode(document))
    return is_drawn


def _is_of(drawn: tuple[int, str] | None, split: str, index: int, crc: int) -> bool:
    """Return whether an image is of the set with this seed and style."""
    return drawn is not None and crc == zlib.crc32(
        _content(draw_image(drawn[0], split, index, drawn[1])[0])
    )


def _content(image: NDArray[np.uint8]) -> bytes:
    return encode(image, "JPEG", quality=JPEG_QUALITY)


def _write_image(path: Path, content: bytes, is_ours: Callable[[int], bool]) -> int:
    """Write an image, and keep one that is not ours as NAME.replaced; return the CRC-32."""
    crc = zlib.crc32(content)
    with disk_errors(path.parent, "writing"):
        found = zlib.crc32(path.read_bytes()) if path.is_file() else crc
        if found != crc and not is_ours(found):
            log.warning("%s is not an image of ours: it is now %s", path, set_aside(path).name)
        write_bytes(path, content)
    return crc


def refuse_others(dest: Path) -> None:
    """Refuse a folder with annotations, or with images but no annotations, of others."""
    for folder, labels in (_places(dest, split) for split in ("train", "val")):
        is_own = not folder.is_dir() or not any(folder.iterdir())
        if labels.exists():
            try:
                is_own = _read(labels)["info"]["description"] == DESCRIPTION
            except (*DECODE_ERRORS, KeyError, TypeError):
                is_own = False
        if not is_own:
            path = labels if labels.exists() else folder
            hint = "generate into another folder"
            raise UsageError(f"{path} was not generated by ssdctl", hint=hint)


def _places(dest: Path, split: str) -> tuple[Path, Path]:
    """Return the folder of a split's images, and its annotation file."""
    return dest / f"{split}2017", dest / "annotations" / f"instances_{split}2017.json"


def _read(annotations: Path) -> Any:
    return msgspec.json.decode(read_limited(annotations, MAX_ANNOTATION_BYTES))


def _checksum(document: dict[str, Any]) -> int:
    """Return the CRC-32 of a document without its `info`."""
    return zlib.crc32(msgspec.json.encode({**document, "info": None}))


def _set_aside_changed(annotations: Path) -> tuple[list[int], tuple[int, str] | None]:
    """Keep changed annotations under another name.

    Return the CRC-32 of each image as drawn, and seed and style of a set that was not finished.
    """
    document = _read(annotations) if annotations.exists() else {}
    if "images" in document and document["info"].get("crc32") != _checksum(document):
        with disk_errors(annotations, "renaming"):
            kept = set_aside(annotations)
        log.warning("%s was changed: it is kept as %s", annotations, kept.name)
    info = document.get("info", {})
    crcs, seed, style = info.get(CRCS), info.get("seed"), info.get("style")
    is_unfinished = "images" not in document and isinstance(seed, int) and style in STYLES
    return crcs if isinstance(crcs, list) else [], (seed, style) if is_unfinished else None


def _is_complete(
    annotations: Path, info: dict[str, Any], folder: Path, names: Sequence[str]
) -> bool:
    try:
        is_same = info.items() <= _read(annotations)["info"].items()
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
    except (OSError, *DECODE_ERRORS, KeyError, TypeError, AttributeError):
        return False
    return is_same and all(sizes.get(name) for name in names)


def draw_image(
    seed: int, split: str, index: int, style_name: str = "solid"
) -> tuple[NDArray[np.uint8], list[LabeledBox]]:
    """Draw one image (height x width x 3); return it and its objects, those behind first."""
    style = STYLES[style_name]
    rng = np.random.default_rng([seed, {"train": 0, "val": 1}[split], index])
    width, height = SIZES[rng.integers(len(SIZES))]
    canvas = _background(rng, width, height, style)
    boxes: list[LabeledBox] = []
    if rng.random() >= EMPTY_SHARE:
        if rng.random() < CROWD_SHARE:
            boxes.append(_draw_crowd(rng, canvas, style))
        short = min(width, height)
        for _ in range(rng.integers(3, 11)):
            size = short * math.exp(rng.uniform(math.log(0.1), math.log(0.5)))
            box = _draw_object(rng, canvas, size, boxes, style)
            if box is not None:
                boxes.append(box)
    canvas += 4 * rng.standard_normal(canvas.shape, dtype=np.float32)  # the sensor's noise
    return canvas.clip(0, 255).astype(np.uint8), boxes


def _background(rng: np.random.Generator, width: int, height: int, style: Style) -> Pixels:
    """Draw clouds of two muted colors with stripes or checks over them."""
    ends = _rgb(rng.random(2), rng.uniform(0.05, 0.35, 2), rng.uniform(*style.background_value, 2))
    cells = rng.integers(3, 12)
    noise = Image.fromarray(rng.random((cells, cells), dtype=np.float32))
    clouds = np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC))[..., None]
    canvas = ends[0] * clouds + ends[1] * (1 - clouds)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    angle, period = rng.uniform(0, math.pi), rng.uniform(6, 40)
    wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) * (2 * math.pi / period))
    if rng.random() < 0.5:
        across = (y * math.cos(angle) - x * math.sin(angle)) * (2 * math.pi / period)
        wave = wave * np.sin(across)
    canvas += rng.uniform(0, 25) * wave[..., None]
    return canvas.astype(np.float32)


def _draw_object(
    rng: np.random.Generator, canvas: Pixels, size: float, others: list[LabeledBox], style: Style
) -> LabeledBox | None:
    """Draw one object of about `size` pixels that does not cover another one too much."""
    height, width, _ = canvas.shape
    kind = style.classes[rng.integers(len(style.classes))]
    stretch = math.exp(rng.uniform(-0.7, 0.7)) if kind.name != "star" else 1.0
    half_w, half_h = size / 2 * math.sqrt(stretch), size / 2 / math.sqrt(stretch)
    angle = rng.uniform(0, 2 * math.pi) if kind.name in ("star", "cone") else rng.normal(0, 0.15)
    reach = math.ceil(math.hypot(half_w, half_h)) + 2
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(np.float32)
    u = (x * math.cos(angle) + y * math.sin(angle)) / half_w
    v = (y * math.cos(angle) - x * math.sin(angle)) / half_h
    inside = OUTLINES[kind.name](u, v)
    alpha = (inside * min(half_w, half_h) + 0.5).clip(0, 1)
    rows, columns = np.nonzero(alpha.max(1) > 0.5)[0], np.nonzero(alpha.max(0) > 0.5)[0]
    if not len(rows) or rows.size >= height or columns.size >= width:
        return None
    alpha = alpha[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    u, v = (a[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] for a in (u, v))
    for _ in range(8):
        left = int(rng.integers(0, width - alpha.shape[1] + 1))
        top = int(rng.integers(0, height - alpha.shape[0] + 1))
        box = LabeledBox(
            kind.name, left, top, alpha.shape[1], alpha.shape[0], area=round(float(alpha.sum()), 1)
        )
        if all(_covered(box, other) < 0.3 for other in others):
            break
    else:
        return None
    hue = rng.random() if rng.random() < style.stray_hue_share else kind.hue + rng.normal(0, 0.04)
    color = _rgb(np.array([hue]), rng.uniform(0.55, 1.0, 1), rng.uniform(0.45, 1.0, 1))[0]
    light = rng.uniform(0, 2 * math.pi)
    shade = 1 + 0.25 * (u * math.cos(light) + v * math.sin(light))
    if style.stripes:
        shade *= 1 - style.stripes * (np.sin(4 * math.pi * (u + v)) > 0)
    region = canvas[top : top + alpha.shape[0], left : left + alpha.shape[1]]
    region += alpha[..., None] * (color * shade[..., None] - region)
    return box


def _draw_crowd(rng: np.random.Generator, canvas: Pixels, style: Style) -> LabeledBox:
    """Draw a swarm too dense to label one by one: one box around it, marked as a crowd."""
    height, width, _ = canvas.shape
    side_w, side_h = int(rng.integers(60, width // 3)), int(rng.integers(50, height // 3))
    left, top = int(rng.integers(0, width - side_w)), int(rng.integers(0, height - side_h))
    kind = style.classes[rng.integers(len(style.classes))]
    y, x = np.mgrid[:side_h, :side_w].astype(np.float32)
    region = canvas[top : top + side_h, left : left + side_w]
    for _ in range(side_w * side_h // 120):
        radius = rng.uniform(3, 6)
        u = (x - rng.uniform(radius, side_w - radius)) / radius
        v = (y - rng.uniform(radius, side_h - radius)) / radius
        alpha = (OUTLINES[kind.name](u, v) * radius + 0.5).clip(0, 1)[..., None]
        color = _rgb(np.array([kind.hue]), np.array([0.9]), rng.uniform(0.5, 1.0, 1))[0]
        region += alpha * (color - region)
    return LabeledBox(kind.name, left, top, side_w, side_h, True, area=side_w * side_h / 2)


def _covered(box: LabeledBox, other: LabeledBox) -> float:
    """Return the overlap of two boxes as a share of the smaller one."""
    width = min(box.left + box.width, other.left + other.width) - max(box.left, other.left)
    height = min(box.top + box.height, other.top + other.height) - max(box.top, other.top)
    smaller = min(box.width * box.height, other.width * other.height)
    return max(width, 0) * max(height, 0) / smaller


def _rgb(hue: NDArray[Any], saturation: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    """Convert HSV (hue in turns) to RGB of 0 to 255; n -> n x 3."""
    k = (np.array([5.0, 3.0, 1.0]) + 6 * hue[:, None]) % 6
    ramp = np.minimum(k, 4 - k).clip(0, 1)
    return np.asarray(255 * value[:, None] * (1 - saturation[:, None] * ramp))
