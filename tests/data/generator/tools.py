"""Write a world by other programs: globox and supervision, as each writes a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from data.generator.worlds import Layout, Tree, World
from data.generator.writers import corners

_PLAIN = Layout(views="unturned", splits=("train",), folders=False, decoys=False, missing=False)


def globox(world: World, tree: Tree, *, save: Callable[[Any, Tree, dict[str, int]], None]) -> None:
    from globox import Annotation, AnnotationSet, BoundingBox

    numbers = {name: n for n, name in enumerate(world.classes)}
    annotations = AnnotationSet()
    for picture in world.pictures:
        tree.image(f"images/{picture.name}", picture)
        boxes = [
            BoundingBox(label=thing.name, xmin=left, ymin=top, xmax=right, ymax=bottom)
            for thing in picture.things
            for left, top, right, bottom in [corners(thing)]
        ]
        annotations.add(Annotation(picture.name, (picture.width, picture.height), boxes))
    save(annotations, tree, numbers)


def _globox_yolo(annotations: Any, tree: Tree, numbers: dict[str, int]) -> None:
    annotations.save_yolo_v5(tree.root / "labels", label_to_id=numbers)
    tree.write("classes.txt", "\n".join(numbers) + "\n")


def supervision(
    world: World, tree: Tree, *, save: Callable[[Any, Tree], None], images: str = "images"
) -> None:
    import numpy as np
    from supervision import DetectionDataset, Detections

    found = {}
    for picture in world.pictures:
        path = tree.root / tree.image(f"{images}/{picture.name}", picture)
        numbers = [world.classes.index(thing.name) for thing in picture.things]
        boxes = np.array([corners(thing) for thing in picture.things], float).reshape(-1, 4)
        found[str(path)] = Detections(xyxy=boxes, class_id=np.array(numbers, int))
    save(DetectionDataset(list(world.classes), list(found), found), tree)


PIXEL = 1.01  # these writers do not count VOC's pixels from 1, or round to whole pixels
TOOLS: Mapping[str, tuple[Layout, Callable[[World, Tree], None]]] = {
    "globox: coco": (
        _PLAIN, partial(globox, save=lambda a, tree, _: a.save_coco(tree.root / "result.json", auto_ids=True))
    ),
    "globox: voc": (
        _PLAIN._replace(tolerance=PIXEL), partial(globox, save=lambda a, tree, _: a.save_pascal_voc(tree.root / "Annotations"))
    ),
    "globox: cvat": (
        _PLAIN, partial(globox, save=lambda a, tree, _: a.save_cvat(tree.root / "annotations.xml"))
    ),
    "globox: openimages": (
        _PLAIN._replace(shun=",", empties=False),
        partial(globox, save=lambda a, tree, _: a.save_openimage(tree.root / "train-annotations-bbox.csv")),
    ),
    "globox: labelme": (
        _PLAIN, partial(globox, save=lambda a, tree, _: a.save_labelme(tree.root / "images"))
    ),
    "globox: via": (
        _PLAIN,
        partial(globox, save=lambda a, tree, _: a.save_via_json(
            tree.root / "images/via.json", image_folder=tree.root / "images")),
    ),
    "globox: yolo": (_PLAIN._replace(classes="all"), partial(globox, save=_globox_yolo)),
    "supervision: coco": (
        _PLAIN._replace(classes="all"),
        partial(supervision, save=lambda d, tree: d.as_coco(annotations_path=str(tree.root / "result.json"))),
    ),
    "supervision: voc": (
        _PLAIN._replace(tolerance=PIXEL),
        partial(supervision, save=lambda d, tree: d.as_pascal_voc(
            annotations_directory_path=str(tree.root / "Annotations"))),
    ),
    "supervision: yolo": (
        _PLAIN._replace(classes="all"),
        partial(supervision, images="train/images", save=lambda d, tree: d.as_yolo(
            annotations_directory_path=str(tree.root / "train/labels"),
            data_yaml_path=str(tree.root / "data.yaml"))),
    ),
    "supervision: labelme": (
        _PLAIN,
        partial(supervision, save=lambda d, tree: d.as_labelme(
            annotations_directory_path=str(tree.root / "images"))),
    ),
    "supervision: createml": (
        _PLAIN,
        partial(supervision, save=lambda d, tree: d.as_createml(
            annotations_path=str(tree.root / "images/_annotations.createml.json"))),
    ),
}  # fmt: skip
