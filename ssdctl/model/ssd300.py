"""SSD300 (Liu et al. 2016) on a ResNet: backbone, five extra blocks, six pairs of heads.

Shapes: B batch, C classes with background, N = 8732 default boxes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ssdctl.boxes.default_boxes import BOXES_PER_CELL
from ssdctl.errors import hints_in_messages
from ssdctl.model import tensor_device, vgg
from ssdctl.model.backbone import OUT_CHANNELS, STAGES, build_backbone, freeze_stem
from ssdctl.model.constants import constants_of
from ssdctl.model.loss import Losses, MultiboxLoss
from ssdctl.model.resnet import NormReLU
from ssdctl.model.torchvision_format import Images, Target, normalized_batch, padded_targets

EXTRA_WIDTHS = (256, 256, 128, 128, 128)  # of the 1x1 convolutions
ALIGNMENT = 64  # tensor cores need a multiple of 8 channels, cuDNN's fastest kernels of 64


def feature_channels(backbone: str) -> tuple[int, ...]:
    """Return the channels of the six feature maps."""
    if backbone == "vgg16":
        return vgg.CHANNELS
    last_channels = 128 if backbone == "resnet18" else 256
    return (OUT_CHANNELS[backbone], 512, 512, 256, 256, last_channels)


class SSD300(nn.Module):
    """The network, with random weights.

    Args:
        backbone: `resnet18`, `resnet34`, `resnet50`, `resnet101`, `resnet152` or `vgg16`.
        num_classes: Classes with background; 81 on COCO.
        extra_norm: `none` (biased convolutions, as MLPerf) or `batch` (batch norm, as NVIDIA).

    Attributes:
        num_classes: Classes with background.
        class_names: Of a checkpoint, without background; that of label 1 is first. Else empty.
    """

    def __init__(self, backbone: str, num_classes: int, extra_norm: str = "none") -> None:
        super().__init__()
        self.num_classes = num_classes
        self.class_names: list[str] = []
        self._loss: MultiboxLoss | None = None  # of `loss`; made when it is needed
        self._frozen_stages = 0
        self._is_norm_frozen = False
        self.constants = constants_of(backbone)
        channels = feature_channels(backbone)
        self.backbone: nn.Sequential
        self.first_map_norm: nn.Module = nn.Identity()
        if backbone == "vgg16":
            self.backbone = vgg.build_trunk()
            self.extra = nn.ModuleList(vgg.build_extra())
            self.first_map_norm = vgg.L2Norm(channels[0])
        else:
            self.backbone = build_backbone(backbone)
            self.extra = nn.ModuleList(
                _extra_block(channels[i], EXTRA_WIDTHS[i], channels[i + 1], i < 3, extra_norm)
                for i in range(5)
            )
        pairs = list(zip(channels, BOXES_PER_CELL, strict=True))
        self.box_heads = nn.ModuleList(nn.Conv2d(c, n * 4, 3, padding=1) for c, n in pairs)
        self.class_heads = nn.ModuleList(
            nn.Conv2d(c, n * num_classes, 3, padding=1) for c, n in pairs
        )
        for part in (self.extra, self.box_heads, self.class_heads):
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

    def freeze_stem(self) -> None:
        """Stop training the first layers; batch norm's statistics are still updated."""
        if isinstance(self.first_map_norm, vgg.L2Norm):
            vgg.freeze_first_stage(self.backbone)
        else:
            freeze_stem(self.backbone)

    def freeze(self, stages: int) -> None:
        """Stop training the first stages of the backbone, statistics of batch norm included.

        Args:
            stages: 1 to 4: stem, layer1, layer2, layer3 of a ResNet; blocks of VGG16.
        """
        self._frozen_stages = stages
        for module in self._frozen_modules():
            module.requires_grad_(False)
        self.train(self.training)

    def freeze_norm(self) -> None:
        """Normalise with the stored statistics of batch norm, in training too."""
        self._is_norm_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> SSD300:
        """Set the mode; what is frozen stays in evaluation mode."""
        super().train(mode)
        for module in self._frozen_modules():
            module.eval()
        if self._is_norm_frozen:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def _frozen_modules(self) -> list[nn.Module]:
        if isinstance(self.first_map_norm, vgg.L2Norm):
            return list(self.backbone[: vgg.STAGE_ENDS[self._frozen_stages]])
        names = [name for stage in STAGES[: self._frozen_stages] for name in stage]
        return [self.backbone.get_submodule(name) for name in names]

    @classmethod
    def from_checkpoint(cls, checkpoint: str | os.PathLike[str]) -> SSD300:
        """Return the network of a checkpoint with its weights, on the CPU, in evaluation mode.

        Args:
            checkpoint: A file, run folder, detector's name or `hf://org/name`, as `ssdctl.load`
                takes it, except for ONNX files.

        Raises:
            ssdctl.errors.UsageError: There is no such file, folder or name.
            ssdctl.errors.NetworkError: The detector cannot be fetched.
            ssdctl.errors.IntegrityError: The file is damaged, or not a checkpoint.
        """
        from ssdctl.inference.predict import load_network  # late: it needs this module

        with hints_in_messages():
            return load_network(checkpoint)

    def loss(self, images: Images, targets: Sequence[Target]) -> Tensor:
        """Return the multibox loss of a batch, a scalar to be minimized.

        Args:
            images: (3, H, W) tensors of any sizes, or (B, 3, H, W): RGB, float in 0 to 1 or uint8.
                They are resized to 300 x 300 and normalized here.
            targets: As torchvision's detectors take them: for each image `boxes`, (G, 4) left, top,
                right, bottom in pixels, and `labels`, (G,), 1 to `num_classes - 1`.

        Raises:
            ssdctl.errors.UsageError: A shape, type or label is wrong.
        """
        with hints_in_messages():
            device = self.box_heads[0].weight.device
            assert isinstance(device, torch.device)
            constants = self.constants
            batch = normalized_batch(images, constants.mean, constants.std, device)
            boxes, labels = padded_targets(images, targets, self.num_classes, device)
        if self._loss is None or self._loss.targets.defaults_ltrb.device != device:
            self._loss = MultiboxLoss(constants=constants).to(device)
        losses: Losses = self._loss(*self(batch), boxes, labels)
        return losses.total

    def forward(self, images_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, 4, N) offsets and (B, C, N) logits of normalised (B, 3, 300, 300) images."""
        features = [self.backbone(images_B3HW)]
        for block in self.extra:
            features.append(block(features[-1]))
        features[0] = self.first_map_norm(features[0])
        offsets, logits = [], []
        for feature, box_head, class_head in zip(
            features, self.box_heads, self.class_heads, strict=True
        ):
            assert isinstance(box_head, nn.Conv2d)
            assert isinstance(class_head, nn.Conv2d)
            if tensor_device.is_gpu(feature):
                offset_map, logit_map = joined_heads(feature, box_head, class_head)
            else:
                offset_map, logit_map = box_head(feature), class_head(feature)
            # Channels are coordinate-major (class-major): (4, shapes) x rows x columns.
            offsets.append(offset_map.flatten(1).unflatten(1, (4, -1)))
            logits.append(logit_map.flatten(1).unflatten(1, (self.num_classes, -1)))
        return torch.cat(offsets, dim=2), torch.cat(logits, dim=2)


def joined_heads(
    feature: Tensor, box_head: nn.Conv2d, class_head: nn.Conv2d
) -> tuple[Tensor, Tensor]:
    """Return what two heads compute from a feature map, as one convolution of aligned width.

    The weights are concatenated at every call, with rows of zeros up to a multiple of `ALIGNMENT`,
    so that parameters and checkpoints are those of separate heads.
    """
    assert box_head.bias is not None
    assert class_head.bias is not None
    widths = [class_head.out_channels, box_head.out_channels]
    padding = -sum(widths) % ALIGNMENT
    weight = F.pad(torch.cat([class_head.weight, box_head.weight]), (0, 0, 0, 0, 0, 0, 0, padding))
    bias = F.pad(torch.cat([class_head.bias, box_head.bias]), (0, padding))
    joined = F.conv2d(feature, weight, bias, padding=1)
    logits, offsets, _ = joined.split([*widths, padding], dim=1)
    return offsets, logits


def _extra_block(
    in_channels: int, width: int, out_channels: int, strided: bool, norm: str
) -> nn.Sequential:
    stride, padding = (2, 1) if strided else (1, 0)
    has_norm = norm == "batch"
    layers: list[nn.Module] = []
    for convolution in (
        nn.Conv2d(in_channels, width, 1, bias=not has_norm),
        nn.Conv2d(width, out_channels, 3, stride, padding, bias=not has_norm),
    ):
        layers.append(convolution)
        if has_norm:
            layers.append(nn.BatchNorm2d(convolution.out_channels))
        layers.append(NormReLU(inplace=True) if has_norm else nn.ReLU(inplace=True))
    return nn.Sequential(*layers)
