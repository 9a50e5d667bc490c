"""Write a world in each format, from the format's own specification.

Every function writes one layout of one format, in the variants that `world.flags` names; LAYOUTS
says what each can express. Nothing here reads how ssdctl reads.
"""

import csv
import io
import json
import math
import posixpath
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any
from unicodedata import normalize
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

import yaml
from data.generator.worlds import STRAY, Layout, Picture, Thing, Tree, World, blank, paint

Write = Callable[[World, Tree], None]
OTHER_FILES: dict[str, str | bytes] = {  # of other programs
    "deploy.yaml": "a: 1\n---\nb: 2\n",
    ".ci.yml": "a: {{ x }}\n\tb: 1\n",
    "compose.yml": b"# Gr\xf6\xdfe\na: 1\n",
    "tasks.yml": "a: 1\na: 2\n",
    "notes on training.txt": b"Gr\xf6\xdfe\n",
    "notes on tests.txt": "Maße".encode("utf-16"),
}
METADATA = b"\0\5\x16\7\0\2\0\0Mac OS X\xb0"
WORDS = {"train": "train", "val": "valid", "test": "test"}  # Roboflow's
SIDES = ("xmin", "ymin", "xmax", "ymax")


def named(template: str, split: str, folder: str = "") -> str:
    """Return a path of a split; `{below}` is no folder for images to train on."""
    below = "" if split == "train" else split
    return template.format(split=split, word=WORDS[split], below=below, folder=folder)


def placed(template: str, split: str, picture: Picture, suffix: str) -> str:
    """Return the path of a picture's file of images or labels, by the path of its folder.

    `{folder}` is the picture's own folder, which is the innermost one without it.
    """
    own = "" if "{folder}" in template else picture.folder
    folder = named(template, split, picture.folder)
    return posixpath.normpath(f"./{folder}/{own}/{picture.stem}{suffix}")


def corners(thing: Thing) -> tuple[float, float, float, float]:
    return thing.left, thing.top, thing.left + thing.width, thing.top + thing.height


def table(rows: Iterable[Iterable[object]], **options: object) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n", **options).writerows(rows)
    return buffer.getvalue()


# COCO: https://cocodataset.org/#format-data


def has_other_categories(world: World) -> bool:
    """Return whether splits list other categories; only COCO's files can."""
    is_possible = len(world.splits) > 1 < len(world.classes) and world.layout.startswith("coco")
    return is_possible and "other categories" in world.options


def coco(world: World, tree: Tree, images: str, labels: str, toml: str = "") -> None:
    """`images` is the folder of a split's images, `labels` its file; file names are relative."""
    text = ""
    ids = {name: 3 * n + 1 for n, name in enumerate(world.classes)}
    bare = [] if world.decoys else [p.stem for p in world.pictures if not p.is_missing]
    is_url = "label studio" in world.flags
    is_bare = "bare names" in world.flags and len({*bare}) == len(world.pictures)
    more = range(25) if is_bare and tree.is_blank else ()
    others = [world.pictures[0]._replace(folder="", stem=f"more {n}", things=()) for n in more]
    for split in world.splits:
        folder, file = named(images, split).rstrip("/"), named(labels, split)
        entries, boxes = [], []
        for n, picture in enumerate([*others, *world.of(split)], 7):
            place = "photos" if others and picture not in others else folder
            path = tree.image(f"{place}/{picture.name}".lstrip("/"), picture)
            name, dot = posixpath.basename(path) if is_bare else picture.name, "./"
            if "from the root" in world.flags:
                name = path
            if "other machine" in world.flags:
                name, dot = f"/home/me/set/{name}", ""
            if "dot" in world.flags and n % 2:
                name = dot + name
            if "backslashes" in world.flags:
                name = name.replace("/", "\\")
            if is_url:
                name = f"/data/local-files/?d={quote(path)}"
            size = {"width": picture.width, "height": picture.height}
            entries.append({"id": n, "file_name": name, **size})
            # A merged dataset has an entry for each object of an image.
            if "listed twice" in world.flags and len(picture.things) > 1:
                is_path = folder == "images" and "other machine" not in world.flags
                is_path &= not is_bare and STRAY not in world.decoys  # which the short name means
                again = path if is_path else dot + name
                entries.append({"id": n + 500, "file_name": again, **(size if n % 2 else {})})
            for k, thing in enumerate(picture.things):
                is_turned = "turned" in world.flags and k % 2 == 0
                box = before_a_turn(thing) if is_turned else thing
                left, top, right, bottom = corners(box)
                polygon = [] if is_turned else [[left, top, right, top, right, bottom]]
                turn = 270.0 * ("turned" in world.flags)  # of a polygon it means nothing
                boxes.append(
                    {
                        "id": len(boxes) + 1,
                        "image_id": n + 500 * (k > 0 and "listed twice" in world.flags),
                        "category_id": ids[thing.name],
                        "bbox": [box.left, box.top, box.width, box.height],
                        "attributes": {"occluded": False, "rotation": turn},
                        "area": thing.width * thing.height,
                        "iscrowd": int(thing.is_crowd),
                        "segmentation": polygon,
                    }
                )
        categories = [{"id": i, "name": name, "supercategory": "none"} for name, i in ids.items()]
        if has_other_categories(world) and split != "train":
            categories.reverse()
        content = {"images": entries, "annotations": boxes, "categories": categories}
        tree.write(file, json.dumps(content))
        text += (
            f"[{split}]\nimages = {json.dumps(folder or '.')}\nannotations = {json.dumps(file)}\n"
        )
    if toml:
        tree.write(toml, text)
    if "data is the file" in world.flags:
        tree.data = tree.root / (toml or labels)


