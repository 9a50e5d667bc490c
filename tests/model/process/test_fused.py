"""Each form of `model/fused.py` against the plain one, on the CPU."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ssdctl.boxes import Matcher, box_cxcywh_to_ltrb, default_boxes_cxcywh, pairwise_iou
from ssdctl.input.normalize import Normalize
from ssdctl.model import fused
from ssdctl.model.backbones import RESNET
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.ssd300 import SSD300


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def random_truth(batch_size: int, num_boxes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return ltrb boxes and labels; the last third of each image is padding."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(batch_size, num_boxes, 2, generator=generator) * 0.6
    size = 0.02 + 0.4 * torch.rand(batch_size, num_boxes, 2, generator=generator)
    labels = torch.randint(1, 5, (batch_size, num_boxes), generator=generator)
    labels[:, -(num_boxes // 3) :] = 0
    return torch.cat([low, low + size], dim=-1), labels


def swapped(module: nn.Module, *forms: str) -> nn.Module:
    other = copy.deepcopy(module)
    fused.swap_in(other, forms)
    assert {type(m).__module__ for m in other.modules()} & {fused.__name__}
    return other


@pytest.mark.parametrize(("norm", "num_classes"), [("none", 81), ("batch", 6), ("batch", 2)])
def test_a_network_in_a_gpus_form_equals_the_plain_one(
    norm: str, num_classes: int, compiling: None
) -> None:
    """Outputs, gradients and statistics; the same weights load."""
    torch.manual_seed(0)
    plain = SSD300("tiny", num_classes, norm).double().train()
    other = swapped(plain, "gpu")
    other.load_state_dict(plain.state_dict())
    images = torch.rand(2, 3, 300, 300, dtype=torch.float64)
    results = []
    for model in (plain, other):
        offsets, logits = model(images)
        (offsets.square().sum() + logits.square().sum()).backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        results.append((offsets, logits, gradients, model.state_dict()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)
    kinds = {type(m) for m in other.modules()}
    assert {fused.JoinedHeads, fused.AlignedStem, fused.NormReLU} <= kinds
    relus = [m for m in other.extra.modules() if isinstance(m, nn.ReLU)]
    assert all((type(m) is fused.NormReLU) == (norm == "batch") for m in relus)


def test_the_relu_after_a_norm_equals_the_relu_at_its_edges(compiling: None) -> None:
    values = torch.tensor([-2.0, -0.0, 0.0, 3.0, float("inf"), float("nan")], requires_grad=True)
    outputs = (fused.NormReLU()(values), nn.ReLU()(values))
    gradients = [torch.autograd.grad(output.sum(), values)[0] for output in outputs]
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["compiled", "gpu"])
def test_colors_as_sums_equal_the_product(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 30, 20, 3), dtype=torch.uint8, generator=generator)
    jitter = torch.tensor([[1.1, 0.7, 1.4, 0.3], [0.9, 1.2, 0.6, -0.3]], dtype=torch.float64)
    normalize = Normalize(RESNET.mean, RESNET.std, torch.float64)
    colors = swapped(normalize, form)(images, jitter)
    torch.testing.assert_close(colors, normalize(images, jitter), rtol=0, atol=1e-12)
    assert colors.stride(1) == (1 if form == "gpu" else 600)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12))
def test_each_form_of_matching_equals_matching(seed: int, num_boxes: int) -> None:
    boxes, labels = random_truth(3, num_boxes, seed)
    defaults = box_cxcywh_to_ltrb(default_boxes_cxcywh())[::7]
    expected = pairwise_iou(boxes, defaults)
    assert torch.equal(fused.pairwise_iou_transposed(boxes, defaults), expected.transpose(1, 2))
    matched = Matcher()(boxes, labels, defaults)
    for forms in (["gpu"], ["no_scatter"], ["no_scatter", "no_gather"], ["gpu", "no_scatter"]):
        actual = swapped(Matcher(), *forms)(boxes, labels, defaults)
        assert all(map(torch.equal, actual, matched))


def test_boxes_without_area_have_a_transposed_iou_of_zero() -> None:
    points = torch.tensor([[[0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0]]])
    assert fused.pairwise_iou_transposed(points, points[0]).eq(0).all()


@pytest.mark.parametrize(
    "forms", [["gpu"], ["compiled", "no_scatter"], ["no_scatter", "no_gather"]], ids="-".join
)
def test_another_form_of_the_loss_equals_the_plain_one(forms: list[str]) -> None:
    boxes, labels = random_truth(2, 9)
    labels[1] = 0
    generator = torch.Generator().manual_seed(1)
    offsets = torch.randn(2, 4, 8732, dtype=torch.float64, generator=generator).requires_grad_()
    logits = torch.randn(2, 5, 8732, dtype=torch.float64, generator=generator).requires_grad_()
    plain = MultiboxLoss(torch.float64, background_negatives=20)
    results = []
    for loss in (plain, swapped(plain, *forms)):
        total = loss(offsets, logits, boxes.double(), labels).total
        results.append((total, *torch.autograd.grad(total, [offsets, logits])))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)
