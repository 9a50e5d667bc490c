"""Images and targets in torchvision's form, as the network and its loss take them.

Images are a list of (3, H, W) tensors, or one (B, 3, H, W): RGB, float in 0 to 1 or uint8. A target
is a dictionary with `boxes`, (G, 4) left, top, right, bottom in pixels, and `labels`, (G,), 1 and
up; one without boxes has no objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.errors import UsageError

Images = Tensor | Sequence[Tensor]
Target = Mapping[str, Tensor]


def normalized_batch(
    images: Images, mean: Sequence[float], std: Sequence[float], device: torch.device
) -> Tensor:
    """Return images resized (antialiased bilinear) and normalized: (B, 3, 300, 300), fp32.

    Raises:
        UsageError: There is none, or one has another shape or type.
    """
    if not len(images):
        raise UsageError("images: the batch is empty")
    pixels = torch.stack([_resized(image, device) for image in images])
    offset, scale = (pixels.new_tensor(values).view(3, 1, 1) for values in (mean, std))
    return (pixels - offset) / scale


def _resized(image: Tensor, device: torch.device) -> Tensor:
    is_number = image.is_floating_point() or image.dtype == torch.uint8
    if image.dim() != 3 or image.shape[0] != 3 or not is_number:
        raise UsageError(
            f"images: {image.dtype} of shape {tuple(image.shape)}",
            hint="expected (3, H, W), float in 0 to 1 or uint8",
        )
    pixels = image.to(device)
    pixels = pixels / 255 if pixels.dtype == torch.uint8 else pixels.float()
    size = (IMAGE_SIZE, IMAGE_SIZE)
    if pixels.shape[1:] == size:
        return pixels
    return F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]


def padded_targets(
    images: Images, targets: Sequence[Target], num_classes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return boxes (B, G, 4) in fractions of each image, and labels (B, G), 0 for padding.

    Raises:
        UsageError: There are not as many targets as images, boxes and labels have other shapes, or
            a label is not that of a class.
    """
    if len(images) != len(targets):
        raise UsageError(f"{len(images)} images, but {len(targets)} targets")
    boxes, labels = [], []
    for number, (image, target) in enumerate(zip(images, targets, strict=True)):
        box = torch.as_tensor(target.get("boxes", torch.empty(0, 4))).to(device).float()
        label = torch.as_tensor(target.get("labels", torch.empty(0))).to(device).long()
        if box.numel() != 4 * len(label):
            raise UsageError(
                f"target {number}: boxes {tuple(box.shape)}, labels {tuple(label.shape)}",
                hint="expected boxes (G, 4) and labels (G,)",
            )
        if len(label) and not bool(((label > 0) & (label < num_classes)).all()):
            raise UsageError(
                f"target {number}: labels from {int(label.min())} to {int(label.max())}",
                hint=f"the network has the labels 1 to {num_classes - 1}; 0 is the background",
            )
        height, width = image.shape[-2:]
        boxes.append(box.reshape(-1, 4) / box.new_tensor([width, height, width, height]))
        labels.append(label)
    pad = torch.nn.utils.rnn.pad_sequence
    boxes_BG4, labels_BG = pad(boxes, batch_first=True), pad(labels, batch_first=True)
    if not boxes_BG4.shape[1]:  # matching needs one column
        return boxes_BG4.new_zeros(len(boxes), 1, 4), labels_BG.new_zeros(len(labels), 1)
    return boxes_BG4, labels_BG
