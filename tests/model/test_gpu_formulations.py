"""What GPUs and XLA compute in another form than the CPU, compared with the CPU's form on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.boxes.matcher import match
from ssdctl.boxes.ops import box_cxcywh_to_ltrb, pairwise_iou, pairwise_iou_transposed
from ssdctl.model import tensor_device
from ssdctl.model.constants import RESNET
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.normalize import Normalize
from ssdctl.model.resnet import NormReLU, StemConv
from ssdctl.model.ssd300 import ALIGNMENT, SSD300, joined_heads
from ssdctl.runtime.torch_compat import installed_version

CODEGEN = Path(__file__).parent.parent.parent / "benchmarks/codegen.py"

pytestmark = pytest.mark.full_network


@pytest.fixture
def as_compiled_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_device, "is_gpu", lambda _: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def random_truth(batch_size: int, num_boxes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return ltrb boxes and labels; the last third of each image is padding."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(batch_size, num_boxes, 2, generator=generator) * 0.6
    size = 0.02 + 0.4 * torch.rand(batch_size, num_boxes, 2, generator=generator)
    labels = torch.randint(1, 5, (batch_size, num_boxes), generator=generator)
    labels[:, -(num_boxes // 3) :] = 0
    return torch.cat([low, low + size], dim=-1), labels


@pytest.mark.parametrize("num_classes", [2, 21, 81])
def test_joined_heads_equal_separate_heads(num_classes: int) -> None:
    torch.manual_seed(0)
    box_head = nn.Conv2d(16, 4 * 6, 3, padding=1).double()
    class_head = nn.Conv2d(16, num_classes * 6, 3, padding=1).double()
    feature = torch.randn(2, 16, 5, 5, dtype=torch.float64, requires_grad=True)
    outputs = joined_heads(feature, box_head, class_head)
    expected = (box_head(feature), class_head(feature))
    parameters = [feature, *box_head.parameters(), *class_head.parameters()]
    gradients = torch.autograd.grad(sum(o.square().sum() for o in outputs), parameters)
    expected_gradients = torch.autograd.grad(sum(e.square().sum() for e in expected), parameters)
    for value, other in zip((*outputs, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-10)


@pytest.mark.slow(in_ci=True)
def test_every_convolution_but_the_stem_has_aligned_channels(
    monkeypatch: pytest.MonkeyPatch, as_compiled_on_gpu: None
) -> None:
    channels: list[tuple[int, int]] = []
    convolve = torch.nn.functional.conv2d

    def record(images: Tensor, weight: Tensor, *arguments: object, **options: object) -> Tensor:
        channels.append((weight.shape[1], weight.shape[0]))
        return convolve(images, weight, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "conv2d", record)
    with torch.device("meta"):
        model = SSD300("resnet34", 81, "none").train()
        offsets, logits = model(torch.empty(1, 3, 300, 300))
    assert (offsets.shape[2], logits.shape[2]) == (8732, 8732)
    assert channels[0] == (4, 64)
    assert len(channels) > 40
    assert all(n % 8 == 0 for pair in channels[1:] for n in pair)
    assert sum(n % ALIGNMENT == 0 and n in (384, 512) for _, n in channels) >= 6


def test_the_stem_with_a_fourth_plane_equals_the_stem() -> None:
    torch.manual_seed(0)
    stem = StemConv(3, 8, 7, stride=2, padding=3, bias=False).double()
    images = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    torch.testing.assert_close(stem.with_fourth_plane(images), stem(images), rtol=0, atol=1e-13)
    stem.with_fourth_plane(images).sum().backward()
    assert stem.weight.grad.shape == stem.weight.shape


def test_the_relu_after_a_norm_as_a_comparison_equals_the_relu() -> None:
    values = torch.tensor([-2.0, -0.0, 0.0, 3.0, float("inf"), float("nan")], requires_grad=True)
    relu = NormReLU()
    outputs = (relu.as_comparison(values), relu(values))
    gradients = [torch.autograd.grad(output.sum(), values)[0] for output in outputs]
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_colors_as_sums_equal_the_product(channels_last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 30, 20, 3), dtype=torch.uint8, generator=generator)
    jitter = torch.tensor([[1.1, 0.7, 1.4, 0.3], [0.9, 1.2, 0.6, -0.3]], dtype=torch.float64)
    normalize = Normalize(RESNET.mean, RESNET.std, torch.float64)
    colors = normalize.as_fused_sums(images, jitter, channels_last=channels_last)
    torch.testing.assert_close(colors, normalize(images, jitter), rtol=0, atol=1e-12)
    assert colors.stride(1) == (1 if channels_last else 600)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12))
def test_fused_matching_equals_matching(seed: int, num_boxes: int) -> None:
    boxes, labels = random_truth(3, num_boxes, seed)
    defaults = box_cxcywh_to_ltrb(default_boxes_cxcywh())[::7]
    expected = pairwise_iou(boxes, defaults)
    assert torch.equal(pairwise_iou_transposed(boxes, defaults), expected.transpose(1, 2))
    matched = match(boxes, labels, defaults)
    for form in ({"fused": True}, {"by_comparison": True}):
        for value, other in zip(match(boxes, labels, defaults, **form), matched, strict=True):
            assert torch.equal(value, other)


def test_boxes_without_area_have_a_transposed_iou_of_zero() -> None:
    points = torch.tensor([[[0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0]]])
    assert pairwise_iou_transposed(points, points[0]).eq(0).all()


@pytest.mark.parametrize("form", ["gpu", "xla"])
def test_another_form_of_the_loss_equals_the_eager_one(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes, labels = random_truth(2, 9)
    loss = MultiboxLoss(torch.float64)
    generator = torch.Generator().manual_seed(1)
    offsets = torch.randn(2, 4, 8732, dtype=torch.float64, generator=generator).requires_grad_()
    logits = torch.randn(2, 5, 8732, dtype=torch.float64, generator=generator).requires_grad_()

    def value_and_gradients() -> tuple[Tensor, ...]:
        total = loss(offsets, logits, boxes.double(), labels).total
        return (total, *torch.autograd.grad(total, [offsets, logits]))

    expected = value_and_gradients()
    monkeypatch.setattr(tensor_device, f"is_{form}", lambda _: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: form == "gpu")
    for value, other in zip(value_and_gradients(), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or installed_version() < (2, 15),
    reason="the script replaces the driver queries of torch 2.15 and Triton",
)
def test_the_generated_step_has_no_atomics_and_only_aligned_channels() -> None:
    options = ("--backbone", "resnet18", "--bs", "16", "--check", "--json")
    done = subprocess.run(
        [sys.executable, CODEGEN, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["atomics"] == counts["unaligned_convolutions"] == 0
    assert counts["launches_forward"] > 50
