"""The network: shapes, size, cost, third-party names, equality with plain functions and torchvision."""

from typing import Any

import pytest
import reference
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ssdctl.benchmark.train import train_flops
from ssdctl.checkpoint.format import Architecture
from ssdctl.checkpoint.third_party import (
    backbone_of,
    from_third_party,
    source_of,
    state_of,
    to_third_party,
)
from ssdctl.model.backbone import without_weights
from ssdctl.model.backbones import find_backbone
from ssdctl.model.ssd300 import SSD300

WEIGHTS = ("weight", "bias")
NORM = {"mlperf": "none", "nvidia": "batch"}
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def on_meta(backbone: str, extra_norm: str, num_classes: int = 81) -> SSD300:
    """A network without memory: enough for names, shapes and counts."""
    with without_weights():
        return SSD300(backbone, num_classes, extra_norm).eval()


def with_lively_weights(backbone: str, extra_norm: str, num_classes: int = 6) -> SSD300:
    """fp64, with biases and statistics that no two layers share, so that a mix-up shows."""
    torch.manual_seed(0)
    model = SSD300(backbone, num_classes, extra_norm)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias, 0, 0.1)
    return model.double().eval()


@pytest.mark.parametrize("backbone", [*RESNETS, "tiny", "vgg16"])
def test_number_of_parameters(backbone: str) -> None:
    file = find_backbone(backbone)
    shared, per_class = file.PARAMETERS
    for num_classes in (2, 81):
        parameters = on_meta(backbone, file.EXTRA_NORMS[0], num_classes).parameters()
        assert sum(p.numel() for p in parameters) == shared + num_classes * per_class
    if backbone == "resnet34":
        assert shared + 81 * per_class == 19_972_534


def test_the_frozen_stem_ends_with_the_first_3x3_convolution() -> None:
    """As in Habana-TF; of VGG16 it is conv1, as in torchvision's recipe."""
    basic = ("conv1", "bn1", "layer1.0.conv1", "layer1.0.bn1")
    assert on_meta("resnet18", "none").backbone.stem == basic
    bottleneck = (*basic, "layer1.0.conv2", "layer1.0.bn2")
    assert on_meta("resnet50", "none").backbone.stem == bottleneck
    model = on_meta("vgg16", "none")
    model.freeze_stem()
    model.freeze(3)
    model.load_state_dict(model.state_dict(), assign=True)  # other parameters
    model.freeze(0)  # trains the other stages again
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"backbone.{layer}.{field}" for layer in (0, 2) for field in WEIGHTS}


@pytest.mark.parametrize(
    ("backbone", "extra_norm", "forward_gflop", "training_gflop"),
    [("resnet34", "none", 31.7, 94.7), ("resnet50", "batch", 40.3, 120.5)],
)
def test_cost(backbone: str, extra_norm: str, forward_gflop: float, training_gflop: float) -> None:
    """A multiplication and an addition count as two: 2 * MAC."""
    model = on_meta(backbone, extra_norm)
    images = torch.empty(2, 3, 300, 300, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert counter.get_total_flops() / 2e9 == pytest.approx(forward_gflop, abs=0.05)
    training_flop = train_flops(Architecture(backbone, extra_norm, 81))
    assert training_flop / 1e9 == pytest.approx(training_gflop, abs=0.05)
    with FlopCounterMode(display=False) as counter:
        nn.functional.conv2d(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
    assert counter.get_total_flops() == 2


@pytest.mark.parametrize(
    ("backbone", "peer"),
    [
        ("resnet34", "mlperf"),
        pytest.param("resnet50", "nvidia", marks=pytest.mark.slow(in_ci=True)),
    ],
)
def test_equal_to_the_functional_network(backbone: str, peer: str) -> None:
    model = with_lively_weights(backbone, NORM[peer])
    image = torch.randn(1, 3, 300, 300, dtype=torch.float64)
    with torch.inference_mode():
        actual = model(image)
        expected = reference.Network(to_third_party(model.state_dict(), peer), peer)(image)
    for own, other in zip(actual, expected, strict=True):
        assert own.std() > 1e-3  # the output is not constant
        assert (own - other).abs().max() <= 1e-10 * other.abs().max()


@pytest.mark.parametrize("peer", ["mlperf", "nvidia"])
@pytest.mark.parametrize("backbone", ["resnet18", "resnet34", "resnet50"])
def test_names_equal_the_third_party_systems(backbone: str, peer: str) -> None:
    class Recorded(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            read.update({name} & set(self))
            return super().get(name, default)

    read: set[str] = set()
    state = to_third_party(on_meta(backbone, NORM[peer]).state_dict(), peer)
    reference.Network(Recorded(state), peer)(torch.empty(1, 3, 300, 300, device="meta"))
    counters = {name for name in state if name.endswith(".num_batches_tracked")}
    assert set(state) == read | counters
    means = (name for name in read if name.endswith(".running_mean"))
    assert counters == {name.replace("running_mean", "num_batches_tracked") for name in means}
    assert source_of({"model": state}) == peer
    assert backbone_of(from_third_party(state, peer)) == backbone


@pytest.mark.parametrize(("key", "prefix"), [("model", ""), ("state_dict", "module._orig_mod.")])
@pytest.mark.parametrize("peer", ["mlperf", "nvidia"])
def test_third_party_round_trip_is_exact(peer: str, key: str, prefix: str) -> None:
    torch.manual_seed(1)
    actual = SSD300("resnet18", 4, NORM[peer]).state_dict()
    expected = {prefix + name: tensor for name, tensor in to_third_party(actual, peer).items()}
    assert source_of({key: expected}) == peer
    back = from_third_party(state_of({key: expected}), peer)
    assert list(back) == list(actual)
    assert all(torch.equal(back[name], tensor) for name, tensor in actual.items())
    SSD300("resnet18", 4, NORM[peer]).load_state_dict(back)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_weights_of_a_seed_and_outputs_are_torchvisions(name: str) -> None:
    from torchvision import models

    torch.manual_seed(5)
    theirs = getattr(models, name)(weights=None)
    random_state = torch.random.get_rng_state()
    torch.manual_seed(5)
    backbone = find_backbone(name).build()
    assert torch.equal(torch.random.get_rng_state(), random_state)  # so the heads' are the same
    ((module, expected),) = backbone.pretrained_parts(theirs.state_dict(), nn.ModuleList())
    assert module is backbone
    assert list(backbone.state_dict()) == list(expected)
    assert all(torch.equal(t, expected[key]) for key, t in backbone.state_dict().items())

    for norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.2, 0.6)  # as no other channel's
        nn.init.normal_(norm.bias, 0, 0.1)
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
    backbone.load_state_dict({k: theirs.state_dict()[k] for k in expected})
    trunk = nn.Sequential(*list(theirs.children())[:7])
    first = trunk[6][0]
    strided = first.conv2 if hasattr(first, "conv3") else first.conv1
    strided.stride = first.downsample[0].stride = (1, 1)
    images = torch.randn(2, 3, 64, 64)
    for training in (False, True):  # with the running statistics, and with the batch's
        outputs = backbone.train(training)(images)
        assert outputs.std() > 1e-4
        assert torch.equal(outputs, trunk.train(training)(images))
    assert torch.equal(backbone.layer3[0].bn1.running_var, first.bn1.running_var)
