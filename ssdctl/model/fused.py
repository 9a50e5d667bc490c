"""What compilers and accelerators compute in another form: same parameters, same result.

The files of the model read like the paper. `swap_in` gives its modules the classes of this file, by
the forms that a device names (`Device.forms`). benchmarks/RESULTS.md lists what each saves.

    compiled    colors and cross-entropy as sums that any compiler fuses
    gpu         the same for channels-last; aligned heads and stem; IoU without tables
    no_scatter  comparisons instead of scatter
    no_gather   comparisons instead of gather

Shapes: B batch, C classes with background, G ground-truth boxes (padded), N default boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ssdctl.boxes import Matcher, pairwise_iou
from ssdctl.input.normalize import Normalize
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.ssd300 import SSD300

ALIGNMENT = 64  # tensor cores need a multiple of 8 channels, cuDNN's fastest kernels of 64


def swap_in(module: nn.Module, forms: Sequence[str]) -> None:
    """Let all parts of a module compute in some forms, in place; the first of equals wins."""
    for part in module.modules():
        kinds = tuple(FORMS[form][type(part)] for form in forms if type(part) in FORMS[form])
        if kinds:
            part.__class__ = kinds[0] if len(kinds) == 1 else type(kinds[0].__name__, kinds, {})
        if "gpu" not in forms:
            continue
        for before, child in itertools.pairwise([None, *part.children()]):
            if type(child) is nn.Conv2d and child.in_channels == 3:
                child.__class__ = AlignedStem
            elif type(child) is nn.ReLU and isinstance(before, _BatchNorm):
                child.__class__ = NormReLU


class AlignedStem(nn.Conv2d):
    """The first convolution, of images with three planes."""

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Convolve four planes, the last of zeros, if compiled.

        Tensor cores need aligned pixels; the compiler writes the plane with the colors.
        """
        if not torch.compiler.is_compiling():
            return super().forward(images_B3HW)
        plane = (0, 0, 0, 0, 0, 1)
        return self._conv_forward(F.pad(images_B3HW, plane), F.pad(self.weight, plane), self.bias)


class NormReLU(nn.ReLU):
    """ReLU directly after a batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x, 0), of NaN NaN.

        Compiled, its backward compares x again, which the compiler computes from the input of the
        batch norm, so that it need not read the result.
        """
        if not torch.compiler.is_compiling():
            return super().forward(x)
        return torch.where(x <= 0, x.new_zeros(()), x)


