"""Pascal VOC: lists, folders of any name, pixels from 1 or 0, and what is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from data.formats import exports

from ssdctl.data.formats import find
from ssdctl.data.formats.voc import read
from ssdctl.errors import DataError


def xml(*objects: str, size: tuple[int, int] | None = (100, 50), file: str = "x.jpg") -> str:
    width, height = size or (0, 0)
    sizes = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return (
        f"<annotation><folder>VOC</folder><filename>{file}</filename>"
        f"{sizes if size else ''}{''.join(objects)}</annotation>"
    )


def thing(name: str, *box: object, more: str = "") -> str:
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inside = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
    return f"<object><name>{name}</name>{more}<bndbox>{inside}</bndbox></object>"


def voc(root: Path, stems: dict[str, str], lists: dict[str, list[str]] | None = None) -> None:
    for stem, content in stems.items():
        exports.image_file(root / "JPEGImages" / f"{stem}.jpg")
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "Annotations" / f"{stem}.xml").write_text(content)
    for name, lines in (lists or {}).items():
        (root / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        (root / "ImageSets/Main" / f"{name}.txt").write_text("\n".join(lines) + "\n")


def test_lists_difficult_parts_and_pixels_from_one(tmp_path: Path) -> None:
    part = "<part><name>head</name><bndbox><xmin>3</xmin></bndbox></part>"
    voc(
        tmp_path,
        {
            "a": xml(thing("dog", 1, 1, 100, 50), thing("cat", 11, 11, 20, 30, more=part)),
            "b": xml(thing("cat", "5.5", 5, 10, 10, more="<difficult>1</difficult>")),
            "c": xml(thing("bird", 1, 1, 10, 10)),
            "d": xml(),
        },
        {"train": ["a", "b"], "val": ["c", "d"], "trainval": ["a", "b", "c", "d"]},
    )
    splits = read(tmp_path)
    assert exports.boxes_of(splits) == {
        "JPEGImages/a.jpg": [("dog", [0, 0, 100, 50], 0), ("cat", [10, 10, 10, 20], 0)],
        "JPEGImages/b.jpg": [("cat", [4.5, 4, 5.5, 6], 1)],
    }
    assert exports.boxes_of(splits, "val") == {
        "JPEGImages/c.jpg": [("bird", [0, 0, 10, 10], 0)],
        "JPEGImages/d.jpg": [],
    }
    assert [c.name for c in splits["train"].classes] == ["bird", "cat", "dog"]
    assert splits["train"].classes == splits["val"].classes


def test_a_devkit_of_two_years(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        stems = {f"{year}_{i}": xml(thing("cat", 1, 1, 9, 9)) for i in range(2)}
        voc(tmp_path / year, stems, {"trainval": [f"{year}_0"], "test": [f"{year}_1"]})
    splits = read(tmp_path)
    assert list(exports.boxes_of(splits)) == [
        "VOC2007/JPEGImages/VOC2007_0.jpg",
        "VOC2012/JPEGImages/VOC2012_0.jpg",
    ]
    assert len(exports.boxes_of(splits, "val")) == 2  # the test images


def test_no_lists_no_size_another_suffix(tmp_path: Path) -> None:
    exports.image_file(tmp_path / "images/a.PNG", (30, 20))
    (tmp_path / "annotations").mkdir()
    content = xml(thing("nut", 2, 2, 4, 4), size=None, file="C:\\other\\name.jpg")
    (tmp_path / "annotations/a.xml").write_text(content)
    splits = read(tmp_path)
    assert exports.boxes_of(splits) == {"images/a.PNG": [("nut", [1, 1, 3, 3], 0)]}
    assert splits["train"].sizes.tolist() == [[30, 20]]


@pytest.mark.parametrize(("side", "width"), [("96.0", 96), ("", 100), ("wide", 0), ("96.5", 0)])
def test_a_size_is_a_whole_number_or_absent(tmp_path: Path, side: str, width: int) -> None:
    voc(tmp_path, {"a": xml(thing("cat", 2, 2, 4, 4)).replace(">100<", f">{side}<")})
    if width:
        assert read(tmp_path)["train"].sizes.tolist() == [[width, 50]]
    else:
        with pytest.raises(DataError, match=r"a\.xml: size/width"):
            read(tmp_path)


def test_xml_next_to_the_images_in_a_folder_per_split(tmp_path: Path) -> None:
    for k, names in enumerate((("train", "valid", "test"), ("Train", "Val2017", "Test"))):
        root = tmp_path / str(k)
        for name in names:
            exports.image_file(root / name / "a.jpg")
            (root / name / "a.xml").write_text(xml(thing("nut", 2, 2, 4, 4)))
        splits = read(root)
        for name, split in zip(names, ("train", "val", "test"), strict=True):
            assert list(exports.boxes_of(splits, split)) == [f"{name}/a.jpg"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<annotation>", "a.xml: broken XML"),
        ('<?xml version="1.0" encoding="none"?><annotation/>', "a.xml: broken XML"),
        ("", "a.xml: not plain XML"),
        ('<!DOCTYPE a [<!ENTITY b "bb">]><annotation>&b;</annotation>', "not plain XML"),
        (xml(thing("", 1, 1, 2, 2)), "a.xml: object 1 has no name"),
        (xml(thing("cat", 1, 1, "two", 2)), r"object 1 \(cat\) lacks a bndbox"),
        (xml(thing("cat", 1, 1, "nan", 2)), r"object 1 \(cat\) lacks a bndbox"),
        (xml("<object><name>cat</name></object>"), r"object 1 \(cat\) lacks a bndbox"),
        (xml(), "no object is labeled"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, content: str, words: str) -> None:
    voc(tmp_path, {"a": content})
    with pytest.raises(DataError, match=words):
        read(tmp_path)


@pytest.mark.parametrize(("root", "prefix"), [("xmlns", ""), ("xmlns:v", "v:")])
def test_a_namespace_makes_no_difference(tmp_path: Path, root: str, prefix: str) -> None:
    content = re.sub(r"<(/?)(\w)", rf"<\1{prefix}\2", xml(thing("cat", 1, 1, 9, 9)))
    content = content.replace("annotation>", f'annotation {root}="http://x.org/voc">', 1)
    voc(tmp_path, {"a": content})
    splits = read(tmp_path)
    assert exports.boxes_of(splits) == {"JPEGImages/a.jpg": [("cat", [0, 0, 9, 9], 0)]}


def test_lists_and_folders_of_cvat(tmp_path: Path) -> None:
    """A list per subset, images in folders, names with spaces."""
    stems = ("a", "day 1/b", "c d", "e")
    for stem in stems:
        (tmp_path / "Annotations" / stem).parent.mkdir(parents=True, exist_ok=True)
    content = xml(thing("cat", 1, 1, 9, 9))
    lists = {
        "Train": ["# made by hand", "a", "#e", "day 1/b"],
        "Validation": ["c d  "],
        "default": ["e"],
    }
    voc(tmp_path, dict.fromkeys(stems, content), {**lists, "cat_Train": ["a  1"]})
    splits = read(tmp_path)
    images = ["JPEGImages/a.jpg", "JPEGImages/day 1/b.jpg", "JPEGImages/e.jpg"]
    assert list(exports.boxes_of(splits)) == images
    assert list(exports.boxes_of(splits, "val")) == ["JPEGImages/c d.jpg"]


def test_the_named_image_of_two_with_the_same_stem(tmp_path: Path) -> None:
    for suffix in (".bmp", ".jpg", ".png", ".tif", ".webp"):
        exports.image_file(tmp_path / f"data/a{suffix}")
    for suffix in (".bmp", ".png"):
        content = xml(thing("cat", 1, 1, 9, 9), file=f"a{suffix}")
        (tmp_path / "labels").mkdir(exist_ok=True)
        (tmp_path / "labels/a.xml").write_text(content)
        splits = read(tmp_path)
        assert list(exports.boxes_of(splits)) == [f"data/a{suffix}"]


def test_images_without_xml_are_counted_and_files_of_macos_ignored(tmp_path: Path) -> None:
    root = tmp_path / "test"  # not a split: it is the dataset folder
    voc(root, {"a": xml(thing("cat", 1, 1, 9, 9))})
    exports.image_file(root / "JPEGImages/b.jpg")
    for name in ("JPEGImages/._a.jpg", "Annotations/._a.xml"):
        (root / name).write_bytes(b"\0\5\x16\7")
    splits = read(root)
    assert list(exports.boxes_of(splits)) == ["JPEGImages/a.jpg"]
    (note,) = splits["train"].notes
    assert "1 images" in note
    assert "b.jpg" in note


def test_absent_and_unsafe_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not Pascal VOC"):
        read(tmp_path)
    voc(tmp_path, {"a": xml(thing("cat", 1, 1, 2, 2))}, {"train": ["a", "b"]})
    with pytest.raises(DataError, match=r"b\.xml"):
        read(tmp_path)
    voc(tmp_path, {}, {"train": ["../../etc/passwd"]})
    with pytest.raises(DataError, match=r"train\.txt.*passwd"):
        read(tmp_path)
    voc(tmp_path, {"b": xml(thing("cat", 1, 1, 2, 2))}, {"train": ["a", "b"]})
    (tmp_path / "JPEGImages/b.jpg").unlink()
    with pytest.raises(DataError, match=r"Annotations/b\.xml"):
        read(tmp_path)


def test_folders_of_other_names(tmp_path: Path) -> None:
    """`annots` with `images` said that images of annotations are missing although all exist."""
    exports.image_file(tmp_path / "cover/0.jpg")  # another image of the same name
    splits = read(exports.voc_other_names(tmp_path))
    assert list(exports.boxes_of(splits)) == [f"images/{n}.jpg" for n in range(6)]
    assert not splits["train"].notes


def test_mirrored_folders_of_splits(tmp_path: Path) -> None:
    exports.voc_mirrored(tmp_path)
    (tmp_path / "images/train/5.jpg").rename(tmp_path / "images/train/new.jpg")
    (tmp_path / "annotations/train/5.xml").unlink()
    exports.image_file(tmp_path / "images/test/6.jpg")
    splits = read(tmp_path)
    assert list(exports.boxes_of(splits)) == [f"images/train/{n}.jpg" for n in range(5)]
    assert list(exports.boxes_of(splits, "val")) == [f"images/test/{n}.jpg" for n in range(6)]
    assert [note.partition(":")[0] for note in splits["train"].notes] == [
        "images/test",
        "images/train",
    ]
    # An image is not taken from another split.
    (tmp_path / "annotations/train/6.xml").write_text(xml(thing("cat", 2, 2, 9, 9)))
    with pytest.raises(DataError, match=r"missing: annotations/train/6\.xml"):
        read(tmp_path)


def test_images_in_folders_of_splits_and_labels_in_one(tmp_path: Path) -> None:
    voc(tmp_path, dict.fromkeys("abc", xml(thing("cat", 2, 2, 9, 9))))
    for name, split in (("a", "train"), ("b", "train"), ("c", "val")):
        (tmp_path / "photos" / split).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"JPEGImages/{name}.jpg").rename(tmp_path / f"photos/{split}/{name}.jpg")
    splits = read(tmp_path)
    assert list(exports.boxes_of(splits)) == ["photos/train/a.jpg", "photos/train/b.jpg"]
    assert list(exports.boxes_of(splits, "val")) == ["photos/val/c.jpg"]


def test_no_image_is_found(tmp_path: Path) -> None:
    voc(tmp_path, dict.fromkeys("abc", xml(thing("cat", 2, 2, 9, 9))))
    for path in (tmp_path / "JPEGImages").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=rf"\b3\b.*{tmp_path}"):
        read(tmp_path)


def test_a_copy_of_the_labels_is_left_out(tmp_path: Path) -> None:
    voc(tmp_path, {"a": xml(thing("cat", 2, 2, 9, 9))})
    (tmp_path / "old/Annotations").mkdir(parents=True)
    (tmp_path / "old/Annotations/a.xml").write_text(xml(thing("dog", 2, 2, 9, 9)))
    splits = read(tmp_path)
    assert exports.boxes_of(splits) == {"JPEGImages/a.jpg": [("cat", [1, 1, 8, 8], False)]}
    assert "old/Annotations/a.xml" in splits["train"].notes[0]


@pytest.mark.parametrize("first", [0, 0.5, -2])
def test_pixels_that_count_from_zero(tmp_path: Path, first: float) -> None:
    """One box shows how the tool counts in all files."""
    voc(tmp_path, {"a": xml(thing("cat", 5, 5, 9, 9)), "b": xml(thing("cat", 3, first, 9, 9))})
    splits = read(tmp_path)
    assert exports.boxes_of(splits) == {
        "JPEGImages/a.jpg": [("cat", [5, 5, 4, 4], False)],
        "JPEGImages/b.jpg": [("cat", [3, first, 6, 9 - first], False)],
    }
    (note,) = splits["train"].notes
    assert "from 0" in note
    assert "b.xml" in note


def test_labelme_of_mit_is_named(tmp_path: Path) -> None:
    polygon = "<polygon><username>me</username><pt><x>1</x><y>2</y></pt></polygon>"
    thing_of_labelme = f"<object><name>cat</name><deleted>0</deleted>{polygon}</object>"
    voc(tmp_path, {"a": xml(thing_of_labelme, size=None)})
    with pytest.raises(DataError, match=r"a\.xml.*LabelMe"):
        find(tmp_path)[1].read(tmp_path)
