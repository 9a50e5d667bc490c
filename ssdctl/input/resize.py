"""Resize decoded images and crops of them to the network's 300 x 300 pixels.

resize(pixels, out)                           # the whole image, exactly as Pillow resizes
resize_crop(pixels, (20, 10, 320, 210), out)  # a crop, within one level of Pillow
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.data.image_decode import Pixels, thread_buffer

FILL_RGB = (123, 117, 104)  # the mean of ImageNet, around images that are zoomed out


def resize(pixels: Pixels, out: Pixels) -> None:
    """Resize a whole image into `out` (300, 300, 3), bit for bit as Pillow does."""
    small = Image.fromarray(pixels).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
    out[...] = np.asarray(small)


def resize_crop(pixels: Pixels, box: tuple[int, int, int, int], flip: bool, out: Pixels) -> None:
    """Resize the crop `box` (ltrb, pixels) into `out` (H, W, 3), mirrored if `flip` is set.

    Pixels outside the image get the mean color of ImageNet.
    PyTorch's kernel is Pillow's filter in 16-bit integers: at most one level from it.
    """
    left, top, right, bottom = box
    height, width = pixels.shape[:2]
    if left < 0 or top < 0 or right > width or bottom > height:
        _resize_padded(pixels, box, flip, out)
        return
    window = pixels[top:bottom, left:right]
    if not (window.flags.c_contiguous and window.flags.writeable):
        packed = thread_buffer("crop", window.size).reshape(window.shape)
        np.copyto(packed, window)
        window = packed
    target = small = _as_images(out)
    if flip:
        small = _as_images(thread_buffer("small", out.size).reshape(out.shape))
    torch.ops.aten._upsample_bilinear2d_aa.out(
        _as_images(window), list(out.shape[:2]), False, None, None, out=small
    )
    if flip:
        torch.ops.aten.flip.out(small, [3], out=target)


def _resize_padded(pixels: Pixels, box: tuple[int, int, int, int], flip: bool, out: Pixels) -> None:
    """Resize a crop that leaves the image: the part inside is resized, the rest filled."""
    low, high = np.array(box[:2]), np.array(box[2:])
    size = np.array(pixels.shape[1::-1])  # width, height
    inner_low, inner_high = low.clip(0, size - 1), high.clip(1, size)
    scale = np.array(out.shape[1::-1]) / (high - low)
    start = np.rint((inner_low - low) * scale).astype(int)
    end = np.maximum(np.rint((inner_high - low) * scale).astype(int), start + 1)
    part = np.empty((end[1] - start[1], end[0] - start[0], 3), np.uint8)
    inner = (int(inner_low[0]), int(inner_low[1]), int(inner_high[0]), int(inner_high[1]))
    resize_crop(pixels, inner, False, part)
    out[...] = FILL_RGB
    window = out[start[1] : end[1], start[0] : end[0]]
    window[...] = part[: window.shape[0], : window.shape[1]]
    if flip:
        out[...] = out[:, ::-1].copy()


def _as_images(pixels: Pixels) -> torch.Tensor:
    """(H, W, 3) -> a (1, 3, H, W) view, channels last."""
    return torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
