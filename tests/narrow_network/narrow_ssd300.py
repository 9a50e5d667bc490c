"""Give SSD300 on a ResNet an eighth of its channels, in the test process and in processes that it starts.

It has an effect only if TEST_NETWORK is `narrow` when a network is built; `tests/conftest.py` sets
it for each test. The switch is not part of the package: users cannot build such a network.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "ssdctl.model.ssd300"
DIVISOR = 8
DEPTHS = {  # blocks of the three layers
    "resnet18": (2, 2, 2),
    "resnet34": (3, 4, 6),
    "resnet50": (3, 4, 6),
    "resnet101": (3, 4, 23),
    "resnet152": (3, 8, 36),
}


def install() -> None:
    """Replace what SSD300 is built from, as soon as its module is imported."""
    if MODULE in sys.modules:
        _replace(sys.modules[MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _replace(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _replace(ssd300: Any) -> None:
    if hasattr(ssd300, "is_replaced_by_tests"):  # pytest imports conftest.py twice
        return
    ssd300.is_replaced_by_tests = True
    full = {n: getattr(ssd300, n) for n in ("feature_channels", "_extra_block", "build_backbone")}

    def feature_channels(backbone: str) -> tuple[int, ...]:
        divisor = DIVISOR if _is_narrow() and backbone in DEPTHS else 1
        return tuple(channels // divisor for channels in full["feature_channels"](backbone))

    def extra_block(inputs: int, width: int, *others: Any) -> Any:
        return full["_extra_block"](inputs, width // DIVISOR if _is_narrow() else width, *others)

    def build_backbone(name: str) -> Any:
        return narrow_backbone(name) if _is_narrow() else full["build_backbone"](name)

    ssd300.feature_channels = feature_channels
    ssd300._extra_block = extra_block
    ssd300.build_backbone = build_backbone


def _is_narrow() -> bool:
    return os.environ.get("TEST_NETWORK") == "narrow"


def narrow_backbone(name: str) -> Any:
    """Return a trunk with the modules of `ssdctl.model.backbone.build_backbone`."""
    from torch import nn

    from ssdctl.model import resnet

    block = resnet.BasicBlock if name in ("resnet18", "resnet34") else resnet.Bottleneck
    width, depths = 64 // DIVISOR, DEPTHS[name]

    def layer(inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
        outputs = width * block.expansion
        downsample = None
        if stride != 1 or inputs != outputs:
            downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        others = [block(outputs, width, 1, None) for _ in range(depth - 1)]
        return nn.Sequential(block(inputs, width, stride, downsample), *others)

    trunk = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            bn1=nn.BatchNorm2d(width),
            relu=nn.ReLU(inplace=True),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1),
            layer1=layer(width, width, depths[0], 1),
            layer2=layer(width * block.expansion, 2 * width, depths[1], 2),
            layer3=layer(2 * width * block.expansion, 4 * width, depths[2], 1),
        )
    )
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return trunk
