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
from ssdctl.data.store_folder import dataset_folders, require_dataset, with_absolute_data
from ssdctl.errors import DataError, UsageError
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import as_batch, decode_sample
from ssdctl.input.normalize import Normalize
from ssdctl.input.sampler import draw_samples

Item = tuple[Tensor, dict[str, Tensor]]
MAX_EPOCH = 2**31  # the random numbers are drawn per epoch
HUE_DEGREES = 18.0  # all recipes except NVIDIA's
COLORS = Normalize(mean=(0, 0, 0), std=(1, 1, 1))
# Functions that choose, repeat or reorder the elements of their first argument.
SELECTING = {
    *("getitem", "index_select", "masked_select", "take", "take_along_dim", "gather", "narrow"),
    *("flip", "flipud", "roll", "cat", "concat", "concatenate", "hstack", "stack"),
    *("repeat", "repeat_interleave", "tile", "expand", "broadcast_to"),
    *("unbind", "split", "split_with_sizes", "tensor_split", "chunk"),
    *("reshape", "view", "flatten", "squeeze", "unsqueeze"),
}
# Functions that keep the order of the elements.
ELEMENTWISE = {
    *("clone", "detach", "contiguous", "get", "to", "type", "cpu", "long", "int", "where"),
    *("add", "sub", "rsub", "mul", "floordiv", "floor_divide", "mod", "remainder", "clamp"),
    *("minimum", "maximum", "masked_fill", "index_fill", "bucketize", "searchsorted"),
    *("full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros"),
}


class _Labels(Tensor):
    """Labels of an image with crowds: `is_crowd`, (G,), follows what transforms do to them."""

    is_crowd: Tensor

    @classmethod
    def of(cls, labels: Tensor, is_crowd: Tensor) -> _Labels:
        marked = labels.as_subclass(cls)
        marked.is_crowd = is_crowd
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            after = func(*args, **options)
            args = *(options.pop(key) for key in ("input", "tensors") if key in options), *args
            if not args or func is Tensor.as_subclass:
                return after
            is_list = isinstance(args[0], (list, tuple))
            parts, name = args[0] if is_list else args[:1], func.__name__.strip("_")
            if any(isinstance(part, cls) for part in parts):
                if name in SELECTING:
                    given = [p.is_crowd if isinstance(p, cls) else p * 0 for p in parts]
                    return cls._marked(
                        after, func(given if is_list else given[0], *args[1:], **options)
                    )
                if name in ("sort", "topk") and after.indices.dim() == 1:
                    values, indices = after
                    return type(after)((cls._marked(values, parts[0].is_crowd[indices]), indices))
            marked = [part for part in (*args, *options.values()) if isinstance(part, cls)]
            if isinstance(after, Tensor) and name in SELECTING | ELEMENTWISE:
                flags = [part.is_crowd for part in marked if part.shape == after.shape]
                if flags and all(torch.equal(flags[0], other) for other in flags):
                    return cls._marked(after, flags[0])
            return after

    @classmethod
    def _marked(cls, after: Any, is_crowd: Any) -> Any:
        """Return labels, or a sequence of them, with their flags; others as they are."""
        if isinstance(after, (list, tuple)):
            return type(after)(map(cls._marked, after, is_crowd))
        is_other = type(after) is not Tensor or after.is_floating_point()
        return after if is_other or after.shape != is_crowd.shape else cls.of(after, is_crowd)

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
            If it indexes `boxes` and `labels` alike, `iscrowd` and `area` follow.

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
        located = with_absolute_data(config).data  # a copy may be opened in another folder
        self._arguments = located.root, split
        self._options: dict[str, Any] = {
            "augment": augment,
            "background": background,
            "store": located.store,
            "transforms": transforms,
        }
        splits = open_dataset(*dataset_folders(config.data))
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
        before = is_crowd = target["iscrowd"]
        old_labels = target["labels"].tolist()
        if is_crowd.any():  # SanitizeBoundingBoxes removes boxes and labels only
            target["labels"] = _Labels.of(target["labels"], is_crowd)
        image, target = self._transforms(tv_tensors.Image(image), target)
        boxes, labels = target["boxes"], target["labels"]
        is_lost = not isinstance(labels, _Labels) and torch.as_tensor(labels).tolist() != old_labels
        if isinstance(labels, _Labels):
            is_crowd = labels.is_crowd
        target |= {n: v.as_subclass(Tensor) for n, v in target.items() if isinstance(v, _Labels)}
        given = [*map(int, target.get("iscrowd", before))]
        if len(given) != len(boxes) or given == before.tolist():  # the transforms left it as it was
            is_crowd = is_crowd if before.any() else before.new_zeros(len(boxes))
            if len(is_crowd) != len(boxes) or (is_lost and before.any()):
                raise UsageError(
                    "transforms: changed the boxes of an image with crowds, but not `iscrowd`",
                    hint="index `iscrowd`, or `labels`, as `boxes`",
                )
            target["iscrowd"] = is_crowd
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
        return _reopened, (type(self), self._arguments, self._options), own


def _reopened(kind: type[Dataset], arguments: tuple[Any, ...], options: dict[str, Any]) -> Dataset:
    """Return a dataset without its own attributes; a subclass may be made of other arguments."""
    dataset = object.__new__(kind)
    Dataset.__init__(dataset, *arguments, **options)
    return dataset
