"""Commands that messages and pages print work today: ssdctl is on no package index, so they name the
packages that are missing, and these are declared dependencies."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

from ssdctl.errors import missing_package
from ssdctl.training.trackers.base import BUILT_IN

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "ssdctl").rglob("*.py"))
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "ssdctl").rglob("*.html")]


def test_remedies_do_not_install_ssdctl_from_an_index() -> None:
    pattern = r"ssdctl\[\w|pip install (--?[\w-]+ )*'?ssdctl\b(?!-)"
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in [*MODULES, *PAGES]]
    matches = [(name, match[0]) for name, text in texts for match in re.finditer(pattern, text)]
    assert len(texts) > 100
    assert matches == []


def test_packages_that_messages_name_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    declared = {re.findall(r"[\w-]+", line)[0] for line in lines}
    named = set()
    for path in MODULES:
        for call in re.findall(r"raise missing_package\(([^)]*)\)", path.read_text("utf-8")):
            named |= set(re.findall(r'"([^"]+)"', call))
    named |= {package for _, package in BUILT_IN.values()}
    assert {"onnx", "safetensors", "av"} <= named
    assert named <= declared


def test_a_missing_package_is_named_with_its_command() -> None:
    error = missing_package("onnx", "onnx", "onnxruntime")
    assert "onnx" in str(error)
    assert error.hint == "pip install onnx onnxruntime"
