"""Random datasets whose truth is known: which file every image is, and what is in it.

Each image has a gray of its own as background, each object a color of its own: pixels tell which
image was read, and which object is under a box.
"""

import io
import random
from collections.abc import Collection
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
from data.samples import with_exif_last
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import ExifTags, Image

SPLITS = ("train", "val", "test")
STEMS = (
    *("0", "1", "frame_000002", "1.tif", "a b", "c,d", "#5", "ü", "it's", "x.y", "0001_r7"),
    *("train", "50%"),
)
FOLDERS = ("", "cam1", "cam prepared", "latest 1/cam1", "val")
EDITS = (
    *("touch", "move a box", "add an image", "add an empty image", "remove an image"),
    "rename a class",
)
CLASSES = (
    *("bolt", "type 2", "a,b", 'say "hi"', "#9", "ünï ✓", "no", "17", "it's", "x: y"),
    *("test", "null"),
)
OPTIONS = ("classes", "group", "read-only", "later val", "other categories", "other files")
STRAY = "a stray copy"
DECOYS = (
    *("aaa", "overlay", "SegmentationClassVisualization", "masks", "zz detections", "old/photos"),
    *("annotations/trimaps", "Annotations", "labels", STRAY),
)
ROOTS = ("set", "train", "my test", "prepared", "a, b")
# Colors that are far apart, without grays; and grays for the images.
COLORS = [c for c in product((0, 85, 170, 255), repeat=3) if max(c) - min(c) > 100]
DECOY_COLOR = COLORS.pop()
MODES = {
    ".jpg": ("RGB", "RGB", "L", "CMYK"),
    ".JPG": ("RGB",),
    ".png": ("RGB", "L", "P", "RGBA", "LA", "I;16"),
    ".bmp": ("RGB",),
}
# How stored pixels are made of upright ones, by their EXIF orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
MARGIN = 3  # pixels of the background around objects


class Thing(NamedTuple):
    """An object; its box is in pixels of the image as it is annotated."""

    name: str
    left: float
    top: float
    width: float
    height: float
    is_crowd: bool
    color: tuple[int, int, int]


class Picture(NamedTuple):
    split: str
    folder: str  # below the images of its split
    stem: str
    suffix: str
    width: int  # as annotated
    height: int
    turn: int  # EXIF orientation
    is_upright: bool  # annotated as shown, not as stored
    mode: str
    gray: int
    things: tuple[Thing, ...]
    is_missing: bool = False  # listed, but there is no file

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.stem}{self.suffix}".lstrip("/")

    def shade(self, color: tuple[int, ...]) -> NDArray[np.int64]:
        """Return a color as this image shows it."""
        if self.mode in ("L", "LA", "I;16"):
            color = (Image.new("RGB", (1, 1), color).convert("L").getpixel((0, 0)),) * 3
        return np.array(color)


class Layout(NamedTuple):
    """What a tool's folders of a format can express."""

    flags: tuple[str, ...] = ()  # variants that may be drawn, see writers.py
    # Of turned images: as stored, upright, or either, as sizes tell (and else "upright").
    views: str = "either"  # or "unturned"
    splits: tuple[str, ...] = SPLITS
    folders: bool = True  # images may be in subfolders, with equal base names
    shared: bool = False  # one folder has the images of all splits
    named: bool = True  # files name the splits, or there is one; else words in folders do
    crowds: bool = False
    empties: bool = True  # images without objects are listed
    decoys: bool = True  # other image files have no meaning
    missing: bool = True  # a listed image may have no file
    suffixes: tuple[str, ...] = tuple(MODES)
    tolerance: float = 0.02  # pixels by which boxes may differ: text has two to eight decimals
    shun: str = ""  # characters that names cannot have
    classes: str = "used"  # the list of classes: those used (sorted), or all


class World(NamedTuple):
    layout: str
    root: str
    flags: frozenset[str]
    classes: tuple[str, ...]
    pictures: tuple[Picture, ...]
    decoys: tuple[str, ...]  # folders with other images of the same names
    small_decoys: bool  # of half the size
    packed: bool
    form: str  # in which Unicode's characters are in file names; macOS writes NFD
    edit: str  # what becomes of it once it is prepared
    options: frozenset[str]  # of `prepare`, and what else happens to it

    def of(self, split: str) -> list[Picture]:
        return [picture for picture in self.pictures if picture.split == split]

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if self.of(split)]


