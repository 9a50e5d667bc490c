"""The multibox loss against plain loops, and finite where the replaced systems gave NaN."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from ssdctl.boxes import box_cxcywh_to_ltrb
from ssdctl.model.backbones import RESNET
from ssdctl.model.loss import Losses, MultiboxLoss

FAR = (0.1, 0.1, 0.4, 0.5)


class Case(NamedTuple):
    """Predictions and targets of a batch, matched and coded already."""

    offsets: Tensor  # B x 4 x N
    logits: Tensor  # B x C x N
    targets: Tensor  # B x 4 x N
    labels: Tensor  # B x N

    def loss(self, **options: Any) -> Losses:
        loss = MultiboxLoss(**options)
        return loss.compare(self.offsets, self.logits, self.targets, self.labels)

    def expected(self, flavor: str = "nvidia", *options: Any) -> reference.Loss:
        return reference.loss_from_targets(
            *(t.double().numpy() for t in self[:3]), *self[3:], flavor, *options
        )


def random_case(
    seed: int, share: float, dtype: torch.dtype, num_boxes: int = 60, scale: float = 3.0
) -> Case:
    """Three images, five classes; about `share` of the boxes are positive, none in the last."""
    rng = np.random.default_rng(seed)
    shape = (3, 4, num_boxes)
    labels = np.where(rng.random((3, num_boxes)) < share, rng.integers(1, 5, (3, num_boxes)), 0)
    labels[2] = 0
    labels[:, ::9] = -1  # to be ignored
    return Case(
        torch.from_numpy(rng.normal(0, scale, shape)).to(dtype),
        torch.from_numpy(rng.normal(0, scale, (3, 5, num_boxes))).to(dtype),
        torch.from_numpy(rng.normal(0, 1, shape)).to(dtype),
        torch.from_numpy(labels),
    )


def whole_loss_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `reference.LOSS` was computed from."""
    offsets, logits = reference.loss_inputs()
    boxes, labels = torch.zeros(3, 5, 4, dtype=dtype), torch.zeros(3, 5, dtype=torch.int64)
    for i, (truths, names) in enumerate(
        zip(reference.LOSS_TRUTHS, reference.LOSS_LABELS, strict=True)
    ):
        if truths:
            boxes[i, : len(truths)] = torch.tensor(truths, dtype=dtype)
            labels[i, : len(truths)] = torch.tensor(names)
    return torch.from_numpy(offsets).to(dtype), torch.from_numpy(logits).to(dtype), boxes, labels


def exact_loss() -> MultiboxLoss:
    """In fp64, with default boxes that were never rounded to fp32: rounding decides ties."""
    loss = MultiboxLoss().double()
    loss.targets.defaults_cxcywh = torch.tensor(reference.default_boxes(), dtype=torch.float64)
    loss.targets.defaults_ltrb = box_cxcywh_to_ltrb(loss.targets.defaults_cxcywh)
    return loss


def assert_finite_gradients(*leaves: Tensor) -> None:
    for leaf in leaves:
        assert leaf.grad.isfinite().all()


