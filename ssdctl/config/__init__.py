"""The typed config that all commands share.

sections/ defines the settings, schema.py combines them into one config, settings.py lists them one
by one (for options, help and docs), resolve.py layers their sources, render.py formats a config.
"""

from ssdctl.config.resolve import Resolved, resolve
from ssdctl.config.sections.data import DataConfig, DownloadConfig, PrepareConfig
from ssdctl.config.sections.evaluate import EvaluateConfig, PredictConfig
from ssdctl.config.sections.launch import LaunchConfig
from ssdctl.config.sections.train import ModelConfig, TrainConfig
from ssdctl.config.settings import Config

__all__ = [
    "Config",
    "DataConfig",
    "DownloadConfig",
    "EvaluateConfig",
    "LaunchConfig",
    "ModelConfig",
    "PredictConfig",
    "PrepareConfig",
    "Resolved",
    "TrainConfig",
    "resolve",
]
