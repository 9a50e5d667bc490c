"""Find the annotations of a dataset and read them.

    splits = read_dataset(root, Conversion(split=0.9))
    splits["train"]                                 # Annotations

Nothing is written.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec
import numpy as np

from ssdctl.data import TOML, index, usual_store
from ssdctl.data.annotations import (
    MAX_NAMED,
    SPLIT_WORDS,
    SPLITS,
    Annotations,
    Conversion,
    Resolved,
    nfc,
    one_image_per_file,
    paths_below,
    refuse,
    split_of,
    with_classes,
)
from ssdctl.data.divide import UNDIVIDED, Division, divided, next_division
from ssdctl.data.find_images import Found, ImageFinder, find_in_splits, notes_on_names
from ssdctl.data.formats import Format, built_in, coco, head_of, load, recognized
from ssdctl.data.image_files import (
    ANNOTATION_FOLDERS,
    dataset_folder,
    file_sizes,
    files_below,
    in_threads,
    is_image,
    is_image_name,
    relative_folder,
    require_root,
    size_or_none,
)
from ssdctl.data.sources import last_store, other_dataset, read_sources
from ssdctl.errors import DataError, UsageError
from ssdctl.files import is_utf8
from ssdctl.runtime.safe_text import counted, listed, quoted, quoted_folder

WHAT_IS_DROPPED = "`ssdctl prepare` lists what was dropped, and why, in the store's report.json"
MAX_LEVELS = 3  # below a folder, searched for a dataset, for the hint of an error
MAX_FOLDERS = 20  # of a level
MAX_FILES = 300_000  # looked at for the hint of an error
MAX_READ = 50  # files of a kind whose content is looked at
LABEL_SUFFIXES = {".xml", ".json", ".txt"}
ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
# As in train.record-00000-of-00010 and train-00000-of-00256; not a checkpoint's .data-*.
TFRECORD = re.compile(r"\.(tf_?)?records?(-\d+-of-\d+)?$|(?<!\.data)-\d{5}-of-\d{5}$")
DATUMARO = (
    "convert it with datumaro (pip install 'datumaro[cli]'): "
    "datum convert -if {} -i DIR -f coco -o OUT -- --save-media"
)
# Formats that are not read: how their files are called, and what leads to one that is.
NOT_READ = {
    "TFRecord": (
        TFRECORD,
        "give the images and labels that it was made from (COCO: `ssdctl download --dest DIR`), or "
        + DATUMARO.format("tf_detection_api").replace("cli]'", "cli]' tensorflow"),
    ),
    "VoTT": (
        re.compile(r"\.vott$|-asset\.json$|(^|/)vott-json-export/"),
        "export it from VoTT as CSV, or " + DATUMARO.format("vott_json"),
    ),
    "WIDER FACE": (re.compile(r"wider_face_\w*bbx_gt\.txt$"), DATUMARO.format("wider_face")),
    "MOT": (
        re.compile(r"(^|/)(gt/gt|det/det)\.txt$|(^|/)seqinfo\.ini$"),
        DATUMARO.format("mot_seq"),
    ),
    "DOTA": (
        re.compile(r"(^|/)labelTxt[^/]*/[^/]+\.txt$"),
        "convert it with DOTA2COCO.py of DOTA_devkit; its boxes become upright",
    ),
}
OF_SPLITS = ("images", "labels")  # folders of folders of splits
SAMPLE_NAMES = 20  # file names by which a folder of images is tried
S = TypeVar("S")
log = logging.getLogger(__name__)


def require_split(splits: Mapping[str, S], name: str, root: Path) -> S:
    if name in splits:
        return splits[name]
    remedy = f"put its labels into a folder or file called {name}, or name them in dataset.toml"
    if name == "train":
        remedy += ", or read a file as training images: --data FILE"
    if name == "val":
        command = index.again_command(root, usual_store(root), "--split", "0.9")
        remedy += f", or create one with `{command}`"
    raise DataError(f"{root}: has no split {name}, only {', '.join(splits) or 'none'}", hint=remedy)


def warning_without_validation(root: Path, folder: Path, num_images: int) -> str:
    """Return a warning that a dataset has no validation split, with the command that makes one."""
    warning = f"{root} has no validation split, so training reports no AP"
    if num_images < 2:
        return warning
    command = index.again_command(root, folder, "--split", "0.9")
    return f"{warning}; to hold out a tenth of the images: {command}"


def find(path: Path, name: str | None = None) -> tuple[str, Format]:
    """Return the format of a folder or of a file such as data.yaml; without a name, detect it."""
    require_root(path)
    _refuse_format_beside_toml(path, name)
    if name is not None and not path.is_file():
        return name, load(name)  # load() raises with the reason
    if "train" in coco.own_splits(path) or (path / TOML).is_file():
        return "coco", coco  # there may be other labels as well
    found = [entry for entry in recognized(path) if name in (None, entry[0])]
    if not found:
        raise _not_a_dataset(path, name) if path.is_file() else _no_dataset(path)
    described = [_describe(path, name, by) for name, _, by in found]
    others = _datasets_beside(path, *found[0][::2]) if len(found) == 1 else []
    name, module, by = found[0]
    if len(found) > 1 or others:
        names = " or --from ".join(format_name for format_name, _, _ in found)
        folders = [f" or --data {quoted_folder(folder)}" for _, folder in others]
        described += [f"{format_name} ({folder})" for format_name, folder in others]
        raise DataError(
            f"{path}: contains several datasets: {', '.join(described)}",
            hint=f"choose one: ssdctl prepare --data {quoted(path)} --from {names}"
            + "".join(folders),
        )
    if by != path:
        log.info("%s: detected %s", path, described[0])
    return name, module


def _datasets_beside(path: Path, name: str, by: Path | bool) -> list[tuple[str, Path]]:
    """Return datasets of other formats in folders next to the one that was found, or to one above.

    Some formats are recognized in any folder below, others only where the dataset is.
    """
    found = list[tuple[str, Path]]()
    if not (isinstance(by, Path) and path.is_dir() and by.is_relative_to(path)):
        return found
    for part in by.relative_to(path).parts:
        if _is_in(path, by):
            break
        own = path / part
        for folder in [folder for folder in _folders_in(path)[:MAX_FOLDERS] if folder != own]:
            with contextlib.suppress(DataError):
                found += [(other, folder) for other, *_ in recognized(folder) if other != name]
        path = own
    return found


def _is_in(folder: Path, by: Path | bool) -> bool:
    """Return whether labels are in a folder itself, or in one of it with a usual name."""
    labels = by if isinstance(by, Path) else folder
    labels = labels.parent if labels.is_file() else labels
    is_usual = labels.name in ANNOTATION_FOLDERS or labels.name.lower() in SPLIT_WORDS
    return labels == folder or (labels.parent == folder and is_usual)


def _refuse_format_beside_toml(root: Path, name: str | None) -> None:
    toml = root / TOML
    if name is not None and toml.is_file():
        raise UsageError(
            f"--from {name}: {toml} exists",
            hint="omit --from to prepare what it names, or move it away",
        )


def read_dataset(
    root: Path,
    conversion: Conversion,
    module: Format | None = None,
    *,
    store: Path | None = None,
    is_optional: bool = False,
) -> dict[str, Annotations]:
    """Read the splits of a dataset, in the order of SPLITS; see `read_and_convert`."""
    return read_and_convert(root, conversion, module, store=store, is_optional=is_optional)[0]


def read_and_convert(
    root: Path,
    conversion: Conversion,
    module: Format | None = None,
    *,
    store: Path | None,
    is_optional: bool,
) -> tuple[dict[str, Annotations], Conversion, Division]:
    """Read the splits of a dataset; return also the conversion, and the division by --split.

    Args:
        module: The format if known.
        store: Of the dataset; images that it ever divided in the same way stay where they are.
        is_optional: --split and --group are not of this call, so they do not apply to a dataset
            that has validation images.
    """
    division = _last_division(root, store) if store else UNDIVIDED
    module, folder = module or find(root, conversion.source)[1], conversion.image_dir
    read = module.read(root, relative_image_dir(root, folder)) if folder else module.read(root)
    for name, part in read.items():
        names = [msgspec.structs.replace(c, name=nfc(c.name)) for c in part.classes]
        read[name] = part._replace(classes=names)
    splits = _with_images(root, read)
    if conversion.classes:
        splits = {s: with_classes(whole, conversion.classes) for s, whole in splits.items()}
    has_splits = "val" in splits or (is_optional and "train" not in splits)
    if conversion.split is not None and has_splits:
        if not is_optional:
            problem = f"{root}: has validation images already, so it is not divided again"
            raise UsageError(problem, hint="omit --split and --group")
        first = next(iter(splits))
        note = f"the dataset has its own splits, so --split {conversion.split} is not used"
        splits[first] = splits[first]._replace(notes=[*splits[first].notes, note])
        conversion = msgspec.structs.replace(conversion, split=None, group=None)
    elif conversion.split is not None:
        # An entry that is listed twice must not be in both parts.
        splits = {split: images for split, (images, _) in resolve_images(splits).items()}
        whole = require_split(splits, "train", root)
        below = relative_folder(whole.folder, root)
        options = conversion.split, conversion.group
        last = division if division.options == options else UNDIVIDED
        train, val = divided(whole, conversion.split, conversion.group, below, last)
        now = dict.fromkeys(paths_below(below, train.file_names), True)
        now |= dict.fromkeys(paths_below(below, val.file_names), False)
        division, num_moved = next_division(division._replace(options=options), now)
        if num_moved:
            note = (
                "images that --split held out before and that are trained on now, or the reverse, "
                f"or that may be under other names: {num_moved:,}"
            )
            train = train._replace(notes=[*train.notes, note])
        splits = {**splits, "train": train, "val": val}
    if "val" not in splits and "test" in splits and len(splits["test"].boxes):
        test = splits.pop("test")
        note = (
            "no validation images are given: the test images are used to validate; "
            "--split 0.9 holds out training images instead"
        )
        splits["val"] = test._replace(notes=[*test.notes, note])
    return {s: splits[s] for s in SPLITS if s in splits}, conversion, division


def _last_division(root: Path, store: Path) -> Division:
    """Return how a store was divided by the last --split."""
    store = last_store(root, store)
    made = index.last_made(store)
    if made is None or other_dataset(root, store) is not None:
        return UNDIVIDED
    division = UNDIVIDED
    with contextlib.suppress(DataError):
        division = read_sources(store / made.sources).division
    if made.conversion.split is not None and not division.sides:
        text = "%s: the last division by --split is lost, so images are divided again"
        log.warning(text, store)
    return division


def relative_image_dir(root: Path, folder: str, *, is_there: bool = True) -> str:
    """Return the folder that the user names, relative to the dataset folder.

    Args:
        is_there: Refuse one that is not there: it may be gone once its images are packed.
    """
    base = dataset_folder(root).resolve()
    paths = [path.resolve() for path in (base / folder, Path(folder))]
    below = [path for path in paths if path.is_relative_to(base)]
    found = [path for path in below if path.is_dir() or not is_there]
    if not found:
        raise UsageError(f"--image-dir {folder}: no folder below {dataset_folder(root)}")
    return min(found, key=lambda path: not path.is_dir()).relative_to(base).as_posix()


def _with_images(root: Path, splits: dict[str, Annotations]) -> dict[str, Annotations]:
    """Return the splits without those that list no image, with a note."""
    empty = [split for split, annotations in splits.items() if not annotations.file_names]
    if "train" in empty or len(empty) == len(splits):
        origin = splits[empty[0]].origin if empty else root
        raise DataError(f"{origin}: lists no images, so there is nothing to train on")
    kept = {split: a for split, a in splits.items() if split not in empty}
    first = next(iter(kept))
    notes = [
        f"{splits[split].origin} lists no images: there is no split {split}" for split in empty
    ]
    words = Counter(split_of(n.rpartition("/")[0]) for n in kept[first].file_names)
    if len(kept) == 1 and len(words.keys() - {None}) > 1:
        found = ", ".join(f"{word}: {words[word]:,}" for word in SPLITS if words[word])
        notes.append(f"the labels name no splits, so {first} has images of all folders ({found})")
    if lists := _unused_lists(root, kept):
        text = "lists of images are not used, since the labels name no such splits"
        notes.append(f"{text}: {listed(lists, MAX_NAMED)}")
    return {**kept, first: kept[first]._replace(notes=[*kept[first].notes, *notes])}


def _unused_lists(root: Path, splits: Mapping[str, Annotations]) -> list[str]:
    """Return lists, such as val.txt, of images that are in another split."""
    stems = {PurePosixPath(name).stem for part in splits.values() for name in part.file_names}
    found = []
    names = files_below(root, MAX_LEVELS, skips_unreadable=True) if root.is_dir() else ()
    for name in (name for name in names if name.endswith(".txt")):
        stem = PurePosixPath(name).stem
        if stem not in stems and split_of(stem) not in (None, *splits):
            line = head_of(root / name).lstrip().partition("\n")[0].strip()
            words = {PurePosixPath(word).stem for word in (line, line.partition(" ")[0])}
            words |= {PurePosixPath(line).name}
            found += [name] * (not words.isdisjoint(stems))
    return found


def require_same_classes(root: Path, splits: Mapping[str, Annotations]) -> None:
    """Refuse splits whose labels would mean different classes."""
    (first, annotations), *others = splits.items()
    for split, other in others:
        if other.classes != annotations.classes:
            classes = [
                ", ".join(f"{c.name} ({c.id})" for c in a.classes) for a in (annotations, other)
            ]
            raise DataError(
                f"{root}: the splits list different categories, or in another order: "
                f"{first} {classes[0]}; {split} {classes[1]}",
                hint="give the annotation files of all splits the same list of categories",
            )


def resolve_images(splits: Mapping[str, Annotations]) -> dict[str, Resolved]:
    """Replace file names by paths of existing files, and absent image sizes by the files'.

    Returns also the files' sizes in bytes, None for a file that does not exist.
    """
    found = {split: _in_one_folder(annotations) for split, annotations in splits.items()}
    for root in {splits[split].folder for split, resolved in found.items() if resolved is None}:
        rest = {split: a for split, a in splits.items() if a.folder == root}
        entries = {
            split: (a.origin, list(zip(a.file_names, map(tuple, a.sizes.tolist()), strict=True)))
            for split, a in rest.items()
        }
        for split, items in find_in_splits(ImageFinder(root), entries).items():
            found[split] = _renamed(rest[split], items), []
    result = {split: _complete(*resolved) for split, resolved in found.items() if resolved}
    for pair in itertools.combinations(result, 2):
        _refuse_other_boxes(pair, *(result[split] for split in pair))
    return result


def _refuse_other_boxes(names: tuple[str, str], first: Resolved, second: Resolved) -> None:
    """Refuse a file that two splits have with different boxes: in one of them it is another image.

    With equal boxes, the images of the splits are not distinct, and `prepare` says so.
    """
    paths, others = (
        {
            f"{images.folder}/{name}": row
            for row, (name, size) in enumerate(zip(images.file_names, num_bytes, strict=True))
            if size is not None
        }
        for images, num_bytes in (first, second)
    )
    if shared := sorted(paths.keys() & others.keys()):
        objects, other_objects = (
            _objects(images, [rows[path] for path in shared])
            for (images, _), rows in ((first, paths), (second, others))
        )
        pairs = zip(shared, objects, other_objects, strict=True)
        different = [path for path, own, other in pairs if own != other]
        what = f"images of {' and '.join(names)}, with different boxes"
        hint = "an image belongs to one split; if a split has an image of this name, copy it there"
        refuse(first[0].origin, what, different, hint)


def _objects(images: Annotations, rows: Sequence[int]) -> list[list[tuple[object, ...]]]:
    """Return the labels and boxes of some of the images."""
    by_row: dict[int, list[tuple[object, ...]]] = {row: [] for row in rows}
    columns = (images.rows.tolist(), images.labels.tolist(), images.boxes.tolist())
    for row, label, box in zip(*columns, strict=True):
        if row in by_row:
            by_row[row].append((label, *box))
    return [sorted(by_row[row], key=repr) for row in rows]


def _in_one_folder(annotations: Annotations) -> Resolved | None:
    """Return the annotations with the first folder that has all images; None if no folder has."""
    names = annotations.file_names
    if any("./" in name or "//" in name for name in names):
        return None  # two entries may be one file
    sample = names[:: max(1, len(names) // SAMPLE_NAMES)]
    for folder in annotations.image_folders or [annotations.folder]:
        if None not in file_sizes(folder, sample):
            num_bytes = file_sizes(folder, names)
            if None not in num_bytes:
                return annotations._replace(folder=folder), num_bytes
    return None


def _renamed(annotations: Annotations, found: Sequence[Found | None]) -> Annotations:
    pairs = list(zip(annotations.file_names, found, strict=True))
    notes = [*annotations.notes, *notes_on_names(annotations.file_names, found)]
    names = [item.file if item else name for name, item in pairs]
    return annotations._replace(file_names=names, notes=notes)


def _complete(annotations: Annotations, num_bytes: list[int | None]) -> Resolved:
    """Merge entries of one file, and take absent image sizes from the files."""
    annotations = one_image_per_file(annotations)
    folder, names, sizes = annotations.folder, annotations.file_names, annotations.sizes
    paths = (str(path.absolute()) for path in (folder, annotations.origin))  # the index has them
    wrong = [repr(name) for name in (*paths, *names) if not is_utf8(name)]
    hint = "rename the folder, or the images and their labels"
    refuse(folder, "names of folders or images that are not UTF-8", wrong, hint)
    if len(num_bytes) != len(names):
        num_bytes = file_sizes(folder, names)
    unsized = [row for row in np.nonzero((sizes == 0).any(axis=1))[0] if num_bytes[row] is not None]
    if not unsized:
        return annotations, num_bytes
    sizes, notes = sizes.copy(), [*annotations.notes]
    sizes[unsized] = in_threads(
        lambda row: size_or_none(folder / names[row], upright=annotations.upright), unsized
    )
    if num_sized := int(sizes[unsized].all(axis=1).sum()):
        notes.append(f"images without width and height, taken from the files: {num_sized:,}")
    sizes[unsized] = sizes[unsized].clip(1)  # dropped when checked, with the reason
    of_files = frozenset(names[row] for row in unsized)
    return annotations._replace(sizes=sizes, notes=notes, unsized=of_files), num_bytes


def datasets_in(folder: Path) -> list[Path]:
    """Return the nearest folders below a folder that are datasets, of the first ones of a level."""
    level = [folder]
    for _ in range(MAX_LEVELS):
        level = [below for above in level for below in _folders_in(above)][:MAX_FOLDERS]
        if found := [path for path in level if _is_dataset(path)]:
            return found
    return []


def _folders_in(folder: Path) -> list[Path]:
    names = next(os.walk(folder), ("", [], []))[1]
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def _is_dataset(path: Path) -> bool:
    with contextlib.suppress(DataError):
        return any(recognized(path))
    return False


def _describe(path: Path, name: str, by: Path | bool) -> str:
    if not isinstance(by, Path) or by == path:
        return name
    return f"{name} ({by.relative_to(path) if by.is_relative_to(path) else by})"


def has_usual_labels(folder: Path) -> bool:
    """Return whether a folder has labels, and files by which formats are usually recognized.

    Other folders are not searched: this one may be the home folder, or the root of a disk.
    """
    patterns = (pattern for name in built_in() for pattern in getattr(load(name), "LOOKED_FOR", ()))
    return any(any(folder.glob(p)) for p in (TOML, *patterns)) and _has_labels(folder)


def _has_labels(folder: Path) -> bool:
    """Return whether the labels of a dataset are in a folder, not in one that is a dataset."""
    with contextlib.suppress(DataError):
        return any(_is_in(folder, by) for _, _, by in recognized(folder))
    return False


def _has_labels_of(path: Path, above: Path, files: Sequence[Path]) -> bool:
    """Return whether the folder above has labels of images among these files.

    Labels of another dataset do not count: images with their names lie beside them.
    """
    stems = {file.stem for file in files if is_image(file)}
    below = files_below(above, 2, skips_unreadable=True)
    names = [Path(name) for name in itertools.islice(below, MAX_FILES)]
    own = {(name.parts[0], name.stem) for name in names if is_image(name)}
    own |= {(path.absolute().name, stem) for stem in stems}
    labels = (name for name in names if name.suffix.lower() in LABEL_SUFFIXES)
    return any(n.stem in stems and (n.parts[0], n.stem) not in own for n in labels)


def _no_dataset(path: Path) -> DataError:
    looked_for = [TOML]
    for name in built_in():
        looked_for += getattr(load(name), "LOOKED_FOR", ())
    files = sorted(Path(n) for n in itertools.islice(files_below(path), MAX_FILES))
    kinds = ["TFRecord" if TFRECORD.search(f.name) else f.suffix.lower() or "other" for f in files]
    first = dict(zip(reversed(kinds), reversed(files), strict=True))
    counts = Counter(kinds).most_common(MAX_NAMED)
    found = [f"{counted(count, f'{kind} file')} such as {first[kind]}" for kind, count in counts]
    above = path.parent if path.name and path.parent.name else path.resolve().parent
    whole, is_part = above.parent, above.name.lower() in OF_SPLITS  # images/train
    is_part = is_part and (has_usual_labels(whole) or _has_labels_of(path, whole, files))
    if is_part and not _has_labels(above):
        hint = f"did you mean the dataset's folder, --data {quoted_folder(whole)}?"
    elif _has_labels(above) or _has_labels_of(path, above, files):
        if not any(recognized(above)) and any(recognized(above.parent)):  # of train/images
            above = above.parent
        hint = f"did you mean the dataset's folder, --data {quoted_folder(above)}?"
    elif below := datasets_in(path):
        named = quoted_folder(below[0])
        hint = f"a folder in it is a dataset: --data {named}; or write a dataset.toml"
        if not any(map(is_image_name, files_below(below[0]))):
            name, _, by = next(recognized(below[0]))
            hint = f"write a dataset.toml for the labels in {named}, which has no images"
            if name != "coco" and isinstance(by, Path) and by.is_file():
                hint = f"name the labels: --data {quoted_folder(by)}"
    else:
        hint = _hint_for(path, files)
    return DataError(
        f"{path}: no dataset found{', but ' if found else ''}{', '.join(found)} "
        f"(looked for {', '.join(looked_for)})",
        hint=hint,
    )


def _hint_for(folder: Path, files: list[Path]) -> str:
    """Return what to do with the files of a folder that is no dataset."""
    from ssdctl.data.formats import yolo

    for file in files:
        if name := _format_not_read(file):
            return f"{file} is of the format {name}, which is not read: {NOT_READ[name][1]}"
    for file in [f for f in files if f.suffix.lower() == ".json"][:MAX_READ]:
        if split_of(file.as_posix()) == "test" and coco.is_coco_file(folder / file):
            option = f"--data {quoted(folder / file)}"
            return f"{file} is only a test split: {option} reads it as training images"
    stems = {file.stem for file in files if is_image(file)}
    texts = [file for file in files if file.suffix.lower() == ".txt" and file.stem in stems]
    for file in texts[:MAX_READ]:
        if yolo.has_boxes(folder / file):
            return (
                f"{file} is YOLO's: write {folder / 'classes.txt'}, with the "
                "name of a class per line, in the order of the class numbers"
            )
    for file in files:
        if file.suffix.lower() in ARCHIVES:
            return f"unpack {folder / file}"
    if 0 < len(files) < MAX_FILES and all(is_image(file) for file in files):
        return (
            "these images have no labels: draw the boxes of about 50 in CVAT, Label Studio or "
            "labelImg; the detector that learns from them labels the rest (docs/labeling.md)"
        )
    return (
        "give the folder that an export was unpacked to, with the labels in one of the formats "
        f"{', '.join(built_in())}; or describe the dataset in a dataset.toml "
        "(docs/custom-dataset.md)"
    )


def _not_a_dataset(path: Path, name: str | None) -> DataError:
    """Return the error for a file that is not a dataset, or not of the format `name`."""
    suffix = path.suffix.lower()
    if suffix in ARCHIVES:
        return DataError(f"{path}: an archive", hint="unpack it and give the folder")
    if kind := _format_not_read(path):
        problem = f"in the format {kind}, which is not read"
        return DataError(f"{path}: {problem}", hint=NOT_READ[kind][1])
    if suffix == ".json" and name in (None, "coco"):
        problem = "not in COCO's format: no images, annotations and categories"
        return DataError(f"{path}: {problem}")
    return DataError(
        f"{path}: not a dataset file{f' of {name}' if name else ''}",
        hint="give a folder, COCO's JSON, a data.yaml, CVAT's annotations.xml or a CSV file",
    )


def _format_not_read(file: Path) -> str | None:
    path = file.as_posix()
    return next((name for name, (files, _) in NOT_READ.items() if files.search(path)), None)
