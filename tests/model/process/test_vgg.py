"""SSD300-VGG16 against torchvision's own class, with random weights in its layout."""

import argparse
import dataclasses
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ssdctl.boxes import BOXES_PER_CELL, FEATURE_SIZES, NUM_BOXES
from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.data.annotations import ClassName
from ssdctl.data.coco_json import COCO_CLASSES
from ssdctl.device.cpu import Cpu
from ssdctl.evaluation.choices import dataset_category_ids
from ssdctl.inference.detector import Detector, DetectorConfig
from ssdctl.input.normalize import Normalize
from ssdctl.model.backbones.vgg16 import CONSTANTS as TORCHVISION_VGG16
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.ssd300 import load_network

NUM_CLASSES = 91


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    """torchvision's model, with weights that give confident detections."""
    from torchvision.models import detection

    torch.manual_seed(3)
    model = detection.ssd300_vgg16(weights=None, weights_backbone=None, num_classes=NUM_CLASSES)
    return model.eval()


@pytest.fixture(scope="module")
def file(theirs: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchvision") / "ssd300_vgg16.pth"
    torch.save(theirs.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def raw_images() -> Tensor:
    """(2, 300, 300, 3) uint8."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 256, (2, 3, 20, 20), generator=generator).float()
    smooth = nn.functional.interpolate(coarse, size=300, mode="bilinear")
    return smooth.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def our_order(values_BNK: Tensor) -> Tensor:
    """Their boxes, row-column-shape within a map, in our order shape-row-column: (B, K, N)."""
    parts, start = [], 0
    for size, shapes in zip(FEATURE_SIZES, BOXES_PER_CELL, strict=True):
        count = size * size * shapes
        part = values_BNK[:, start : start + count].unflatten(1, (size * size, shapes))
        parts.append(part.transpose(1, 2).flatten(1, 2))
        start += count
    assert start == NUM_BOXES
    return torch.cat(parts, dim=1).transpose(1, 2)


def their_outputs(model: nn.Module, raw_images: Tensor) -> tuple[Tensor, Tensor]:
    """Raw (B, N, 4) offsets and (B, N, C) logits of torchvision's model."""
    images, _ = model.transform(list(raw_images.permute(0, 3, 1, 2) / 255))
    output = model.head(list(model.backbone(images.tensors).values()))
    return output["bbox_regression"], output["cls_logits"]


@pytest.mark.slow(in_ci=True)
def test_detections_are_torchvisions(theirs: nn.Module, file: Path, raw_images: Tensor) -> None:
    checkpoint, raw_images = load_checkpoint(file), raw_images[:1]
    assert checkpoint.architecture.backbone == "vgg16"
    model, rules = load_network(checkpoint).eval(), TORCHVISION_VGG16
    detector = Detector(
        model, Cpu("eager"), DetectorConfig("fp32", rules.score_threshold, rules.nms_iou)
    )
    [result] = detector(raw_images)
    with torch.no_grad():
        [target] = theirs(list(raw_images.permute(0, 3, 1, 2) / 255))
    assert len(result.scores) == len(target["scores"]) >= 1
    mine, other = (
        torch.argsort(scores, descending=True, stable=True)
        for scores in (result.scores, target["scores"])
    )
    torch.testing.assert_close(result.scores[mine], target["scores"][other], atol=1e-5, rtol=0)
    assert torch.equal(result.labels[mine], target["labels"][other])
    torch.testing.assert_close(result.boxes[mine] * 300, target["boxes"][other], atol=2e-3, rtol=0)
    with torch.no_grad():
        pixels = Normalize(rules.mean, rules.std, torch.float64)(raw_images)
        outputs = model.double()(pixels)
        expected = their_outputs(deepcopy(theirs).double(), raw_images.double())
    for actual, output in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, our_order(output), rtol=1e-5, atol=1e-5)


def targets() -> tuple[Tensor, Tensor]:
    """Ground truth of two images: (2, 3, 4) ltrb fractions and (2, 3) labels, one padded."""
    boxes = torch.tensor(
        [
            [[0.1, 0.1, 0.5, 0.6], [0.3, 0.2, 0.9, 0.9], [0.6, 0.6, 0.64, 0.7]],
            [[0.0, 0.0, 1.0, 1.0], [0.2, 0.5, 0.3, 0.7], [0.0, 0.0, 0.0, 0.0]],
        ]
    )
    return boxes.double(), torch.tensor([[1, 17, 90], [3, 44, 0]])


@pytest.mark.slow(in_ci=True)
def test_losses_are_torchvisions(theirs: nn.Module) -> None:
    """The loss of given outputs, without the network's cost."""
    from torchvision.models.detection.image_list import ImageList
    from torchvision.ops import box_iou

    generator = torch.Generator().manual_seed(1)
    offsets = torch.randn(2, NUM_BOXES, 4, generator=generator, dtype=torch.float64)
    logits = torch.randn(2, NUM_BOXES, NUM_CLASSES, generator=generator, dtype=torch.float64)
    maps = [torch.zeros(2, 1, size, size) for size in FEATURE_SIZES]
    anchors = theirs.anchor_generator(
        ImageList(torch.zeros(2, 3, 300, 300), [(300, 300)] * 2), maps
    )
    boxes, labels = targets()
    target = [
        {"boxes": b[label > 0] * 300, "labels": label[label > 0]}
        for b, label in zip(boxes, labels, strict=True)
    ]
    matched = [
        theirs.proposal_matcher(box_iou(w["boxes"], a.double()))
        for w, a in zip(target, anchors, strict=True)
    ]
    outputs = {"bbox_regression": offsets, "cls_logits": logits}
    expected = theirs.compute_loss(target, outputs, [a.double() for a in anchors], matched)
    loss = MultiboxLoss(torch.float64, constants=TORCHVISION_VGG16)
    actual = loss(our_order(offsets), our_order(logits), boxes, labels)
    torch.testing.assert_close(actual.box, expected["bbox_regression"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        actual.classification, expected["classification"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow(in_ci=True)
def test_what_torchvisions_program_saves_is_read(theirs: nn.Module, tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    for content in (state, {"model": state, "args": argparse.Namespace(lr=1), "epoch": 3}):
        torch.save(content, tmp_path / "model_3.pth")
        assert load_checkpoint(tmp_path / "model_3.pth").architecture.backbone == "vgg16"


@pytest.mark.slow(in_ci=True)
def test_classes_are_cocos_with_gaps_which_are_not_evaluated(file: Path) -> None:
    checkpoint = load_checkpoint(file)
    assert len(checkpoint.classes) == 90
    assert checkpoint.classes[0] == ClassName(1, "person")
    assert checkpoint.classes[89] == ClassName(90, "toothbrush")
    assert checkpoint.classes[11].id is None  # 12 is a gap
    renumbered = [ClassName(id_ + 1000, name) for id_, name in reversed(COCO_CLASSES)]
    ids = dataset_category_ids(checkpoint, renumbered, Path("coco"))
    assert (ids[0], ids[89], ids[11]) == (1001, 1090, -1)
    assert (ids > 0).sum() == 80
    unnamed = dataclasses.replace(checkpoint, classes=[])  # labels are category ids
    own = [ClassName(id_, str(id_)) for id_ in (90, 3, 1)]
    ids = dataset_category_ids(unnamed, own, Path("own"))
    assert (ids[0], ids[1], ids[2], ids[89], (ids > 0).sum()) == (1, -1, 3, 90, 3)