# YOLO: https://docs.ultralytics.com/datasets/detect, https://github.com/AlexeyAB/darknet


def yolo_label(picture: Picture, world: World) -> str:
    lines = []
    for thing in picture.things:
        left, top, right, bottom = corners(thing)
        x, y = (left + right) / 2, (top + bottom) / 2
        values = [x, top, right, y, x, bottom, left, y]
        if "polygons" not in world.flags:
            values = [x, y, thing.width, thing.height]
        sides = (picture.width, picture.height)
        fractions = " ".join(f"{v / sides[n % 2]:.7f}" for n, v in enumerate(values))
        lines.append(f"{world.classes.index(thing.name)} {fractions}\n")
    return "".join(lines)


def yolo(world: World, tree: Tree, images: str, labels: str, names: str, lists: str = "") -> None:
    """`names` is the file of class names: a data.yaml, or a line for each."""
    content: dict[str, object] = {}
    for split in world.splits:
        folder, paths = named(images, split), []
        for picture in world.of(split):
            path = tree.image(placed(images, split, picture, picture.suffix), picture)
            paths.append(f"/home/me/set/{path}" if "other machine" in world.flags else f"./{path}")
            if picture.things or "no empty files" not in world.flags:
                tree.write(placed(labels, split, picture, ".txt"), yolo_label(picture, world))
        content[split] = folder or "."
        if "stale" in world.flags and "no empty files" not in world.flags:
            content[split] = f"../{WORDS[split]}/images"
        elif "other machine" in world.flags:
            content[split] = f"/home/me/parts/{folder}"
        elif "above" in world.flags:
            content[split] = f"../{folder.replace('val/', 'valid/')}"
        if lists:
            content[split] = named(lists, split)
            tree.write(named(lists, split), "\n".join(paths) + "\n")
    if not names.endswith(".yaml"):
        for split in world.splits:
            tree.write(named(names, split), "\n".join(world.classes) + "\n")
        if lists:
            lines = [f"{'valid' if k == 'val' else k} = {v}\n" for k, v in content.items()]
            lines += [f"names = {names}\n", "backup = backup/\n"]
            tree.write("obj.data", f"classes = {len(world.classes)}\n{''.join(lines)}")
            tree.data = tree.root / "obj.data" if "data is the file" in world.flags else tree.root
        return
    content["names"] = list(world.classes)
    if "table of names" in world.flags:
        content |= {"path": ".", "names": dict(enumerate(world.classes))}
    tree.write(names, yaml.safe_dump(content, allow_unicode=True, sort_keys=False))
    if "data is the file" in world.flags:
        tree.data = tree.root / names


