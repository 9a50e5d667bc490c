"""Pascal VOC: lists, folders of any name, pixels from 1 or 0, and what is broken."""

from pathlib import Path

import pytest
from data.formats.exports import boxes_of, tree

from ssdctl.data.dataset import find, resolve_images
from ssdctl.data.formats.voc import read
from ssdctl.errors import DataError


def xml(*objects: str, file: str = "x.jpg", folder: str = "VOC") -> str:
    return (
        f"<annotation><folder>{folder}</folder><filename>{file}</filename><size><width>100</width>"
        f"<height>50</height><depth>3</depth></size>{''.join(objects)}</annotation>"
    )


def thing(name: str, *box: object, more: str = "") -> str:
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inside = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
    return f"<object><name>{name}</name>{more}<bndbox>{inside}</bndbox></object>"


CAT = xml(thing("cat", 2, 2, 9, 9))


def voc(root: Path, stems: dict[str, str], lists: dict[str, list[str]] | None = None) -> Path:
    tree(root, {f"JPEGImages/{stem}.jpg": None for stem in stems})
    tree(root, {f"Annotations/{stem}.xml": content for stem, content in stems.items()})
    return tree(root, {f"ImageSets/Main/{k}.txt": "\n".join(v) for k, v in (lists or {}).items()})


def test_a_devkit_of_two_years(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        stems = {f"{year}_{i}": CAT for i in range(2)}
        voc(tmp_path / year, stems, {"trainval": [f"{year}_0"], "test": [f"{year}_1"]})
    splits = read(tmp_path)
    years = ("VOC2007", "VOC2012")
    assert list(boxes_of(splits)) == [f"{y}/JPEGImages/{y}_0.jpg" for y in years]
    assert list(boxes_of(splits, "test")) == [f"{y}/JPEGImages/{y}_1.jpg" for y in years]


@pytest.mark.parametrize(
    ("side", "width"), [("96.0", 96), ("", 100), ("0", 100), ("wide", 0), ("96.5", 0)]
)
def test_a_size_is_a_whole_number_or_absent(tmp_path: Path, side: str, width: int) -> None:
    voc(tmp_path, {"a": CAT.replace(">100<", f">{side}<")})
    if width:
        assert resolve_images(read(tmp_path))["train"][0].sizes.tolist() == [[width, 50]]
    else:
        with pytest.raises(DataError, match=r"a\.xml: size/width"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<annotation>", "a.xml"),
        ("", "a.xml"),
        ('<!DOCTYPE a [<!ENTITY b "bb">]><annotation>&b;</annotation>', "document type"),
        (xml(thing("", 1, 1, 2, 2)), "a.xml: object 1"),
        (xml(thing("cat", 1, 1, "two", 2)), r"a.xml: object 1 \(cat\)"),
        (xml(thing("cat", 1, 1, 2, 2, more="<difficult>no</difficult>")), "difficult: 'no'"),
        (xml("<object><name>cat</name></object>"), r"a.xml: object 1 \(cat\)"),
        (xml("<object><name>cat</name><polygon><pt><x>1</x></pt></polygon></object>"), "LabelMe"),
        (xml(), "no object"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, content: str, words: str) -> None:
    voc(tmp_path, {"a": content})
    with pytest.raises(DataError, match=words):
        find(tmp_path, "voc")[1].read(tmp_path)


def test_lists_and_folders_of_cvat(tmp_path: Path) -> None:
    """A list per subset, images in folders, names with spaces."""
    train = ["# made by hand", "a", "#e", "day 1/b"]
    lists = {"Train": train, "Validation": ["c d  "], "default": ["e"], "cat_Train": ["a  1"]}
    lists["val"] = ["f", "c d"]
    splits = read(voc(tmp_path, dict.fromkeys(("a", "day 1/b", "c d", "e", "f"), CAT), lists))
    images = ["JPEGImages/a.jpg", "JPEGImages/day 1/b.jpg", "JPEGImages/e.jpg"]
    assert list(boxes_of(splits)) == images
    assert list(boxes_of(splits, "val")) == ["JPEGImages/c d.jpg", "JPEGImages/f.jpg"]


@pytest.mark.parametrize("suffix", [".bmp", ".png", ".PNG"])
def test_the_named_image_of_two_with_the_same_stem(tmp_path: Path, suffix: str) -> None:
    tree(tmp_path, {f"data/a{s}": None for s in (".bmp", ".jpg", ".png", ".PNG", ".tif", ".webp")})
    content = xml(thing("cat", 1, 1, 9, 9), file=f"C:\\other\\a{suffix}")
    assert list(boxes_of(read(tree(tmp_path, {"labels/a.xml": content})))) == [f"data/a{suffix}"]


@pytest.mark.parametrize(
    ("stems", "listed", "removed", "words"),
    [
        ("", "", "", "Annotations"),
        ("a", "a b", "", r"b\.xml"),
        ("a", "../../etc/passwd", "", r"train\.txt.*passwd"),
        ("a b", "a b", "b", r"Annotations/b\.xml"),
        ("a b c", "", "a b c", r"\b3\b"),
        ("a", "a\na b", "", r"Annotations/a b\.xml"),  # not `a` with a flag
        ("a", "a\nb  -1", "", r"Annotations/b\.xml"),
    ],
)
def test_absent_and_unsafe_names(
    tmp_path: Path, stems: str, listed: str, removed: str, words: str
) -> None:
    lists = {"train": listed.splitlines() if "\n" in listed else listed.split()} if listed else {}
    voc(tmp_path, dict.fromkeys(stems.split(), CAT), lists)
    for stem in removed.split():
        (tmp_path / f"JPEGImages/{stem}.jpg").unlink()
    with pytest.raises(DataError, match=words) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_lists_need_the_names_of_splits_and_images(tmp_path: Path) -> None:
    voc(tmp_path, dict.fromkeys("ab", CAT), {"train_list": ["a"], "val_list": ["b"]})
    with pytest.raises(DataError, match=r"only: train_list\.txt, val_list\.txt"):
        read(tmp_path)
    voc(tmp_path, {}, {"train": ["a"], "val": []})
    assert read(tmp_path)["train"].notes[0].endswith("the list of val is empty")


@pytest.mark.parametrize("first", [0, 0.5, -2])
def test_pixels_that_count_from_zero(tmp_path: Path, first: float) -> None:
    """One box shows how the tool counts in all files."""
    voc(tmp_path, {"a": xml(thing("cat", 5, 5, 9, 9)), "b": xml(thing("cat", 3, first, 9, 9))})
    splits = read(tmp_path)
    assert boxes_of(splits) == {
        "JPEGImages/a.jpg": [("cat", [5, 5, 4, 4], False)],
        "JPEGImages/b.jpg": [("cat", [3, first, 6, 9 - first], False)],
    }
    (note,) = splits["train"].notes
    assert "from 0" in note
    assert "b.xml" in note
