"""Write a world by other programs: globox and supervision, as each writes a format."""

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


def _globox_via(annotations: Any, tree: Tree, _: dict[str, int]) -> None:
    folder = tree.root / "images"
    annotations.save_via_json(folder / "via.json", image_folder=folder)


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


def _globox(layout: Layout, name: str, path: str, **options: object) -> tuple[Layout, Any]:
    def save(annotations: Any, tree: Tree, _: dict[str, int]) -> None:
        getattr(annotations, f"save_{name}")(tree.root / path, **options)

    return layout, partial(globox, save=save)


def _supervision(layout: Layout, name: str, **paths: str) -> tuple[Layout, Any]:
    def save(dataset: Any, tree: Tree) -> None:
        given = {f"{key}_path": str(tree.root / path) for key, path in paths.items()}
        getattr(dataset, f"as_{name}")(**given)

    images = "train/images" if name == "yolo" else "images"
    return layout, partial(supervision, save=save, images=images)


# These writers do not count VOC's pixels from 1, or round to whole pixels.
_ROUNDED = _PLAIN._replace(tolerance=1.01)
_ALL = _PLAIN._replace(classes="all")
_BOXES = _PLAIN._replace(shun=",", empties=False)
TOOLS: Mapping[str, tuple[Layout, Callable[[World, Tree], None]]] = {
    "globox: coco": _globox(_PLAIN, "coco", "result.json", auto_ids=True),
    "globox: voc": _globox(_ROUNDED, "pascal_voc", "Annotations"),
    "globox: cvat": _globox(_PLAIN, "cvat", "annotations.xml"),
    "globox: openimages": _globox(_BOXES, "openimage", "train-annotations-bbox.csv"),
    "globox: labelme": _globox(_PLAIN, "labelme", "images"),
    "globox: via": (_PLAIN, partial(globox, save=_globox_via)),
    "globox: yolo": (_ALL, partial(globox, save=_globox_yolo)),
    "supervision: coco": _supervision(_ALL, "coco", annotations="result.json"),
    "supervision: voc": _supervision(_ROUNDED, "pascal_voc", annotations_directory="Annotations"),
    "supervision: yolo": _supervision(
        _ALL, "yolo", annotations_directory="train/labels", data_yaml="data.yaml"
    ),
    "supervision: labelme": _supervision(_PLAIN, "labelme", annotations_directory="images"),
    "supervision: createml": _supervision(
        _PLAIN, "createml", annotations="images/_annotations.createml.json"
    ),
}
