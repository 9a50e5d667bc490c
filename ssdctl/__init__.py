"""Train, evaluate and deploy SSD300 object detectors, on your own images or on COCO.

    import ssdctl

    ssdctl.prepare("photos")
    run = ssdctl.train("photos", epochs=20)
    result = ssdctl.load(run)("street.jpg")
    result[result.scores > 0.5].plot()

The functions are the commands of the same names. To train with a loop of your own, use `SSD300`,
`MultiboxLoss` and `Dataset`. Importing this package does not import torch.
"""

from __future__ import annotations

import ast
import importlib
import logging
from pathlib import Path
from typing import Any

from ssdctl import errors  # noqa: F401 - public, as ssdctl.errors
from ssdctl._version import __version__  # noqa: F401 - public

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_bytes())
# The module of each public name: `__init__.pyi` lists them once, for type checkers, too.
_MODULES = {
    alias.name: str(line.module)
    for line in _STUB.body
    if isinstance(line, ast.ImportFrom)
    for alias in line.names
}
__all__ = sorted(_MODULES)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # applications add theirs


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: the config and the results take time to import."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ssdctl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
