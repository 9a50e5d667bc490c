"""Resize decoded pictures and crops of them to the network's 300 x 300 pixels.

resize(pixels, out)                           # the whole picture, exactly as Pillow resizes
resize_crop(pixels, (20, 10, 320, 210), out)  # a crop, within one level of Pillow
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.data.image_decode import Pixels, thread_buffer


def resize(pixels: Pixels, out: Pixels) -> None:
    """Resize a whole picture into `out` (300, 300, 3), bit for bit as Pillow does."""
    small = Image.fromarray(pixels).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
    out[...] = np.asarray(small)


def resize_crop(pixels: Pixels, box: tuple[int, int, int, int], flip: bool, out: Pixels) -> None:
    """Resize the crop `box` (ltrb, pixels) into `out` (300, 300, 3), mirrored if `flip` is set.

    PyTorch's kernel is Pillow's filter in 16-bit integers: at most one level from it.
    """
    left, top, right, bottom = box
    window = pixels[top:bottom, left:right]
    if not window.flags.c_contiguous:
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


def _as_images(pixels: Pixels) -> torch.Tensor:
    """(H, W, 3) -> a (1, 3, H, W) view, channels last."""
    return torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
