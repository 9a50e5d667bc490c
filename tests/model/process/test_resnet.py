"""The ResNet against torchvision's: names, initial weights and outputs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ssdctl
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


PACKAGE = Path(ssdctl.__file__).parent


COMMANDS = """
import contextlib, io, os, sys
from ssdctl.cli.main import main

def run(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main([*arguments])
        except SystemExit as end:
            assert not end.code, (arguments, end.code)
    return out.getvalue()

options = "--backbone mynet7 --backbone-weights none --bs 2 --warmup 1st --steps 1 --workers 1"
assert "mynet7" in run("train", "--help")
assert "mynet7" in run("config", "schema")
assert "torch" not in sys.modules
run("train", "--data", sys.argv[1], "--out", "run", *options.split(), "--fp32", "--device", "cpu")
assert '"mynet7"' in open("run/config.toml").read()
run("evaluate", "run/checkpoints/last.pt", "--device", "cpu", "--limit", "1")
run("export", "run/checkpoints/last.pt", "--format", "safetensors", "--out", "x")
os.environ |= {"_SSDCTL_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
os.environ["COMP_WORDS"] = "ssdctl\\ntrain\\n--backbone\\nmyn"
print(run("unused"))
"""


def test_a_copy_of_a_file_is_a_backbone(shapes: Path, tmp_path: Path) -> None:
    copy = tmp_path / "installed/ssdctl"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(copy / "model/backbones/resnet18.py", copy / "model/backbones/mynet7.py")
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, shapes],
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mynet7"]
