"""A backbone is one file: a copy of one under another name, with nothing else changed, works."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import install_package

import ssdctl
from ssdctl.errors import UsageError
from ssdctl.model.backbones import find_backbone
from ssdctl.model.ssd300 import SSD300
from ssdctl.runtime.packages import plugin_names

PACKAGE = Path(ssdctl.__file__).parent


def test_another_package_adds_a_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (PACKAGE / "model/backbones/tiny.py").read_text()
    entries = "[ssdctl.backbones]\nothers = my_backbone\n"
    install_package(tmp_path / "site", monkeypatch, "my_backbone", source, entries)
    assert "others" in plugin_names("ssdctl.model.backbones", "ssdctl.backbones")
    assert find_backbone("others").__name__ == "my_backbone"
    shapes = [tuple(p.shape) for p in SSD300("others", 3).parameters()]
    assert shapes == [tuple(p.shape) for p in SSD300("tiny", 3).parameters()]


def test_an_unknown_backbone_is_refused() -> None:
    with pytest.raises(UsageError, match="resnet19"):
        find_backbone("resnet19")