# Pascal VOC: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html


def before_a_turn(thing: Thing) -> Thing:
    """Return an object whose box is the same after a quarter of a turn, as CVAT writes it."""
    x, y = thing.left + thing.width / 2, thing.top + thing.height / 2
    size = {"width": thing.height, "height": thing.width}
    return thing._replace(left=x - thing.height / 2, top=y - thing.width / 2, **size)


def voc_xml(picture: Picture, folder: str, world: World) -> str:
    objects = ""
    for thing in picture.things:
        is_turned = "turned" in world.flags
        left, top, right, bottom = corners(before_a_turn(thing) if is_turned else thing)
        turn = "<attribute><name>rotation</name><value>90.0</value></attribute>" * is_turned
        # Pixels count from 1, and the last one belongs to the box.
        values = zip(SIDES, (left + 1, top + 1, right, bottom), strict=True)
        box = "".join(f"<{side}>{value:g}</{side}>" for side, value in values)
        objects += (
            f"<object><name>{escape(thing.name)}</name><pose>Unspecified</pose>"
            f"<difficult>{thing.is_crowd if is_turned else int(thing.is_crowd)}</difficult><bndbox>{box}</bndbox>"
            f"<attributes>{turn}</attributes>"
            "<part><name>head</name><bndbox><xmin>3</xmin></bndbox></part></object>"
        )
    file = f"{picture.stem}{picture.suffix}"
    named = "" if "no folder" in world.flags else f"<folder>{escape(folder)}</folder>"
    if "no filename" not in world.flags:
        named += f"<filename>{escape(file)}</filename>"
    top = '<annotation xmlns="http://x.org/voc">' if "namespace" in world.flags else "<annotation>"
    top = f'<?xml version="1.0" encoding="GB2312"?>\n{top}' if "gbk" in world.flags else top
    return (
        f"{top}{named}<size><width>{picture.width}</width><height>{picture.height}</height>"
        f"<depth>3</depth></size><segmented>0</segmented>{objects}</annotation>"
    )


def voc(world: World, tree: Tree, images: str, labels: str, lists: str = "") -> None:
    suffix, whole = ".XML" if "upper case" in world.flags else ".xml", list[str]()
    for split in world.splits:
        stems = []
        for picture in world.of(split):
            path = tree.image(placed(images, split, picture, picture.suffix), picture)
            label = placed(labels, split, picture, suffix)
            names = {"paths": path, "pairs": f"{path} {label}"}
            stem = f"{picture.folder}/{picture.stem}".lstrip("/")
            stems.append(next((names[flag] for flag in names if flag in world.flags), stem))
            if picture.things or not (lists and "no empty files" in world.flags):
                folder = posixpath.dirname(path).rpartition("/")[2]
                content = voc_xml(picture, folder, world)
                is_gbk = "gbk" in world.flags
                tree.write(label, content.encode("gb18030") if is_gbk else content)
            if "foreign files" in world.flags:  # of GDAL
                tree.write(f"{label.rpartition('.')[0]}.0.aux.xml", "<PAMDataset/>")
        if lists:
            tree.write(f"{lists}/{split}.txt", "".join(f"{stem}\n" for stem in stems))
            whole += stems
    if len(world.splits) > 1 and lists:
        tree.write(f"{lists}/trainval.txt", "\n".join(whole))


# CVAT for images 1.1: https://docs.cvat.ai/docs/manual/advanced/xml_format


