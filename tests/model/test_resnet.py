"""The ResNet against torchvision's: names, initial weights and outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ssdctl.model.backbones import find_backbone
from ssdctl.model.resnet import BasicBlock, Bottleneck, ResNet

NETWORKS = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
DEEP = ("resnet101", "resnet152")


def torchvision_network(name: str) -> nn.Module:
    """Return torchvision's network, with batch norms that no two channels share."""
    from torchvision import models

    network: nn.Module = getattr(models, name)(weights=None)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.2, 0.6)
            nn.init.normal_(module.bias, 0, 0.1)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network


@pytest.mark.parametrize(
    "name",
    [n if n not in DEEP else pytest.param(n, marks=pytest.mark.slow(in_ci=True)) for n in NETWORKS],
)
@pytest.mark.process
def test_outputs_equal_torchvisions(name: str) -> None:
    torch.manual_seed(3)
    expected = torchvision_network(name)
    network = ResNet(*NETWORKS[name])
    network.load_state_dict(expected.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    for training in (False, True):  # with the running statistics, and with the batch's
        outputs = network.train(training)(images)
        assert outputs.isfinite().all()
        assert outputs.std() > 1e-4
        assert torch.equal(outputs, expected.train(training)(images))
    assert torch.equal(network.layer4[0].bn1.running_var, expected.layer4[0].bn1.running_var)


@pytest.mark.parametrize(
    "name",
    ["resnet18", "resnet34", "resnet50", *(pytest.param(n, marks=pytest.mark.slow) for n in DEEP)],
)
@pytest.mark.process
def test_a_seed_gives_torchvisions_weights(name: str) -> None:
    from torchvision import models

    torch.manual_seed(5)
    expected = getattr(models, name)(weights=None).state_dict()
    random_state = torch.random.get_rng_state()
    torch.manual_seed(5)
    weights = ResNet(*NETWORKS[name]).state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights.items())
    assert torch.equal(torch.random.get_rng_state(), random_state)  # so the heads' are the same
    torch.manual_seed(5)
    backbone = find_backbone(name).build().state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in backbone.items())