def paint(picture: Picture, *, is_decoy: bool = False, is_small: bool = False) -> bytes:
    """Return the file of an image."""
    if is_small:
        picture = picture._replace(width=picture.width // 2, height=picture.height // 2)
    shape = picture.height, picture.width, 3
    pixels = np.full(shape, DECOY_COLOR if is_decoy else picture.gray, np.uint8)
    for thing in () if is_decoy else picture.things:
        rows = slice(round(thing.top), round(thing.top + thing.height))
        pixels[rows, round(thing.left) : round(thing.left + thing.width)] = thing.color
    image = Image.fromarray(pixels)
    if picture.is_upright and picture.turn in TURNS:
        image = image.transpose(TURNS[picture.turn])
    if picture.mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    elif picture.mode == "P":
        image = image.quantize(64)
    else:
        image = image.convert(picture.mode)
    options = {}
    if picture.turn != 1:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = picture.turn
    buffer = io.BytesIO()
    kind = {".png": "PNG", ".bmp": "BMP"}.get(picture.suffix)
    if kind is None:
        image.save(buffer, "JPEG", quality=100, subsampling=0, **options)
    else:
        image.save(buffer, kind, **options)
    return with_exif_last(buffer.getvalue()) if picture.gray % 32 == 8 else buffer.getvalue()


@cache
def blank(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


class Tree:
    """A dataset folder as it is written, and the image of every file that its labels mean."""

    def __init__(self, root: Path, *, is_blank: bool = False, form: str = "NFC") -> None:
        self.root, self.is_blank, self.form = root, is_blank, form
        self.images: dict[str, Picture] = {}
        self.data = root  # what --data is given
        self.files: set[Path] = set()

    def image(self, path: str, picture: Picture) -> str:
        assert path not in self.images
        self.images[normalize(self.form, path)] = picture
        if not picture.is_missing:
            self.write(path, blank(*picture[4:6]) if self.is_blank else paint(picture))
        return path

    def write(self, path: str, content: str | bytes) -> None:
        file = self.root / normalize(self.form, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):  # the form of names may differ from file to file
            content = normalize(("NFC", self.form)[len(self.files) % 2], content).encode()
        self.files.add(file)
        if not file.is_file() or file.read_bytes() != content:
            file.write_bytes(content)


def _things(rng: random.Random, picture: Picture, classes: list[str], crowds: bool) -> list[Thing]:
    """Return up to four objects, each in a quarter of the image."""
    things = []
    cell_width, cell_height = (picture.width - 2 * MARGIN) / 2, (picture.height - 2 * MARGIN) / 2
    cells = rng.sample([(x, y) for x in (0, 1) for y in (0, 1)], rng.choice((1, 1, 2, 3, 4)))
    for x, y in cells:
        # In quarters of a pixel, at least 6 pixels wide.
        width, height = (rng.randint(24, int(4 * c)) / 4 for c in (cell_width, cell_height))
        left = MARGIN + x * cell_width + rng.randint(0, int(4 * (cell_width - width))) / 4
        top = MARGIN + y * cell_height + rng.randint(0, int(4 * (cell_height - height))) / 4
        left, top = (int(4 * v) / 4 for v in (left, top))
        name, is_crowd = rng.choice(classes), crowds and rng.random() < 0.2
        things.append(Thing(name, left, top, width, height, is_crowd, (0, 0, 0)))
    return things


def _picture(rng: random.Random, layout: Layout, name: tuple[str, str, str], k: int) -> Picture:
    split, folder, stem = name
    suffix = rng.choice(layout.suffixes)
    has_turn = suffix != ".bmp" and layout.views != "unturned"
    turn = rng.choice((1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8)) if has_turn else 1
    width, height = rng.randint(24, 64), rng.randint(24, 64)
    # If the size does not tell, the format does.
    is_upright = layout.views in ("upright", "either, else upright")
    if layout.views.startswith("either") and turn >= 5 and width != height:
        is_upright = rng.random() < 0.5
    mode, gray = rng.choice(MODES[suffix]), 8 + 16 * k
    return Picture(split, folder, stem, suffix, width, height, turn, is_upright, mode, gray, ())


def _names(text: Collection[str], layout: Layout) -> list[str]:
    return [name for name in text if not set(layout.shun) & set(name)]


@st.composite
def worlds(draw: st.DrawFn, layouts: dict[str, Layout]) -> World:
    """Draw a dataset: what decides is drawn one by one, so that failures shrink to few of it."""
    name = draw(st.sampled_from(sorted(layouts)))
    layout = layouts[name]
    flags = {flag for flag in layout.flags if draw(st.booleans())}
    names = _names(CLASSES, layout)
    classes = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    splits = layout.splits[: draw(st.integers(1, len(layout.splits)))]
    usual = FOLDERS if layout.named else FOLDERS[:-1]
    folders = draw(st.lists(st.sampled_from(usual), min_size=1, max_size=3, unique=True))
    stems = draw(
        st.lists(st.sampled_from(_names(STEMS, layout)), min_size=1, max_size=4, unique=True)
    )
    places = [
        (s, f, n) for s in splits for f in (folders if layout.folders else [""]) for n in stems
    ]
    rng = random.Random(draw(st.integers(0, 2**32)))
    if layout.shared:  # a name can be in one split only
        places = list({place[1:]: place for place in rng.sample(places, len(places))}.values())
        places[0] = ("train", *places[0][1:])
        splits = [split for split in splits if any(place[0] == split for place in places)]
    # Every split has an image, and names repeat across splits and folders.
    firsts = [rng.choice([p for p in places if p[0] == split]) for split in splits]
    others = [place for place in places if place not in firsts]
    chosen = firsts + rng.sample(others, min(len(others), draw(st.integers(0, 7))))
    colors = rng.sample(COLORS, len(COLORS))
    pictures = []
    share_empty = draw(st.sampled_from((0, 0.3))) if layout.empties else 0
    for k, place in enumerate(chosen):
        picture = _picture(rng, layout, place, k)
        if k == 0 or rng.random() >= share_empty:
            things = _things(rng, picture, classes, layout.crowds)
            things = [thing._replace(color=colors.pop()) for thing in things]
            picture = picture._replace(things=tuple(things))
        elif "no empty files" in flags:  # nothing says how it is annotated
            picture = picture._replace(turn=1, is_upright=False)
        pictures.append(picture)
    missing = draw(st.sampled_from(("none", "none", "none", "an image", "a folder", "a split")))
    lost = rng.choice(pictures[1:]) if pictures[1:] else pictures[0]
    if layout.missing and missing != "none" and lost is not pictures[0]:
        is_lost = {
            "an image": lambda p: p is lost,
            "a folder": lambda p: (p.split, p.folder) == (lost.split, lost.folder),
            "a split": lambda p: p.split == lost.split,
        }[missing]
        pictures = [p._replace(is_missing=k > 0 and is_lost(p)) for k, p in enumerate(pictures)]
        if name == "openimages":  # an image that is not listed could be the missing one, moved
            gone = {(p.split, p.stem) for p in pictures if p.is_missing}
            pictures = [
                p for p in pictures if p.things or p.is_missing or (p.split, p.stem) not in gone
            ]
    else:
        copies = draw(st.integers(0, 2)) if layout.missing else 0
        _copy(pictures, copies)
    if draw(st.booleans()):  # as of one camera: sizes tell nothing
        pictures = _of_one_size(pictures, layout)
    rng.shuffle(pictures)
    # A decoy could be the moved file of an image that is missing.
    may_have_decoys = layout.decoys and not any(picture.is_missing for picture in pictures)
    decoys = draw(st.sets(st.sampled_from(DECOYS), max_size=2)) if may_have_decoys else set()
    return World(
        layout=name,
        root=draw(st.sampled_from(ROOTS)),
        flags=frozenset(flags),
        classes=tuple(classes),
        pictures=tuple(pictures),
        decoys=tuple(sorted(decoys)),
        small_decoys=draw(st.booleans()),
        packed=draw(st.booleans()),
        form=draw(st.sampled_from(("NFC", "NFC", "NFD"))),
        edit=draw(st.sampled_from(EDITS)),
        options=frozenset(option for option in OPTIONS if draw(st.booleans())),
    )


def _of_one_size(pictures: list[Picture], layout: Layout) -> list[Picture]:
    """Return the images with borders that make them as large as the largest."""
    width, height = (max(p[side] for p in pictures) for side in (4, 5))
    fixed = {"width": width, "height": height}
    if layout.views.startswith("either"):
        fixed["is_upright"] = layout.views != "either"
    return [p._replace(**fixed) for p in pictures]


def _copy(pictures: list[Picture], count: int) -> None:
    """Make images of other splits copies of training images."""
    originals = [p for p in pictures if p.split == "train" and p.things]
    others = [k for k, p in enumerate(pictures) if p.split != "train"]
    for k, original in list(zip(others, originals, strict=False))[:count]:
        split, folder, stem = pictures[k][:3]
        pictures[k] = original._replace(split=split, folder=folder, stem=stem)


def with_val(world: World) -> World:
    """Return a world of one split with a validation image: a copy of one to train on."""
    first = next(p for p in world.pictures if p.things and not p.is_missing)
    later = first._replace(split="val", stem="later", gray=8 + 16 * len(world.pictures))
    options = world.options - {"other categories"}
    return world._replace(pictures=(*world.pictures, later), options=options)


def edited(world: World) -> World | None:
    """Return the world after its edit, with the same images otherwise; None if it has no such."""
    pictures = list(world.pictures)
    where = [
        k for k, p in enumerate(pictures) if p.things and not p.is_missing and p.split == "train"
    ]
    if world.edit == "touch":
        return world
    k = where[-1]
    old, first = pictures[k], pictures[k].things[0]
    if world.edit == "move a box":
        moved = first._replace(left=first.left + 0.25, width=first.width - 0.5)
        pictures[k] = old._replace(things=(moved, *old.things[1:]))
    elif world.edit == "rename a class":
        renamed = {"bolt": "nuts", first.name: "nut"}
        pictures = [
            p._replace(things=tuple(t._replace(name=renamed.get(t.name, t.name)) for t in p.things))
            for p in pictures
        ]
        classes = tuple(renamed.get(name, name) for name in world.classes)
        return world._replace(pictures=tuple(pictures), classes=classes)
    elif world.edit == "remove an image":
        if len(where) < 2:
            return None
        del pictures[k]
    else:
        things = () if world.edit == "add an empty image" else old.things
        if not things and "no empty files" in world.flags:  # nothing says how it is annotated
            old = old._replace(turn=1, is_upright=False)
        pictures.append(old._replace(stem="new", gray=8 + 16 * len(pictures), things=things))
    return world._replace(pictures=tuple(pictures))