def cvat_shape(n: int, thing: Thing, world: World) -> str:
    """Return a shape whose extent is the box; of four of a kind, the first and last are turned."""
    left, top, right, bottom = corners(thing)
    x, y, rx, ry = (left + right) / 2, (top + bottom) / 2, thing.width / 2, thing.height / 2
    head = f'label={quoteattr(thing.name)} source="manual" occluded="0" z_order="0"'
    kinds = [kind for kind in ("ellipses", "polygons") if kind in world.flags] or ["boxes"]
    kind, is_turned = kinds[n % len(kinds)], n % 4 in (0, 3)
    if kind == "polygons":
        points = f"{x:.3f},{top:.3f};{right:.3f},{y:.3f};{x:.3f},{bottom:.3f};{left:.3f},{y:.3f}"
        return f'<polygon {head} points="{points}"></polygon>'
    if kind == "ellipses" and not is_turned:
        return f'<ellipse {head} cx="{x}" cy="{y}" rx="{rx}" ry="{ry}"></ellipse>'
    if kind == "ellipses":  # turned by 10 degrees, and as wide and high as the box
        cosine, sine = math.cos(math.radians(10)) ** 2, math.sin(math.radians(10)) ** 2
        first, second = (
            math.sqrt((cosine * a * a - sine * b * b) / (cosine - sine))
            for a, b in ((rx, ry), (ry, rx))
        )
        radii = f'rx="{first:.6f}" ry="{second:.6f}"'
        return f'<ellipse {head} cx="{x}" cy="{y}" {radii} rotation="10.0"></ellipse>'
    if is_turned:
        left, top, right, bottom = x - ry, y - rx, x + ry, y + rx
        head += ' rotation="270.0"'
    return f'<box {head} xtl="{left}" ytl="{top}" xbr="{right}" ybr="{bottom}"></box>'


def cvat_xml(world: World, tree: Tree) -> None:
    images = []
    for n, picture in enumerate(world.pictures):
        folder = f"images/{picture.split}" if len(world.splits) > 1 else "images"
        tree.image(f"{folder}/{picture.name}", picture)
        shapes = "".join(cvat_shape(n, t, world) for n, t in enumerate(picture.things))
        subset = f' subset="{picture.split}"' if len(world.splits) > 1 else ""
        images.append(
            f"<image id={quoteattr(str(n))} name={quoteattr(picture.name)}{subset} "
            f'width="{picture.width}" height="{picture.height}">{shapes}<tag label="t"/></image>'
        )
    labels = "".join(f"<label><name>{escape(name)}</name></label>" for name in world.classes)
    labels += "<label><name>nose</name><parent>person</parent></label>"  # a point of a skeleton
    tree.write(
        "annotations.xml",
        '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version><meta><job>'
        f"<labels>{labels}</labels></job></meta>{''.join(images)}</annotations>",
    )
    if "data is the file" in world.flags:
        tree.data = tree.root / "annotations.xml"


# Open Images: https://storage.googleapis.com/openimages/web/download_v7.html


def csv_table(world: World, rows: Iterable[Iterable[object]]) -> str:
    """Return a CSV file, as some programs and Excel's languages write it."""
    quoting = csv.QUOTE_ALL if "quoted" in world.flags else csv.QUOTE_MINIMAL
    return table(rows, quoting=quoting, delimiter=";" if "semicolons" in world.flags else ",")


def openimages(world: World, tree: Tree) -> None:
    header = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsGroupOf"
    mids = {name: f"/{'m' if n else 'g'}/0{n}" for n, name in enumerate(world.classes)}
    for split in world.splits:
        word = {"val": "validation"}.get(split, split)
        rows: list[Iterable[object]] = [header.split(",")]
        for picture in world.of(split):
            tree.image(f"{word}/{picture.name}", picture)
            image_id = picture.name.removesuffix("" if "suffixes" in world.flags else ".jpg")
            for thing in picture.things:
                left, top, right, bottom = corners(thing)
                x = (f"{v / picture.width:.8f}" for v in (left, right))
                y = (f"{v / picture.height:.8f}" for v in (top, bottom))
                group = int(thing.is_crowd)
                rows.append([image_id, "x", mids[thing.name], 1, *x, *y, 0, group])
        tree.write(f"{word}-annotations-bbox.csv", csv_table(world, rows))
    rows = [(mid, name) for name, mid in mids.items()]
    tree.write("class-descriptions-boxable.csv", csv_table(world, rows))


# KITTI: the development kit of the object detection benchmark


