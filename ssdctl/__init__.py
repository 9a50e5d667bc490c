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

import importlib
import logging
from typing import TYPE_CHECKING, Any

from ssdctl import errors
from ssdctl._version import __version__

if TYPE_CHECKING:
    from ssdctl.api import configure, default_boxes, evaluate, export, load, prepare, report, train
    from ssdctl.config.settings import Config
    from ssdctl.inference.predict import Predictor
    from ssdctl.inference.results import Detection, Result
    from ssdctl.input.dataset import Dataset
    from ssdctl.model.loss import MultiboxLoss
    from ssdctl.model.ssd300 import SSD300
    from ssdctl.runs.evaluation import Evaluation
    from ssdctl.runs.run import Run
    from ssdctl.training.observers import Observer
    from ssdctl.training.trainer import Trainer

__all__ = [
    "SSD300",
    "Config",
    "Dataset",
    "Detection",
    "Evaluation",
    "MultiboxLoss",
    "Observer",
    "Predictor",
    "Result",
    "Run",
    "Trainer",
    "__version__",
    "configure",
    "default_boxes",
    "errors",
    "evaluate",
    "export",
    "load",
    "prepare",
    "report",
    "train",
]

# The module of each name that is imported when it is used; functions are in `ssdctl.api`.
_MODULES = {
    "Config": "ssdctl.config.settings",
    "Dataset": "ssdctl.input.dataset",
    "Detection": "ssdctl.inference.results",
    "Evaluation": "ssdctl.runs.evaluation",
    "MultiboxLoss": "ssdctl.model.loss",
    "Observer": "ssdctl.training.observers",
    "Predictor": "ssdctl.inference.predict",
    "Result": "ssdctl.inference.results",
    "Run": "ssdctl.runs.run",
    "SSD300": "ssdctl.model.ssd300",
    "Trainer": "ssdctl.training.trainer",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())  # applications add theirs


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: the config and the results take time to import."""
    if name not in __all__:
        raise AttributeError(f"module 'ssdctl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "ssdctl.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
