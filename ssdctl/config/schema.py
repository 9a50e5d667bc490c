"""The config: all settings of ssdctl, and the rules that involve several of them.

The command line's options, their help, the JSON schema, `config init` and the docs are generated
from the classes in `sections/`, which define the type, bounds, default and meaning of each setting.
A field without a default belongs to the recipe: every preset sets it.
"""

import contextlib
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from ssdctl.config.fields import (
    AUGMENTATION_LISTS,
    AUGMENTATIONS,
    BACKBONES,
    BackboneName,
    augmentation_names,
)
from ssdctl.config.sections.data import DataConfig, DownloadConfig, PrepareConfig
from ssdctl.config.sections.evaluate import EvaluateConfig, PredictConfig
from ssdctl.config.sections.launch import LAUNCHER_NAMES, LAUNCHERS, LaunchConfig
from ssdctl.config.sections.train import ModelConfig, SettledTrainConfig, TrainConfig
from ssdctl.errors import UsageError
from ssdctl.runtime.packages import load_plugin, plugin_names


class Sections(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The tables of the config, except those of launchers."""

    data: DataConfig
    download: DownloadConfig
    prepare: PrepareConfig
    model: ModelConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    predict: PredictConfig
    launch: LaunchConfig


def _launcher_tables() -> list[tuple[str, Any]]:
    """Return the name and type of each table that a launcher adds: `slurm`, `kubernetes`."""
    tables = []
    for name in LAUNCHER_NAMES:
        with contextlib.suppress(UsageError):  # a broken plugin: an error if it is used
            if (table := getattr(load_plugin(*LAUNCHERS, name), "Settings", None)) is not None:
                tables.append((name, table))
    return tables


LAUNCHER_TABLES = _launcher_tables()
if TYPE_CHECKING:
    Config = Sections
else:
    Config = msgspec.defstruct(
        "Config",
        LAUNCHER_TABLES,
        bases=(Sections,),
        module=__name__,
        namespace={"__doc__": "All settings, resolved."},
        **dict.fromkeys(("frozen", "kw_only", "forbid_unknown_fields", "dict"), True),
    )


class SettledConfig(Config, frozen=True):
    train: SettledTrainConfig


def conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, problem) of each rule between several settings that the config breaks."""
    problems = []
    decays = config.train.decay_epochs
    if list(decays) != sorted(set(decays)):
        problems.append(("train.decay_epochs", "the epochs must increase"))
    weights_backbone = config.model.weights.partition("-")[0]
    is_backbone = weights_backbone in typing.get_args(BackboneName)
    if is_backbone and weights_backbone != config.model.backbone:
        problems.append(
            ("model.weights", f"{config.model.weights} does not fit {config.model.backbone}")
        )
    if config.model.extra_norm not in load_plugin(*BACKBONES, config.model.backbone).EXTRA_NORMS:
        problem = f"{config.model.backbone} has no extra blocks with {config.model.extra_norm}"
        problems.append(("model.extra_norm", problem))
    if config.train.lr_decay == "cosine" and len(decays) != 2:
        problems.append(("train.decay_epochs", "cosine needs two epochs, its start and its end"))
    augment, names = config.train.augment, augmentation_names(config.train.augment)
    if augment not in AUGMENTATION_LISTS:
        known = plugin_names(*AUGMENTATIONS)
        if unknown := [name for name in names if name not in known]:
            listed = ", ".join([*AUGMENTATION_LISTS, *known])
            problems.append(
                ("train.augment", f"no augmentation {unknown[0]!r}; there are {listed}")
            )
    if "zoom" in names and config.train.pipeline == "dali":
        problems.append(("train.augment", "zoom needs --pipeline native"))
    if config.train.init is not None and config.train.resume not in ("auto", "never"):
        problems.append(("train.init", "starts a new run, --resume FILE continues one"))
    if config.train.profile is not None:
        first, last = map(int, config.train.profile.split(","))
        if last < first:
            problems.append(("train.profile", f"step {last} is before step {first}"))
    return problems
