"""A dataset for `torch.utils.data.DataLoader`, in the form that torchvision's detectors take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ssdctl.boxes import IMAGE_SIZE
from ssdctl.config.call import overrides_of, public_call, resolve_call
from ssdctl.data.annotations import ClassName
from ssdctl.data.image_decode import ImageError
from ssdctl.data.index import read_areas
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store_folder import dataset_folders, require_dataset, with_absolute_paths
from ssdctl.errors import DataError, UsageError
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import as_batch, decode_sample
from ssdctl.input.normalize import Normalize
from ssdctl.input.sampler import draw_samples

Item = tuple[Tensor, dict[str, Tensor]]
MAX_EPOCH = 2**31  # the random numbers are drawn per epoch
HUE_DEGREES = 18.0  # all recipes except NVIDIA's
COLORS = Normalize(mean=(0, 0, 0), std=(1, 1, 1))


# Functions that keep the order of labels, such as a lookup of labels in a table: `getitem`.
SAME_ORDER = {
    *("getitem", "clone", "detach", "to", "long", "int", "add", "sub", "rsub", "mul", "clamp"),
    *("where", "masked_fill", "ones_like", "zeros_like", "full_like"),
}


class _Labels(Tensor):
    """Labels of an image with crowds: `labels[index]` indexes `is_crowd`, (G,), as well."""

    is_crowd: Tensor

    @classmethod
    def of(cls, labels: Tensor, is_crowd: Tensor) -> _Labels:
        marked = labels.as_subclass(cls)
        marked.is_crowd = is_crowd
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            after = func(*args, **(kwargs or {}))
            if not isinstance(after, Tensor) or after.ndim == 0:
                return after
            if func is Tensor.__getitem__ and isinstance(args[0], cls):
                return cls.of(after, args[0].is_crowd[args[1]])
            if func.__name__.strip("_") in SAME_ORDER:
                for labels in args:
                    if isinstance(labels, cls) and after.shape == labels.shape:
                        return cls.of(after, labels.is_crowd)
            return after

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()


class Dataset(torch.utils.data.Dataset[Item]):
    """The images and boxes of a dataset that `ssdctl prepare` reads; items are (image, target).

    An image is a (3, H, W) tensor, RGB, float32 in 0 to 1. A target has `boxes`, (G, 4) float32:
    left, top, right, bottom in pixels of the image; `labels`, (G,) int64, 1 and up; `image_id`, a
    scalar; `area`, (G,) float32 in square pixels, the annotated one if the image is not augmented;
    `iscrowd`, (G,) int64, 1 for a box around a crowd. Augmentations are drawn with torch's random
    numbers: `torch.manual_seed` repeats them. A dataset that was never prepared is indexed first.

    Args:
        data: The dataset folder or file; any format that `ssdctl.prepare` reads.
        split: `train`, `val` or `test`. In `train`, images without boxes are left out.
        background: Whether `train` also has the images without objects, with no box each.
        augment: `ssd` (crops, flips and colors of the SSD paper; the image is 300 x 300 then),
            `ssd-zoom` (also smaller objects), names separated by commas, or `none` (the whole
            image in its own size).
        store: Folder of the prepared data; None is `prepared/` in the dataset folder.
        transforms: Called with an image and its target, as `torchvision.transforms.v2` takes them:
            the image is a `tv_tensors.Image`, `boxes` are `tv_tensors.BoundingBoxes`. Returns both.
            `area` and `iscrowd` follow `boxes` and `labels[index]`; if they are chosen or reordered
            otherwise, so must `iscrowd` be.

    Attributes:
        class_names: Names of the labels 1 and up; a network has one more class, the background.

    Raises:
        ssdctl.errors.UsageError: There is no such split or augmentation.
        ssdctl.errors.DataError: The dataset cannot be used.
    """

    @public_call()
    def __init__(
        self,
        data: str | os.PathLike[str],
        split: Literal["train", "val", "test"] = "train",
        *,
        augment: str = "none",
        background: bool = False,
        store: str | os.PathLike[str] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        if augment is None:
            raise UsageError("augment: None", hint='write augment="none"')
        before = set(vars(self))
        given = overrides_of("train", {"data": data, "store": store, "augment": augment})
        config = resolve_call(None, given)
        require_dataset(config.data)
        located = with_absolute_paths(config).data  # a copy may be opened in another folder
        self._arguments = located.root, split
        self._options: dict[str, Any] = {
            "augment": augment,
            "background": background,
            "store": located.store,
            "transforms": transforms,
        }
        splits = open_dataset(*dataset_folders(located))
        if split not in splits:
            raise UsageError(
                f"{os.fspath(data)}: it has no split {split!r}", hint=f"it has {', '.join(splits)}"
            )
        self._split = splits[split]
        self._rows = np.flatnonzero(self._split.usable)
        if split == "train":
            others = self._split.background[: None if background else 0]
            self._rows = np.sort(np.concatenate([self._split.trainable, others]))
        self._areas, self._is_crowd = read_areas(self._split.index_file)
        self._crowds = self._split._replace(labels=1 + self._is_crowd)  # 2 is a crowd
        self._augment, self._transforms = augment, transforms
        self._opened = vars(self).keys() - before  # a subclass may have more attributes
        self.class_names = [c.name for c in self._split.classes]

    @property
    def classes(self) -> list[ClassName]:
        """The classes with the category ids of the dataset."""
        return list(self._split.classes)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    @public_call()
    def __getitem__(self, index: int) -> Item:
        """Return an image and its target.

        Raises:
            IndexError: There are fewer images.
            TypeError: The index is not an integer.
            ssdctl.errors.DataError: The image cannot be read.
        """
        if not hasattr(index, "__index__"):
            raise TypeError(f"dataset[{index!r}]: expected an integer")
        row = int(self._rows[range(len(self))[index]])
        image, target = self._whole(row) if self._augment == "none" else self._drawn(row)
        target["image_id"] = torch.tensor(int(self._split.image_ids[row]))
        return (image, target) if self._transforms is None else self._transformed(image, target)

    @staticmethod
    def collate(items: Sequence[Item]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return a list of images and a list of targets: the `collate_fn` of a DataLoader."""
        return [image for image, _ in items], [target for _, target in items]

    def _whole(self, row: int) -> Item:
        split = self._split
        try:
            pixels = torch.from_numpy(split.decode(row).copy())
        except ImageError as error:
            raise DataError(f"{split.location(row)}: {error}") from None
        height, width = pixels.shape[:2]
        span = slice(split.starts[row], split.starts[row + 1])
        boxes = torch.tensor(split.boxes[span]) * torch.tensor([width, height] * 2)
        shrunk = width * height / math.prod(split.sizes[row].tolist())
        target = {
            "boxes": boxes,
            "labels": torch.tensor(split.labels[span], dtype=torch.int64),
            "area": torch.tensor(shrunk * self._areas[span], dtype=torch.float32),
            "iscrowd": torch.tensor(self._is_crowd[span], dtype=torch.int64),
        }
        return pixels.permute(2, 0, 1) / 255, target

    def _drawn(self, row: int) -> Item:
        split = self._split
        seed, epoch = torch.randint(MAX_EPOCH, (2,)).tolist()
        config = LoaderConfig(
            seed=seed,
            batch_size=1,
            threads=1,
            max_boxes=max(split.most_boxes, 1),
            augment=self._augment,
            hue_degrees=HUE_DEGREES,
        )
        drawn = config, np.array([row]), np.array([epoch])
        samples = draw_samples(split, *drawn)
        pixels = np.empty((1, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        if problem := decode_sample(split, samples, 0, pixels[0]):
            raise DataError(f"{split.location(row)}: {problem}")
        batch = as_batch(samples, torch.from_numpy(pixels))
        image = COLORS(batch.images, batch.jitter)[0].clamp(0, 1)
        is_real = batch.labels[0] > 0
        boxes, labels = batch.boxes[0][is_real] * IMAGE_SIZE, batch.labels[0][is_real]
        area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
        is_crowd = torch.zeros_like(labels)
        if self._is_crowd[split.starts[row] : split.starts[row + 1]].any():
            marked = draw_samples(self._crowds, *drawn)  # the same views
            is_crowd = torch.from_numpy(marked.view.boxes.labels[0])[is_real] - 1
        return image, {"boxes": boxes, "labels": labels, "area": area, "iscrowd": is_crowd}

    def _transformed(self, image: Tensor, target: dict[str, Tensor]) -> Item:
        from torchvision import tv_tensors  # late: it takes a second

        assert self._transforms is not None
        size = tuple(image.shape[-2:])
        target["boxes"] = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        before, old = target["iscrowd"], target["labels"].tolist()
        if before.any():  # SanitizeBoundingBoxes removes boxes and labels only
            target["labels"] = _Labels.of(target["labels"], before)
        image, target = self._transforms(tv_tensors.Image(image), target)
        boxes, labels, after = target["boxes"], target["labels"], target.get("iscrowd", before)
        target |= {n: v.as_subclass(Tensor) for n, v in target.items() if isinstance(v, _Labels)}
        if len(after) != len(boxes) or [*map(int, after)] == before.tolist():
            if isinstance(labels, _Labels):
                after = labels.is_crowd
            elif not before.any():
                after = before.new_zeros(len(boxes))
        is_lost = not isinstance(labels, _Labels) and torch.as_tensor(labels).tolist() != old
        if len(after) != len(boxes) or (after is before and before.any() and is_lost):
            raise UsageError(
                "transforms: changed the labels of an image with crowds, but not `iscrowd`",
                hint="index `iscrowd`, or `labels`, as `boxes`; or copy `iscrowd`",
            )
        target["iscrowd"] = after
        plain = torch.as_tensor(boxes).as_subclass(Tensor)
        extent = plain[:, 2:]
        if getattr(boxes, "format", tv_tensors.BoundingBoxFormat.XYXY).value == "XYXY":
            extent = extent - plain[:, :2]
        target["area"] = extent.prod(dim=1)
        return image, target

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the store again in another process, because its files are memory-mapped."""
        names = vars(self).keys() - {*self._opened, "_opened"}
        own = {name: value for name, value in vars(self).items() if name in names}
        digest = self._split.labels_digest()
        return _reopened, (type(self), self._arguments, self._options, digest), own


def _reopened(
    kind: type[Dataset], arguments: tuple[Any, ...], options: dict[str, Any], digest: str
) -> Dataset:
    """Return a dataset without its own attributes; a subclass may be made of other arguments."""
    dataset = object.__new__(kind)
    Dataset.__init__(dataset, *arguments, **options)
    if dataset._split.labels_digest() != digest:
        raise DataError(
            f"{arguments[0]}: was prepared again since this process's Dataset was opened",
            hint="make the Dataset again",
        )
    return dataset