def one_image(
    box: tuple[float, ...], num_classes: int = 5, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predictions that require a gradient, and one image with one padded ground truth."""
    generator = torch.Generator().manual_seed(0)
    offsets = (scale * torch.randn(1, 4, 8732, generator=generator)).requires_grad_()
    logits = (scale * torch.randn(1, num_classes, 8732, generator=generator)).requires_grad_()
    boxes, labels = torch.zeros(1, 3, 4), torch.tensor([[1, 0, 0]])
    boxes[0, 0] = torch.tensor(box)
    return offsets, logits, boxes, labels


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.02, 0.1, 0.24]))
def test_equal_to_the_loop(dtype: torch.dtype, rtol: float, seed: int, share: float) -> None:
    case = random_case(seed, share, dtype)
    actual = [float(v) for v in case.loss()]
    np.testing.assert_allclose(actual, case.expected(), rtol=rtol)
    if (3 * (case.labels > 0).sum(1) <= (case.labels == 0).sum(1)).all():
        np.testing.assert_allclose(actual, case.expected("mlperf"), rtol=rtol)


@pytest.mark.parametrize("divisor", ["image", "batch"])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_images_without_objects_have_their_hardest_negatives(divisor: str, share: float) -> None:
    case = random_case(1, share, torch.float64)
    constants = RESNET._replace(loss_divisor=divisor)
    actual = case.loss(constants=constants, background_negatives=7)
    np.testing.assert_allclose(
        [float(v) for v in actual], case.expected("nvidia", 7, divisor), rtol=1e-10
    )
    assert actual.classification > case.loss(constants=constants).classification


def test_more_negatives_requested_than_available() -> None:
    """Positives that are counted as negatives too: NVIDIA's ORed masks, not MLPerf's sum."""
    case = random_case(0, 0.6, torch.float64)
    assert (3 * (case.labels > 0).sum(1) > (case.labels == 0).sum(1)).any()
    actual = [float(v) for v in case.loss()]
    np.testing.assert_allclose(actual, case.expected("nvidia"), rtol=1e-10)
    assert case.expected("mlperf").classification > 1.05 * case.expected("nvidia").classification


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_loss_equals_the_golden_value(dtype: torch.dtype, rtol: float) -> None:
    """Matching, coding and loss of 8732 boxes and 81 classes; one image has no object."""
    loss = exact_loss() if dtype is torch.float64 else MultiboxLoss()
    actual = [float(value) for value in loss(*whole_loss_inputs(dtype))]
    assert actual == pytest.approx(list(reference.LOSS), rel=rtol)
    if dtype is torch.float64:
        truth = (reference.LOSS_TRUTHS, reference.LOSS_LABELS, reference.default_boxes())
        loop = reference.multibox_loss(*reference.loss_inputs(), *truth, "mlperf")
        assert loop == pytest.approx(reference.LOSS, rel=1e-14)


@pytest.mark.parametrize(
    "box",
    [
        (0.4, 0.6, 0.42, 0.6),  # COCO has two boxes of zero height: NaN in third-party systems
        (0.4, 0.6, 0.4, 0.6),
        (1.0, 1.0, 1.0, 1.0),
        (0.0, 0.0, 1e-30, 1.0),
    ],
)
def test_boxes_without_area_stay_finite(box: tuple[float, ...]) -> None:
    offsets, logits, boxes, labels = one_image(box)
    losses = MultiboxLoss()(offsets, logits, boxes, labels)
    losses.total.backward()
    assert torch.stack(list(losses)).isfinite().all()
    assert losses.box > 0  # its forced match is there
    assert_finite_gradients(offsets, logits)


def test_infinities_outside_the_selected_boxes_stay_there() -> None:
    case = random_case(7, 0.1, torch.float64)
    before = case.loss()
    is_negative = case.labels.eq(0).unsqueeze(1)
    infinity = torch.tensor(torch.inf, dtype=torch.float64)
    offsets = torch.where(is_negative, infinity, case.offsets).requires_grad_()
    # A class that a negative surely is not: a logit of -inf. It is then easy, so not selected.
    impossible = torch.arange(5)[None, :, None].gt(0) & is_negative
    chosen = torch.zeros_like(impossible)
    chosen[:, :, ::7] = True
    logits = torch.where(impossible & chosen, -infinity, case.logits).requires_grad_()
    losses = case._replace(offsets=offsets, logits=logits).loss()
    losses.total.backward()
    assert losses.box == before.box
    assert losses.total.isfinite()
    assert_finite_gradients(offsets, logits)


def test_nan_in_a_selected_box_is_seen() -> None:
    """The guard can only skip values that it reads."""
    case = random_case(9, 0.1, torch.float32)
    positive = (case.labels[0] > 0).nonzero()[0]
    for field in ("offsets", "logits"):
        spoiled = getattr(case, field).clone()
        spoiled[0, 0, positive] = torch.nan
        assert case._replace(**{field: spoiled}).loss().total.isnan()


@pytest.mark.parametrize("inside_autocast", [False, True])
def test_bf16_predictions_are_summed_in_fp32(inside_autocast: bool) -> None:
    offsets, logits, boxes, labels = one_image(FAR, scale=4.0)
    loss = MultiboxLoss()
    rounded = (offsets.detach().bfloat16(), logits.detach().bfloat16())
    with torch.autocast("cpu", torch.bfloat16, enabled=inside_autocast):
        actual = loss(*rounded, boxes, labels)
    expected = loss(rounded[0].float(), rounded[1].float(), boxes, labels)
    for value, true_value in zip(actual, expected, strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, true_value)


@settings(max_examples=60, deadline=None)
@given(
    offsets=arrays(np.float32, (1, 4, 6), elements=st.floats(-(2.0**127), 2.0**127, width=32)),
    logits=arrays(np.float32, (1, 3, 6), elements=st.floats(-(2.0**127), 2.0**127, width=32)),
    labels=arrays(np.int64, (1, 6), elements=st.integers(0, 2)),
)
def test_gradients_are_finite_for_any_finite_prediction(
    offsets: np.ndarray, logits: np.ndarray, labels: np.ndarray
) -> None:
    leaves = [torch.from_numpy(a).requires_grad_() for a in (offsets, logits)]
    MultiboxLoss().compare(*leaves, torch.zeros(1, 4, 6), torch.from_numpy(labels)).total.backward()
    assert_finite_gradients(*leaves)


def test_gradient_equals_the_difference_quotient() -> None:
    case = random_case(13, 0.2, torch.float64, num_boxes=7)
    offsets, logits = case.offsets.requires_grad_(), case.logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda o, c: MultiboxLoss().compare(o, c, case.targets, case.labels).total,
        (offsets, logits),
    )