def kitti(world: World, tree: Tree, folder: str) -> None:
    for split in world.splits:
        base = named(folder, split)
        for picture in world.of(split):
            tree.image(f"{base}/image_2/{picture.name}", picture)
            lines = "DontCare -1 -1 -10 3.00 3.00 9.50 9.50 -1 -1 -1 -1000 -1000 -1000 -10\n"
            for thing in picture.things:
                box = " ".join(f"{value:.2f}" for value in corners(thing))
                score = " 0.97" if "scores" in world.flags else ""
                lines += (
                    f"{thing.name} 0.00 0 -1.58 {box} 1.65 1.67 3.64 -0.65 1.71 46.7 -1.59{score}\n"
                )
            stem = f"{picture.folder}/{picture.stem}".lstrip("/")
            tree.write(f"{base}/label_2/{stem}.txt", lines)


# TensorFlow's tutorials: xml_to_csv.py; Roboflow's "Tensorflow Object Detection"


def tf_csv(world: World, tree: Tree, images: str, labels: str) -> None:
    header = ["filename", "width", "height", "class", *SIDES]
    everything: list[Iterable[object]] = [header]
    for split in world.splits:
        rows: list[Iterable[object]] = [header]
        for picture in world.of(split):
            path = tree.image(placed(images, split, picture, picture.suffix), picture)
            name = path if "from the root" in world.flags else picture.name
            if "other machine" in world.flags:
                name = f"C:\\me\\{path}".replace("/", "\\")
            size = (picture.width, picture.height)
            boxes = [(thing.name, *corners(thing)) for thing in picture.things]
            rows += [(name, *size, *box) for box in boxes or [[""] * 5]]
        tree.write(named(labels, split), csv_table(world, rows))
        everything += rows[1:]
    names = [picture.name for picture in world.pictures]
    if "all" in world.flags and len(world.splits) > 1 and len({*names}) == len(names):
        tree.write(labels.format(split="all"), csv_table(world, everything))


# keras-retinanet's CSV files: https://github.com/fizyr/keras-retinanet#csv-datasets


def retinanet_csv(world: World, tree: Tree, images: str, labels: str) -> None:
    for split in world.splits:
        rows: list[Iterable[object]] = []
        if "header" in world.flags:
            rows.append(("path", "x1", "y1", "x2", "y2", "class"))
        if "reversed" in world.flags:
            rows = [("image", *SIDES, "label")]  # VoTT's words
        for picture in world.of(split):
            path = tree.image(placed(images, split, picture, picture.suffix), picture)
            name = path if "from the root" in world.flags else picture.name
            rows += [(name, *corners(thing), thing.name) for thing in picture.things]
            if not picture.things:
                rows.append((name, "", "", "", "", ""))
        if "reversed" in world.flags:
            rows = [row[::-1] for row in map(tuple, rows)]
        tree.write(named(labels, split), csv_table(world, rows))
        names = [(name, n) for n, name in enumerate(world.classes)]
        file = posixpath.join(posixpath.dirname(named(labels, split)), "classes.csv")
        tree.write(file, csv_table(world, names))


# VGG Image Annotator: https://www.robots.ox.ac.uk/~vgg/software/via/docs/face_track_annotation.html


def via_json(world: World, tree: Tree) -> None:
    for split in world.splits:
        entries = {}
        for picture in world.of(split):
            file = tree.root / normalize(tree.form, tree.image(f"{split}/{picture.name}", picture))
            regions: list[object] = []
            for thing in picture.things:
                left, top, right, bottom = corners(thing)
                shape = {"name": "rect", "x": left, "y": top}
                shape |= {"width": thing.width, "height": thing.height}
                if "polygons" in world.flags:
                    xs, ys = [left, right, right, left], [top, top, bottom, bottom]
                    shape = {"name": "polygon", "all_points_x": xs, "all_points_y": ys}
                number = str(world.classes.index(thing.name))
                attributes = {"name": number if "options" in world.flags else thing.name}
                regions.append({"shape_attributes": shape, "region_attributes": attributes})
            size = file.stat().st_size if file.is_file() else 0
            entry = {"filename": picture.name, "size": size, "file_attributes": {}}
            numbered = {str(n): region for n, region in enumerate(regions)}  # version 1
            entry["regions"] = numbered if "version 1" in world.flags else regions
            entries[f"{picture.name}{size}"] = entry
        menu = {"type": "radio", "options": {str(n): name for n, name in enumerate(world.classes)}}
        content = {"_via_settings": {}, "_via_img_metadata": entries}
        content["_via_attributes"] = {"region": {"name": menu}} if "options" in world.flags else {}
        project = {"project", "options"} & world.flags
        tree.write(f"{split}/via_region_data.json", json.dumps(content if project else entries))


