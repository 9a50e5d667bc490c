"""Backbones: the ResNets are torchvision's; a backbone is one file, here or in another package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import install_package
from torch import nn

import ssdctl
from ssdctl.errors import UsageError
from ssdctl.model.backbones import find_backbone

PACKAGE = Path(ssdctl.__file__).parent


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


def test_third_party_files_are_of_our_backbones(tmp_path: Path) -> None:
    """Whatever is installed; a new process, since the names are read once."""
    source = (PACKAGE / "model/backbones/vgg16.py").read_text()
    with pytest.MonkeyPatch.context() as patch:
        entries = "[ssdctl.backbones]\nanother = my_backbone\n"
        install_package(tmp_path, patch, "my_backbone", source, entries)
    code = (
        "from ssdctl.checkpoint.third_party import backbone_of\n"
        "from ssdctl.model.ssd300 import SSD300\n"
        "print(backbone_of(SSD300('another', 3).state_dict()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert found.split() == ["vgg16"]


def test_an_unknown_backbone_is_refused() -> None:
    with pytest.raises(UsageError, match="resnet19") as error:
        find_backbone("resnet19")
    assert "resnet18" in str(error.value.hint)
