"""The typed config that all commands share.

sections.py defines the settings, settings.py combines them into one config and lists them one by
one (for options, help and docs), resolve.py layers their sources, render.py formats a config.
"""

from ssdctl.config.resolve import resolve
from ssdctl.config.sections import DataConfig, ModelConfig, PrepareConfig, TrainConfig
from ssdctl.config.settings import Config

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "PrepareConfig",
    "TrainConfig",
    "resolve",
]
