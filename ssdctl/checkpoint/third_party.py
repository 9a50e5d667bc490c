"""The checkpoints of the replaced PyTorch systems, both ways (their keys differ, their tensors
do not: heads and blocks lie in the same order).

MLPerf and Habana: `{"model", "label_map"}`; NVIDIA and its TPU fork add epoch, iteration,
optimizer and scheduler. `module.` (distributed) and `_orig_mod.` (compiled) may precede the keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ssdctl.data.formats.coco import ClassName

COMMON = {"additional_blocks.": "extra.", "loc.": "box_heads.", "conf.": "class_heads."}
PREFIXES: dict[str, dict[str, str]] = {  # their prefix -> ours
    "mlperf": {
        "model.layer1.0.": "backbone.conv1.",
        "model.layer1.1.": "backbone.bn1.",
        "model.layer1.4.": "backbone.layer1.",
        "model.layer1.5.": "backbone.layer2.",
        "model.layer2.0.": "backbone.layer3.",
        **COMMON,
    },
    "nvidia": {
        "feature_extractor.feature_extractor.0.": "backbone.conv1.",
        "feature_extractor.feature_extractor.1.": "backbone.bn1.",
        "feature_extractor.feature_extractor.4.": "backbone.layer1.",
        "feature_extractor.feature_extractor.5.": "backbone.layer2.",
        "feature_extractor.feature_extractor.6.": "backbone.layer3.",
        **COMMON,
    },
}
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
BLOCKS = {  # blocks in layer1 to layer3, and whether they are bottlenecks
    (2, 2, 2, False): "resnet18",
    (3, 4, 6, False): "resnet34",
    (3, 4, 6, True): "resnet50",
    (3, 4, 23, True): "resnet101",
    (3, 8, 36, True): "resnet152",
}


def peer_of(payload: Any) -> str | None:
    """Whose checkpoint this is: `mlperf`, `nvidia` or None."""
    if not isinstance(payload, Mapping) or not isinstance(payload.get("model"), Mapping):
        return None
    names = [WRAPPERS.sub("", str(name)) for name in payload["model"]]
    for peer in PREFIXES:
        mark = next(iter(PREFIXES[peer]))
        if any(name.startswith(mark) for name in names):
            return peer
    return None


def from_peer(state: Mapping[str, Tensor], peer: str) -> dict[str, Tensor]:
    """A peer's weights under our names; names that are nobody's stay, to be refused later."""
    return {_renamed(WRAPPERS.sub("", k), PREFIXES[peer]): v for k, v in state.items()}


def to_peer(state: Mapping[str, Tensor], peer: str) -> dict[str, Tensor]:
    """Our weights under a peer's names."""
    backwards = {ours: theirs for theirs, ours in PREFIXES[peer].items()}
    return {_renamed(k, backwards): v for k, v in state.items()}


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def label_map(classes: list[ClassName]) -> dict[int, str]:
    """The peers' table of class names; 0 is the background. Empty where the names are unknown."""
    if not classes:
        return {}
    return {0: "background", **{label: c.name for label, c in enumerate(classes, start=1)}}


def backbone_of(state: Mapping[str, Tensor]) -> str | None:
    """The backbone's name, from the shape of its blocks; None where no ResNet has it."""
    blocks = [
        len({m[1] for k in state if (m := re.match(rf"backbone\.layer{n}\.(\d+)\.", k))})
        for n in (1, 2, 3)
    ]
    is_bottleneck = any(k.startswith("backbone.layer1.0.conv3.") for k in state)
    return BLOCKS.get((blocks[0], blocks[1], blocks[2], is_bottleneck))
