"""Color on the device: jitter and normalization as one 3x4 affine map per image.

Given the mean of an image, brightness, contrast, saturation and hue are affine in RGB, so they
combine with the normalization into one matrix and one offset: one pass over the pixels.
The sequential definition clamps to [0, 1] after each step and rotates hue in HSV; this one rotates
it about the gray axis in YIQ and does not clamp. docs/numerics.md gives the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

LUMA = (0.299, 0.587, 0.114)
RGB_TO_YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


class Normalize(nn.Module):
    """Convert uint8 (B, H, W, 3) images to float (B, 3, H, W), except on the CPU channels-last.

    The constants are buffers: creating one at every step would synchronize with the device.
    """

    mean: Tensor
    std: Tensor
    inverse_std: Tensor  # on the diagonal of a matrix

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=dtype), persistent=False)
        self.register_buffer("inverse_std", torch.diag(1 / self.std), persistent=False)
        self.color_map = ColorMap(dtype)

    def forward(self, images_BHW3: Tensor, jitter_B4: Tensor | None = None) -> Tensor:
        """Normalize and jitter the colors.

        Args:
            images_BHW3: RGB, 0 to 255.
            jitter_B4: Factors of brightness, contrast and saturation, and the hue's rotation
                in radians; None leaves the colors unchanged.
        """
        if jitter_B4 is None:
            pixels = images_BHW3.to(self.mean.dtype) / 255
            return ((pixels - self.mean) / self.std).permute(0, 3, 1, 2)
        jitter_B4 = jitter_B4.to(self.mean.dtype)
        return self.jittered(images_BHW3, jitter_B4)

    def jittered(self, images_BHW3: Tensor, jitter_B4: Tensor) -> Tensor:
        """Return the images with jittered colors, normalized; `model/fused.py` has other forms."""
        if images_BHW3.device.type == "cpu":
            return self._as_plane_product(images_BHW3, jitter_B4)
        pixels = images_BHW3.to(self.mean.dtype) / 255
        matrix_B33, offset_B3 = self.map_and_normalize(jitter_B4, pixels.mean(dim=(1, 2)))
        flat = torch.baddbmm(offset_B3[:, None], pixels.flatten(1, 2), matrix_B33.transpose(1, 2))
        return flat.reshape(pixels.shape).permute(0, 3, 1, 2)

    def _as_plane_product(self, images_BHW3: Tensor, jitter_B4: Tensor) -> Tensor:
        """Return the colors on the CPU, where products with rows of three are ten times slower and
        bytes are cheaper to move than floats."""
        planes = images_BHW3.permute(0, 3, 1, 2).contiguous().flatten(2).to(self.mean.dtype)
        matrix_B33, offset_B3 = self.map_and_normalize(jitter_B4, planes.mean(dim=2) / 255)
        mapped = torch.baddbmm(offset_B3.unsqueeze(2), matrix_B33 / 255, planes)
        return mapped.unflatten(2, images_BHW3.shape[1:3])

    def map_and_normalize(self, jitter_B4: Tensor, mean_rgb_B3: Tensor) -> tuple[Tensor, Tensor]:
        matrix_B33, offset_B3 = self.color_map(jitter_B4, mean_rgb_B3)
        return matrix_B33 / self.std[:, None], (offset_B3 - self.mean) / self.std


class ColorMap(nn.Module):
    """The jitter as an affine map of RGB in 0 to 1: (B, 3, 3) matrices and (B, 3) offsets.

    In order: brightness scales; contrast blends with the image's mean gray; saturation blends
    with each pixel's gray; hue rotates the chroma plane of YIQ.
    """

    luma: Tensor
    identity: Tensor
    to_yiq: Tensor
    from_yiq: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        to_yiq = torch.tensor(RGB_TO_YIQ, dtype=torch.float64)
        to_yiq[1:] -= to_yiq[1:].mean(dim=1, keepdim=True)  # undo rounding: gray stays gray
        constants = {
            "luma": torch.tensor(LUMA, dtype=torch.float64),
            "identity": torch.eye(3),
            "to_yiq": to_yiq,
            "from_yiq": torch.linalg.inv(to_yiq),
        }
        for name, tensor in constants.items():
            self.register_buffer(name, tensor.to(dtype), persistent=False)

    def forward(self, jitter_B4: Tensor, mean_rgb_B3: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maps of images with these mean colors."""
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

    def _hue_rotation(self, angle_B: Tensor) -> Tensor:
        """Return (B, 3, 3) rotations of the chroma plane by (B,) radians; luma is kept."""
        cos, sin = angle_B.cos(), angle_B.sin()
        zero, one = torch.zeros_like(cos), torch.ones_like(cos)
        rotation = torch.stack([one, zero, zero, zero, cos, sin, zero, -sin, cos], dim=1)
        return self.from_yiq @ rotation.unflatten(1, (3, 3)) @ self.to_yiq
