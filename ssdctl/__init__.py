"""Train, evaluate and deploy SSD300 detectors. Importing this package does not import torch.

import ssdctl

ssdctl.prepare("photos")
run = ssdctl.train(data="photos", epochs=20)
for detection in ssdctl.load(run).predict("street.jpg"):
    print(detection.name, detection.score, detection.box)

The functions are those of `ssdctl.api`; the commands of the command line use the same code.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ssdctl import errors
from ssdctl._version import __version__

if TYPE_CHECKING:
    from ssdctl.api import Run, configure, evaluate, export, load, prepare, train
    from ssdctl.config import Config
    from ssdctl.inference.predict import Predictor
    from ssdctl.inference.results import Detection, Result

__all__ = [
    "Config",
    "Detection",
    "Predictor",
    "Result",
    "Run",
    "__version__",
    "configure",
    "errors",
    "evaluate",
    "export",
    "load",
    "prepare",
    "train",
]

# `import torch` would load Gaudi's bridge before ssdctl/device/hpu.py has set the bridge's mode.
os.environ.setdefault("PT_HPU_AUTOLOAD", "0")
logging.getLogger(__name__).addHandler(logging.NullHandler())  # applications add theirs


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: the config and the results take time to import."""
    if name not in __all__:
        raise AttributeError(f"module 'ssdctl' has no attribute {name!r}")
    if name == "Config":
        from ssdctl.config import Config

        return Config
    if name == "Predictor":
        from ssdctl.inference.predict import Predictor

        return Predictor
    if name in ("Detection", "Result"):
        from ssdctl.inference import results

        return getattr(results, name)
    from ssdctl import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
