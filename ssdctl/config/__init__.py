"""The typed config that every command shares.

schema.py says which settings there are, settings.py lists them one by one (for options, help and
docs), resolve.py layers their sources, render.py writes a config down.
"""

from ssdctl.config.resolve import Resolved, resolve
from ssdctl.config.schema import (
    Config,
    DataConfig,
    DownloadConfig,
    EvaluateConfig,
    KubernetesConfig,
    LaunchConfig,
    ModelConfig,
    PredictConfig,
    PrepareConfig,
    SlurmConfig,
    TrainConfig,
)

__all__ = [
    "Config",
    "DataConfig",
    "DownloadConfig",
    "EvaluateConfig",
    "KubernetesConfig",
    "LaunchConfig",
    "ModelConfig",
    "PredictConfig",
    "PrepareConfig",
    "Resolved",
    "SlurmConfig",
    "TrainConfig",
    "resolve",
]
