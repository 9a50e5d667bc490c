"""Colour on the device: jitter and normalisation as one 3x4 affine map per picture.

Brightness, contrast, saturation and hue are each affine in RGB once a picture's mean is known,
so they fold with the normalisation into one matrix and one offset; pixels are touched once.
The sequential definition clamps to [0, 1] after each step and turns hue in HSV; this one turns it
about the gray axis in YIQ and does not clamp: docs/numerics.md gives the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
LUMA = (0.299, 0.587, 0.114)
RGB_TO_YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


class Normalise(nn.Module):
    """uint8 (B, H, W, 3) pictures -> float (B, 3, H, W), channels last in memory but for the CPU.

    The constants are buffers, made once: one that is made at every step is a wait for the device.

    Args:
        dtype: Of the arithmetic and the result.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN, dtype=dtype), persistent=False)
        self.register_buffer("std", torch.tensor(STD, dtype=dtype), persistent=False)
        self.colour_map = ColourMap(dtype)

    def forward(self, images_BHW3: Tensor, jitter_B4: Tensor | None = None) -> Tensor:
        """Normalise, and jitter the colours.

        Args:
            images_BHW3: RGB, 0 to 255.
            jitter_B4: Factors of brightness, contrast and saturation, and the hue's turn in
                radians; None leaves the colours.
        """
        pixels = images_BHW3.to(self.mean.dtype) / 255
        if jitter_B4 is None:
            return ((pixels - self.mean) / self.std).permute(0, 3, 1, 2)
        matrix, offset = self.colour_map(jitter_B4.to(pixels.dtype), pixels.mean(dim=(1, 2)))
        matrix, offset = matrix / self.std[:, None], (offset - self.mean) / self.std
        return _mapped(pixels, matrix, offset)


def _mapped(pixels_BHW3: Tensor, matrix_B33: Tensor, offset_B3: Tensor) -> Tensor:
    """Each picture's affine map of its pixels -> (B, 3, H, W)."""
    if pixels_BHW3.device.type == "cpu":  # products with rows of three are ten times slower here
        planes = pixels_BHW3.permute(0, 3, 1, 2).contiguous().flatten(2)
        mapped = torch.baddbmm(offset_B3.unsqueeze(2), matrix_B33, planes)
        return mapped.unflatten(2, pixels_BHW3.shape[1:3])
    flat = torch.baddbmm(offset_B3[:, None], pixels_BHW3.flatten(1, 2), matrix_B33.transpose(1, 2))
    return flat.reshape(pixels_BHW3.shape).permute(0, 3, 1, 2)


class ColourMap(nn.Module):
    """The jitter as an affine map of RGB in 0 to 1: (B, 3, 3) matrices and (B, 3) offsets.

    In order: brightness scales; contrast blends with the picture's mean gray; saturation blends
    with each pixel's gray; hue turns the chroma plane of YIQ.
    """

    luma: Tensor
    identity: Tensor
    to_yiq: Tensor
    from_yiq: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        to_yiq = torch.tensor(RGB_TO_YIQ, dtype=torch.float64)
        to_yiq[1:] -= to_yiq[1:].mean(dim=1, keepdim=True)  # rounded: keep gray exactly gray
        constants = {
            "luma": torch.tensor(LUMA, dtype=torch.float64),
            "identity": torch.eye(3),
            "to_yiq": to_yiq,
            "from_yiq": torch.linalg.inv(to_yiq),
        }
        for name, tensor in constants.items():
            self.register_buffer(name, tensor.to(dtype), persistent=False)

    def forward(self, jitter_B4: Tensor, mean_rgb_B3: Tensor) -> tuple[Tensor, Tensor]:
        """The maps of pictures with these mean colours."""
        brightness, contrast, saturation, hue = jitter_B4[:, :, None].unbind(dim=1)  # B x 1 each
        mean_gray = brightness * (mean_rgb_B3 @ self.luma).unsqueeze(1)
        scale = (brightness * contrast).unsqueeze(-1)
        shift = (1 - contrast) * mean_gray  # the same for the three channels, so gray

        to_gray = self.luma.expand(3, 3)
        saturate = (
            saturation.unsqueeze(-1) * self.identity + (1 - saturation).unsqueeze(-1) * to_gray
        )
        matrix = self._hue_rotation(hue.squeeze(1)) @ saturate * scale
        return matrix, shift.expand(-1, 3)  # gray stays gray under saturation and hue

    def _hue_rotation(self, turn_B: Tensor) -> Tensor:
        """(B,) radians -> (B, 3, 3): the chroma plane turned, luma kept."""
        cos, sin = turn_B.cos(), turn_B.sin()
        zero, one = torch.zeros_like(cos), torch.ones_like(cos)
        rotation = torch.stack([one, zero, zero, zero, cos, sin, zero, -sin, cos], dim=1)
        return self.from_yiq @ rotation.unflatten(1, (3, 3)) @ self.to_yiq


def normalise(
    images_BHW3: Tensor, jitter_B4: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`Normalise` on pictures, wherever they lie."""
    result: Tensor = Normalise(dtype).to(images_BHW3.device)(images_BHW3, jitter_B4)
    return result