# LabelMe: https://github.com/wkentaro/labelme


def labelme_json(world: World, tree: Tree, images: str, labels: str) -> None:
    for split in world.splits:
        for picture in world.of(split):
            path = tree.image(placed(images, split, picture, picture.suffix), picture)
            shapes = []
            for thing in picture.things:
                left, top, right, bottom = corners(thing)
                shape = {"label": thing.name, "difficult": thing.is_crowd, "flags": {}}
                points = [[right, bottom], [left, top]]  # drawn from any corner
                if "polygons" in world.flags:
                    points = [[left, top], [right, top], [(left + right) / 2, bottom]]
                kind = "polygon" if "polygons" in world.flags else "rectangle"
                if "turned" in world.flags:
                    kind, (x, y) = "oriented_rectangle", ((left + right) / 2, (top + bottom) / 2)
                    points = [[x, top], [right, y], [x, bottom], [left, y]]
                shapes.append({**shape, "points": points, "shape_type": kind})
            label = placed(labels, split, picture, ".json")
            name = posixpath.relpath(path, posixpath.dirname(label) or ".")
            much = "A" * 70_000 * ("large" in world.flags)  # before the path, and after it
            content = {"version": "5.4.1", "flags": {much: True}, "shapes": shapes}
            content["imagePath"] = name.replace("/", "\\") if "backslashes" in world.flags else name
            size = {"imageData": much, "imageHeight": picture.height, "imageWidth": picture.width}
            tree.write(label, json.dumps({**content, **size}, ensure_ascii=False))


# Create ML: https://developer.apple.com/documentation/createml/building-an-object-detector-data-source


def createml_json(world: World, tree: Tree) -> None:
    for split in world.splits:
        word, entries = WORDS[split], []
        for picture in world.of(split):
            tree.image(f"{word}/{picture.name}", picture)
            boxes = []
            for thing in picture.things:
                left, top, right, bottom = corners(thing)
                center = {"x": (left + right) / 2, "y": (top + bottom) / 2}
                size = {"width": thing.width, "height": thing.height}
                boxes.append({"label": thing.name, "coordinates": {**center, **size}})
            key = "imagefilename" if "old keys" in world.flags else "image"
            many = "annotation" if "old keys" in world.flags else "annotations"
            entries.append({key: picture.name, many: boxes})
        tree.write(f"{word}/_annotations.createml.json", json.dumps(entries))


def _with(layout: Layout, *flags: str, **more: object) -> Layout:
    return layout._replace(flags=(*layout.flags, *flags), **more)


_ONE = ("train",)
_COCO_FLAGS = ("from the root", "other machine", "dot", "backslashes", "label studio")
_COCO = Layout((*_COCO_FLAGS, "listed twice", "turned"), crowds=True, classes="all")
_COCO_TOML = _COCO._replace(flags=("listed twice", "data is the file"))
_COCO_1 = _COCO._replace(splits=_ONE)
_YOLO = Layout(("no empty files", "polygons", "table of names"), "upright", shun='"', classes="all")
_ULTRALYTICS = _with(_YOLO, "stale", "other machine", "data is the file", named=False)
_ROBOFLOW = _with(_YOLO, "above", named=False)
_YOLO_LISTS = _with(_YOLO, "other machine", shared=True)
_DARKNET = _YOLO._replace(flags=("no empty files", "data is the file"), shared=True)
_YOLO_WORDS = _YOLO._replace(flags=("polygons",), named=False)
_YOLO_1 = _YOLO_WORDS._replace(splits=_ONE)
_VOC = Layout(
    ("no folder", "no filename", "upper case", "foreign files", "namespace", "turned", "gbk"),
    crowds=True,
)
_VOC_LISTS = _with(_VOC, "no empty files", "paths", "pairs", shared=True)
_VOC_1 = _VOC._replace(splits=_ONE, folders=False)
_VOC_WORDS = _VOC._replace(named=False, splits=_ONE)
_VOC_FLAT = _VOC._replace(named=False, folders=False)
_CSV = Layout(("quoted", "semicolons", "all", "other machine"))
_CSV_FLAT = _CSV._replace(flags=("quoted", "semicolons"), folders=False)
_RETINANET = Layout(("semicolons", "header", "reversed"), "unturned", classes="all")
_KITTI = Layout(("scores",), "stored", named=False)
_OPEN_IMAGES = Layout(("quoted", "semicolons", "suffixes"), "upright", named=False, crowds=True)
_LABELME = Layout(
    ("polygons", "large", "turned"), named=False, views="either, else upright", crowds=True
)