class JoinedHeads(SSD300):
    """SSD300 with the two heads of a feature map as one convolution of aligned width."""

    def predict(self, level: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate the heads' weights, with rows of zeros up to a multiple of `ALIGNMENT`.

        This happens at every call, so parameters and checkpoints keep separate heads.
        """
        heads = [cast(nn.Conv2d, h[level]) for h in (self.class_heads, self.box_heads)]
        widths = [head.out_channels for head in heads]
        padding = -sum(widths) % ALIGNMENT
        weight = F.pad(torch.cat([h.weight for h in heads]), (0, 0, 0, 0, 0, 0, 0, padding))
        bias = F.pad(torch.cat([cast(Tensor, h.bias) for h in heads]), (0, padding))
        joined = F.conv2d(feature, weight, bias, padding=1)
        logits, offsets, _ = joined.split([*widths, padding], dim=1)
        return offsets, logits


class ColorsAsSums(Normalize):
    """Each plane as a sum of three: a matrix product is not fused with its input."""

    def jittered(self, images_BHW3: Tensor, jitter_B4: Tensor) -> Tensor:
        red, green, blue = self._planes(images_BHW3)
        matrix_B33, offset_B3 = self.map_and_normalize(jitter_B4, self._mean_rgb(images_BHW3))
        weights_B3311 = (matrix_B33 / 255)[..., None, None]
        planes = [
            weights_B3311[:, c, 0] * red
            + weights_B3311[:, c, 1] * green
            + weights_B3311[:, c, 2] * blue
            + offset_B3[:, c, None, None]
            for c in range(3)
        ]
        return torch.stack(planes, dim=1)

    def _planes(self, images_BHW3: Tensor) -> list[Tensor]:
        return [plane.to(self.mean.dtype) for plane in images_BHW3.unbind(dim=3)]

    def _mean_rgb(self, images_BHW3: Tensor) -> Tensor:
        """Return (B, 3) means; over the rows first, whose pixels are adjacent in memory."""
        num_values = 255 * images_BHW3.shape[1] * images_BHW3.shape[2]
        return images_BHW3.to(self.mean.dtype).sum(dim=1).sum(dim=1) / num_values


class ChannelsLastColors(ColorsAsSums):
    """One expression over (B, H, W, 3): a concatenation would be written to memory in fp32.

    Products with a matrix are stored, so that the expression has few inputs: a compiler splits one
    with many.
    """

    def jittered(self, images_BHW3: Tensor, jitter_B4: Tensor) -> Tensor:
        mean_rgb_B3 = self._mean_rgb(images_BHW3)
        red, green, blue = self._planes(images_BHW3)
        matrix_B33, offset_B3 = self.color_map(jitter_B4, mean_rgb_B3)
        weights_B33 = torch.matmul(self.inverse_std, matrix_B33) / 255
        offset_B3 = torch.matmul(offset_B3 - self.mean, self.inverse_std)
        red_w, green_w, blue_w = weights_B33[:, None, None].unbind(dim=-1)  # B x 1 x 1 x 3
        pixels_BHW3 = (
            red[..., None] * red_w
            + green[..., None] * green_w
            + blue[..., None] * blue_w
            + offset_B3[:, None, None]
        )
        return pixels_BHW3.permute(0, 3, 1, 2)


class MatcherWithoutTables(Matcher):
    """Two IoU tables, each computed within its reduction, so neither is written to memory."""

    def best_matches(self, boxes_BG4: Tensor, defaults_N4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        favorite = pairwise_iou(boxes_BG4, defaults_N4).argmax(dim=2)
        best_iou, best_box = pairwise_iou_transposed(boxes_BG4, defaults_N4).max(dim=2)
        return best_iou, best_box, favorite


class MatcherWithoutScatter(Matcher):
    """Gaudi scatters 64-bit integers on the host; on CUDA it is not deterministic."""

    def scatter_largest(self, values_BG: Tensor, index_BG: Tensor, size: int) -> Tensor:
        numbers_N = torch.arange(size, device=index_BG.device)
        is_there_BGN = index_BG.unsqueeze(2) == numbers_N
        none = values_BG.new_full((), -1)
        return values_BG.unsqueeze(2).where(is_there_BGN, none).amax(dim=1)


class MatcherWithoutGather(Matcher):
    """XLA's gather is slow, and a comparison and a sum are fused into the operations around."""

    def take(self, values_BKG: Tensor, index_BN: Tensor) -> Tensor:
        number_GN = torch.arange(values_BKG.shape[2], device=index_BN.device).unsqueeze(1)
        is_chosen_B1GN = (index_BN.unsqueeze(1) == number_GN).unsqueeze(1)
        zero = values_BKG.new_zeros(())
        return torch.where(is_chosen_B1GN, values_BKG.unsqueeze(3), zero).sum(dim=2)


class LossByComparison(MultiboxLoss):
    """Compilers fuse a comparison with every class into their passes over the logits.

    In backward, a gather becomes a table of zeros. They cannot fuse a custom function, nor cache
    its code.
    """

    def cross_entropy(self, logits_BCN: Tensor, label_BN: Tensor) -> Tensor:
        class_C1 = torch.arange(logits_BCN.shape[1], device=label_BN.device).unsqueeze(1)
        is_target_BCN = label_BN.unsqueeze(1) == class_C1
        target_logit_BN = logits_BCN.where(is_target_BCN, logits_BCN.new_zeros(())).sum(dim=1)
        largest_BN = logits_BCN.detach().amax(dim=1)
        total_BN = (logits_BCN - largest_BN.unsqueeze(1)).exp().sum(dim=1)
        return total_BN.log() - (target_logit_BN - largest_BN)


FORMS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "gpu": {
        SSD300: JoinedHeads,
        Normalize: ChannelsLastColors,
        Matcher: MatcherWithoutTables,
        MultiboxLoss: LossByComparison,
    },
    "compiled": {Normalize: ColorsAsSums, MultiboxLoss: LossByComparison},
    "no_scatter": {Matcher: MatcherWithoutScatter},
    "no_gather": {Matcher: MatcherWithoutGather, MultiboxLoss: LossByComparison},
}


def pairwise_iou_transposed(a_BG4: Tensor, b_N4: Tensor) -> Tensor:
    """Return the values of `pairwise_iou`, bit by bit, as (B, N, G)."""
    left, top, right, bottom = a_BG4.unsqueeze(1).unbind(dim=-1)  # B x 1 x G each
    b_left, b_top, b_right, b_bottom = b_N4.unsqueeze(1).unbind(dim=-1)  # N x 1 each
    width = (torch.minimum(right, b_right) - torch.maximum(left, b_left)).clamp(min=0)
    height = (torch.minimum(bottom, b_bottom) - torch.maximum(top, b_top)).clamp(min=0)
    overlap = width * height
    area = ((right - left) * (bottom - top)).clamp(min=0)
    least = torch.finfo(b_N4.dtype).tiny
    b_area = ((b_right - b_left) * (b_bottom - b_top)).clamp(min=least)
    return overlap / (area + b_area - overlap)