_FORMATS = (coco, yolo, voc, cvat_xml, openimages, kitti, tf_csv, retinanet_csv, via_json)
WRITERS = {w.__name__.replace("_", "-"): w for w in (*_FORMATS, labelme_json, createml_json)}
# By a writer's name: what a layout can express, and the paths that its writer takes.
_PLACES: Mapping[str, tuple[Any, ...]] = {
    "coco: 2017": (_COCO, "{split}2017", "annotations/instances_{split}2017.json"),
    "coco: roboflow": (_COCO, "{word}", "{word}/_annotations.coco.json"),
    "coco: images": (_COCO, "images/{split}", "annotations/instances_{split}.json"),
    "coco: below": (_with(_COCO, named=False, empties=False), "images/{below}", "{split}.json"),
    "coco: elsewhere": (_with(_COCO_1, decoys=False), "my photos", "labels.json"),
    "coco: flat": (_with(_COCO_1, "bare names", "data is the file"), "images", "result.json"),
    "coco: beside": (_with(_COCO_1, decoys=False), "", "labels.json"),
    "coco: toml": (_COCO_TOML, "{split} prepared", "j/{split}.json", "dataset.toml"),
    "yolo: ultralytics": (_ULTRALYTICS, "images/{split}", "labels/{split}", "data.yaml"),
    "yolo: roboflow": (_ROBOFLOW, "{split}/images", "{split}/labels", "data.yaml"),
    "yolo: lists": (_YOLO_LISTS, "images", "labels", "data.yaml", "{split}.txt"),
    "yolo: folders": (_YOLO_1, "{folder}/images", "{folder}/labels", "classes.txt"),
    "yolo: labelImg": (_YOLO_1, "images", "images", "classes.txt"),
    "yolo: beside": (_YOLO_1, "annotations", "annotations", "classes.txt"),
    "yolo: img": (_with(_YOLO_1, decoys=False), "img", "labels", "classes.txt"),
    "yolo: here": (_with(_YOLO, splits=_ONE, decoys=False), "", "", "data.yaml"),
    "yolo: classes of splits": (
        *(_YOLO_WORDS, "{split}/images", "{split}/labels", "{split}/labels/classes.txt"),
    ),
    "yolo: darknet": (_DARKNET, "data/obj", "data/obj", "data/obj.names", "data/{split}.txt"),
    "voc: lists": (_VOC_LISTS, "JPEGImages", "Annotations", "ImageSets/Main"),
    "voc: labelme2voc": (_VOC_1, "JPEGImages", "Annotations"),
    "voc: pet": (_VOC_1, "images", "annotations/xmls"),
    "voc: odd": (_VOC_1, "b pictures", "c boxes"),
    "voc: folders": (_VOC_WORDS, "{folder}/JPEGImages", "{folder}/Annotations"),
    "voc: videos": (
        _VOC_WORDS._replace(decoys=False),
        *("videos/{folder}/frames", "videos/{folder}/annots"),
    ),
    "voc: beside": (_VOC_FLAT, "{word}", "{word}"),
    "voc: demo": (_VOC_FLAT, "training_demo/images/{word}", "training_demo/images/{word}"),
    "voc: mirrored": (_with(_VOC, named=False), "images/{split}", "annotations/{split}"),
    "cvat-xml": (Layout(("polygons", "ellipses", "data is the file"), classes="all"),),
    "openimages": (_OPEN_IMAGES._replace(suffixes=(".jpg",)),),
    "kitti": (_KITTI, "{split}"),
    "kitti: training": (_with(_KITTI, splits=_ONE), "training"),
    "tf-csv: data": (_CSV, "images/{split}", "data/{split}_labels.csv"),
    "tf-csv: below": (_with(_CSV, named=False), "images/{below}", "data/{split}_labels.csv"),
    "tf-csv: flat": (_with(_CSV, splits=_ONE), "images", "data/{split}_labels.csv"),
    "tf-csv: roboflow": (_CSV_FLAT, "{word}", "{word}/_annotations.csv"),
    "retinanet-csv": (_with(_RETINANET, "from the root"), "{split}", "{split}.csv"),
    "retinanet-csv: roboflow": (_RETINANET, "{word}", "{word}/_annotations.csv"),
    "via-json": (Layout(("polygons", "version 1", "project", "options"), "unturned"),),
    "labelme-json": (_with(_LABELME, "backslashes"), "{split}", "{split}"),
    "labelme-json: apart": (_LABELME, "images/{split}", "labels/{split}"),
    "createml-json": (Layout(("old keys",), "unturned"),),
}


def _writer(name: str, *places: str) -> Write:
    return lambda world, tree: WRITERS[name.partition(":")[0]](world, tree, *places)


LAYOUTS: Mapping[str, tuple[Layout, Write]] = {
    name: (layout, _writer(name, *places)) for name, (layout, *places) in _PLACES.items()
}


def add_decoys(world: World, tree: Tree) -> None:
    """Write images that no label means, although their names are those of images of the dataset."""
    images = dict(tree.images)
    many = [path for path, picture in images.items() if len(world.of(picture.split)) > 2]
    for folder in world.decoys:
        for path, picture in images.items():
            top, _, below = path.rpartition("images/") if "demo" in world.layout else ("", "", path)
            place = f"{top}{folder}/{below.partition('/')[2] or below}"
            if folder == STRAY:  # a copy of one image, in the folder above
                above = f"{top}{below.partition('/')[2]}"
                is_own = any(posixpath.dirname(above) == posixpath.dirname(p) for p in images)
                place = above if [path] == many[:1] and not is_own else path
            for suffix in {picture.suffix, ".png"} if place != path else ():
                _decoy(world, tree, picture, f"{place.removesuffix(picture.suffix)}{suffix}")
    # An image of another folder is not the missing one, if the others are where their paths say.
    for path, picture in images.items() if world.layout[:4] not in ("yolo", "open") else ():
        if picture.is_missing and path.endswith(f"/{picture.name}"):
            siblings = (p for p in world.of(picture.split) if p.folder and not p.is_missing)
            own = picture.folder or ("" if world.layout.startswith("voc") else "no folder")
            for folder in {p.folder for p in siblings if not p.folder.endswith(own)}:
                lead = path.removesuffix(picture.name)
                _decoy(world, tree, picture, f"{lead}{folder}/{picture.stem}{picture.suffix}")


def add_other_files(world: World, tree: Tree) -> None:
    """Write files that are none of the dataset's, and the metadata that macOS writes beside each."""
    if "other files" in world.options:
        for name, content in OTHER_FILES.items():
            tree.write(name, content)
        if "yolo" not in world.layout:
            tree.write("backup.data", "names = backup.names\n")
        for file in [path.relative_to(tree.root) for path in tree.files]:
            for folder in (".", "__MACOSX"):
                tree.write(f"{folder}/{file.with_name(f'._{file.name}')}", METADATA)


def _decoy(world: World, tree: Tree, picture: Picture, path: str) -> None:
    if path in tree.images:
        return
    decoy = picture._replace(suffix=PurePosixPath(path).suffix, mode="RGB", turn=1)
    size = decoy[4] // 2, decoy[5] // 2
    drawn = blank(*size) if world.small_decoys else blank(*decoy[4:6])
    if not tree.is_blank:
        drawn = paint(decoy, is_decoy=True, is_small=world.small_decoys)
    tree.write(path, drawn)
